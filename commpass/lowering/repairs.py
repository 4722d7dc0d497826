"""A temporary patch for a bug of torch 2.11 that prevents Inductor from compiling the graphs of
codecs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch


def without_loop_splitting() -> AbstractContextManager[Any]:
    """Disable loop splitting in Inductor's C++ backend for one compilation, if it has the bug.

    If a value is divided into blocks, torch 2.11 splits the loop of one of several fused nodes,
    which then no longer matches the others: ``unexpected group``. Since torch 2.13 Inductor checks
    whether they match.
    """
    from torch._inductor.codegen.cpp import CppScheduling
    from torch._inductor.scheduler import SchedulerNode

    if hasattr(SchedulerNode, "snapshot_loop_state"):
        return nullcontext()
    return patch.object(CppScheduling, "try_loop_split", lambda self, nodes: nodes)
