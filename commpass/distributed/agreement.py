"""All ranks reach the same decision, and verify it, before a compiled graph runs (law 5).

A rank whose graph changes something of a group publishes a vote with a digest in the plan store. It
waits for the votes of all ranks of that group, and of all groups that those ranks change in the
same graph, and so on. All connected ranks read the same votes and reach the same verdict:

- All change the same: the plan is applied.
- One rank changes nothing, or compiles another graph: no rank can change anything. All compile the
  graph untouched and report why. If their graphs differ, the ranks leave that group for good: it is
  unknown which graphs correspond from then on, so nothing more of the group is changed.
- The plans differ under different policies: all ranks raise PlanMismatch.
- The plans differ because one rank skips a site that its own compute overlaps: all ranks plan again
  without that decision. The same holds if a rank does not send what others send because it uses
  only its own part.

A rank that changes nothing publishes that and proceeds without waiting. So does a rank that alone
compiles the same code again with decisions that were agreed on before, site by site. A rank that
compiles other code with them waits a while for the others (``reuse``): they may plan that graph
differently.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterable

import torch.distributed as dist

from commpass.distributed import compile_progress, differences
from commpass.distributed.agreement_round import AgreementRound
from commpass.distributed.environment import difference
from commpass.distributed.hosts import is_distributed
from commpass.distributed.parts import SEVERAL, Part, call_of, may_match, parts
from commpass.distributed.plan_store import (
    History,
    LatestEntry,
    NoChange,
    Participant,
    PlanStore,
    Round,
    current_store,
)
from commpass.distributed.refusal import check_refusals
from commpass.distributed.reuse import must_compare, publish_reuse
from commpass.errors import PlanMismatch, Unanswered
from commpass.groups import timeout_of
from commpass.plan import NONE, Plan, Site, uncompressed

log = logging.getLogger("commpass")

PATIENCE_S = 30.0
"""Seconds after which a log line names the ranks that are waited for."""
LONGEST_PAUSE_S = 0.25
HIDDEN = "the ranks decide differently, since each counts its own compute"
"""The verdict after which all ranks plan again without counting what each of them computes."""
LOCAL_PART = "some ranks use only their own part of a result, and other ranks use more of it"
"""The verdict after which all ranks plan again and also send what this rank alone would not use."""
DEFAULT_TIMEOUT_S = 1800.0
"""The time-out of a group that specifies none: that of torch's groups."""


def agree(
    plan: Plan,
    first: Iterable[Site],
    ends: Iterable[tuple[str, int | None]],
    participant: Participant,
    timeout_s: float | None = None,
) -> tuple[str, Round | None]:
    """Compare a plan with those of all ranks that are connected to this one.

    ``first`` are the graph's sites before any change, ``ends`` the (group, peer) of its
    collectives. ``timeout_s``: seconds to wait for the others; None for the groups' own time-out.

    Return a verdict and a round. The verdict is "" if the plan is to be applied, HIDDEN,
    LOCAL_PART, or the reason why no rank may apply it. The round is the one in which the changes
    were compared, or None. Raise PlanMismatch on all ranks if they changed the same graph
    differently. Raise Unanswered if a rank did not answer in time.
    """
    first, ends = tuple(first), tuple(ends)
    own_parts = parts(plan, first, ends, participant.digest)
    if not own_parts:
        return "", None
    check_refusals()
    store = current_store()
    for part in own_parts:
        store.published_policies.setdefault(part.where, set()).add(participant.digest)
    histories = {part.key: store.history(part.key, part.group) for part in own_parts}
    changing = [part for part in own_parts if part.changed or part.hidden_sites]
    agreed = [part for part in changing if _is_agreed(part, histories[part.key], participant.scope)]
    reusable = [
        part
        for part in changing
        if part not in agreed
        and not histories[part.key].departure_reason
        and _is_agreed(part, histories[part.key], participant.backend)
    ]
    new_parts = [part for part in changing if part not in agreed and part not in reusable]
    reasons = (histories[part.key].departure_reason for part in new_parts)
    if why := next(filter(None, reasons), ""):
        sites = tuple(uncompressed(site, why) for site in plan.sites)
        plan = plan.untouched(sites, why)
        own_parts = parts(plan, first, ends, participant.digest)
        agreed, reusable, new_parts = [], [], []
    waiting = [
        part
        for part in own_parts
        if part in new_parts or _is_dissenting(part, histories[part.key], participant)
    ]
    for part in own_parts:
        if part in agreed:
            _publish_reuse_if_known(store, part, histories[part.key], participant)
        elif part not in waiting and part not in reusable:
            _publish_no_change(store, part, histories[part.key], plan, participant)
    timeout_s = timeout_s or _timeout([*waiting, *reusable])
    patience_s = min(PATIENCE_S, timeout_s)
    round = None
    if waiting:
        waiting += reusable
    else:
        compares, round = must_compare(store, reusable, histories, participant, patience_s)
        waiting = reusable if compares else []
    if not waiting:
        return why, None if agreed else round
    comparison = AgreementRound(store, waiting, histories, plan, participant, timeout_s)
    try:
        verdict = _verdict(comparison)
    finally:
        _count(comparison)
    reusing = sorted(
        {part.key for part in agreed} | {k for k, by in comparison.reuse_notes.items() if by}
    )
    if verdict not in ("", HIDDEN, LOCAL_PART) and reusing:
        raise PlanMismatch(
            f"{verdict}\nTherefore this {plan.direction} graph cannot run as planned, but the ranks"
            f" of {_names(reusing)} continue with a plan that was agreed on earlier. Compile the"
            " same code on all ranks."
        )
    return verdict or why, None if verdict or agreed else comparison.round()


SETTINGS_S = 60.0
"""Seconds that a rank with settings waits for the settings of all others."""


def same_environment(timeout_s: float | None = None) -> None:
    """Raise PlanMismatch if ranks were started with different settings.

    A rank without settings compares only what is published already. A rank with settings waits for
    the others, since ranks that are switched off take part in no later round. A rank that does not
    answer in time may not use commpass at all.
    """
    if not is_distributed():
        return
    try:
        store = current_store()
        complete = store.read_settings()
        start, pause = time.monotonic(), 0.001
        patience = min(timeout_s or SETTINGS_S, SETTINGS_S)
        waits = store.settings[store.rank].text and not store.warned_of_settings
        while waits and not complete and not difference(store.settings):
            if time.monotonic() - start > patience:
                store.warned_of_settings = True
                log.warning(NO_SETTINGS, patience, store.settings[store.rank].text)
                break
            compile_progress.stage("waits for the environments of other ranks")
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)
            complete = store.read_settings()
    except RuntimeError as error:  # a rank that has to compare plans reports it
        log.debug("commpass could not reach the store: %s", error)
        return
    if why := difference(store.settings):
        raise PlanMismatch(why)


NO_SETTINGS = (
    "not all ranks published within %g s whether they were started with %s: assuming that they"
    " were, or that they do not use commpass"
)


def _is_agreed(part: Part, history: History, scope: str) -> bool:
    """Return whether all of the part was agreed on before, for the given backend or code."""
    if part.changed and part.digest in history.agreed_digests[scope]:
        return True
    decisions, wanted = history.agreed_decisions[scope], part.decisions()
    for site in part.first:
        key = next((key for key in part.keys_of(site) if key in decisions), "")
        if not key or not decisions[key] == wanted[key] != SEVERAL:
            return False
    return not (part.plan.simplified or part.plan.grouped or part.plan.split)


def _is_dissenting(part: Part, history: History, participant: Participant) -> bool:
    """Return whether the part leaves unchanged what was agreed to be changed: others must learn of
    it."""
    decisions = history.agreed_decisions[participant.backend]
    return not part.changed and any(
        _agreed_decision(decisions, part, site) != NONE for site in part.first
    )


def _agreed_decision(decisions: dict[str, str], part: Part, site: Site) -> str:
    """Return what was agreed on for a site.

    If it is unknown for which of its sizes this plan is, prefer any decision other than NONE.
    """
    for key in part.keys_of(site):
        if found := {decision for other, decision in decisions.items() if may_match(key, other)}:
            return next(iter(sorted(found - {NONE})), NONE)
    return NONE


def _publish_no_change(
    store: PlanStore, part: Part, history: History, plan: Plan, participant: Participant
) -> None:
    """Publish that nothing is changed, and do not wait."""
    if history.departure_reason:
        return
    call = call_of(part, participant)
    note = NoChange(
        0, part.outline, part.sites, participant.digest, participant.name, part.failure, call
    )
    try:
        store.publish_note(part.where, part.key, history, note)
    except RuntimeError as error:  # the store is gone: no rank can read it, and none has to
        log.debug("commpass could not reach the store: %s", error)


def _publish_reuse_if_known(
    store: PlanStore, part: Part, history: History, participant: Participant
) -> None:
    """Publish that what was agreed on for the same code is applied for this call.

    If the call is unknown, publish nothing: other ranks could not tell which graph it is.
    """
    if not call_of(part, participant):
        return
    try:
        publish_reuse(store, part, history, participant)
    except RuntimeError as error:  # as above
        log.debug("commpass could not reach the store: %s", error)


def longest_timeout(some: Iterable[dist.ProcessGroup]) -> float:
    """Return the longest time-out of some groups, in seconds."""
    return max(map(timeout_of, some), default=0.0) or DEFAULT_TIMEOUT_S


def _timeout(waiting: Iterable[Part]) -> float:
    return longest_timeout(part.group for part in waiting)


def _names(keys: Iterable[str]) -> str:
    return ", ".join(f"group {key.partition('@')[0]!r}" for key in keys)


def _count(comparison: AgreementRound) -> None:
    """Do not count a round in which any rank only left a note: that rank has not counted it
    either."""
    for key in comparison.parts:
        history = comparison.histories[key]
        if notes := [*comparison.no_changes[key].values(), *comparison.reuse_notes[key].values()]:
            history.count -= 1
            history.adopt_notes(
                note for note in notes if note.policy == comparison.participant.digest
            )
        else:
            history.clear_notes()


def _verdict(comparison: AgreementRound) -> str:
    """Wait for all votes. Return why the graph must stay untouched, or ""."""
    try:
        _wait(comparison)
        return _decide(comparison)
    except RuntimeError as error:
        if isinstance(error, PlanMismatch):
            raise
        raise Unanswered(
            f"the ranks could not compare their plans for this {comparison.plan.direction} graph:"
            f" the store of torch.distributed does not answer ({str(error).splitlines()[0]})"
        ) from error


def _wait(comparison: AgreementRound) -> None:
    start, warned, pause = time.monotonic(), False, 0.001
    while True:
        comparison.publish()
        comparison.poll()
        comparison.publish()  # other votes may change this one, and this rank may finish first
        if comparison.is_decided():
            return
        waited = time.monotonic() - start
        if waited > 1:  # a rank that is switched off will not vote
            comparison.store.read_settings()
            if why := difference(comparison.store.settings):
                raise PlanMismatch(why)
            check_refusals()
            compile_progress.stage(differences.awaited(comparison))
        if waited > comparison.timeout_s:
            _give_up(comparison)
            raise Unanswered(differences.timeout_message(comparison))
        if waited > PATIENCE_S and not warned:
            warned = True
            log.warning("%s", differences.waiting_message(comparison, waited))
        time.sleep(pause)
        many = sum(len(ranks) for _, ranks in comparison.groups_in_round.values())
        pause = min(2 * pause, LONGEST_PAUSE_S * (1 + many / 256))


def _give_up(comparison: AgreementRound) -> None:
    """Publish that this rank raises."""
    for key, part in comparison.parts.items():
        vote = dataclasses.replace(comparison.vote_for(part), gave_up=True)
        comparison.store.publish_vote(key, comparison.own_groups[key][0], vote)


def _decide(comparison: AgreementRound) -> str:
    if contradictions := comparison.contradicting_ranks():
        _give_up(comparison)
        key, ranks = next(iter(contradictions.items()))
        raise PlanMismatch(differences.reuse_message(comparison, key, ranks))
    votes = [
        (key, rank, vote)
        for key in comparison.groups_in_round
        for rank, vote in comparison.votes[key].items()
    ]
    if found := [(key, rank) for key, rank, vote in votes if vote.gave_up]:
        raise Unanswered(differences.gave_up_message(comparison, *found[0]))
    departing = {
        key
        for key in comparison.parts
        if key in comparison.conflicts or comparison.has_other_graph(key)
    }
    departing |= {key for key in comparison.parts if comparison.has_other_policy(key)}
    if comparison.is_unchanged():
        why = differences.no_change_reason(comparison)
    elif (
        (differing_group := comparison.differing_group())
        and not comparison.has_several_graphs()
        and comparison.uses_local_part()
    ):
        return LOCAL_PART
    elif differing_group and not comparison.has_several_graphs() and comparison.has_hidden_sites():
        return HIDDEN
    elif differing_group:
        why = differences.mismatch_message(comparison, differing_group)
        if len({vote.policy for _, _, vote in votes}) > 1:
            raise PlanMismatch(why)
        why = "; ".join(
            [*(differences.departure_reason(comparison, key) for key in sorted(departing)), why]
        )
    else:
        for key, part in comparison.parts.items():
            comparison.histories[key].agree(comparison.participant, part.digest, part.decisions())
        return ""
    if comparison.dissenting and comparison.has_absent_rank():
        raise PlanMismatch(
            f"{why}\nBut other ranks continue with a plan that was agreed on earlier. Compile the"
            " same code on all ranks."
        )
    # Then not all ranks can see from the votes that no rank can change anything.
    unclear = comparison.has_absent_rank() or any(
        comparison.absent_ranks(key) for key in comparison.groups_in_round
    )
    for key, part in comparison.parts.items():
        if unclear:
            follows = dataclasses.replace(comparison.vote_for(part), failure=why, follows=True)
            comparison.store.publish_vote(key, comparison.own_groups[key][0], follows)
            entry = LatestEntry(vote=follows, round_id=(key, comparison.own_groups[key][0]))
            comparison.store.publish_latest(part.where, entry)
    for part in (each for each in comparison.parts.values() if not each.changed):
        decisions = dict.fromkeys(part.decisions(), NONE)
        comparison.histories[part.key].agree(comparison.participant, "", decisions)
    for key in departing:
        comparison.histories[key].departure_reason = differences.departure_reason(comparison, key)
        comparison.store.publish_departure(key, comparison.histories[key].departure_reason)
    return why if any(part.changed for part in comparison.parts.values()) else ""
