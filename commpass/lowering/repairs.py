"""A fault of older torches that keeps Inductor from compiling what codecs are made of, mended for
one compile."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch


def repaired() -> AbstractContextManager[Any]:
    """Where a value is divided into blocks, Inductor's C++ of torch 2.11 splits the loop of one of
    several fused nodes, which then no longer fits the others: ``unexpected group``. There it splits
    none. Since 2.13 it looks whether they fit."""
    from torch._inductor.codegen.cpp import CppScheduling
    from torch._inductor.scheduler import SchedulerNode

    if hasattr(SchedulerNode, "snapshot_loop_state"):
        return nullcontext()
    return patch.object(CppScheduling, "try_loop_split", lambda self, nodes: nodes)
