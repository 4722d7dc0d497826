"""The GPU that a kernel is launched on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make a GPU the current one in this context. Triton launches on the current one, wherever the
    tensors are. On a CPU, where Triton interprets, nothing changes."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
