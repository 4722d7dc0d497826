"""What a shell offers for options whose values have names.

The functions get what is typed so far, and return the names that begin like it. Where they return
none, the shell offers files. They must be quick, so they do not import torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from commpass.plan import dump
from commpass.plan.kinds import KINDS

POLICIES = (
    "off",
    "lossless",
    "balanced",
    "aggressive",
    "taco",
    "equarx",
    "zipccl",
    "lowbit-tp",
    "ssfusion",
    "sdp4bit",
    "tahquant",
    "taco-3d",
    "balanced-3d",
)
CODECS = (
    *("cast", "int8", "int6", "int4", "int2", "fp8", "mxfp8", "mxfp6", "mxfp4", "nvfp4"),
    *("rotated", "ecq", "table", "taco", "equarx", "sdp4bit", "tahquant", "mixed", "exponent"),
    *("topk", "randomk", "dgc", "gaussiank", "redsync", "sidco"),
)


def policy(incomplete: str) -> list[str]:
    return _beginning(POLICIES, incomplete)


def policies(incomplete: str) -> list[str]:
    """Complete the last name of a list such as ``off,lossless,bal``."""
    first, comma, last = incomplete.rpartition(",")
    return [f"{first}{comma}{name}" for name in _beginning((*POLICIES, "on"), last)]


def codec(incomplete: str) -> list[str]:
    return _beginning(CODECS, incomplete)


def kind(incomplete: str) -> list[str]:
    return _beginning(KINDS, incomplete)


def direction(incomplete: str) -> list[str]:
    return _beginning(("forward", "backward"), incomplete)


def machine(incomplete: str) -> list[str]:
    from commpass.costmodel.machines import machine_names

    return _beginning(machine_names(), incomplete)


def profile(incomplete: str) -> list[str]:
    from commpass.costmodel.profile import NAMES

    return _beginning(NAMES, incomplete)


def run(ctx: Any, incomplete: str) -> list[str]:
    """Complete the name of a run of the folder that was given before.

    An option without its value ends the parsing, so the folder is still among the arguments.
    """
    folder = next((Path(each) for each in ctx.args if Path(each).is_dir()), None)
    if folder is None:
        return []
    return _beginning((*dict.fromkeys(dump.runs(folder).values()), dump.ALL), incomplete)


def _beginning(names: Any, incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
