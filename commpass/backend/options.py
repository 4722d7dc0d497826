"""The options of the backend, and those that it passes to Inductor."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, get_origin

from commpass.costmodel import Profile
from commpass.errors import PolicyError

INNER = ("inductor", "eager", "aot_eager", "tensorrt")
SAMPLING_COMPILERS = INNER[:3]
"""The inner compilers that know the operator that samples errors. Others need not know it."""
OPTIONS = ("policy", "inner", "profile", "strict", "dump", "timeout", "autotune")
AUTOTUNE_S = 10.0
"""Seconds in which the kernels of one graph are timed, unless the user gives a number."""
LONGEST_S = 86_400
"""The largest number of seconds that ``autotune`` may be: a day."""
Compiler = Callable[..., Any]


def inductor_options(options: Mapping[str, Any], inner: str | Compiler) -> dict[str, Any]:
    """Return options by their names in Inductor's config. Raise PolicyError for options that the
    inner compiler does not have."""
    from torch._inductor import config

    known = list(config.get_config_copy()) if inner == "inductor" else []
    found = {name.replace("-", "_"): value for name, value in options.items()}
    for name, value in found.items():
        if name not in known:
            close = difflib.get_close_matches(name, [*OPTIONS, *known], 1)
            hint = f"; did you mean {close[0]!r}?" if close else "."
            others = ", and the options of Inductor" if known else ""
            raise PolicyError(f"unknown option {name!r}{hint} Known: {', '.join(OPTIONS)}{others}.")
        expected: Any = config.get_type(name)  # type: ignore[attr-defined]
        if get_origin(expected) is None and not isinstance(value, expected):
            raise PolicyError(f"option {name}={value!r}: must be a {expected.__name__}")
    return found


def check_autotune(value: Any) -> None:
    """Raise PolicyError unless a value is one of the option ``autotune``."""
    if value is None or isinstance(value, bool):
        return
    if not isinstance(value, Real) or not 0 <= float(value) <= LONGEST_S:
        raise PolicyError(
            f"autotune={value!r}: must be True, False, or seconds for each graph from 0 to"
            f" {LONGEST_S}, e.g. autotune=30"
        )


def autotune_seconds(autotune: bool | float | None, inner: str | Compiler) -> float:
    """Return the seconds in which the kernels of one graph may be timed; 0.0 for none.

    If ``autotune`` is None, Inductor's option ``max_autotune`` decides.
    """
    from torch._inductor import config

    if inner != "inductor":
        return 0.0
    chosen = bool(config.max_autotune) if autotune is None else autotune
    return AUTOTUNE_S * chosen if isinstance(chosen, bool) else float(chosen)


def in_cuda_graphs(profile: Profile) -> Profile:
    """Return the profile with launches inside CUDA graphs, if Inductor records such graphs."""
    from torch._inductor import config

    if not config.triton.cudagraphs:
        return profile
    return dataclasses.replace(profile, kernels=profile.kernels.in_graph)
