"""What the ranks of a site hand to its collective: tensors, arguments, and the prices of the
group."""

from __future__ import annotations

import dataclasses

import torch

from commpass.collectives import Payload, Request
from commpass.costmodel import Prices, Profile, prices
from commpass.plan import ROWS, Site


def payload_of(site: Site) -> Payload:
    """Return the payload that a rank hands to the collective."""
    dtype = getattr(torch, site.dtype)
    return Payload(max(site.bytes, 0) // dtype.itemsize, site.width, dtype)


def request_of(site: Site) -> Request:
    """Return the request of a site, as seen by any of its ranks."""
    sent, received = site.splits or (None, None)
    return Request(
        site.group,
        site.group_size,
        op=site.reduce_op or "sum",
        sent=sent,
        received=received,
        peer=site.peer or 0,
        tag=site.tag,
        by_messages=site.by_messages,
    )


def common_input(site: Site) -> tuple[Payload, Request]:
    """Return the payload and request that times are predicted for.

    If ranks may hold different sizes, they are standard sizes that all ranks know.
    """
    if not site.uneven:
        return payload_of(site), request_of(site)
    dtype = getattr(torch, site.dtype)
    rows = (ROWS,) * site.group_size
    request = dataclasses.replace(
        request_of(site),
        sent=rows,
        received=rows,
        unknown=not _has_known_splits(site),
        has_even_peers=False,
    )
    return Payload(ROWS * site.group_size * site.width, site.width, dtype), request


def own_request(site: Site) -> Request:
    """Return this rank's request if ranks may hold different sizes.

    If the sizes are still unknown, all entries count as sent to one rank, which gives the same
    bytes.
    """
    request = request_of(site)
    if _has_known_splits(site):
        return request
    entries = payload_of(site).numel // max(site.width, 1)
    rows = (entries, *[0] * (site.group_size - 1))
    return dataclasses.replace(request, sent=rows, received=rows, unknown=True)


def _has_known_splits(site: Site) -> bool:
    return all(isinstance(size, int) for some in site.splits or () for size in some)


def prices_of(site: Site, profile: Profile) -> Prices:
    """Return the prices in the group of a site."""
    labels = (site.group_label, *site.group_labels)
    return prices(profile, site.group_size, labels, site.global_ranks)
