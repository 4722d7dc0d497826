"""Texts about one site: what it is, and what was done to it."""

from __future__ import annotations

from commpass.plan import SINGLE_KERNEL, Candidate, PlannedSite
from commpass.utils.printable import brief


def kind_of(site: PlannedSite) -> str:
    """Return ``all_reduce(sum)``."""
    return site.kind + (f"({site.reduce_op})" if site.reduce_op else "")


def group_of(site: PlannedSite) -> str:
    """Return ``tp/8``: the name of its group, and the number of ranks."""
    return f"{site.group_label or site.group}/{site.group_size}"


def tensor_of(site: PlannedSite) -> str:
    """Return ``bfloat16[4096, s0]``."""
    return f"{site.dtype.removeprefix('torch.')}[{', '.join(map(str, site.shape))}]"


def done(site: PlannedSite) -> str:
    """Return what is done to a site in a few words: ``int8 by two_shot x4``."""
    if not site.compressed:
        return "uncompressed: overlapped with compute" if site.hidden else "uncompressed"
    chunks = f" x{site.chunks}" if site.chunks > 1 else ""
    single = " in a single kernel" if site.lowering == SINGLE_KERNEL else ""
    single += " beside compute" if site.own_stream else ""
    return f"{brief(site.codec)} by {site.algorithm}{chunks}{single}"


def described(choice: Candidate) -> str:
    """Return a candidate as text with all its settings: ``int8 by ring, 4 chunks, kernel``."""
    if not choice.compressed:
        return "uncompressed"
    chunks = f", {choice.chunks} chunks" if choice.chunks > 1 else ""
    return f"{brief(choice.codec)} by {choice.algorithm}{chunks}{form_of(choice)}"


def form_of(choice: Candidate) -> str:
    """Return how encode and decode are carried out, as an appendix: ``, fused, kernel``."""
    names = {"kernel": ", kernel", SINGLE_KERNEL: ", single kernel"}
    kernel = names.get(choice.lowering, "")
    kernel += " beside compute" if isinstance(choice, PlannedSite) and choice.own_stream else ""
    return (", fused" if choice.fused else "") + kernel
