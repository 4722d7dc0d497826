"""joint: what is saved for backward, before torch splits a joint graph into forward and backward.

needs: a joint graph of AOTAutograd with fake values.
gives: the same graph, with marks at nodes that are to be saved.
changes: no computed value. torch's partitioner reads the marks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from torch import fx
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass

from commpass.costmodel import Profile
from commpass.passes.fx.parse import is_collective
from commpass.passes.simplify.saved import save_codes
from commpass.utils.ambient import rewriting

log = logging.getLogger("commpass")
SLOT = "joint_custom_pre_pass"
"""Inductor's setting for passes on joint graphs. They run before its own."""


def mark_saved(gm: fx.GraphModule, profile: Profile, *, strict: bool = False) -> None:
    """Mark what is saved for backward.

    If that fails, torch alone decides, and a warning says why; if ``strict``, the error is raised.
    """
    if all(not is_collective(node) for node in gm.graph.nodes):
        return
    try:
        with rewriting():
            save_codes(gm, profile)
    except Exception as error:
        if strict:
            raise
        why = f"{type(error).__name__}: {error}"
        log.warning("joint graph: torch alone decides what is saved for backward: %s", why)


class Joint(CustomGraphPass):
    """A custom pass that runs ``function`` after the passes already in its slot."""

    def __init__(self, function: Callable[[fx.GraphModule], None], before: Any):
        self.function = function
        self.before = before if isinstance(before, (list, tuple)) else [before] if before else []

    def __call__(self, graph: fx.Graph) -> None:
        for each in self.before:
            each(graph)
        module = graph.owning_module
        assert module is not None
        self.function(module)

    def uuid(self) -> Any:
        """Return a name for Inductor's cache, or None if an earlier pass has none.

        The cache's keys have the graphs that the pass has led to, so no source is in the name.
        """
        names = [each.uuid() if hasattr(each, "uuid") else None for each in self.before]
        return None if None in names else ("commpass joint", *names)


def with_joint(
    patches: Mapping[str, Any], function: Callable[[fx.GraphModule], None]
) -> dict[str, Any]:
    """Return patches of Inductor's config that also run ``function`` on joint graphs."""
    before = patches[SLOT] if SLOT in patches else getattr(config, SLOT)
    return {**patches, SLOT: Joint(function, before)}
