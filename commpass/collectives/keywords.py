"""Unknown keyword arguments of functions that may be called in a graph."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from commpass.utils import keywords

P = ParamSpec("P")
R = TypeVar("R")


def named_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """As ``utils.keywords.named_arguments``, of a function that Dynamo can trace.

    Dynamo cannot trace the search for the nearest name. There torch names the wrong argument.
    """
    checked = keywords.named_arguments(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        return checked(*args, **kwargs)

    return call
