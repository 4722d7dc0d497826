"""The public functions: make a backend, or compile with one by its name."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import fx

from commpass.backend.compiler import Backend
from commpass.backend.options import INNER, OPTIONS, Compiler, check_autotune
from commpass.costmodel import Profile
from commpass.distributed.environment import dump_here, policy_here
from commpass.distributed.machine import profile_here
from commpass.distributed.refusal import publishing_refusal
from commpass.errors import PolicyError, nearest
from commpass.lowering import cpu
from commpass.policy import Policy
from commpass.tensorrt import Engines
from commpass.utils.keywords import named_arguments

Made = TypeVar("Made", bound=Callable[..., Any])


def _called_first(function: Made) -> Made:
    """Tell users who give the function itself to ``torch.compile`` to call it."""

    @functools.wraps(function)
    def checked(*args: Any, **options: Any) -> Any:
        if args and isinstance(args[0], fx.GraphModule):
            raise PolicyError(
                "backend=commpass.backend is the function that makes a backend: call it, with a"
                ' policy: torch.compile(model, backend=commpass.backend("balanced"))'
            )
        return function(*args, **options)

    return checked  # type: ignore[return-value]


@_called_first
@publishing_refusal
@named_arguments
def backend(
    policy: str | Path | Policy = "lossless",
    *,
    inner: str | Compiler = "inductor",
    profile: str | Path | Profile | None = None,
    strict: bool = False,
    dump: str | os.PathLike[str] | None = None,
    timeout: float | None = None,
    autotune: bool | float | None = None,
) -> Backend:
    """Return a backend for ``torch.compile(model, backend=commpass.backend("balanced"))``.

    Args:
        policy: the name of a preset, the path of a TOML file, or a Policy. The environment
            variables COMMPASS_POLICY and COMMPASS=off override it.
        inner: the compiler of the rewritten graphs.
            ``"inductor"``: Inductor.
            ``"eager"``: runs the graphs that Inductor would get, operator by operator.
            ``"aot_eager"``: runs AOTAutograd's graphs, without Inductor's decompositions.
            ``"tensorrt"``: compiles AOTAutograd's graphs to torch-tensorrt engines, for inference.
            A function ``(graph_module, example_inputs) -> callable``: called with each of
            AOTAutograd's graphs.
        profile: the cost model's data on links and kernels: a Profile, a name (``"nvlink-4"``,
            ``"ethernet-25g"``), or the path of a .json or .toml file. If None, the environment
            variable COMMPASS_PROFILE, or else the network that is read from the system.
        strict: if True, raise when a pass fails. Otherwise log a warning and compile the untouched
            graph.
        dump: a folder into which rank 0 writes plans and graphs, for ``commpass explain`` and
            related commands. If None, the environment variable COMMPASS_DUMP.
        timeout: seconds that ranks wait for each other's plans. If None, the time-out of the
            process groups. After 30 s a message names the ranks that are waited for.
        autotune: whether tile sizes of kernels are timed on the GPU while a graph is compiled, for
            at most 10 s for each graph, or for at most this number of seconds. If None, Inductor's
            option ``max_autotune`` decides, as in ``mode="max-autotune"``. It needs
            ``inner="inductor"``. See docs/lowering.md.

    Raises PolicyError for an unknown name, with the nearest known one.
    """
    chosen = policy_here(policy)
    if not callable(inner) and inner not in INNER:
        raise PolicyError(
            f"unknown inner compiler {inner!r}{nearest(str(inner), INNER)} Or give a function."
        )
    seconds = isinstance(timeout, Real) and not isinstance(timeout, bool) and timeout > 0
    if timeout is not None and not seconds:
        expected = "seconds as a number above 0, e.g. timeout=30"
        raise PolicyError(f"timeout={timeout!r}: must be {expected}")
    if not isinstance(strict, bool):
        raise PolicyError(f"strict={strict!r}: must be strict=True or strict=False")
    if dump is not None and not isinstance(dump, (str, os.PathLike)):
        raise PolicyError(f'dump={dump!r}: must be the path of a folder, e.g. dump="dumps"')
    check_autotune(autotune)
    if autotune and inner != "inductor":
        raise PolicyError(f'autotune={autotune!r}: kernels are only used with inner="inductor"')
    if inner == "tensorrt":
        inner = Engines()
    settings = profile_here(profile), strict, dump_here(dump), timeout, autotune
    made = Backend(chosen, inner, *settings)
    if inner == "inductor" and torch.version.cuda is None:  # else a graph may need no C++
        cpu.precompile_headers()
    return made


_by_options: list[tuple[dict[str, Any], Backend]] = []


def by_name(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Compile one Dynamo graph.

    Called for ``torch.compile(model, backend="commpass", options={"policy": "balanced"})``.

    ``options`` holds arguments of ``commpass.backend`` and options of Inductor. Equal arguments of
    ``commpass.backend`` share one Backend. Raises PolicyError for an unknown option.
    """
    own = {key: value for key, value in (options or {}).items() if key in OPTIONS}
    others = {key: value for key, value in (options or {}).items() if key not in OPTIONS}
    found = next((each for given, each in _by_options if given == own), None)
    if found is None:
        found = backend(**own)
        _by_options.append((own, found))
    return found(gm, example_inputs, mode=mode, options=others)


def _reset_by_name() -> None:
    for _, each in _by_options:
        each.reset()


by_name.reset = _reset_by_name  # type: ignore[attr-defined]
