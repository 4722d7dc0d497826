"""Gradients that DDP drops: with ``find_unused_parameters=True`` a parameter that no rank used in a
step keeps the gradient that it had, whatever came back for it in its bucket.

A codec with error feedback sends what is left of such a parameter all the same. What came back and
was dropped is left again.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from commpass.distributed.flat import put_back


class Dropped:
    """What came back in a step, until it is known what DDP made of it."""

    def __init__(self, hook: str, ranks: int):
        self.hook, self.ranks = hook, ranks
        self._sent: list[tuple[Tensor, Tensor]] = []
        self._complete = False

    def sent(self, bucket: dist.GradBucket) -> None:
        """The means of a bucket's gradients will be in its views."""
        if bucket.index() == 0:
            self._sent.clear()
        self._sent += zip(bucket.parameters(), bucket.gradients(), strict=True)
        self._complete = bucket.is_last()

    def end(self) -> None:
        """DDP may be ready (a checkpoint has backwards within a backward). What it has not put into
        gradients is not sent yet, a part on each rank. A mean that is not finite is lost."""
        if not self._complete:
            return
        for parameter, mean in self._sent:
            if parameter.grad is None or not torch.equal(parameter.grad, mean):
                left = torch.where(mean.isfinite(), mean, 0) / self.ranks
                put_back(self.hook, parameter, left)
        self._sent.clear()
