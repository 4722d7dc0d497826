"""A codec inside another one."""

from __future__ import annotations

from commpass.codecs.codec import Codec
from commpass.errors import PolicyError


def inner_codec(field: str, text: str) -> Codec:
    """The codec that a parameter of another one names. Raises PolicyError for one that needs state
    of its own."""
    from commpass.codecs.names import codec

    inner = codec(text)
    if inner.state is not None:
        raise PolicyError(
            f"{field}={text!r}: it needs {inner.state} of its own; take a codec without state, such"
            " as 'int8'"
        )
    return inner
