"""Choose the tile sizes of a graph's kernels by their times, within a bound of time.

Each choice runs on random values, never on those of the user. A choice must give the bytes of the
static choice, and is used only if it is clearly faster. A choice that cannot be compiled or
launched is skipped.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from commpass.lowering.gpu import tile_cache
from commpass.lowering.gpu.tunable import Choice, Tunable, describe, values_of
from commpass.lowering.timed import Timed
from commpass.utils.ambient import making_lasting_tensors
from commpass.utils.printable import first_line

log = logging.getLogger("commpass")

Timer = Callable[[Callable[[], object], torch.device], float]
"""Returns the microseconds of a call on a device."""
GAIN = 0.97
"""A choice is used if it takes at most this share of the time of the static one: times vary by 1 to
2 percent."""


@dataclass
class Tuning:
    """The results of ``tune``, and how they were found: the number of calls that were ``timed``,
    that were ``stored`` on disk, and the seconds that it took."""

    found: dict[Tunable, Timed] = field(default_factory=dict)
    timed: int = 0
    stored: int = 0
    seconds: float = 0.0


def tune(
    calls: Mapping[Tunable, int],
    budget_s: float,
    timer: Timer,
    *,
    folder: Path | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Tuning:
    """Choose the tile sizes of kernel calls, given with the number of their uses in the graph.

    Those that take the longest by their bytes and uses are timed first. After ``budget_s`` seconds
    no further choice is timed; the one that runs is finished. Results are read from and written to
    ``folder``, unless it is None.
    """
    made, start = Tuning(), clock()
    order = sorted(calls, key=lambda call: -call.cost * calls[call])
    with making_lasting_tensors():
        for call in order:
            known = tile_cache.read(folder, call)
            if known is not None:
                made.found[call], made.stored = known, made.stored + 1
                continue
            timed = _fastest(call, timer, lambda: clock() - start < budget_s)
            if timed.note == NO_TIME:
                timed = replace(timed, note=f"{timed.note} within {budget_s:g} s")
            elif not timed.note:
                tile_cache.write(folder, call, timed)
            made.found[call] = timed
            made.timed += bool(timed.us)
    if made.timed and torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # the memory of the random values
    made.seconds = clock() - start
    return made


NO_TIME = "not all choices were timed"


def _fastest(call: Tunable, timer: Timer, has_time: Callable[[], bool]) -> Timed:
    """Time the choices of a call while there is time, the static one first."""
    if not has_time():
        return Timed(note=NO_TIME)
    static, *others = call.choices
    times: dict[Choice, float] = {}
    skipped, note = list[str](), ""
    try:
        inputs = call.examples()
        expected = call.run(static, inputs)
        static_us = timer(partial(call.run, static, inputs), call.device)
        for choice in others:
            if not has_time():
                note = NO_TIME
                break
            if why := _skip_reason(call, choice, inputs, expected):
                log.info("tile size %s is not used: %s", describe(choice), why)
                skipped.append(f"{describe(choice)}: {why}")
            else:
                times[choice] = timer(partial(call.run, choice, inputs), call.device)
    except Exception as error:  # of the static choice or the timer, or no memory
        _check(call.device)
        return Timed(note=f"not timed: {first_line(error)}")
    best = min(times, key=times.__getitem__, default=static)
    us = times.get(best, static_us)
    if us > GAIN * static_us:
        return Timed(None, static_us, static_us, tuple(skipped), note)
    return Timed(values_of(best), static_us, us, tuple(skipped), note)


def _skip_reason(
    call: Tunable, choice: Choice, inputs: list[Tensor], expected: list[Tensor]
) -> str:
    """Run a choice once. Return why it cannot be used, or ""."""
    try:
        same = _same(call.run(choice, inputs), expected)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # it cannot be compiled, or needs more than a processor has
        _check(call.device)
        return first_line(error)
    return "" if same else "it gives other bytes than the static choice"


def _same(results: list[Tensor], expected: list[Tensor]) -> bool:
    pairs = zip(results, expected, strict=True)
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


def _check(device: torch.device) -> None:
    """Raise the error of a GPU that can run nothing any more."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
