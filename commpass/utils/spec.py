"""Settings as text: a name with parameters, such as ``int8(block=128)``.

Policies, plans and calls use this form for codecs and algorithms.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from commpass.errors import PolicyError, nearest


def parse(text: str) -> tuple[str, dict[str, Any]]:
    """Parse ``"int8(block=128, form=e4m3)"`` into its name and parameters, whose values are numbers
    or words.

    A single word, as in ``"cast(fp16)"``, is the value of the first parameter and has the key ""
    here. Raises PolicyError for invalid text.
    """
    name, parameters = _parsed(text)
    return name, dict(parameters)


@lru_cache(maxsize=4096)
def _parsed(text: str) -> tuple[str, dict[str, Any]]:
    """Parse a text once. A backend that the garbage collector deletes reports on texts known here.

    Before 3.11.8, Python's own parser fails if the collector interrupts it and parses something
    else (https://github.com/python/cpython/issues/106905).
    """
    name, bracket, rest = text.strip().partition("(")
    if not bracket:
        return name, {}
    try:
        call = ast.parse(f"_({rest}", mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            raise SyntaxError
        if len(call.args) == 1 and not call.keywords and isinstance(call.args[0], ast.Name):
            return name.strip(), {"": _value(call.args[0])}
        if call.args:
            raise SyntaxError
        given = {str(keyword.arg): _value(keyword.value) for keyword in call.keywords}
        if len(given) < len(call.keywords):
            raise SyntaxError
        return name.strip(), given
    except (SyntaxError, ValueError):
        raise PolicyError(f"cannot read {text!r}; write it like 'int8(block=128)'") from None


def _value(node: ast.expr) -> Any:
    """Return a number or a word. A value with its own parameters, such as ``inner=int4(block=64)``,
    stays text."""
    return ast.unparse(node) if isinstance(node, (ast.Name, ast.Call)) else ast.literal_eval(node)


def spell(name: str, parameters: tuple[tuple[str, Any], ...]) -> str:
    """Return a name with its parameters, in the form that ``parse`` reads."""
    return (
        f"{name}({', '.join(f'{key}={value}' for key, value in parameters)})"
        if parameters
        else name
    )


@lru_cache(maxsize=256)
def parameters_of(builder: Callable[..., Any]) -> dict[str, Any]:
    """Return the parameters of what ``builder`` makes, with their defaults: its keyword-only
    ones."""
    parameters = inspect.signature(builder).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def changed_parameters(
    kind: str, builder: Callable[..., Any], options: dict[str, Any]
) -> tuple[tuple[str, Any], ...]:
    """Return the given parameters that differ from their defaults, in order. A parameter with a
    fraction may be given as a whole number.

    Raises PolicyError for an unknown parameter or a value of the wrong type.
    """
    known = parameters_of(builder)
    if "" in options and known:
        options = {next(iter(known)) if key == "" else key: value for key, value in options.items()}
    for key, value in options.items():
        if key not in known:
            raise PolicyError(f"{kind} has no parameter {key!r}{nearest(key, known)}")
        if type(value) is int and isinstance(known[key], float):
            options = options | {key: float(value)}
            continue
        if type(value) is not type(known[key]):
            raise PolicyError(f"{kind}: {key}={value!r} should be like {key}={known[key]!r}")
    return tuple((key, value) for key, value in sorted(options.items()) if value != known[key])
