"""Messages for ranks that do not agree: which ranks are waited for, and how two plans differ."""

from __future__ import annotations

import time

from commpass.distributed.agreement_round import AgreementRound
from commpass.distributed.pairs import endpoints, mismatches
from commpass.distributed.plan_store import Vote, spans
from commpass.plan import Plan, diff

SHOW_S = 10.0
"""How long another rank may take to publish its plan, once all have voted."""
MOST = 10
SIZES = (
    "Of an all-to-all the splits may look alike on some ranks and not on others: a rank whose own "
    "look even decides for even ones."
)


def _location(meeting: AgreementRound, key: str) -> str:
    name = key.partition("@")[0]
    if "/pair/" in key:
        return (
            f"what is sent and received in group {name!r} by ranks {spans(meeting.halls[key][1])}"
        )
    return f"group {name!r} (ranks {spans(meeting.halls[key][1])})"


def _waited_for(meeting: AgreementRound) -> str:
    """Return the ranks by group that have published nothing."""
    found = []
    for key in meeting.halls:
        if missing := meeting.absent_ranks(key):
            new = [rank for rank in missing if rank not in meeting.nonces]
            never = f" (rank {spans(new)} has compiled nothing yet)" if new else ""
            found.append(f"rank {spans(missing)} of {_location(meeting, key)}{never}")
    return "; ".join(found)


def patience(meeting: AgreementRound, waited_s: float) -> str:
    """Return a log line for a rank that is waiting."""
    return (
        f"rank {meeting.here.rank} has waited {waited_s:.0f} s, of at most {meeting.timeout_s:g} s,"
        f" for the plans of {_waited_for(meeting)} to compare this {meeting.plan.direction} graph"
        " with"
    )


def silence(meeting: AgreementRound) -> str:
    return (
        f"{_waited_for(meeting)} published no plan for this {meeting.plan.direction} graph within"
        f" {meeting.timeout_s:g} s, but rank {meeting.here.rank} did. It compiled another graph,"
        " stopped, or needs longer: raise the time-out with commpass.backend(...,"
        f" timeout=seconds). Here the plan is:\n{_outline(meeting.plan)}"
    )


def gave_up(meeting: AgreementRound, key: str, rank: int) -> str:
    return (
        f"rank {rank} of {_location(meeting, key)} waited in vain for the plan of another rank for"
        f" this {meeting.plan.direction} graph and gave up. Raise the time-out with"
        f" commpass.backend(..., timeout=seconds). Here the plan is:\n{_outline(meeting.plan)}"
    )


def reused(meeting: AgreementRound, key: str, ranks: list[int]) -> str:
    """Return the message for ranks that reuse an agreed plan while others have planned something
    else."""
    digest = meeting.heard[key][ranks[0]].digest
    others = [rank for rank, word in meeting.heard[key].items() if word.digest != digest]
    other = meeting.heard[key][others[0]].digest
    return (
        f"rank {spans(ranks)} of {_location(meeting, key)} goes on with plan {digest}, which was"
        f" agreed on before, but rank {spans(sorted(others))} plans {other or 'nothing'} for this"
        f" {meeting.plan.direction} graph, which is that of the same call. The model or its inputs"
        " differ between ranks: a number of a rank's own, say. Give every rank the same, or keep"
        " those collectives as they are with commpass.keep. Here the plan is:\n"
        f"{_outline(meeting.plan)}"
    )


def departed_reason(meeting: AgreementRound, key: str) -> str:
    return (
        f"the ranks of {_location(meeting, key)} compile different graphs: nothing of it is changed"
    )


def no_change_reason(meeting: AgreementRound) -> str:
    """Return why no rank may change anything: which ranks change nothing, and why."""
    here, said, follow = meeting.speaker, [], []
    for key, heard in meeting.heard.items():
        nothing = {rank: word for rank, word in heard.items() if not word.digest}
        for rank, word in sorted((meeting.alone[key] | nothing).items()):
            policy = ""
            if word.policy != here.digest and word.policy_name == here.name:
                policy = f" (under a policy {here.name!r} or a profile that says something else)"
            elif word.policy != here.digest:
                policy = f" (its policy is {word.policy_name!r}, here it is {here.name!r})"
            where = f"of {_location(meeting, key)} in this graph{policy}"
            if isinstance(word, Vote) and word.follows:
                follow.append(word.failure)
            elif word.failure:
                said.append(f"rank {rank}: {word.failure}")
            else:
                said.append(f"rank {rank} changes nothing {where}")
        said += [f"rank {rank}: {why}" for rank, why in sorted(meeting.left[key].items())]
        if key in meeting.conflicts or (key in meeting.parts and meeting.other_graph(key)):
            said.append(departed_reason(meeting, key))
    said = list(dict.fromkeys(said)) or follow[:1]
    more = f"; and {len(said) - MOST} more" if len(said) > MOST else ""
    return "; ".join(said[:MOST]) + more


def text(meeting: AgreementRound, key: str) -> str:
    """Return how the plans of the two sides of a round differ."""
    sides: dict[str, list[int]] = {}
    for rank, word in sorted(meeting.heard[key].items()):
        sides.setdefault(word.digest, []).append(rank)
    me, number = meeting.here.rank, meeting.halls[key][0]
    one = next((ranks for ranks in sides.values() if me in ranks), next(iter(sides.values())))
    other = next(ranks for ranks in sides.values() if ranks is not one)
    own = meeting.parts[key].plan if key in meeting.parts else None
    if own is not None and me == one[0]:
        meeting.here.show(key, number, own.to_json())
    labels = [me if own is not None else one[0], other[0]]
    if "/pair/" in key:
        labels.sort()
    listed = "; ".join(
        f"rank {spans(ranks)}: plan {digest}" for digest, ranks in sorted(sides.items())
    )
    head = (
        f"the ranks of {_location(meeting, key)} planned differently for this"
        f" {meeting.plan.direction}"
        f" graph ({listed}).\n"
    )
    left, right = (
        own if rank == me and own else _published_plan(meeting, key, rank) for rank in labels
    )
    if left is None or right is None:
        return f"{head}Rank {labels[left is not None]} did not show its plan."
    if "/pair/" in key:
        rows = _messages(key, {labels[0]: left, labels[1]: right})
    else:
        rows = [
            str(found)
            .replace("the first", f"rank {labels[0]}")
            .replace("the second", f"rank {labels[1]}")
            for found in diff(left, right)
        ]
    words = [meeting.heard[key][rank] for rank in labels]
    names = [
        f"{word.policy_name!r} on rank {rank}" for rank, word in zip(labels, words, strict=True)
    ]
    more = [f"  ... and {len(rows) - MOST} more"] if len(rows) > MOST else []
    uneven = [SIZES] if any(site.splits for site in (*left.sites, *right.sites)) else []
    last = "Give every rank the same policy, profile and model."
    if words[0].policy == words[1].policy:
        last = "Their policies are the same: the model or its inputs differ between ranks."
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


def _messages(key: str, plans: dict[int, Plan]) -> list[str]:
    """Return how the two ends of messages differ; ranks are numbers in the group."""
    pair = key.rpartition("/")[2].partition("~")[0]
    low, high = (int(number) for number in pair.split("-"))
    numbers = dict(zip(sorted(plans), (low, high), strict=True))
    return mismatches(endpoints(plan.sites, numbers[rank]) for rank, plan in sorted(plans.items()))


def _published_plan(meeting: AgreementRound, key: str, rank: int) -> Plan | None:
    """Wait for the plan that a rank publishes and return it; None if it does not come in time."""
    until = time.monotonic() + min(SHOW_S, meeting.timeout_s)
    places = [
        word.elsewhere[rank] for word in meeting.heard[key].values() if rank in word.elsewhere
    ]
    place = (places or [(key, meeting.halls[key][0])])[0]
    while True:
        raw = meeting.here.plan(meeting.nonces[rank], *place)
        if raw is not None:
            return Plan.from_json(raw)
        if time.monotonic() > until:
            return None
        time.sleep(0.01)


def _outline(plan: Plan, limit: int = 5) -> str:
    rows = [
        f"  {s.name}: {s.kind} {s.dtype}{list(s.shape)} {s.codec} by {s.algorithm}"
        for s in plan.sites[:limit]
    ]
    more = [f"  ... and {len(plan.sites) - limit} more"] if len(plan.sites) > limit else []
    return "\n".join(rows + more)
