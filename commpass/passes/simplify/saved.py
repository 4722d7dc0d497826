"""Codes of a gathered value are saved for backward instead of the value.

Checkpointing asks torch's partitioner to repeat the operators of a block in backward. torch then
saves the inputs of the block, and among them a gathered value from which only codes are computed.
The codes have fewer bytes. Once they are saved, forward needs nothing but the codes, and the rule
"quantised before gather" can gather them.
"""

from __future__ import annotations

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from commpass.costmodel import Profile
from commpass.passes.fx.direction import AGAIN
from commpass.passes.fx.parse import is_wait
from commpass.passes.simplify.editor import Editor
from commpass.passes.simplify.rules.quantise import smaller_cut


def save_codes(gm: fx.GraphModule, profile: Profile) -> list[fx.Node]:
    """Ask the partitioner of a joint graph of forward and backward to save codes, and return them.

    Only metadata changes: backward no longer repeats the operators from a gather to the codes. The
    ranks need not agree on that. A gather that backward repeats is left alone: torch saves its
    input, which is smaller than the codes of all ranks.
    """
    if not any(map(_is_repeated, gm.graph.nodes)):
        return []
    editor = Editor(gm, profile)
    editor.refresh()
    saved: list[fx.Node] = []
    for wait in filter(is_wait, gm.graph.nodes):
        found = None if _is_repeated(wait) else smaller_cut(wait, editor)
        if found is None:
            continue
        region, cut = found
        needed = [
            node
            for first in (*region.needed_for(cut), *cut)
            for node in region.members(first)
            if _is_repeated(node)
        ]
        for node in needed:
            node.meta["recompute"] = CheckpointPolicy.PREFER_SAVE
        for node in cut if needed else ():
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            saved.append(node)
    return saved


def _is_repeated(node: fx.Node) -> bool:
    """Whether checkpointing asks for a node to be computed again in backward."""
    return node.meta.get("recompute") in AGAIN
