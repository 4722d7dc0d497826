"""Time the tile sizes of a planned graph's kernels on its GPU, and use the fastest on all ranks.

The ranks have agreed on the plan. Of each process group, the first rank times the kernels of the
group's sites, and all of its ranks use the result. The bits do not depend on it.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from torch import fx

from commpass.backend.shared import Job, Shared
from commpass.distributed import agreed_tiles, compile_progress, record
from commpass.distributed.agreed_tiles import TileSizes
from commpass.distributed.hosts import is_distributed
from commpass.distributed.plan_store import Round, current_store
from commpass.errors import CommpassError, Unanswered
from commpass.lowering.timed import Timed
from commpass.passes import PassContext
from commpass.passes.fx import meta
from commpass.passes.retile import TunableNode, retile, tunable_nodes, with_reasons
from commpass.plan import PlannedSite
from commpass.utils.printable import first_line, less, plural

PATIENCE_S = 60.0
"""Seconds in addition to the bound after which a rank no longer waits: the rank that times kernels
also compiles the choice that it is timing."""
ALONE = "not timed: this rank compiles the graph without the others"
NO_SUCH_KERNEL = "not timed: the first rank of its group has no such kernel"
NOT_ON_A_GPU = (
    "autotune=%r: no kernel is timed for a graph on device %s, since only kernels of GPUs have tile"
    " sizes to choose from"
)
OTHER_GPU = (
    "this rank's GPU does not have the tile sizes of %s that the first rank of its group has timed:"
    " it uses the static choice, with the same results"
)


def set_tile_sizes(shared: Shared, job: Job, outcome: PassContext, round: Round | None) -> None:
    """Choose the tile sizes of a graph's kernels, and set them in place. ``round`` is that of the
    comparison of its plan, or None.

    The reasons of the plan's sites name the times. If the first rank of a group fails, its ranks
    use the static choices; if ``strict``, they raise CommpassError. Raises Unanswered if the store
    of torch.distributed does not answer.
    """
    if not job.autotune_s:
        return
    if (device := meta.device_of(outcome.gm)) != "cuda":
        if shared.autotune and not shared.logged_untimed:
            shared.logged_untimed = True
            record.log.info(NOT_ON_A_GPU, shared.autotune, device)
        return
    nodes = tunable_nodes(outcome.gm)
    if not is_distributed():
        found = _checked(shared, _timed(shared, job, nodes), nodes)
    elif round is None or round.has_reuse:
        found = {each.call.identity: Timed(note=ALONE) for each in nodes} | shared.tile_sizes
    else:
        try:
            found = _agreed(shared, job, outcome, round, nodes)
        except RuntimeError as error:
            if isinstance(error, CommpassError):
                raise
            raise Unanswered(
                "the ranks could not agree on tile sizes: the store of torch.distributed does not"
                f" answer ({str(error).splitlines()[0]})"
            ) from error
    _apply(shared, job, outcome, nodes, found)


def _agreed(
    shared: Shared, job: Job, outcome: PassContext, round: Round, nodes: Sequence[TunableNode]
) -> dict[str, Timed]:
    """Return the results of the first rank of each node's group. This rank first publishes its own,
    also if it has timed nothing, since others may wait for it."""
    store, sites = current_store(), {site.name: site for site in outcome.plan.sites}
    by_owner: dict[int, list[TunableNode]] = defaultdict(list)
    for each in nodes:
        by_owner[_owner(sites.get(each.mark.site), round, store.rank)].append(each)
    own = by_owner.pop(store.rank, [])
    sizes = agreed_tiles.publish(store, round, _timed(shared, job, own))
    found = _checked(shared, sizes, own)
    patience_s = min(shared.timeout or job.autotune_s + PATIENCE_S, job.autotune_s + PATIENCE_S)
    start = time.monotonic()  # all of them time at once, so one bound holds for all
    for owner, others in sorted(by_owner.items()):
        sizes = agreed_tiles.receive(store, round, owner, patience_s, start)
        found |= _checked(shared, sizes, others)
    return found


def _owner(site: PlannedSite | None, round: Round, own_rank: int) -> int:
    """Return the rank that times the kernels of a site: the first of its group.

    It is this one if others do not take part. The two ends of a message have different kernels, so
    each times its own.
    """
    if site is None or site.pairwise:
        return own_rank
    ranks = site.global_ranks
    return min(ranks) if own_rank in ranks and set(ranks) <= set(round.ranks) else own_rank


def _timed(shared: Shared, job: Job, nodes: Sequence[TunableNode]) -> TileSizes:
    """Time the kernels of nodes that this process has no result for, and return all results."""
    if not nodes:
        return TileSizes()
    from commpass.lowering.gpu import autotune, tile_cache, timing

    calls = Counter(each.call for each in nodes)
    new = {call: n for call, n in calls.items() if call.identity not in shared.tile_sizes}
    compile_progress.stage("times tile sizes of kernels")
    try:
        place = tile_cache.folder()
        tuning = autotune.tune(new, job.autotune_s, timing.time_us, folder=place)
    except Exception as error:
        return TileSizes(failure=first_line(error))
    found = {call.identity: timed for call, timed in tuning.found.items()}
    if new:
        before = sum(timed.static_us * calls[call] for call, timed in tuning.found.items())
        after = sum(timed.us * calls[call] for call, timed in tuning.found.items())
        left = len(new) - tuning.timed - tuning.stored
        record.log.info(
            "%s graph %s: tile sizes of %s in %.1f s: %d timed, %d read from Inductor's cache, %d"
            " not timed; one call of the graph: %.1f us -> %.1f us%s",
            *(job.direction, job.number, plural(len(new), "kernel"), tuning.seconds, tuning.timed),
            *(tuning.stored, left, before, after, less(after, before)),
        )
    known = {call.identity: shared.tile_sizes.get(call.identity) for call in calls}
    return TileSizes(found | {key: timed for key, timed in known.items() if timed is not None})


def _checked(shared: Shared, sizes: TileSizes, nodes: Sequence[TunableNode]) -> dict[str, Timed]:
    """Return the result for each node's kernel. Report a failure, or raise it if ``strict``."""
    if sizes.failure:
        if shared.strict:
            raise CommpassError(f"tile sizes of kernels were not timed: {sizes.failure}")
        record.log.warning("tile sizes of kernels are the static choices: %s", sizes.failure)
    missing = Timed(note=f"not timed: {sizes.failure}" if sizes.failure else NO_SUCH_KERNEL)
    found = {each.call.identity: sizes.found.get(each.call.identity, missing) for each in nodes}
    shared.tile_sizes |= {key: timed for key, timed in found.items() if timed.us}
    return found


def _apply(
    shared: Shared,
    job: Job,
    outcome: PassContext,
    nodes: Sequence[TunableNode],
    found: dict[str, Timed],
) -> None:
    """Set the tile sizes of nodes, and add the times to the reasons of their sites."""
    if not nodes:
        return
    from commpass.lowering.gpu.tunable import find_choice

    choices: dict[fx.Node, Any] = {}
    texts: dict[str, dict[str, None]] = defaultdict(dict)
    for each in nodes:
        timed = found[each.call.identity]
        texts[each.mark.site][f"{each.mark.role} {timed.text}"] = None
        if timed.choice is None:
            continue
        if (choice := find_choice(each.call, timed.choice)) is None:
            record.log.warning(OTHER_GPU, each.mark.role)
        else:
            choices[each.node] = choice
    try:
        retile(outcome.gm, choices, job.decompositions)
    except Exception as error:
        if shared.strict:
            raise
        record.log.warning("tile sizes of kernels are the static choices: %s", first_line(error))
        return
    outcome.plan = with_reasons(outcome.plan, {name: list(some) for name, some in texts.items()})
