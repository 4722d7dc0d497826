"""Which code a graph was compiled from, and for which of its calls.

A digest of a plan says what is done, and not to which graph: two functions may have plans of one
digest on this rank and different ones elsewhere. What tells a graph that is compiled again from
another one is the code that Dynamo compiled. What ranks share is the number of the call for which
they compile: they call the same code equally often.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import fx
from torch._dynamo.resume_execution import ContinueExecutionCache

_calls: Counter[str] = Counter()
"""How often graphs with collectives were called, by the digest of their code and direction."""


@dataclass(frozen=True)
class Origin:
    """Digests of the code that a graph was compiled from: ``function`` of the whole function,
    ``code`` of that or of the part of it that follows a graph break. Both are "" where that is not
    known: then the graph's operators must do. Where only ``code`` is "", other ranks cannot tell
    which call it is."""

    function: str = ""
    code: str = ""


UNKNOWN = Origin()


def code_here() -> CodeType | None:
    """The code that Dynamo is compiling now; None if a backend was called by hand."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        translator: Any = InstructionTranslator.current_tx()
    except AttributeError:
        return None
    while getattr(translator, "parent", None) is not None:
        translator = translator.parent
    return translator.f_code


def origin_of(code: CodeType | None) -> Origin:
    """The origin of what is compiled from ``code``. Code of torch's own calls any module, and so
    tells nothing."""
    if code is None:
        return UNKNOWN
    resumed = ContinueExecutionCache.generated_code_metadata.get(code)
    whole = code if resumed is None or resumed.code is None else resumed.code
    if whole.co_filename.startswith(f"{torch.__path__[0]}/"):
        return UNKNOWN
    return Origin(_digest_of(whole), _digest_of(code))


def origin_of_graph(gm: fx.GraphModule) -> Origin:
    """The origin of a graph whose code is not known: its operators, whatever their sizes."""
    digest = _digest([str(node.target) for node in gm.graph.nodes if node.op == "call_function"])
    return Origin(digest, digest)


def origin_of_hook(*facts: Any) -> Origin:
    """The origin of the graph of a hook's exchange: what tells the exchange from others."""
    digest = _digest([str(fact) for fact in facts])
    return Origin(digest, digest)


def call_of(origin: Origin, direction: str) -> str:
    """A digest of the next call of a code in a direction, equal on ranks that called it equally
    often."""
    key = _key(origin, direction)
    return _digest([key, _calls[key]])


def count_call(origin: Origin, direction: str) -> None:
    _calls[_key(origin, direction)] += 1


def forget_calls() -> None:
    """As in a new process."""
    _calls.clear()


def _key(origin: Origin, direction: str) -> str:
    return f"{origin.code}/{direction}"


def _digest_of(code: CodeType) -> str:
    """Of what is the same on all ranks that run the same program: not of where its file lies."""
    plain = [each for each in code.co_consts if isinstance(each, (int, float, str, bytes))]
    return _digest(
        [code.co_qualname, code.co_firstlineno, code.co_code.hex(), code.co_names, plain]
    )


def _digest(facts: Any) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
