"""Inner codecs of other codecs."""

from __future__ import annotations

from collections.abc import Callable

from commpass.codecs.codec import Codec
from commpass.errors import PolicyError

Resolve = Callable[[str], Codec]
"""Builds a codec from its text: ``commpass.codec``, passed as an argument to avoid a circular
import."""


def inner_codec(resolve: Resolve, parameter: str, text: str) -> Codec:
    """Return the inner codec that a parameter names. Raises PolicyError if it needs state, or if
    its scales are calibrated for the channels of a tensor."""
    inner = resolve(text)
    if inner.state is not None:
        raise PolicyError(
            f"{parameter}={text!r}: it needs {inner.state} of its own; take a codec without state,"
            " such as 'int8'"
        )
    if inner.is_calibrated:
        raise PolicyError(
            f"{parameter}={text[:40]!r}: its scales were calibrated for the channels of a whole"
            " tensor, and it would be given something else; use it alone, or take a codec that"
            " measures its scales, such as 'int4'"
        )
    return inner
