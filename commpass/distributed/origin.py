"""Identify the code that a graph was compiled from, and the call that it was compiled for.

A digest of a plan describes the changes, but not the graph. Two functions may have plans of one
digest on this rank and different plans on others. The code that Dynamo compiled distinguishes a
graph that is compiled again from another one. Ranks share the number of the call for which they
compile: they call the same code equally often.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import fx
from torch._dynamo import external_utils
from torch._dynamo.resume_execution import ContinueExecutionCache

_calls: Counter[str] = Counter()
"""How often graphs with collectives were called, by the digest of their code and direction."""


@dataclass(frozen=True)
class Origin:
    """Digests of the code that a graph was compiled from.

    ``function`` is the digest of the whole function, ``code`` that of the function or of its part
    after a graph break. Both are "" if unknown: then the graph's operators identify it. If only
    ``code`` is "", other ranks cannot identify the call.
    """

    function: str = ""
    code: str = ""


UNKNOWN = Origin()


def code_here() -> CodeType | None:
    """Return the code that Dynamo is compiling now; None if the backend was called directly."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        translator: Any = InstructionTranslator.current_tx()
    except AttributeError:
        return None
    while getattr(translator, "parent", None) is not None:
        translator = translator.parent
    return _wrapped_code(translator) or translator.f_code


def _wrapped_code(translator: Any) -> CodeType | None:
    """Return the code of the function that torch wrapped to compile it; None if it wrapped none.

    torch 2.11 wraps functions without a file: all of them have the code of the wrapper.
    """
    wrapper, cells = translator.f_code, getattr(translator, "closure", None)
    if wrapper.co_filename != external_utils.__file__ or not cells:
        return None
    wrapped = dict(zip(wrapper.co_freevars, cells, strict=True)).get("fn")
    return None if wrapped is None else getattr(wrapped.cell_contents, "__code__", None)


def origin_of(code: CodeType | None) -> Origin:
    """Return the origin of what is compiled from ``code``.

    It is ``UNKNOWN`` for torch's own code, which calls any module and so identifies nothing.
    """
    if code is None:
        return UNKNOWN
    resumed = ContinueExecutionCache.generated_code_metadata.get(code)
    whole = code if resumed is None or resumed.code is None else resumed.code
    if whole.co_filename.startswith(f"{torch.__path__[0]}/"):
        return UNKNOWN
    return Origin(_digest_of(whole), _digest_of(code))


def origin_of_graph(gm: fx.GraphModule) -> Origin:
    """Return the origin of a graph whose code is unknown: its operators, whatever their sizes."""
    digest = _digest([str(node.target) for node in gm.graph.nodes if node.op == "call_function"])
    return Origin(digest, digest)


def origin_of_hook(*facts: Any) -> Origin:
    """Return the origin of a hook's exchange: the facts that distinguish it from others."""
    digest = _digest([str(fact) for fact in facts])
    return Origin(digest, digest)


def call_of(origin: Origin, direction: str) -> str:
    """Return a digest of the next call of a code in a direction.

    It is equal on ranks that called the code equally often.
    """
    key = _key(origin, direction)
    return _digest([key, _calls[key]])


def count_call(origin: Origin, direction: str) -> None:
    _calls[_key(origin, direction)] += 1


def forget_calls() -> None:
    """Forget all counts, as in a new process."""
    _calls.clear()


def _key(origin: Origin, direction: str) -> str:
    return f"{origin.code}/{direction}"


def _digest_of(code: CodeType) -> str:
    """Return a digest of what all ranks of a program share of the code: not its file's location."""
    plain = [each for each in code.co_consts if isinstance(each, (int, float, str, bytes))]
    return _digest(
        [code.co_qualname, code.co_firstlineno, code.co_code.hex(), code.co_names, plain]
    )


def _digest(facts: Any) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
