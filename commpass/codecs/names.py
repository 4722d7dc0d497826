"""Codecs by name with parameters: ``codec("int8", block=128)`` or the same as text, ``"int8(block=128)"``."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from commpass.codecs.block import BlockCodec
from commpass.codecs.codec import Codec
from commpass.codecs.parts import HADAMARD, NO_TRANSFORM, fp8_grid, int_grid, is_power_of_two
from commpass.errors import PolicyError, nearest


def int8(spec: str, *, block: int = 256) -> Codec:
    """Symmetric 8-bit integers, one absmax scale a block (EQuARX, section 3)."""
    return BlockCodec(spec, _block(block), NO_TRANSFORM, int_grid(8))


def int4(spec: str, *, block: int = 128) -> Codec:
    """Symmetric 4-bit integers, two in a byte, one absmax scale a block."""
    return BlockCodec(spec, _block(block), NO_TRANSFORM, int_grid(4))


def fp8(spec: str, *, form: str = "e4m3", block: int = 256) -> Codec:
    """8-bit floats, ``form`` e4m3 or e5m2, one absmax scale a block; travels as uint8."""
    return BlockCodec(spec, _block(block), NO_TRANSFORM, fp8_grid(_form(form)))


def rotated(spec: str, *, bits: int = 8, form: str = "int", block: int = 256) -> Codec:
    """A Hadamard rotation of each block, then integers of 8 or 4 ``bits``, or fp8 with ``form`` e4m3 or e5m2."""
    if not is_power_of_two(_block(block)):
        raise PolicyError(f"block={block}: a Hadamard rotation needs a power of two, such as 128 or 256")
    if form != "int":
        if bits != 8:
            raise PolicyError(f"bits={bits} with form={form!r}: 8-bit floats have 8 bits; leave bits out")
        return BlockCodec(spec, block, HADAMARD, fp8_grid(_form(form)))
    if bits not in (4, 8):
        raise PolicyError(f"bits={bits}: must be 4 or 8")
    return BlockCodec(spec, block, HADAMARD, int_grid(bits))


NAMES: dict[str, Callable[..., Codec]] = {"int8": int8, "int4": int4, "fp8": fp8, "rotated": rotated}


def codec(name: str | Codec, **parameters: Any) -> Codec:
    """A codec by name. ``name`` may hold parameters, ``"int8(block=128)"``; keywords win over those.

    Raises PolicyError for an unknown name, parameter or value, with the nearest valid one.
    """
    if isinstance(name, Codec):
        return name
    if not isinstance(name, str):
        raise PolicyError(f"{name!r} is no codec: give a name such as 'int8', or one with parameters such as 'int8(block=128)'")
    word, given = _parse(name)
    if word not in NAMES:
        raise PolicyError(f"unknown codec {word!r}{nearest(word, NAMES)}")
    known = _parameters(word)
    given |= parameters
    for key, value in given.items():
        if key not in known:
            raise PolicyError(f"codec {word!r} has no parameter {key!r}{nearest(key, known)}")
        if type(value) is not type(known[key]):
            raise PolicyError(f"codec {word!r}: {key}={value!r} should be like {key}={known[key]!r}")
    return _build(word, tuple((key, value) for key, value in sorted(given.items()) if value != known[key]))


def _parameters(word: str) -> dict[str, Any]:
    """The parameters of a codec with their defaults."""
    parameters = inspect.signature(NAMES[word]).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


@lru_cache(maxsize=256)
def _build(word: str, changed: tuple[tuple[str, Any], ...]) -> Codec:
    """A codec from its parameters other than the defaults."""
    spec = f"{word}({', '.join(f'{key}={value}' for key, value in changed)})" if changed else word
    try:
        return NAMES[word](spec, **dict(changed))
    except PolicyError as error:
        raise PolicyError(f"codec {word!r}: {error}") from None


def _parse(text: str) -> tuple[str, dict[str, Any]]:
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
    return node.id if isinstance(node, ast.Name) else ast.literal_eval(node)


def _block(block: int) -> int:
    if not (8 <= block <= 65536 and block % 8 == 0):
        raise PolicyError(f"block={block}: must be a multiple of 8 from 8 to 65536")
    return block


def _form(form: str) -> str:
    if form not in ("e4m3", "e5m2"):
        raise PolicyError(f"form={form!r}{nearest(form, ('e4m3', 'e5m2'))}")
    return form
