"""Codecs by name and parameters: ``codec("int8", block=128)`` or, as text,
``"int8(block=128)"``."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

from commpass.codecs.block import presets
from commpass.codecs.cast import bf16, cast, fp16
from commpass.codecs.codec import Codec
from commpass.codecs.exponent import exponent
from commpass.codecs.raw import raw
from commpass.codecs.sparse import presets as sparse
from commpass.codecs.sparse.segments import segments
from commpass.codecs.wrappers.difference import difference
from commpass.codecs.wrappers.mixed import mixed
from commpass.codecs.wrappers.outlier import outlier
from commpass.errors import PolicyError, nearest
from commpass.utils.spec import changed, parse, spelled


def codec(name: str | Codec, **parameters: Any) -> Codec:
    """Return the codec of a name. ``name`` may contain parameters, ``"int8(block=128)"``; keyword
    arguments take precedence.

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


@lru_cache(maxsize=256)
def _build(name: str, parameters: tuple[tuple[str, Any], ...]) -> Codec:
    """Build a codec from the parameters that differ from their defaults."""
    try:
        return NAMES[name](spelled(name, parameters), **dict(parameters))
    except PolicyError as error:
        raise PolicyError(f"codec {name!r}: {error}") from None


NAMES: dict[str, Callable[..., Codec]] = {
    "int8": presets.int8,
    "int6": presets.int6,
    "int4": presets.int4,
    "int2": presets.int2,
    "fp8": presets.fp8,
    "mxfp8": presets.mxfp8,
    "mxfp6": presets.mxfp6,
    "mxfp4": presets.mxfp4,
    "nvfp4": presets.nvfp4,
    "rotated": presets.rotated,
    "table": presets.table,
    "taco": presets.taco,
    "equarx": presets.equarx,
    "sdp4bit": presets.sdp4bit,
    "tahquant": presets.tahquant,
    "exponent": exponent,
    "raw": raw,
    "cast": cast,
    "bf16": bf16,
    "fp16": fp16,
    # Codecs with an inner codec get ``codec`` to look it up.
    "outlier": partial(outlier, codec),
    "difference": partial(difference, codec),
    "mixed": partial(mixed, codec),
    "segments": partial(segments, codec),
    "topk": partial(sparse.topk, codec),
    "randomk": partial(sparse.randomk, codec),
    "dgc": partial(sparse.dgc, codec),
    "gaussiank": partial(sparse.gaussiank, codec),
    "redsync": partial(sparse.redsync, codec),
    "sidco": partial(sparse.sidco, codec),
}
"""The builder of each codec: it takes the text, then the parameters as keywords."""
