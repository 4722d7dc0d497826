"""Exceptions with messages for users: what was wrong, where, and what to write instead."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable
from numbers import Real
from pathlib import Path
from typing import Any

from commpass.utils.printable import clean_lines


class CommpassError(Exception):
    """Base of every error that commpass raises on purpose."""

    def __init__(self, *args: Any, **kwargs: Any):
        shown = (clean_lines(each) if isinstance(each, str) else each for each in args)
        super().__init__(*shown, **kwargs)


class PolicyError(CommpassError, ValueError):
    """An invalid policy, rule, codec or module pattern. The message names the nearest valid one."""


class ScopeError(CommpassError, RuntimeError):
    """A ``compress`` or ``keep`` around a compiled call, where it cannot affect the graph."""


class PlanMismatch(CommpassError, RuntimeError):
    """The ranks of a group made different plans, or one of them did not answer in time."""


class Unanswered(PlanMismatch):
    """A rank of a group did not answer in time or was unreachable. The next call tries again."""


class ParallelError(CommpassError, ValueError):
    """A model, mesh or parameter that cannot be parallelized as requested."""


class DumpError(CommpassError, ValueError):
    """A dump that commpass did not write, that is truncated, or that a newer version wrote."""


class ProfileError(PolicyError):
    """A profile that commpass did not write, or measured times that no link can have."""


class CalibrationError(CommpassError, ValueError):
    """A calibration that cannot be made, that commpass did not write, or that a newer version
    wrote."""


class TraceError(CommpassError, ValueError):
    """A trace that torch.profiler did not write, or one of another program."""


class KernelError(CommpassError, ValueError):
    """A kernel that cannot be generated or compiled as requested, or an unknown architecture."""


class VerifyError(CommpassError, RuntimeError):
    """A rewritten graph that differs from its plan."""


def nearest(wrong_name: str, known: Iterable[str]) -> str:
    """Return the end of an error message: ``; did you mean 'int8'? Known: int4, int8.``

    A name is suggested if it differs only in upper and lower case, or if one typing error separates
    them. It is also suggested if difflib finds 60 percent of the letters of both in the same order,
    first as they are, then in lower case.
    """
    names = sorted(set(known))
    lower = {name.lower(): name for name in names}
    same = [name for name in names if name.lower() == wrong_name.lower()]
    close = (
        same
        or difflib.get_close_matches(wrong_name, names, n=1)
        or [lower[name] for name in difflib.get_close_matches(wrong_name.lower(), lower, n=1)]
        or [name for name in names if _one_slip(wrong_name, name)]
    )
    hint = f"; did you mean {close[0]!r}?" if close else "."
    more = f" and {len(names) - MOST} more" if len(names) > MOST else ""
    return (
        f"{hint} Known: {', '.join(name or repr(name) for name in names[:MOST])}{more}."
        if names
        else "."
    )


MOST = 40
"""The maximum number of names in a message."""


def _one_slip(wrong_name: str, name: str) -> bool:
    """Whether two names differ by one wrong, missing or extra letter, or by swapped letters
    (``sr``, ``rs``)."""
    steps = difflib.SequenceMatcher(None, wrong_name, name).get_opcodes()
    sizes = [max(b - a, d - c) for what, a, b, c, d in steps if what != "equal"]
    return len(wrong_name) > 1 and (sizes == [1] or sorted(wrong_name) == sorted(name))


_PYTHON = {"null": "None", "array": "list", "object": "dict"}
"""Python's names of JSON's types."""


def type_reason(error: Exception) -> str:
    """Return the reason of an error of msgspec with Python's names of types: "expected float or
    None, got str"."""
    text = str(error)

    def named(found: re.Match[str]) -> str:
        kinds = [_PYTHON.get(each, each) for each in found[1].split(" | ")]
        return " or ".join(kinds)

    return text[:1].lower() + re.sub(r"`([a-z0-9| ]+)`", named, text[1:])


def check_number(
    parameter: str,
    value: Any,
    minimum: float = 0.0,
    *,
    above: bool = False,
    maximum: float = math.inf,
) -> None:
    """Raise PolicyError unless a value is a finite number from ``minimum`` to ``maximum``. If
    ``above``, ``minimum`` itself is excluded."""
    number = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not minimum <= value <= maximum or (above and value == minimum):
        low = f"above {minimum:g}" if above else f"of at least {minimum:g}"
        high = "" if maximum == math.inf else f" and at most {maximum:g}"
        end = ")" * (parameter.count("(") - parameter.count(")"))
        raise PolicyError(f"{parameter}={value!r}{end}: must be a number {low}{high}")


SMALLEST, LARGEST = 1e-30, 1e30
"""The range of the times and rates of a profile, in whatever unit. Products of a few of them are
finite, and those of rates not 0."""


def check_quantity(
    parameter: str, value: Any, *, above: bool = False, maximum: float = math.inf
) -> None:
    """As ``check_number``, for a number of a profile. Times are computed from these, so a number
    that would make a time infinite is refused too: one that is too large or, if it is a rate
    (``above``), too small."""
    check_number(parameter, value, above=above, maximum=maximum)
    low = SMALLEST if above else 0
    if not low <= value <= LARGEST:
        end = ")" * (parameter.count("(") - parameter.count(")"))
        raise PolicyError(f"{parameter}={value!r}{end}: must be from {low:g} to {LARGEST:g}")


def unwritable(path: Path, error: OSError) -> str:
    """Return the message that a file cannot be written."""
    why = error.strerror
    if isinstance(error, FileNotFoundError) and not path.parent.is_dir():
        why = f"there is no folder {path.parent}; make it first"
    return f"{path}: cannot be written: {why}"
