"""The device of a job, its input data, and its output.

Results are one line of JSON each, written at once, so that a job that dies has reported what it
found.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

POISON = 0xAB
LINES = 6
"""The number of last lines of a traceback that are reported."""


class Lost(RuntimeError):
    """A kernel has broken the process's GPU context: nothing runs in it any more."""


@dataclass
class Bench:
    """The settings and output of a job.

    With ``dry`` there is no GPU: Triton interprets on small tensors, and nothing is timed.
    ``small`` uses the same sizes on a GPU.
    """

    job: str
    device: torch.device
    seed: int
    dry: bool = False
    small: bool = False
    out: Path | None = None
    until: float = float("inf")
    found: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.small = self.small or self.dry
        self.random = torch.Generator(self.device).manual_seed(self.seed)

    # --- reports ----------------------------------------------------------------------------------

    def say(self, kind: str, **what: Any) -> None:
        line = {"kind": kind, "job": self.job, **what}
        self.found.append(line)
        if self.out is not None:
            with self.out.open("a") as file:
                file.write(json.dumps(line, default=str) + "\n")

    def check(self, name: str, passed: bool, said: str = "", **numbers: Any) -> bool:
        self.say("check", name=name, passed=bool(passed), said=said, **numbers)
        return bool(passed)

    def note(self, name: str, said: str, **more: Any) -> None:
        self.say("note", name=name, said=said, **more)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Report a failure in this block as a failed check, and go on."""
        try:
            yield
            self.synchronize()
        except Exception as error:
            lines = "".join(traceback.format_exception(error)).strip().splitlines()
            self.check(name, False, "\n".join([*_causes(error), *lines[-LINES:]]))
            try:
                self.synchronize()
            except Exception as lost:
                raise Lost(str(lost)) from error

    def late(self, name: str) -> bool:
        """Return whether there is no time left for something, and report it if so."""
        if time.time() > self.until:
            self.say("left out", name=f"{name}, for want of time")
            return True
        return False

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    # --- data -------------------------------------------------------------------------------------

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        made = torch.randn(shape, generator=self.random, device=self.device)
        return made.to(dtype)

    def rows(self, count: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Return values of all sizes: outliers, a third of a row zeros, minus zero, small
        numbers."""
        x = self.normal(count, numel) * self.normal(count, numel).exp()
        x[0, ::37] *= 40
        x[count // 2, : numel // 3] = 0
        x[count // 2, -1] = -0.0
        x[-1, numel // 2 :] *= 1e-30 if dtype != torch.float16 else 1e-6
        limit = torch.finfo(dtype).max
        return x.clamp(-limit, limit).to(dtype)


def _causes(error: BaseException) -> Iterator[str]:
    """Yield a line for each error that led to this one, the first one first: Triton wraps the error
    of an inner function in those of its callers."""
    cause = error.__cause__ or error.__context__
    if cause is not None:
        yield from _causes(cause)
        yield f"{type(cause).__name__}: {(str(cause).strip().splitlines() or [''])[-1]}"


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill unwritten memory inside this block, so that a kernel that leaves any of its output
    unwritten is noticed."""

    def filled(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*args: Any, **named: Any) -> Tensor:
            tensor = make(*args, **named)
            if tensor.numel() and tensor.is_contiguous():
                tensor.view(-1).view(torch.uint8).fill_(POISON)
            return tensor

        return made

    with (
        patch.object(torch, "empty", filled(torch.empty)),
        patch.object(torch, "empty_like", filled(torch.empty_like)),
        patch.object(Tensor, "new_empty", filled(Tensor.new_empty)),
    ):
        yield
