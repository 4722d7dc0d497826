"""Gradients of several micro-batches, exchanged once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from commpass.parallel.in_graph.reading import ExchangedParameter, every_held
from commpass.utils.ambient import without_ambient_state


@contextmanager
def accumulate(model: nn.Module) -> Iterator[None]:
    """Gradients of what the model computes in here stay on their rank, and are exchanged with those
    of the next backward outside: all micro-batches but the last are run in here, forward and
    backward, as in ``no_sync`` of DistributedDataParallel.

    They are kept in ``reduce_dtype``, in memory of the size of the gathered parameters, which is
    used again in later steps; ``drop_accumulated`` gives it back. A parameter that the last
    micro-batch does not use sends what it has with the next one that does. Raises ParallelError for
    a model that ``replicate`` and ``shard`` have not seen.
    """
    held = [one for one, _ in every_held(model)]
    before = [one.accumulating for one in held]
    for one, parameter in every_held(model):
        if one.leaf is None and parameter.requires_grad:
            _make_room(one, parameter.device)
        one.accumulating = True
    try:
        yield
    finally:
        for one, was in zip(held, before, strict=True):
            one.accumulating = was


def _make_room(shard: ExchangedParameter, device: torch.device) -> None:
    shape, dtype = shard.how.shape, shard.how.reduce_dtype
    shard.leaf = torch.zeros((), dtype=dtype, device=device).expand(shape).requires_grad_()
    pending = shard.pending = torch.zeros(shape, dtype=dtype, device=device)

    def add(leaf: Tensor) -> None:
        # A forward that is under way may hold it: backward takes what is there by then.
        with without_ambient_state(), torch.autograd._unsafe_preserve_version_counter(pending):
            pending.add_(leaf.grad)  # type: ignore[arg-type]
        leaf.grad = None

    shard.leaf.register_post_accumulate_grad_hook(add)


def drop_accumulated(model: nn.Module) -> None:
    """Forgets what ``accumulate`` kept and was not exchanged yet, as ``zero_grad`` does with
    gradients, and gives its memory back."""
    for held, _ in every_held(model):
        held.leaf = held.pending = None
