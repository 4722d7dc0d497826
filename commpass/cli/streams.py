"""Output streams for terminals that cannot show all characters."""

from __future__ import annotations

import codecs
import io
import sys

ASCII = {"→": "->", "·": "-", "─": "-"}


def spelled(error: UnicodeError) -> tuple[str, int]:
    """Signs that an encoding does not have, in ASCII."""
    assert isinstance(error, UnicodeEncodeError)
    missing = error.object[error.start : error.end]
    return "".join(ASCII.get(sign, "?") for sign in missing), error.end


def print_whatever_the_encoding() -> None:
    """Lets standard output and standard error take any text."""
    codecs.register_error("commpass.spelled", spelled)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="commpass.spelled")
