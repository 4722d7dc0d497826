"""Links whose collectives are rings or messages, each step with a start-up time of its own."""

from __future__ import annotations

from commpass.costmodel import Link
from commpass.costmodel.profile import link_named

HOP_US = {"nvlink-4": 8.0, "pcie-4": 10.0, "infiniband-hdr": 15.0}
"""Microseconds of a step: assumptions of these models. The papers have no such numbers, and their
libraries are older than those of the named profiles."""


def hops(name: str) -> Link:
    """Return the link of this name, at its stated rate less the share that libraries do not
    reach."""
    return Link(HOP_US[name], link_named(name).gbytes_per_s)
