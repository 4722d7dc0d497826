"""Codecs by name with parameters: ``codec("int8", block=128)`` or the same as text,
``"int8(block=128)"``."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from commpass.codecs import blocks, sparse
from commpass.codecs.codec import Codec
from commpass.codecs.difference import difference
from commpass.codecs.exponent import exponent
from commpass.codecs.outlier import outlier
from commpass.codecs.raw import raw
from commpass.errors import PolicyError, nearest

NAMES: dict[str, Callable[..., Codec]] = {
    "int8": blocks.int8,
    "int6": blocks.int6,
    "int4": blocks.int4,
    "int2": blocks.int2,
    "fp8": blocks.fp8,
    "rotated": blocks.rotated,
    "table": blocks.table,
    "taco": blocks.taco,
    "equarx": blocks.equarx,
    "sdp4bit": blocks.sdp4bit,
    "tahquant": blocks.tahquant,
    "exponent": exponent,
    "raw": raw,
    "outlier": outlier,
    "difference": difference,
    "topk": sparse.topk,
    "randomk": sparse.randomk,
    "dgc": sparse.dgc,
    "gaussiank": sparse.gaussiank,
    "redsync": sparse.redsync,
    "sidco": sparse.sidco,
}


def codec(name: str | Codec, **parameters: Any) -> Codec:
    """A codec by name. ``name`` may hold parameters, ``"int8(block=128)"``; keywords win over
    those.

    Raises PolicyError for an unknown name, parameter or value, with the nearest valid one.
    """
    if isinstance(name, Codec):
        return name
    if not isinstance(name, str):
        raise PolicyError(
            f"{name!r} is no codec: give a name such as 'int8', or one with parameters such as"
            " 'int8(block=128)'"
        )
    word, given = parse(name)
    if word not in NAMES:
        raise PolicyError(f"unknown codec {word!r}{nearest(word, NAMES)}")
    return _build(word, changed(f"codec {word!r}", NAMES[word], given | parameters))


def changed(
    what: str, builder: Callable[..., Any], given: dict[str, Any]
) -> tuple[tuple[str, Any], ...]:
    """The parameters that are given and are not the defaults, in order. Raises PolicyError for an
    unknown one, or a type of value that it cannot have."""
    known = parameters_of(builder)
    for key, value in given.items():
        if key not in known:
            raise PolicyError(f"{what} has no parameter {key!r}{nearest(key, known)}")
        if type(value) is not type(known[key]):
            raise PolicyError(f"{what}: {key}={value!r} should be like {key}={known[key]!r}")
    return tuple((key, value) for key, value in sorted(given.items()) if value != known[key])


def spelled(name: str, parameters: tuple[tuple[str, Any], ...]) -> str:
    """A name with its parameters, as ``parse`` reads it."""
    return (
        f"{name}({', '.join(f'{key}={value}' for key, value in parameters)})"
        if parameters
        else name
    )


def parameters_of(builder: Callable[..., Any]) -> dict[str, Any]:
    """The parameters of a codec (or whatever is built by name) with their defaults."""
    parameters = inspect.signature(builder).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


@lru_cache(maxsize=256)
def _build(word: str, parameters: tuple[tuple[str, Any], ...]) -> Codec:
    """A codec from its parameters other than the defaults."""
    try:
        return NAMES[word](spelled(word, parameters), **dict(parameters))
    except PolicyError as error:
        raise PolicyError(f"codec {word!r}: {error}") from None


def parse(text: str) -> tuple[str, dict[str, Any]]:
    """``"int8(block=128, form=e4m3)"`` to its name and parameters; values are numbers or words."""
    word, bracket, rest = text.strip().partition("(")
    if not bracket:
        return word, {}
    try:
        call = ast.parse(f"_({rest}", mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
            raise SyntaxError
        given = {str(keyword.arg): _value(keyword.value) for keyword in call.keywords}
        if len(given) < len(call.keywords):
            raise SyntaxError
        return word.strip(), given
    except (SyntaxError, ValueError):
        raise PolicyError(f"cannot read codec {text!r}; write it like 'int8(block=128)'") from None


def _value(node: ast.expr) -> Any:
    """A number or a word; a codec with parameters of its own, such as ``inner=int4(block=64)``,
    stays text."""
    return ast.unparse(node) if isinstance(node, (ast.Name, ast.Call)) else ast.literal_eval(node)
