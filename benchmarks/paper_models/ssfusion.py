"""SSFusion: the times of an all_gather and an all_reduce of all gradients on more and more
ranks."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from commpass.costmodel import Link
from commpass.costmodel.links import steps

from .hops import hops


@dataclass(frozen=True)
class Gradients:
    """A model's gradients: bytes (SSFusion, table IV), and the number of exchanges that send
    them."""

    nbytes: float
    exchanges: int


BERT_LARGE = Gradients(1.32e9, 5 + 24 * 16 + 2)
"""5 of the embedding, 16 per layer, 2 of the head: each is a separate tensor."""
GPT2_LARGE = Gradients(3.2e9, 2 + 36 * 12 + 2)
"""2 of the embedding, 12 per layer, 2 of the last norm."""
FEW, MANY = 8, 64


def growth(kind: str, of: Gradients, link: Link) -> float:
    """Return how many times longer 64 ranks take than 8 (SSFusion, section IV.D, equations 3 and
    4)."""
    few, many = (
        of.exchanges * link.time_us(kind, of.nbytes / of.exchanges, ranks) for ranks in (FEW, MANY)
    )
    return many / few


def fit_alpha(of: Gradients, grown: float) -> Link:
    """Return the link of stated rate whose start-up time makes an all_reduce of ``of`` grow by
    ``grown``.

    ``many = grown * few``, solved for alpha.
    """
    link = hops("infiniband-hdr")
    (few, few_sent), (many, many_sent) = (
        steps("all_reduce", ranks, of.nbytes) for ranks in (FEW, MANY)
    )
    us = (grown * few_sent - many_sent) / (link.gbytes_per_s * 1e3)
    return dataclasses.replace(link, alpha_us=us / (of.exchanges * (many - grown * few)))


def in_buffers(of: Gradients, mib: float) -> Gradients:
    """Return the same gradients, fused into buffers of some MiB."""
    return Gradients(of.nbytes, max(1, round(of.nbytes / (mib * (1 << 20)))))
