"""Colours of pictures and pages: one for each policy and codec, the same everywhere.

The first ones are those of Okabe and Ito, which people with any colour vision can distinguish.
"""

from __future__ import annotations

import zlib

OTHERS = ("#882255", "#44aa99", "#332288", "#999933", "#aa4499", "#661100")
"""Colours of policies without an own one; the name selects one of them."""

WITHOUT = "#8c959f"
POLICIES = {
    "off": WITHOUT,
    "plain": WITHOUT,
    "bf16": "#e69f00",
    "lossless": "#0072b2",
    "balanced": "#009e73",
    "aggressive": "#d55e00",
    "int8": "#cc79a7",
    "int4": "#56b4e9",
    "rotated": "#332288",
}
WAITING = "#333333"
"""The part of a step during which a rank waits."""


def colour_of(policy: str) -> str:
    """Return the colour of a policy or codec, as ``#rrggbb``.

    A variant has the colour of its first part: ``balanced, not moved`` that of ``balanced``, and
    ``plain bf16`` that of ``bf16``.
    """
    name = policy.partition(",")[0].partition("(")[0].removeprefix("plain ").strip()
    return POLICIES.get(name) or OTHERS[zlib.crc32(name.encode()) % len(OTHERS)]
