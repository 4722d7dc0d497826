"""Timed tile sizes on disk, in Inductor's cache folder: one JSON file for each kernel call on each
kind of GPU."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch

from commpass.lowering.gpu.launch import interpreting
from commpass.lowering.gpu.tunable import Tunable, values_of
from commpass.lowering.timed import Timed
from commpass.utils.version import own_version

log = logging.getLogger("commpass")

FOLDER = "commpass_tile_sizes"
LONGEST_US = 1e12
"""No kernel takes as long: a file with this time or more is damaged."""


def folder() -> Path | None:
    """Return the folder of the files, or None if Inductor's caches are disabled."""
    from torch._inductor import config
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return None if config.force_disable_caches else Path(cache_dir()) / FOLDER


def key_of(call: Tunable) -> str:
    """Return the name of a call's file: a digest of all that its times depend on."""
    facts = [
        call.identity,
        [values_of(each) for each in call.choices],
        card(call.device),
        _triton_version(),
        str(torch.__version__),
        own_version(),
    ]
    return hashlib.sha256(msgspec.json.encode(facts)).hexdigest()[:32]


def card(device: torch.device) -> str:
    """Return the name of a GPU, with its number of multiprocessors."""
    if device.type != "cuda" or interpreting():
        return device.type
    its = torch.cuda.get_device_properties(device)
    return f"{its.name}, {its.multi_processor_count}"


def _triton_version() -> str:
    import triton

    return str(triton.__version__)


def read(place: Path | None, call: Tunable) -> Timed | None:
    """Return the stored result for a call, or None. A file that is damaged is logged."""
    if place is None:
        return None
    file = place / f"{key_of(call)}.json"
    try:
        found = msgspec.json.decode(file.read_bytes(), type=Timed)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        log.warning("%s is damaged, and its kernel is timed again: %s", file, error)
        return None
    known: list[Mapping[str, int | bool] | None] = [None, *map(values_of, call.choices)]
    if found.choice not in known or not 0 < found.us <= found.static_us < LONGEST_US:
        why = "unknown sizes, or times that are none"
        log.warning("%s is damaged, and its kernel is timed again: %s", file, why)
        return None
    return found


def write(place: Path | None, call: Tunable, timed: Timed) -> None:
    """Store a result. Other processes see the whole file or none."""
    if place is None:
        return
    try:
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=place, suffix=".tmp", delete=False) as file:
            try:
                file.write(msgspec.json.format(msgspec.json.encode(timed), indent=1))
                file.flush()
                os.replace(file.name, place / f"{key_of(call)}.json")
            except OSError:
                os.unlink(file.name)
                raise
    except OSError as error:
        log.warning("tile sizes are not stored in %s: %s", place, error)
