"""torchtitan's trainer on CPUs: ``torchrun ... titan_on_cpu.py --module ... --config ...``.

torchtitan takes the device of the accelerators that it finds, and "cuda" if there is none. This
file names the device instead, and gives it the seven functions that torchtitan asks of a GPU.
Nothing else of torchtitan is changed.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

import torch
from torchtitan.tools import utils

utils.device_type = "cpu"
utils.device_module = SimpleNamespace(
    device_count=lambda: 1,
    current_device=lambda: 0,
    set_device=lambda device: None,
    synchronize=lambda: None,
    empty_cache=lambda: None,
    get_device_name=lambda device: "CPU",
    get_device_properties=lambda device: SimpleNamespace(
        total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    ),
    memory_stats=lambda device: {},
    reset_peak_memory_stats=lambda: None,
)

if __name__ == "__main__":
    from torchtitan.train import main

    torch.set_num_threads(1)
    main()
