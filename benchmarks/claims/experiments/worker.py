"""One rank of an experiment: ``python -m benchmarks.claims.experiments.worker MODULE OUT OPTIONS``.

``launch`` starts it. An exception is written to a file beside OUT.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist


def main() -> None:
    module, out, options = sys.argv[1:]
    try:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        found = importlib.import_module(module).on_rank(**json.loads(options))
        if dist.get_rank() == 0:
            Path(out).write_text(json.dumps(found))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        rank = os.environ.get("RANK", "0")
        Path(out).with_suffix(f".{rank}.txt").write_text(traceback.format_exc())
        raise


if __name__ == "__main__":
    main()
