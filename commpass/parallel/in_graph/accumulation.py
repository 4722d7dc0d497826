"""Gradient accumulation: exchange the gradients of several micro-batches once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from commpass.parallel.in_graph.reading import ExchangedParameter, exchanged_parameters
from commpass.utils.ambient import without_ambient_state
from commpass.utils.keywords import named_arguments


@named_arguments
@contextmanager
def accumulate(model: nn.Module) -> Iterator[None]:
    """Keep the gradients of this context on their rank until the next backward outside of it.

    They are exchanged with those of that backward. Run the forward and backward of all
    micro-batches but the last in this context, as in ``no_sync`` of DistributedDataParallel.

    Gradients are kept in ``reduce_dtype``, in memory of the size of the gathered parameters, which
    later steps use again; ``drop_accumulated`` frees it. A parameter that the last micro-batch does
    not use sends its gradient with the next one that does. Raise ParallelError for a model that was
    not passed to ``replicate`` or ``shard``.

    Args:
        model: a model that was passed to ``replicate`` or ``shard``.
    """
    exchanged = [one for one, _ in exchanged_parameters(model)]
    before = [one.accumulating for one in exchanged]
    for one, parameter in exchanged_parameters(model):
        if one.leaf is None and parameter.requires_grad:
            _make_room(one, parameter.device)
        one.accumulating = True
    try:
        yield
    finally:
        for one, accumulating in zip(exchanged, before, strict=True):
            one.accumulating = accumulating


def _make_room(shard: ExchangedParameter, device: torch.device) -> None:
    shape, dtype = shard.how.shape, shard.how.reduce_dtype
    shard.leaf = torch.zeros((), dtype=dtype, device=device).expand(shape).requires_grad_()
    pending = shard.pending = torch.zeros(shape, dtype=dtype, device=device)

    def add(leaf: Tensor) -> None:
        # A running forward may refer to it: backward uses the value at that time.
        with without_ambient_state(), torch.autograd._unsafe_preserve_version_counter(pending):
            pending.add_(leaf.grad)  # type: ignore[arg-type]
        leaf.grad = None

    shard.leaf.register_post_accumulate_grad_hook(add)


@named_arguments
def drop_accumulated(model: nn.Module) -> None:
    """Drop what ``accumulate`` kept and was not exchanged yet, and free its memory.

    This corresponds to ``zero_grad`` for gradients.

    Args:
        model: a model that was passed to ``replicate`` or ``shard``.
    """
    for exchanged, _ in exchanged_parameters(model):
        exchanged.leaf = exchanged.pending = None
