"""``Preset``: a codec with a name. The presets are in the files of their codecs; ``registry`` has
all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from commpass.codecs.codec import Codec


@dataclass(frozen=True)
class Preset:
    """A codec with a name, for ``commpass.codec`` and for the command ``commpass codecs``.

    ``build`` takes the text of the codec, and its parameters as keywords. With ``has_inner``, its
    first argument is the function that builds an inner codec from text (``wrappers.inner``).
    ``purpose`` is one line: what it is for, and its paper. ``measured`` holds the texts of the
    codecs that the command measures by default.
    """

    name: str
    build: Callable[..., Codec]
    purpose: str
    measured: tuple[str, ...] = ()
    has_inner: bool = False
