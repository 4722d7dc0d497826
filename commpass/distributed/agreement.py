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

from commpass.distributed import differences
from commpass.distributed.agreement_round import AgreementRound
from commpass.distributed.environment import difference
from commpass.distributed.parts import SEVERAL, Part, call_of, may_match, parts
from commpass.distributed.plan_store import (
    History,
    LatestEntry,
    NoChange,
    Participant,
    PlanStore,
    Round,
    board,
)
from commpass.distributed.reuse import must_compare, publish_reuse
from commpass.errors import PlanMismatch, Unanswered
from commpass.groups import ready, timeout_of
from commpass.plan import NONE, Plan, Site, uncompressed

log = logging.getLogger("commpass")

PATIENCE_S = 30.0
"""Seconds after which a log line names the ranks that are waited for."""
LONGEST_PAUSE_S = 0.25
HIDDEN = "the ranks do not decide alike by what they compute"
"""The verdict after which all ranks plan again without counting what each of them computes."""
OWN = "some ranks use only their own part of a result, and others more"
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

    Return a verdict and a round. The verdict is "" if the plan is to be applied, HIDDEN, OWN, or
    the reason why no rank may apply it. The round is the one in which the changes were compared, or
    None. Raise PlanMismatch on all ranks if they changed the same graph differently. Raise
    Unanswered if a rank did not answer in time.
    """
    first, ends = tuple(first), tuple(ends)
    mine = parts(plan, first, ends, participant.digest)
    if not mine:
        return "", None
    here = board()
    for part in mine:
        here.spoken.setdefault(part.where, set()).add(participant.digest)
    pasts = {part.key: here.history(part.key, part.group) for part in mine}
    said = [part for part in mine if part.changed or part.hidden_sites]
    settled = [part for part in said if _is_agreed(part, pasts[part.key], participant.scope)]
    likely = [
        part
        for part in said
        if part not in settled
        and not pasts[part.key].apart
        and _is_agreed(part, pasts[part.key], participant.backend)
    ]
    fresh = [part for part in said if part not in settled and part not in likely]
    if why := next((pasts[part.key].apart for part in fresh if pasts[part.key].apart), ""):
        sites = tuple(uncompressed(site, why) for site in plan.sites)
        plan = plan.untouched(sites, why)
        mine, settled, likely, fresh = parts(plan, first, ends, participant.digest), [], [], []
    waiting = [
        part for part in mine if part in fresh or _dissenting(part, pasts[part.key], participant)
    ]
    for part in mine:
        if part in settled:
            _say_reused(here, part, pasts[part.key], participant)
        elif part not in waiting and part not in likely:
            _publish_no_change(here, part, pasts[part.key], plan, participant)
    timeout_s = timeout_s or _timeout([*waiting, *likely])
    patience_s = min(PATIENCE_S, timeout_s)
    round = None
    if waiting:
        waiting += likely
    else:
        compares, round = must_compare(here, likely, pasts, participant, patience_s)
        waiting = likely if compares else []
    if not waiting:
        return why, None if settled else round
    meeting = AgreementRound(here, waiting, pasts, plan, participant, timeout_s)
    try:
        verdict = _verdict(meeting)
    finally:
        _count(meeting)
    going = sorted({part.key for part in settled} | {k for k, by in meeting.reused.items() if by})
    if verdict not in ("", HIDDEN, OWN) and going:
        raise PlanMismatch(
            f"{verdict}\nSo this {plan.direction} graph cannot be carried out as planned, but what"
            f" was agreed on before with the ranks of {_names(going)} goes on there. Compile on"
            " all ranks alike."
        )
    return verdict or why, None if verdict or settled else meeting.round()


SETTINGS_S = 60.0
"""Seconds that a rank with settings waits for the settings of all others."""


def same_environment(timeout_s: float | None = None) -> None:
    """Raise PlanMismatch if ranks were started with different settings.

    A rank without settings compares only what is published already. A rank with settings waits for
    the others, since ranks that are switched off take part in no later round. A rank that does not
    answer in time may not use commpass at all.
    """
    if not ready() or dist.get_world_size() == 1 or "fake" in dist.get_backend(dist.group.WORLD):
        return
    try:
        here = board()
        complete = here.hear_settings()
        start, pause = time.monotonic(), 0.001
        patience = min(timeout_s or SETTINGS_S, SETTINGS_S)
        alone = here.settings[here.rank].words and not here.settings_said
        while alone and not complete and not difference(here.settings):
            if time.monotonic() - start > patience:
                here.settings_said = True
                log.warning(SILENT, patience, here.settings[here.rank].words)
                break
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)
            complete = here.hear_settings()
    except RuntimeError as error:  # a rank that has to compare plans reports it
        log.debug("commpass could not reach the store: %s", error)
        return
    if why := difference(here.settings):
        raise PlanMismatch(why)


SILENT = (
    "not all ranks have said within %g s whether they were started with %s as well: they are taken"
    " to be, or not to use commpass"
)


def _is_agreed(part: Part, past: History, scope: str) -> bool:
    """Return whether all of the part was agreed on before, for the given backend or code."""
    if part.changed and part.digest in past.agreed[scope]:
        return True
    known, wanted = past.known[scope], part.decisions()
    for site in part.first:
        key = next((key for key in part.keys_of(site) if key in known), "")
        if not key or not known[key] == wanted[key] != SEVERAL:
            return False
    return not (part.plan.simplified or part.plan.grouped or part.plan.split)


def _dissenting(part: Part, past: History, participant: Participant) -> bool:
    """Return whether the part leaves unchanged what was agreed to be changed: others must learn of
    it."""
    known = past.known[participant.backend]
    return not part.changed and any(_known(known, part, site) != NONE for site in part.first)


def _known(known: dict[str, str], part: Part, site: Site) -> str:
    """Return what was agreed on for a site.

    If it is unknown for which of its sizes this plan is, prefer any decision other than NONE.
    """
    for key in part.keys_of(site):
        if found := {said for other, said in known.items() if may_match(key, other)}:
            return next(iter(sorted(found - {NONE})), NONE)
    return NONE


def _publish_no_change(
    store: PlanStore, part: Part, past: History, plan: Plan, participant: Participant
) -> None:
    """Publish that nothing is changed, and do not wait."""
    if past.apart:
        return
    call = call_of(part, participant)
    note = NoChange(
        0, part.outline, part.sites, participant.digest, participant.name, part.failure, call
    )
    try:
        store.note(part.where, part.key, past, note)
    except RuntimeError as error:  # the store is gone: no rank can read it, and none has to
        log.debug("commpass could not reach the store: %s", error)


def _say_reused(store: PlanStore, part: Part, past: History, participant: Participant) -> None:
    """Publish that what was agreed on for the same code is applied for this call.

    If the call is unknown, publish nothing: other ranks could not tell which graph it is.
    """
    if not call_of(part, participant):
        return
    try:
        publish_reuse(store, part, past, participant)
    except RuntimeError as error:  # as above
        log.debug("commpass could not reach the store: %s", error)


def longest_timeout(some: Iterable[dist.ProcessGroup]) -> float:
    """Return the longest time-out of some groups, in seconds."""
    return max(map(timeout_of, some), default=0.0) or DEFAULT_TIMEOUT_S


def _timeout(waiting: Iterable[Part]) -> float:
    return longest_timeout(part.group for part in waiting)


def _names(keys: Iterable[str]) -> str:
    return ", ".join(f"group {key.partition('@')[0]!r}" for key in keys)


def _count(meeting: AgreementRound) -> None:
    """Do not count a round in which any rank only left a note: that rank has not counted it
    either."""
    for key in meeting.parts:
        past = meeting.pasts[key]
        if notes := [*meeting.alone[key].values(), *meeting.reused[key].values()]:
            past.count -= 1
            past.heed(note for note in notes if note.policy == meeting.speaker.digest)
        else:
            past.forget_notes()


def _verdict(meeting: AgreementRound) -> str:
    """Wait for all votes. Return why the graph must stay untouched, or ""."""
    try:
        _wait(meeting)
        return _judge(meeting)
    except RuntimeError as error:
        if isinstance(error, PlanMismatch):
            raise
        raise Unanswered(
            f"the ranks could not compare their plans for this {meeting.plan.direction} graph: the "
            f"store of torch.distributed does not answer ({str(error).splitlines()[0]})"
        ) from error


def _wait(meeting: AgreementRound) -> None:
    start, told, pause = time.monotonic(), False, 0.001
    while True:
        meeting.publish()
        meeting.poll()
        meeting.publish()  # other votes may change this one, and this rank may finish first
        if meeting.decided():
            return
        waited = time.monotonic() - start
        if waited > 1:  # a rank that is switched off will not vote
            meeting.here.hear_settings()
            if why := difference(meeting.here.settings):
                raise PlanMismatch(why)
        if waited > meeting.timeout_s:
            _give_up(meeting)
            raise Unanswered(differences.silence(meeting))
        if waited > PATIENCE_S and not told:
            told = True
            log.warning("%s", differences.patience(meeting, waited))
        time.sleep(pause)
        many = sum(len(ranks) for _, ranks in meeting.halls.values())
        pause = min(2 * pause, LONGEST_PAUSE_S * (1 + many / 256))


def _give_up(meeting: AgreementRound) -> None:
    """Publish that this rank raises."""
    for key, part in meeting.parts.items():
        word = dataclasses.replace(meeting.vote_for(part), gave_up=True)
        meeting.here.publish_vote(key, meeting.mine[key][0], word)


def _judge(meeting: AgreementRound) -> str:
    if against := meeting.contradicted():
        _give_up(meeting)
        raise PlanMismatch(differences.reused(meeting, *next(iter(against.items()))))
    words = [
        (key, rank, word) for key in meeting.halls for rank, word in meeting.heard[key].items()
    ]
    if found := [(key, rank) for key, rank, word in words if word.gave_up]:
        raise Unanswered(differences.gave_up(meeting, *found[0]))
    apart = {key for key in meeting.parts if key in meeting.conflicts or meeting.other_graph(key)}
    apart |= {key for key in meeting.parts if meeting.other_policy(key)}
    if meeting.is_unchanged():
        why = differences.no_change_reason(meeting)
    elif (
        (differing := meeting.differing())
        and not meeting.several_graphs()
        and meeting.uses_local_part()
    ):
        return OWN
    elif differing and not meeting.several_graphs() and meeting.hidden_sites():
        return HIDDEN
    elif differing:
        why = differences.text(meeting, differing)
        if len({word.policy for _, _, word in words}) > 1:
            raise PlanMismatch(why)
        why = "; ".join(
            [*(differences.departed_reason(meeting, key) for key in sorted(apart)), why]
        )
    else:
        for key, part in meeting.parts.items():
            meeting.pasts[key].agree(meeting.speaker, part.digest, part.decisions())
        return ""
    if meeting.contrary and meeting.has_absent_rank():
        raise PlanMismatch(
            f"{why}\nBut other ranks go on with what was agreed on before. Compile on all ranks"
            " alike."
        )
    silent = any(meeting.absent_ranks(hall) for hall in meeting.halls)
    for key, part in meeting.parts.items():
        if (
            silent or meeting.has_absent_rank()
        ):  # not all ranks can see from the votes that no rank can change anything
            follows = dataclasses.replace(meeting.vote_for(part), failure=why, follows=True)
            meeting.here.publish_vote(key, meeting.mine[key][0], follows)
            meeting.here.publish_latest(
                part.where, LatestEntry(word=follows, place=(key, meeting.mine[key][0]))
            )
    for part in (each for each in meeting.parts.values() if not each.changed):
        decisions = dict.fromkeys(part.decisions(), NONE)
        meeting.pasts[part.key].agree(meeting.speaker, "", decisions)
    for key in apart:
        meeting.pasts[key].apart = differences.departed_reason(meeting, key)
        meeting.here.leave(key, meeting.pasts[key].apart)
    return why if any(part.changed for part in meeting.parts.values()) else ""
