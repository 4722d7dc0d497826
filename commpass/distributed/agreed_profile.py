"""The profile that all ranks plan by: the given one, or the default."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import msgspec
from torch import fx

from commpass.costmodel import Profile
from commpass.costmodel.networks import on_processors
from commpass.costmodel.profile import NOMINAL
from commpass.distributed.agreed_network import agreed_default, has_collective
from commpass.distributed.first_value import first_value
from commpass.distributed.hosts import is_distributed
from commpass.distributed.network import NetworkOfRank
from commpass.distributed.plan_store import PlanStore, current_store
from commpass.distributed.processors import WHOLE, Capacity, capacity_of
from commpass.errors import Unanswered

log = logging.getLogger("commpass")

PATIENCE_S = 5.0
"""How long a rank waits for the processors of others. It is short, since a program with a named
profile may use commpass on some ranks alone."""


def agreed_profile(
    profile: Profile | None,
    device: str,
    gm: fx.GraphModule | None = None,
    timeout_s: float | None = None,
) -> Profile:
    """Return the profile to use for a type of device, equal on all ranks: ``profile``, or the
    default if it is None.

    If it is named for its link, its times of processors become those of ranks with as many cores as
    these have, and as fast ones. Wait at most ``timeout_s`` seconds for what other ranks have read,
    and not at all for a graph ``gm`` without collectives.
    """
    if profile is None:
        return agreed_default(device, gm, timeout_s)
    if device != "cpu" or profile.source != NOMINAL:
        return profile
    capacity = agreed_capacity(gm, timeout_s)
    return on_processors(profile, capacity.cores, capacity.speed)


def agreed_capacity(gm: fx.GraphModule | None = None, timeout_s: float | None = None) -> Capacity:
    """Return the processors that every rank can count on, equal on all ranks; a core of the cost
    model without other ranks."""
    if not is_distributed():
        return WHOLE
    try:
        store = current_store()
        if store.capacity is None and (gm is None or has_collective(gm)):
            store.capacity = _agree(store, min(timeout_s or PATIENCE_S, PATIENCE_S))
    except Unanswered:
        raise
    except RuntimeError as error:  # the store is gone: the comparison of plans reports it
        log.debug("commpass could not reach the store: %s", error)
        return WHOLE
    if store.capacity is None:
        return WHOLE
    return msgspec.json.decode(store.capacity, type=Capacity)


def _agree(store: PlanStore, patience_s: float) -> str:
    def value(found: Mapping[int, NetworkOfRank]) -> str:
        known = [one.processors for one in found.values() if one.processors]
        return msgspec.json.encode(capacity_of(known)).decode()

    return first_value(
        store,
        "capacity",
        store.networks,
        value,
        without_rank_0=msgspec.json.encode(WHOLE).decode(),
        patience_s=patience_s,
        silent=SILENT,
    )


SILENT = (
    "%d ranks did not publish their processors within %g s: plans assume that these share none."
    " Create the backend on all ranks after init_process_group"
)
