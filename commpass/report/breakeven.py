"""From which size on compression pays: a table by link, ranks and dtype, from the cost model."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

from rich.table import Table
from rich.text import Text

from commpass.costmodel import Profile
from commpass.costmodel.cards import CARDS, GPU
from commpass.costmodel.kernels import CPU, Kernels
from commpass.distributed.machine import profile_here
from commpass.errors import PolicyError, nearest
from commpass.passes.candidates import candidates
from commpass.passes.choose import choose
from commpass.plan import PlannedSite, Site
from commpass.plan.kinds import IN_GRAPHS, KINDS
from commpass.policy import Policy, policy_named
from commpass.report.codecs import dtype_of
from commpass.report.numbers import micros, size
from commpass.report.tables import console_for, plain_table, print_json

LEAST, MOST = 1 << 10, 1 << 34
"""Bytes of the smallest and the largest tensor that is tried, in powers of two."""
LINKS = ("ethernet-1g", "ethernet-10g", "l40s-pcie", "p4d.24xlarge", "dgx-h100")
MOST_RANKS, MOST_BYTES = 1 << 20, 1 << 60
"""The most ranks, and the largest tensor, that can be named."""
UNITS = {"": 0, "KIB": 10, "MIB": 20, "GIB": 30}


@dataclass(frozen=True)
class Even:
    """The break-even size for one link, number of ranks and dtype.

    ``from_bytes`` is the smallest tensor of one rank, in powers of two, from which on compression
    is chosen (inf: none up to 16 GiB). The other fields are for a tensor of ``at_bytes``.
    """

    profile: str
    ranks: int
    dtype: str
    from_bytes: float
    at_bytes: int
    uncompressed_us: float
    predicted_us: float
    codec: str
    algorithm: str
    reason: str


def run(
    profiles: Sequence[str],
    ranks: str,
    dtypes: str,
    kind: str,
    policy: str,
    at: str,
    *,
    gpus: bool,
    card: str | None,
    json: bool,
) -> None:
    """Print the table. Codecs run on the card, if one is named. With ``gpus`` they run on that of
    each profile."""
    if kind not in IN_GRAPHS or KINDS[kind].pairwise:
        known = [name for name in IN_GRAPHS if not KINDS[name].pairwise]
        raise PolicyError(f"unknown kind {kind!r}{nearest(kind, known)}")
    chosen, numbers, nbytes = policy_named(policy), _numbers(ranks), _bytes(at)
    names = [name.strip() for name in dtypes.split(",")]
    for name in names:
        _check_size(nbytes, max(numbers), name)
    links = [profile_of(name, card, gpus=gpus) for name in profiles]
    rows = [
        even(link, many, dtype, kind, chosen, nbytes)
        for link in links
        for dtype in names
        for many in numbers
    ]
    if json:
        print_json(rows)
        return
    made = table(rows, nbytes)
    console = console_for(made)
    heading = f"{kind} under policy {chosen.name}, predicted up to {size(MOST)}"
    console.print(Text(heading))
    console.print(made)


def _check_size(nbytes: int, ranks: int, dtype: str) -> None:
    """Raise PolicyError for a tensor without a value for each rank: a larger one would be timed."""
    least = ranks * dtype_of(dtype).itemsize
    if nbytes < least:
        raise PolicyError(
            f"--size {nbytes:,} bytes: {ranks:,} ranks of {dtype} need at least {least:,} bytes, a"
            " value for each"
        )


def profile_of(name: str, card: str | None = None, *, gpus: bool = False) -> Profile:
    """Return a profile whose codecs run on ``card``, if it is given.

    Raises PolicyError for an unknown card. It also does so if no card is given and the profile is
    a link between GPUs of any kind, or the processors of hosts, and ``gpus`` is true.
    """
    found = profile_here(name)
    assert found is not None
    if card is not None:
        if card not in CARDS:
            raise PolicyError(f"--card {card!r}: no such card{nearest(card, CARDS)}")
        named = f"{found.name} with {card}"
        return dataclasses.replace(found, name=named, kernels=CARDS[card].kernels)
    if found.kernels == GPU or (gpus and found.kernels == CPU):
        raise PolicyError(
            f"{name} does not say which GPU encodes: name it with --card, or give a machine such as"
            f" dgx-h100 instead of the link. Cards: {', '.join(sorted(CARDS))}."
        )
    return found


def device_of(kernels: Kernels) -> str:
    """Return the type of the device that these rates were stated for, or measured on. Only a GPU
    has graphs of launches."""
    return "cuda" if kernels.graph_launch_us else "cpu"


def even(
    profile: Profile, ranks: int, dtype: str, kind: str, policy: Policy, at_bytes: int
) -> Even:
    """Return from which size on the policy compresses a collective, and its choice at one size."""
    at_size = decided(profile, ranks, dtype, kind, policy, at_bytes)
    least = _smallest_gaining(profile, ranks, dtype, kind, policy)
    times, chosen = (at_size.plain_us, at_size.predicted_us), (at_size.codec, at_size.algorithm)
    return Even(profile.name, ranks, dtype, least, at_size.bytes, *times, *chosen, at_size.reason)


def _smallest_gaining(profile: Profile, ranks: int, dtype: str, kind: str, policy: Policy) -> float:
    """Return the smallest power of two such that it and all larger ones are compressed. It has a
    value for each rank."""
    least, nbytes = inf, MOST
    while nbytes >= smallest(ranks, dtype):
        if not decided(profile, ranks, dtype, kind, policy, nbytes).compressed:
            break
        least, nbytes = nbytes, nbytes // 2
    return least


def smallest(ranks: int, dtype: str) -> int:
    """Return the smallest tensor that is tried, in bytes."""
    least = LEAST
    while least < ranks * dtype_of(dtype).itemsize:
        least *= 2
    return least


def decided(
    profile: Profile, ranks: int, dtype: str, kind: str, policy: Policy, nbytes: int
) -> PlannedSite:
    """Return the choice for one collective that no compute overlaps."""
    unit = ranks * dtype_of(dtype).itemsize
    entries = max(1, nbytes // unit) * ranks
    device = device_of(profile.kernels)
    site = Site(
        name=kind,
        kind=kind,
        reduce_op="sum" if KINDS[kind].sums else None,
        group="",
        group_size=ranks,
        dtype=dtype,
        shape=(entries,),
        bytes=entries * unit // ranks,
        direction="backward",
        device=device,
        by_messages=device == "cpu",  # as with gloo
    )
    allowed = policy.allowed(site)[0]
    options = candidates(site, allowed, profile, policy.reassociate)
    return choose([site], [options], [allowed], profile)[0]


def table(rows: Sequence[Even], at_bytes: int) -> Table:
    """Return a table with a line for each link, dtype and number of ranks."""
    numbers = ("ranks", "pays from", f"at {size(at_bytes)},\npredicted", "times")
    last = "codec by\nalgorithm"
    made = plain_table("link", "dtype", *numbers, last, folded=(last,), right=numbers)
    for row in rows:
        made.add_row(*map(Text, _cells(row)))
    return made


def _cells(row: Even) -> Iterator[str]:
    yield from (row.profile, row.dtype, str(row.ranks))
    less = " or less" if row.from_bytes == smallest(row.ranks, row.dtype) else ""
    yield "never" if row.from_bytes == inf else size(row.from_bytes) + less
    times = micros(row.uncompressed_us), micros(row.predicted_us, row.uncompressed_us)
    before, after = times[0].split(), times[1].split()
    yield " -> ".join((before[0] if before[1:] == after[1:] else times[0], times[1]))  # one unit
    yield f"{row.uncompressed_us / row.predicted_us:.2f}"
    yield f"{row.codec} by {row.algorithm}" if row.codec != "none" else "uncompressed"


def _numbers(ranks: str) -> list[int]:
    try:
        found = [int(each) for each in ranks.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 2 or max(found) > MOST_RANKS:
        raise PolicyError(
            f"--ranks {ranks!r}: must be numbers from 2 to {MOST_RANKS:,}, such as 2,8,64"
        )
    return found


def _bytes(text: str) -> int:
    """Parse ``16MiB``, ``64 KiB`` or a number of bytes."""
    found = re.fullmatch(r"([0-9]{1,20})\s*([a-z]*)", text.strip(), re.IGNORECASE)
    unit = UNITS.get(found.group(2).upper()) if found else None
    nbytes = int(found.group(1)) << unit if found and unit is not None else 0
    if not 0 < nbytes <= MOST_BYTES:
        raise PolicyError(
            f"--size {text!r}: must be bytes, such as 65536, 64KiB or 16MiB, and at most 2^60"
        )
    return nbytes
