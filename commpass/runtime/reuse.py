"""A rank whose plan was agreed on before, for other code, asks whether the others compile it too.

A plan of the same digest may be that of another graph, which other ranks plan differently. A rank
that compiles the same code again goes on at once. One that compiles other code publishes that it
would reuse the plan, and waits a while: it goes on when all ranks of its groups publish the same,
and compares its plan as if it was new if one of them does. If they publish nothing, this rank is
taken to be the only one that compiles such a graph, and goes on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping

from commpass.runtime.board import Board, History, Note, Notes, Speaker, spans
from commpass.runtime.parts import Part, call_of

log = logging.getLogger("commpass")

LONGEST_PAUSE_S = 0.25
ALONE = (
    "rank %d compiled a function that is new here, with collectives whose plan was agreed on"
    " before, and rank %s compiled none for that call within %g s. Rank %d goes on with that plan:"
    " the others are taken to run what they compiled before. To avoid the wait, let all ranks call"
    " the same compiled functions"
)


def publish_reuse(
    here: Board, part: Part, past: History, speaker: Speaker, *, waits: bool = False
) -> Note:
    """Publishes that this rank goes on with what was agreed on, or would."""
    note = Note(
        0,
        part.outline,
        part.sites,
        speaker.digest,
        speaker.name,
        "",
        call=call_of(part, speaker),
        digest=part.reused_digest,
        waits=waits,
    )
    here.note(part.where, part.key, past, note)
    return note


def must_compare(
    here: Board,
    likely: Iterable[Part],
    pasts: Mapping[str, History],
    speaker: Speaker,
    patience_s: float,
) -> bool:
    """Whether another rank plans the graph anew, so that this one has to compare its plan.

    ``likely`` are the parts whose plans were agreed on for other code. Waits for at most
    ``patience_s`` seconds.
    """
    likely = tuple(likely)
    if not likely:
        return False
    try:
        asked = [_Asked(here, part, pasts[part.key], speaker) for part in likely]
        if _wait(here, asked, patience_s):
            for each in asked:
                del each.past.notes[each.note.graph]  # this graph is compared
            return True
        for each in asked:
            publish_reuse(here, each.part, each.past, speaker)
    except RuntimeError as error:  # the store is gone: nobody can be heard
        log.debug("commpass could not reach the store: %s", error)
    for part in likely:
        pasts[part.key].agree(speaker, part.digest, part.decisions())
    return False


class _Asked:
    """One part, and what its other ranks have published of this graph."""

    def __init__(self, here: Board, part: Part, past: History, speaker: Speaker):
        self.here, self.part, self.past = here, part, past
        self.note = publish_reuse(here, part, past, speaker, waits=True)
        self.open = [rank for rank in part.ranks if rank != here.rank]

    def differs(self, nonces: Mapping[int, str]) -> bool:
        """Reads what there is. Whether a rank compares its plan, or has another one."""
        here, key, known = self.here, self.part.key, self.here.spoken[self.part.where]
        places = {rank: nonces[rank] for rank in self.open if rank in nonces}
        words = here.words(places, key, self.past.count + 1)
        if any(not self.past.is_past(word) for word in words.values()):
            return True
        if here.apart(places, key):
            return True
        if any(now.policy not in known for now in here.last(places, self.part.where).values()):
            return True
        for rank, notes in here.notes(places, key).items():
            if note := self._same_graph(notes):
                if note.digest != self.note.digest:
                    return True
                self.open.remove(rank)
        return False

    def _same_graph(self, notes: Notes) -> Note | None:
        repeats = self.past.repeats.get(self.note.graph, 0)
        found = (
            note
            for note in notes.notes
            if notes.count == self.past.count
            and note.repeats > repeats
            and note.is_of(self.note.call, self.note.outline)
        )
        return next(found, None)


def _wait(here: Board, asked: list[_Asked], patience_s: float) -> bool:
    start, pause = time.monotonic(), 0.001
    nonces: dict[int, str] = {}
    while True:
        missing = {rank for each in asked for rank in each.open} - nonces.keys()
        nonces |= here.nonces(sorted(missing))
        if any(each.differs(nonces) for each in asked):
            return True
        silent = sorted({rank for each in asked for rank in each.open})
        if not silent:
            return False
        if time.monotonic() - start > patience_s:
            log.warning(ALONE, here.rank, spans(silent), patience_s, here.rank)
            return False
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_S)
