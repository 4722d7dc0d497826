"""Codecs by name and parameters: ``codec("int8", block=128)`` or, as text,
``"int8(block=128)"``."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

from commpass.codecs import cast, raw
from commpass.codecs.block import presets
from commpass.codecs.codec import Codec
from commpass.codecs.entropy import codec as entropy
from commpass.codecs.exponent import codec as exponent
from commpass.codecs.sparse import presets as sparse
from commpass.codecs.sparse import segments
from commpass.codecs.wrappers import difference, mixed, outlier
from commpass.errors import PolicyError, nearest
from commpass.utils.spec import changed_parameters, parse, spell


def codec(name: str | Codec, **parameters: Any) -> Codec:
    """Return the codec of a name.

    Args:
        name: the name, with or without parameters, such as ``"int8(block=128)"``. A Codec is
            returned as it is.
        **parameters: parameters of the codec, which take precedence over those in the name.

    Raises PolicyError for an unknown name, parameter or value, with the nearest valid one.
    """
    if isinstance(name, Codec):
        return name
    if not isinstance(name, str):
        raise PolicyError(
            f"{name!r} is no codec: give a name such as 'int8', or one with parameters such as"
            " 'int8(block=128)'"
        )
    base, given = parse(name)
    if base not in NAMES and "," in base:
        names = [each.strip() for each in base.split(",")]
        raise PolicyError(f"{base!r} has several names: write a list, {names}")
    if base not in NAMES:
        raise PolicyError(f"unknown codec {base!r}{nearest(base, NAMES)}")
    return _build(base, changed_parameters(f"codec {base!r}", NAMES[base], given | parameters))


@lru_cache(maxsize=256)
def _build(name: str, parameters: tuple[tuple[str, Any], ...]) -> Codec:
    """Build a codec from the parameters that differ from their defaults."""
    try:
        return NAMES[name](spell(name, parameters), **dict(parameters))
    except PolicyError as error:
        raise PolicyError(f"codec {name!r}: {error}") from None


PRESETS = (
    *cast.PRESETS,
    *presets.PRESETS,
    *entropy.PRESETS,
    *outlier.PRESETS,
    *difference.PRESETS,
    *mixed.PRESETS,
    *exponent.PRESETS,
    *sparse.PRESETS,
    *segments.PRESETS,
    *raw.PRESETS,
)
"""All codecs that have a name, in the order in which the command line shows them."""

NAMES: dict[str, Callable[..., Codec]] = {
    preset.name: partial(preset.build, codec) if preset.has_inner else preset.build
    for preset in PRESETS
}
"""The builder of each codec: it takes the text, then the parameters as keywords."""
