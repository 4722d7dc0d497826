"""Makes text with user-chosen names safe to print.

A module name may contain terminal control characters. Unprintable characters are therefore replaced
by blanks wherever people read the text.
"""

from __future__ import annotations

import logging
import math
import re
import zlib

DATA = re.compile(r"(?<==)[A-Za-z0-9]{64,}")
"""A codec parameter that is data, such as the channels and scales of a calibration."""


def brief(text: str) -> str:
    """Shorten codec data in a text to its beginning and a checksum, which distinguishes two such
    codecs: ``outlier(statistics=cAAAQA...5f3e01aa)``."""
    return DATA.sub(lambda data: f"{data[0][:6]}...{zlib.crc32(data[0].encode()):08x}", text)


def clean(text: str) -> str:
    """Return one line, ``brief`` and without control characters, so that a name cannot break a
    line, a terminal or an XML file."""
    text = brief(text)
    return text if text.isprintable() else "".join(c if c.isprintable() else " " for c in text)


def clean_lines(text: str) -> str:
    """Apply ``clean`` to each line of a text."""
    return "\n".join(map(clean, text.split("\n")))


def plural(count: int, noun: str) -> str:
    """Return ``1 graph``, ``2 graphs``."""
    return f"{count} {noun}{'s' * (count != 1)}"


def less(after: float, before: float, *, brackets: bool = True) -> str:
    """Return `` (75% less)`` or `` (12% more)``, without brackets ``, 75% less``. Return "" if they
    differ by less than half a per cent, or if one is unknown."""
    share = round(100 * (after / before - 1)) if before > 0 and after >= 0 else 0
    if not share:
        return ""
    text = f"{abs(share)}% {'less' if share < 0 else 'more'}"
    return f" ({text})" if brackets else f", {text}"


def amount(count: float) -> str:
    """Format bytes in up to three digits: ``260 KiB``; "?" for a negative count, which means
    unknown."""
    if count < 0:
        return "?"
    power = min(3, int(math.log2(count) // 10)) if count >= 1024 else 0
    if round(count / 1024**power, 0) >= 1000 and power < 3:
        power += 1
    return f"{float(f'{count / 1024**power:.3g}'):g} {('B', 'KiB', 'MiB', 'GiB')[power]}"


class CleanMessages(logging.Filter):
    """Removes control characters from log messages."""

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if (shown := clean_lines(message)) != message:
            record.msg, record.args = shown, ()
        return True


logging.getLogger("commpass").addFilter(CleanMessages())


def first_line(error: Exception) -> str:
    """Return the type and the first line of an error, of at most 200 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return ": ".join([type(error).__name__, *(line[:200] for line in lines[:1])])
