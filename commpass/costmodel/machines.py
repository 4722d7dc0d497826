"""Named machines: hosts of GPUs with their links and network, each in a file of ``machines/``.

A machine is the GPUs that share ``intra_host_link``, which is a rack for NVL72. Its name is also
that of a profile (``profile_named``).
"""

from __future__ import annotations

import functools
from importlib import resources
from importlib.resources.abc import Traversable

import msgspec

from commpass.costmodel.cards import CARDS
from commpass.costmodel.interconnects import INTERCONNECTS
from commpass.errors import PolicyError, ProfileError, check_number, nearest

SUFFIX = ".toml"


class IntraHostLink(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The link between the GPUs of a machine: a named link, with measured numbers of the machine.

    - ``gbytes_per_s``: the rate that a GPU reaches in one direction (0: that of the named link).
    - ``island`` and ``bridge_gbytes_per_s``: as in ``Link``.
    """

    base: str
    gbytes_per_s: float = 0.0
    island: int = 0
    bridge_gbytes_per_s: float = 0.0


class NamedMachine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A host, as its file describes it.

    - ``card`` is a GPU of ``CARDS``, and ``gpus`` their number.
    - ``intra_host_link`` joins the GPUs. ``network`` is the link of one of the ``ports`` that the
      GPUs share between hosts.
    - ``oversubscription``: the rate of all ports of a host, relative to the rate of its way through
      the network while all hosts send.
    - ``sources``: where the numbers are from, and which are assumptions.

    Raises PolicyError for an unknown card or link, or an invalid number.
    """

    title: str
    card: str
    gpus: int
    intra_host_link: str | IntraHostLink
    network: str
    ports: int
    sources: tuple[str, ...]
    oversubscription: float = 1.0

    def __post_init__(self) -> None:
        for name, known in (("card", CARDS), ("network", INTERCONNECTS)):
            if (given := getattr(self, name)) not in known:
                raise PolicyError(f"{name}: unknown name {given!r}{nearest(given, known)}")
        if self.inside.base not in INTERCONNECTS:
            why = nearest(self.inside.base, INTERCONNECTS)
            raise PolicyError(f"intra_host_link: unknown name {self.inside.base!r}{why}")
        check_number("gpus", self.gpus, 1)
        check_number("ports", self.ports, 1)
        check_number("oversubscription", self.oversubscription, 1)
        if not self.sources:
            raise PolicyError("sources: must say where the numbers are from")

    @property
    def inside(self) -> IntraHostLink:
        """The link between the GPUs, also if the file has only its name."""
        link = self.intra_host_link
        return IntraHostLink(link) if isinstance(link, str) else link


def _folder() -> Traversable:
    return resources.files(__package__) / "machines"


@functools.cache
def machine_names() -> tuple[str, ...]:
    """Return the names of all machines, sorted."""
    files = (each.name for each in _folder().iterdir())
    return tuple(sorted(name.removesuffix(SUFFIX) for name in files if name.endswith(SUFFIX)))


@functools.cache
def machine_named(name: str) -> NamedMachine:
    """Return a machine by name. Raises PolicyError for an unknown name, with the nearest one."""
    if name not in machine_names():
        link = ": it is a link, for --profile" if name in INTERCONNECTS else ""
        raise PolicyError(f"unknown machine {name!r}{link}{nearest(name, machine_names())}")
    return parse_machine((_folder() / (name + SUFFIX)).read_bytes(), name)


def parse_machine(raw: bytes, name: str) -> NamedMachine:
    """Return the machine of a TOML file's content. Raises ProfileError with the file's name and the
    cause."""
    try:
        return msgspec.toml.decode(raw, type=NamedMachine)
    except (msgspec.DecodeError, PolicyError) as error:
        raise ProfileError(f"machine {name!r}: {error}") from error
