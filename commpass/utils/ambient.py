"""Isolates what commpass computes from the caller's torch state.

Codecs and exchanges must not depend on settings that the caller has enabled. torch keeps such state
in two places:

- Per *thread*: autocast on any device, grad mode, the default device and other function modes,
  dispatch modes. ``without_ambient_state`` disables it and restores it afterwards.
- Per *process*: the default dtype, deterministic algorithms. A change here would affect the
  caller's other threads. Codecs therefore name every dtype, and use no operator that deterministic
  algorithms change.

Inference mode changes no values. Only tensors that outlive the call must not be created in it
(``making_lasting_tensors``), because autograd could never write to them. Graphs must not be traced
in it (``rewriting``), because it omits nodes of views.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from torch import overrides
from torch.utils import _python_dispatch as python_dispatch
from torch.utils._device import DeviceContext

P = ParamSpec("P")
R = TypeVar("R")


def without_ambient_state() -> AbstractContextManager[Any]:
    """Disable the thread's autocast, grad mode, default device and foreign modes inside the
    context.

    torch's own modes stay: they trace (fake tensors, ``make_fx``), record or count
    (``CommDebugMode``), or decide what a checkpoint saves. Dynamo traces this without a graph
    break.
    """
    return _traced() if torch.compiler.is_dynamo_compiling() else _WithoutAmbientState()


def ambient_free(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function to run ``without_ambient_state``."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with without_ambient_state():
            return function(*args, **kwargs)

    return run


@contextmanager
def rewriting() -> Iterator[None]:
    """Like ``without_ambient_state``, and without inference mode, for code that traces and changes
    graphs."""
    with torch.inference_mode(False), without_ambient_state():  # in this order: it sets grad mode
        yield


@contextmanager
def making_lasting_tensors() -> Iterator[None]:
    """Like ``without_ambient_state``, for real tensors that outlive the call (tables, state, facts
    about a codec).

    It also disables tracing, fake tensors, all dispatch modes, and inference mode.
    """
    with without_ambient_state(), torch._C._DisableTorchDispatch(), torch.inference_mode(False):
        torch._C._set_grad_enabled(False)  # leaving inference mode enables it
        yield


class _WithoutAmbientState:
    """The context of ``without_ambient_state``. It takes about 2 microseconds per call;
    ``contextlib`` takes 50 % longer."""

    __slots__ = ("autocast", "dispatch", "functions", "grad")

    def __enter__(self) -> None:
        functions, dispatch = torch._C._len_torch_function_stack, torch._C._len_torch_dispatch_stack
        self.functions = FUNCTION_MODES.drop_foreign() if functions() else None
        self.dispatch = DISPATCH_MODES.drop_foreign() if dispatch() else None
        self.autocast = torch._C._DisableAutocast()
        self.autocast.__enter__()
        self.grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *error: object) -> None:
        torch._C._set_grad_enabled(self.grad)
        self.autocast.__exit__(None, None, None)
        if self.dispatch is not None:
            DISPATCH_MODES.replace(self.dispatch)
        if self.functions is not None:
            FUNCTION_MODES.replace(self.functions)


@dataclass(frozen=True)
class _Modes:
    """A stack of torch modes."""

    all: Callable[[], list[Any]]
    pop: Callable[[], Any]
    push: Callable[[Any], None]

    def drop_foreign(self) -> list[Any] | None:
        """Remove default devices and modes that are not torch's from the stack. Return the original
        stack, outermost first, or None if nothing changed."""
        before = self.all()
        own = [mode for mode in before if _is_torchs(mode)]
        if len(own) == len(before):
            return None
        self.replace(own)
        return before

    def replace(self, modes: list[Any]) -> None:
        """Replace the stack by these modes, outermost first."""
        for _ in self.all():
            self.pop()
        for mode in modes:
            self.push(mode)


FUNCTION_MODES = _Modes(
    overrides._get_current_function_mode_stack, overrides._pop_mode, overrides._push_mode
)
DISPATCH_MODES = _Modes(
    python_dispatch._get_current_dispatch_mode_stack,
    python_dispatch._pop_mode,
    python_dispatch._push_mode,
)


def _is_torchs(mode: object) -> bool:
    return type(mode).__module__.startswith("torch.") and not isinstance(mode, DeviceContext)


@contextmanager
def _traced() -> Iterator[None]:
    """The same with functions that Dynamo can trace into its graph."""
    with (
        torch.no_grad(),
        torch._C.DisableTorchFunction(),
        torch.autocast("cpu", enabled=False),
        torch.autocast("cuda", enabled=False),
    ):
        yield
