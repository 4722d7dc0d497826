"""The profile that all ranks plan by: the given one, or the default."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from torch import fx

from commpass.costmodel import Profile
from commpass.costmodel.networks import on_shared_processors
from commpass.costmodel.profile import NOMINAL
from commpass.distributed.agreed_network import agreed_default, has_collective
from commpass.distributed.first_value import first_value
from commpass.distributed.hosts import is_distributed
from commpass.distributed.network import NetworkOfRank
from commpass.distributed.plan_store import PlanStore, current_store
from commpass.distributed.processors import fewest_cores
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
    these have. Wait at most ``timeout_s`` seconds for what other ranks have read, and
    not at all for a graph ``gm`` without collectives.
    """
    if profile is None:
        return agreed_default(device, gm, timeout_s)
    if device != "cpu" or profile.source != NOMINAL:
        return profile
    return on_shared_processors(profile, agreed_cores(gm, timeout_s))


def agreed_cores(gm: fx.GraphModule | None = None, timeout_s: float | None = None) -> float:
    """Return the cores of the rank with the fewest, at most 1, equal on all ranks; 1 without other
    ranks."""
    if not is_distributed():
        return 1.0
    try:
        store = current_store()
        if store.cores is None and (gm is None or has_collective(gm)):
            store.cores = _agree(store, min(timeout_s or PATIENCE_S, PATIENCE_S))
    except Unanswered:
        raise
    except RuntimeError as error:  # the store is gone: the comparison of plans reports it
        log.debug("commpass could not reach the store: %s", error)
        return 1.0
    return 1.0 if store.cores is None else store.cores


def _agree(store: PlanStore, patience_s: float) -> float:
    def value(found: Mapping[int, NetworkOfRank]) -> str:
        known = [one.processors for one in found.values() if one.processors]
        return str(min(1.0, fewest_cores(known)))

    found = first_value(
        store,
        "cores",
        store.networks,
        value,
        without_rank_0="1.0",
        patience_s=patience_s,
        silent=SILENT,
    )
    return float(found)


SILENT = (
    "%d ranks did not publish their processors within %g s: plans assume that these share none."
    " Create the backend on all ranks after init_process_group"
)
