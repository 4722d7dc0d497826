"""Exchanges as point-to-point messages: all are in flight at once, in both directions, and every
receive is posted before the first send.

gloo runs an all-to-all of large messages one direction at a time, and at most as many exchanges at
once as a group has workers. Its messages have neither limit. The result of an exchange started here
is waited for like that of any functional collective.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from commpass.utils.ambient import ambient_free

ops = torch.ops.commpass

TAG = 0x70617373
"""The tag that separates these messages from the user's messages between the same two ranks."""


def _all_to_all(wire: Tensor, received: Sequence[int], sent: Sequence[int], group: str) -> Tensor:
    """Send the first ``sent[0]`` rows to rank 0 and so on; receive ``received[0]`` rows from it and
    so on."""
    arrived = wire.new_empty((sum(received), *wire.shape[1:]))
    _post(arrived.split(list(received)), wire.contiguous().split(list(sent)), arrived, group)
    return arrived


def _all_gather(wire: Tensor, ranks: int, group: str) -> Tensor:
    """Send all rows to all ranks and return them in rank order."""
    arrived = wire.new_empty((wire.shape[0] * ranks, *wire.shape[1:]))
    _post(arrived.chunk(ranks), [wire.contiguous()] * ranks, arrived, group)
    return arrived


def _post(coming: Sequence[Tensor], going: Sequence[Tensor], arrived: Tensor, name: str) -> None:
    """Start all messages of one exchange; waiting for ``arrived`` waits for all of them."""
    resolve: Any = dist.distributed_c10d._resolve_process_group
    group = resolve(name)
    rank = group.rank()
    works = [group.recv([coming[peer]], peer, TAG) for peer in _peers(coming, rank)]
    works += [group.send([going[peer]], peer, TAG) for peer in _peers(going, rank)]
    coming[rank].copy_(going[rank])
    for work in works:
        torch._C._distributed_c10d._register_work(arrived, work)


def _peers(parts: Sequence[Tensor], rank: int) -> Iterator[int]:
    """The ranks that a message comes from or goes to. The next rank comes first, so that not all
    ranks send to the same one at once."""
    for step in range(1, len(parts)):
        peer = (rank + step) % len(parts)
        if parts[peer].numel():
            yield peer


def _shape_of_all_to_all(
    wire: Tensor, received: Sequence[int], sent: Sequence[int], group: str
) -> Tensor:
    _tell_inductor()
    return wire.new_empty((sum(received), *wire.shape[1:]))


def _shape_of_all_gather(wire: Tensor, ranks: int, group: str) -> Tensor:
    _tell_inductor()
    return wire.new_empty((wire.shape[0] * ranks, *wire.shape[1:]))


@lru_cache
def _inductor_knows() -> bool:
    from torch._inductor import ir
    from torch._inductor.lowering import (
        add_layout_constraint,
        constrain_to_fx_strides,
        register_lowering,
    )

    def exchange(operator: Any) -> Any:
        def lowered(wire: Any, *how: Any) -> Any:
            started: Any = ir._CollectiveKernel.create_out_of_place(operator, wire, *how)
            return ir.TensorBox.create(started)

        return lowered

    for packet in (ops.all_to_all_single, ops.all_gather_into_tensor):
        add_layout_constraint(packet, constrain_to_fx_strides)
        register_lowering(packet)(exchange(packet.default))
    return True


def _tell_inductor() -> None:
    """Register the exchanges in Inductor if it is in use: it then does not reuse their buffers
    until they are waited for."""
    if "torch._inductor.compile_fx" in sys.modules:
        _inductor_knows()


# Names and arguments are those of torch's functional collectives.
_library = torch.library.Library("commpass", "FRAGMENT")
for _name, _arguments, _function, _shape in (
    (
        "all_to_all_single",
        "Tensor input, SymInt[] output_split_sizes, SymInt[] input_split_sizes, str group_name",
        _all_to_all,
        _shape_of_all_to_all,
    ),
    (
        "all_gather_into_tensor",
        "Tensor input, int group_size, str group_name",
        _all_gather,
        _shape_of_all_gather,
    ),
):
    _library.define(f"{_name}({_arguments}) -> Tensor")
    _library.impl(_name, ambient_free(_function), "CompositeExplicitAutograd")
    torch.library.register_fake(f"commpass::{_name}", _shape, lib=_library)
