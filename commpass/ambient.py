"""The boundary between the caller's torch state and what commpass computes.

What a codec or an exchange computes must not depend on what the caller has switched on around it.
Torch keeps such state in two places:

- Of the *thread*: autocast on any device, grad mode, the default device and other function modes,
  dispatch modes. ``without_ambient_state`` shuts it out, and restores it.
- Of the *process*: the default dtype, deterministic algorithms. To change it here would change it
  for the caller's other threads. Codecs therefore name every dtype, and have no operator that
  deterministic algorithms change.

Inference mode changes no values. Only tensors that outlive the call must not be made in it
(``making_lasting_tensors``): autograd could never write to them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode

P = ParamSpec("P")
R = TypeVar("R")


def without_ambient_state() -> AbstractContextManager[Any]:
    """In here the thread's autocast, grad mode, function modes (so the default device) and foreign
    dispatch modes are off.

    Torch's own dispatch modes stay: they trace (fake tensors, ``make_fx``), record or count
    (``CommDebugMode``), or say what a checkpoint saves. Dynamo traces this without a graph break.
    """
    return _traced() if torch.compiler.is_dynamo_compiling() else _Shut()


def ambient_free(function: Callable[P, R]) -> Callable[P, R]:
    """The function, always called ``without_ambient_state``."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with without_ambient_state():
            return function(*args, **kwargs)

    return run


@contextmanager
def making_lasting_tensors() -> Iterator[None]:
    """As ``without_ambient_state``, for real tensors that outlive the call (tables, state, facts
    about a codec): also without tracing, fake tensors, any dispatch mode, and inference mode."""
    with without_ambient_state(), torch._C._DisableTorchDispatch(), torch.inference_mode(False):
        torch._C._set_grad_enabled(False)  # which leaving inference mode switches on
        yield


class _Shut:
    """About 3 microseconds a call: ``contextlib`` would take half as long again."""

    __slots__ = ("autocast", "functions", "grad", "modes")

    def __enter__(self) -> None:
        self.modes = _drop_foreign_modes() if torch._C._len_torch_dispatch_stack() else None
        self.autocast = torch._C._DisableAutocast()
        self.autocast.__enter__()
        self.functions = torch._C.DisableTorchFunction()
        self.functions.__enter__()
        self.grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *error: object) -> None:
        torch._C._set_grad_enabled(self.grad)
        self.functions.__exit__(None, None, None)
        self.autocast.__exit__(None, None, None)
        if self.modes is not None:
            _replace_modes(self.modes)


def _drop_foreign_modes() -> list[Any] | None:
    """Takes every dispatch mode that is not torch's off the stack. Returns the whole stack as it
    was, outermost first; None where nothing changed."""
    before = _get_current_dispatch_mode_stack()
    own = [mode for mode in before if type(mode).__module__.startswith("torch.")]
    if len(own) == len(before):
        return None
    _replace_modes(own)
    return before


def _replace_modes(modes: list[Any]) -> None:
    for _ in range(torch._C._len_torch_dispatch_stack()):
        _pop_mode()
    for mode in modes:
        _push_mode(mode)


@contextmanager
def _traced() -> Iterator[None]:
    """The same in terms that Dynamo knows, which end up in its graph."""
    with (
        torch.no_grad(),
        torch._C.DisableTorchFunction(),
        torch.autocast("cpu", enabled=False),
        torch.autocast("cuda", enabled=False),
    ):
        yield
