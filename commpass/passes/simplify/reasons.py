"""What simplify adds to the reasons of sites: why a rule left one as it was, or made it."""

from __future__ import annotations

import dataclasses

import torch
from torch import fx

from commpass.passes.simplify.editor import REJECTED, RULE
from commpass.passes.simplify.rules.gathers import AS_BYTES
from commpass.passes.simplify.rules.quantise import IN_16_BITS
from commpass.passes.simplify.rules.quantise import RULE as QUANTISED
from commpass.passes.simplify.rules.sequence import RULE as SEQUENCE_PARALLEL
from commpass.plan import PlannedSite

SENDS_CODES = (QUANTISED, IN_16_BITS, SEQUENCE_PARALLEL)


def with_rules(site: PlannedSite, start: fx.Node) -> PlannedSite:
    """Return an uncompressed site with the rules that made or rejected it in its reason.

    ``start`` is the node of its collective.
    """
    if site.compressed:
        return site
    reason = site.reason
    dtype = getattr(torch, site.dtype, None)
    if start.meta.get(RULE) in SENDS_CODES and dtype is not None and not dtype.is_floating_point:
        reason += f": they are codes or scales ({start.meta[RULE]})"
    if start.meta.get(RULE) == AS_BYTES:
        reason += f": they are floats of 8 bits or fewer ({AS_BYTES})"
    rejected = dict.fromkeys(start.meta.get(REJECTED, {}).values())
    return dataclasses.replace(site, reason="; ".join(filter(None, (reason, *rejected))))
