"""Messages for ranks that do not agree: which ranks are waited for, and how two plans differ."""

from __future__ import annotations

import time
from collections.abc import Sequence

from commpass.distributed.agreement_round import AgreementRound
from commpass.distributed.pairs import endpoints, mismatches
from commpass.distributed.plan_store import Vote, spans
from commpass.plan import Difference, Plan, diff

SHOW_S = 10.0
"""How long another rank may take to publish its plan, once all have voted."""
MOST = 10
SIZES = (
    "The splits of an all-to-all may be even on some ranks and uneven on others: each rank decides"
    " by its own splits."
)


def _location(comparison: AgreementRound, key: str) -> str:
    name, ranks = key.partition("@")[0], spans(comparison.groups_in_round[key][1])
    if "/pair/" in key:
        return f"what is sent and received in group {name!r} by ranks {ranks}"
    return f"group {name!r} (ranks {ranks})"


def _absent_ranks(comparison: AgreementRound) -> str:
    """Return the ranks by group that have published nothing."""
    found = []
    for key in comparison.groups_in_round:
        if missing := comparison.absent_ranks(key):
            new = [rank for rank in missing if rank not in comparison.nonces]
            never = f" (rank {spans(new)} has compiled nothing yet)" if new else ""
            found.append(f"rank {spans(missing)} of {_location(comparison, key)}{never}")
    return "; ".join(found)


def awaited(comparison: AgreementRound) -> str:
    """Return what a rank waits for, in a few words."""
    return f"waits for the plans of {_absent_ranks(comparison)}"


def waiting_message(comparison: AgreementRound, waited_s: float) -> str:
    """Return a log line for a rank that is waiting."""
    return (
        f"rank {comparison.store.rank} has waited {waited_s:.0f} s, of at most"
        f" {comparison.timeout_s:g} s, for the plans of {_absent_ranks(comparison)} to compare this"
        f" {comparison.plan.direction} graph with"
    )


def timeout_message(comparison: AgreementRound) -> str:
    return (
        f"{_absent_ranks(comparison)} published no plan for this {comparison.plan.direction} graph"
        f" within {comparison.timeout_s:g} s, but rank {comparison.store.rank} did. It compiled"
        " another graph, stopped, or needs longer: raise the time-out with commpass.backend(...,"
        f" timeout=seconds). Here the plan is:\n{_outline(comparison.plan)}"
    )


def gave_up_message(comparison: AgreementRound, key: str, rank: int) -> str:
    return (
        f"rank {rank} of {_location(comparison, key)} waited in vain for the plan of another rank"
        f" for this {comparison.plan.direction} graph, and gave up. Raise the time-out with"
        f" commpass.backend(..., timeout=seconds). Here the plan is:\n{_outline(comparison.plan)}"
    )


def reuse_message(comparison: AgreementRound, key: str, ranks: list[int]) -> str:
    """Return the message for ranks that reuse an agreed plan while others have planned something
    else."""
    digest = comparison.votes[key][ranks[0]].digest
    others = [rank for rank, vote in comparison.votes[key].items() if vote.digest != digest]
    other = comparison.votes[key][others[0]].digest
    return (
        f"rank {spans(ranks)} of {_location(comparison, key)} continues with plan {digest}, which"
        f" was agreed on earlier, but rank {spans(sorted(others))} plans {other or 'nothing'} for"
        f" this {comparison.plan.direction} graph of the same call. The model or its inputs differ"
        " between ranks, for example in a number. Give every rank the same, or exclude those"
        " collectives with commpass.keep. Here the plan is:\n"
        f"{_outline(comparison.plan)}"
    )


def departure_reason(comparison: AgreementRound, key: str) -> str:
    ranks = f"the ranks of {_location(comparison, key)}"
    return f"{ranks} compile different graphs: the collectives of that group stay unchanged"


def no_change_reason(comparison: AgreementRound) -> str:
    """Return why no rank may change anything: which ranks change nothing, and why."""
    participant, reasons, follow = comparison.participant, [], []
    for key, votes in comparison.votes.items():
        nothing = {rank: vote for rank, vote in votes.items() if not vote.digest}
        for rank, vote in sorted((comparison.no_changes[key] | nothing).items()):
            policy = ""
            if vote.policy != participant.digest and vote.policy_name == participant.name:
                policy = f" (under another policy {participant.name!r} or another profile)"
            elif vote.policy != participant.digest:
                policy = f" (its policy is {vote.policy_name!r}, here it is {participant.name!r})"
            where = f"of {_location(comparison, key)} in this graph{policy}"
            if isinstance(vote, Vote) and vote.follows:
                follow.append(vote.failure)
            elif vote.failure:
                reasons.append(f"rank {rank}: {vote.failure}")
            else:
                reasons.append(f"rank {rank} changes nothing {where}")
        reasons += [
            f"rank {rank}: {why}" for rank, why in sorted(comparison.departures[key].items())
        ]
        if key in comparison.conflicts or (
            key in comparison.parts and comparison.has_other_graph(key)
        ):
            reasons.append(departure_reason(comparison, key))
    reasons = list(dict.fromkeys(reasons)) or follow[:1]
    more = f"; and {len(reasons) - MOST} more" if len(reasons) > MOST else ""
    return "; ".join(reasons[:MOST]) + more


def mismatch_message(comparison: AgreementRound, key: str) -> str:
    """Return how the plans of the two sides of a round differ."""
    sides: dict[str, list[int]] = {}
    for rank, vote in sorted(comparison.votes[key].items()):
        sides.setdefault(vote.digest, []).append(rank)
    own_rank, number = comparison.store.rank, comparison.groups_in_round[key][0]
    one = next((ranks for ranks in sides.values() if own_rank in ranks), next(iter(sides.values())))
    other = next(ranks for ranks in sides.values() if ranks is not one)
    own_plan = comparison.parts[key].plan if key in comparison.parts else None
    if own_plan is not None and own_rank == one[0]:
        comparison.store.publish_plan(key, number, own_plan.to_json())
    labels = [own_rank if own_plan is not None else one[0], other[0]]
    if "/pair/" in key:
        labels.sort()
    listed = "; ".join(
        f"rank {spans(ranks)}: plan {digest}" for digest, ranks in sorted(sides.items())
    )
    head = (
        f"the ranks of {_location(comparison, key)} planned differently for this"
        f" {comparison.plan.direction}"
        f" graph ({listed}).\n"
    )
    left, right = (
        own_plan if rank == own_rank and own_plan else _published_plan(comparison, key, rank)
        for rank in labels
    )
    if left is None or right is None:
        return f"{head}Rank {labels[left is not None]} did not publish its plan in time."
    different = diff(left, right)
    if "/pair/" in key:
        rows = _messages(key, {labels[0]: left, labels[1]: right})
    else:
        rows = [
            str(found)
            .replace("the first", f"rank {labels[0]}")
            .replace("the second", f"rank {labels[1]}")
            for found in different
        ]
    votes = [comparison.votes[key][rank] for rank in labels]
    names = [
        f"{vote.policy_name!r} on rank {rank}" for rank, vote in zip(labels, votes, strict=True)
    ]
    more = [f"  ... and {len(rows) - MOST} more"] if len(rows) > MOST else []
    uneven = [SIZES] if any(site.splits for site in (*left.sites, *right.sites)) else []
    last = "Give every rank the same policy, profile and model."
    if votes[0].policy == votes[1].policy:
        last = cause(different)
    failed = [
        f"On rank {rank} {site.name} is {site.reason}."
        for rank, plan in zip(labels, (left, right), strict=True)
        for site in plan.sites
        if site.failed
    ]
    if failed:
        last = " ".join(failed[:MOST])
    return head + "\n".join(
        [
            *(f"  {row}" for row in rows[:MOST]),
            *more,
            *uneven,
            f"  (policy {', '.join(names)}; profile {left.profile!r} and {right.profile!r})",
            last,
        ]
    )


def cause(different: Sequence[Difference]) -> str:
    """Return why plans under the same policy differ."""
    if different and all(each.field in ("lowering", "fused") for each in different):
        return (
            "Their policies are the same, but not all ranks have the same kernels: their processors"
            " or compilers differ (commpass explain shows what was not fused, and why). Kernels are"
            " not used with Rule(lowering='inline')."
        )
    return "Their policies are the same: the model or its inputs differ between ranks."


def _messages(key: str, plans: dict[int, Plan]) -> list[str]:
    """Return how the two ends of messages differ; ranks are numbers in the group."""
    pair = key.rpartition("/")[2].partition("~")[0]
    low, high = (int(number) for number in pair.split("-"))
    numbers = dict(zip(sorted(plans), (low, high), strict=True))
    return mismatches(endpoints(plan.sites, numbers[rank]) for rank, plan in sorted(plans.items()))


def _published_plan(comparison: AgreementRound, key: str, rank: int) -> Plan | None:
    """Wait for the plan that a rank publishes and return it; None if it does not come in time."""
    deadline = time.monotonic() + min(SHOW_S, comparison.timeout_s)
    round_ids = [
        vote.other_rounds[rank]
        for vote in comparison.votes[key].values()
        if rank in vote.other_rounds
    ]
    round_id = (round_ids or [(key, comparison.groups_in_round[key][0])])[0]
    while True:
        raw = comparison.store.plan(comparison.nonces[rank], *round_id)
        if raw is not None:
            return Plan.from_json(raw)
        if time.monotonic() > deadline:
            return None
        time.sleep(0.01)


def _outline(plan: Plan, limit: int = 5) -> str:
    rows = [
        f"  {s.name}: {s.kind} {s.dtype}{list(s.shape)} {s.codec} by {s.algorithm}"
        for s in plan.sites[:limit]
    ]
    more = [f"  ... and {len(plan.sites) - limit} more"] if len(plan.sites) > limit else []
    return "\n".join(rows + more)
