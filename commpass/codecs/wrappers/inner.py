"""A codec inside another one."""

from __future__ import annotations

from collections.abc import Callable

from commpass.codecs.codec import Codec
from commpass.errors import PolicyError

Resolve = Callable[[str], Codec]
"""From the text of a codec to the codec: ``commpass.codec``, handed to those who need it, since it
knows them."""


def inner_codec(resolve: Resolve, parameter: str, text: str) -> Codec:
    """The codec that a parameter of another one names. Raises PolicyError for one that needs state
    of its own."""
    inner = resolve(text)
    if inner.state is not None:
        raise PolicyError(
            f"{parameter}={text!r}: it needs {inner.state} of its own; take a codec without state,"
            " such as 'int8'"
        )
    return inner
