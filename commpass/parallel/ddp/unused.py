"""Return to error feedback what DDP drops of parameters that no rank used.

With ``find_unused_parameters=True`` a parameter that no rank used in a step keeps its previous
gradient, whatever its bucket returned. A codec with error feedback still sends the residual of such
a parameter. What DDP dropped of the result is added back to the residual.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from commpass.distributed.flat import add_to_residual


class UnusedParameters:
    """The results of a step, until it is known what DDP did with them."""

    def __init__(self, hook: str, ranks: int):
        self.hook, self.ranks = hook, ranks
        self._sent: list[tuple[Tensor, Tensor]] = []
        self._complete = False

    def add_bucket(self, bucket: dist.GradBucket) -> None:
        """Remember the views of a bucket, which will hold the means of its gradients."""
        if bucket.index() == 0:
            self._sent.clear()
        self._sent += zip(bucket.parameters(), bucket.gradients(), strict=True)
        self._complete = bucket.is_last()

    def end(self) -> None:
        """Add back what DDP has not put into gradients, once a step is complete.

        DDP may be ready (a checkpoint has backwards within a backward). Each rank adds back one
        part of the mean. A mean that is not finite is lost.
        """
        if not self._complete:
            return
        for parameter, mean in self._sent:
            if parameter.grad is None or not _equal(parameter.grad, mean):
                dropped = torch.where(mean.isfinite(), mean, 0) / self.ranks
                add_to_residual(self.hook, parameter, dropped)
        self._sent.clear()


def _equal(grad: Tensor, mean: Tensor) -> bool:
    """Return whether all values are equal, where a NaN equals a NaN."""
    if torch.equal(grad, mean):
        return True
    return bool(mean.isnan().any()) and torch.allclose(grad, mean, 0, 0, equal_nan=True)
