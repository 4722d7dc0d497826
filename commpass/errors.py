"""Errors for people: what was wrong, where, and what to write instead."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class CommpassError(Exception):
    """Base of every error that commpass raises on purpose."""


class PolicyError(CommpassError, ValueError):
    """A policy, rule, codec or module pattern that cannot be meant: names the nearest valid one."""


class ScopeError(CommpassError, RuntimeError):
    """A ``compress`` or ``keep`` around a compiled call, from where it cannot reach the compiled graph."""


class PlanMismatch(CommpassError, RuntimeError):
    """The ranks of a group planned differently, or one of them did not answer in time."""


class DumpError(CommpassError, ValueError):
    """A dump that is not ours, cut short, or written by a newer version."""


class VerifyError(CommpassError, RuntimeError):
    """A rewritten graph that is not what its plan says."""


def nearest(word: str, known: Iterable[str]) -> str:
    """A sentence end that helps: ``; did you mean 'int8'? Known: int4, int8.``"""
    names = sorted(set(known))
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    return f"{hint} Known: {', '.join(names)}." if names else "."
