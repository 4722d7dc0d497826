"""The predictions of all rows, as JSON and in numbers."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import msgspec

from benchmarks.published.predict import predicted
from benchmarks.published.rows import Row, read
from benchmarks.published.setups import setup_of

PATH = Path(__file__).parents[1] / "results" / "published.json"
MISSED = 0.25
"""A row misses if one of its times is off by a larger share."""
REASONS = {
    r"quickreduce.* 2$": "on two ranks the kernels hide behind the link; their share was fitted to "
    "four ranks",
    r"aiter": "on two ranks the kernels hide behind the link; their share was fitted to four ranks",
    r"quickreduce.* [48]$": "each peer adds about a microsecond of signals, and kernels are slower "
    "at some sizes (16 MiB takes longer for each value than 4 and 64 MiB)",
    r"vllm.* 4$": "kernels for bf16 are slower than those for fp16",
    r"aiconfigurator.*B200": "messages of NCCL on Blackwell take longer than in its own model",
    r"aiconfigurator.*RTX": "NCCL reaches 24 to 37 GB/s on this host, and 48 on that of b12x",
    r"torchcomms": "a slow form of the kernel, which its authors replaced (pull request 4002)",
    r"COCCL": "the best size and setting of a figure; the size here is 1 GiB",
}
"""Why rows miss, by a pattern of source, hardware and ranks."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """A row with its prediction. Times are in microseconds; if ``unit`` is ``ratio``, they are
    relative to the plain time. ``why`` says why there is no prediction, or why it misses."""

    source: str
    hardware: str
    ranks: int | None
    collective: str
    dtype: str
    bytes: int | None
    codec: str
    level: str
    split: str
    checked: str
    unit: str
    measured_plain: float | None
    measured_compressed: float | None
    predicted_plain: float | None
    predicted_compressed: float | None
    why: str

    @property
    def errors(self) -> tuple[float | None, float | None]:
        """The relative errors of both times, None where one of the two numbers is missing."""
        return (
            _off(self.predicted_plain, self.measured_plain) if self.unit == "us" else None,
            _off(self.predicted_compressed, self.measured_compressed),
        )

    @property
    def has_right_sign(self) -> bool | None:
        """Whether the faster of the two was predicted to be faster; None without both."""
        of = (
            self.measured_plain,
            self.measured_compressed,
            self.predicted_plain,
            self.predicted_compressed,
        )
        if None in of:
            return None
        return (of[1] < of[0]) == (of[3] < of[2])  # type: ignore[operator]


def _off(predicted_us: float | None, measured_us: float | None) -> float | None:
    if predicted_us is None or measured_us is None:
        return None
    return predicted_us / measured_us - 1


def all_rows() -> list[Published]:
    """Return every row of the table with its prediction."""
    return [_published(row) for row in read()]


def _published(row: Row) -> Published:
    setup = setup_of(row)
    plain: float | None = None
    compressed: float | None = None
    why = setup if isinstance(setup, str) else ""
    if not isinstance(setup, str):
        plain, compressed = predicted(setup)
        if row.is_ratio:
            assert plain is not None
            assert compressed is not None
            plain, compressed = 1.0, compressed / plain
    found = Published(
        source=row.source,
        hardware=row.hardware,
        ranks=row.ranks,
        collective=row.collective,
        dtype=row.dtype,
        bytes=row.nbytes,
        codec=row.codec,
        level=row.level,
        split=row.split,
        checked=row.checked,
        unit="ratio" if row.is_ratio else "us",
        measured_plain=row.plain,
        measured_compressed=row.compressed,
        predicted_plain=_rounded(plain),
        predicted_compressed=_rounded(compressed),
        why=why,
    )
    return _explained(found)


def _explained(found: Published) -> Published:
    if found.why or not misses(found):
        return found
    text = f"{found.source} {found.hardware} {found.ranks}"
    why = next((why for pattern, why in REASONS.items() if re.search(pattern, text)), "not known")
    return dataclasses.replace(found, why=why)


def _rounded(number: float | None) -> float | None:
    return None if number is None else float(f"{number:.5g}")


def misses(row: Published) -> bool:
    """Whether one of its times is off by more than ``MISSED``, or the sign is wrong."""
    off = any(error is not None and abs(error) > MISSED for error in row.errors)
    return off or row.has_right_sign is False


@dataclass(frozen=True)
class Summary:
    """How near the predictions of some rows are: the number of times, their median error, the
    shares within 10 % and 25 %, and the number and share of right signs."""

    times: int
    median: float
    within_10: float
    within_25: float
    signs: int
    right: float


def summary(rows: Iterable[Published]) -> Summary:
    """Return the errors of rows. A plain time that several rows share counts once."""
    errors: list[float] = []
    signs: list[bool] = []
    seen: set[tuple[object, ...]] = set()
    for row in rows:
        plain, compressed = row.errors
        key = (row.source, row.hardware, row.collective, row.bytes, row.measured_plain)
        if plain is not None and key not in seen:
            errors.append(abs(plain))
            seen.add(key)
        if compressed is not None:
            errors.append(abs(compressed))
        if (sign := row.has_right_sign) is not None:
            signs.append(sign)
    if not errors:
        return Summary(0, 0.0, 0.0, 0.0, len(signs), 0.0)

    def within(most: float) -> float:
        return sum(error <= most for error in errors) / len(errors)

    right = sum(signs) / len(signs) if signs else 0.0
    return Summary(len(errors), median(errors), within(0.1), within(0.25), len(signs), right)


def write(rows: Sequence[Published], path: Path = PATH) -> None:
    """Write the rows as JSON."""
    raw = msgspec.json.encode({"rows": rows})
    path.write_bytes(msgspec.json.format(raw, indent=1) + b"\n")


def stored(path: Path = PATH) -> list[Published]:
    """Read what ``write`` wrote."""
    return msgspec.json.decode(path.read_bytes(), type=dict[str, list[Published]])["rows"]
