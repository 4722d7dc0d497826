"""Profiles: what the cost model knows about a machine, which are its links by group, its kernels,
and the margin of error of both."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import groupby

import msgspec

from commpass.costmodel.cards import CARDS, GPU, card_of, kernels_with
from commpass.costmodel.interconnects import INTERCONNECTS, family_of, gpu_link
from commpass.costmodel.interconnects import NVLINK as NVLINK_FAMILY
from commpass.costmodel.kernels import CPU, Kernels
from commpass.costmodel.links import Link, sharing
from commpass.costmodel.machines import machine_named, machine_names
from commpass.costmodel.protocols import between_hosts
from commpass.errors import PolicyError, check_number, check_quantity, nearest
from commpass.plan.kinds import KINDS
from commpass.utils.deprecated import renamed_fields
from commpass.utils.keywords import named_arguments, named_fields

GLOO_FACTORS = {"reduce_scatter": 2.0, "all_to_all": 2.0}
"""gloo's reduce_scatter sends twice the necessary bytes; its all_to_all of large messages is half
duplex."""
GLOO_BUFFERED_BYTES = 256 * 1024.0
"""The bytes of each rank in an all_to_all that are sent in both directions at once: 2 ranks, 64 KiB
to 16 MiB (benchmarks/network/never_slower.py)."""
GLOO_OVERHEAD_US = 250.0
"""Processor time of a rank for one more message to another rank and one from it: two-shots of int8
in 2, 4 and 8 chunks, 2 and 4 ranks (benchmarks/network/reduces.py)."""
TCP_CONTENTION_BYTES = 96 * 1024.0
"""The additional cost of two-shots compared with rings of the same bytes, for each exchange. It is
at least this on 4 ranks at 0.1 Gbit/s, int8 and int4 of 1 to 64 MiB, and hardly more at 1 Gbit/s
(same benchmark)."""

SLICE_US = 1000.0
"""How long other processes on the same core run on while a rank could continue. 4 ranks on 2 cores,
1 Gbit/s: with 1000 to 3000 us steps are 1.18 to 1.9 times as fast as plain, with 0 they are 0.95 to
1.36. A two-shot of 512 KiB takes 8.3 ms (benchmarks/network/steps.py and reduces.py)."""

LINK, INTRA_HOST = "(link)", "(intra-host)"
"""The names of the links of groups without an entry: between hosts, and inside one."""
OLD_NAMES = {"node": "ranks_per_host", "inside": "intra_host_link"}
"""Fields of a profile by their old names, which work for one version."""


@renamed_fields(OLD_NAMES)
@named_fields()
@dataclass(frozen=True)
class Profile:
    """Links and kernels: what the cost model knows of a cluster.

    Args:
        name: the name in plans and reports.
        link: the link of groups that nothing else covers.
        links: by glob over group labels (such as ``tp``), a link; the first match is used.
        kernels: the rates of kernels.
        margin: the uncertainty of the model, as a share of the plain time: a site is compressed
            only if it gains more.
        ranks_per_host: the number of consecutive global ranks on one host (0: unknown): rank r is
            on host ``r // ranks_per_host``.
        intra_host_link: the link between ranks of one host. It is used for a group whose ranks are
            all on one host, if no entry of ``links`` matches, and for the inner hops of algorithm
            ``hierarchical``. That algorithm is available for groups with equally many ranks on each
            of several hosts.
        ports: the network ports of a host, which its ranks share, all at the same time (0: each has
            its own). Exchanges of groups that have the same link take turns on it.
        source: where the numbers are from, in words for reports. Profiles that differ in it alone
            are equal.

    Raises PolicyError for a field of a wrong type or an invalid number.
    """

    name: str
    link: Link
    links: Mapping[str, Link] = field(default_factory=dict)
    kernels: Kernels = CPU
    margin: float = 0.1
    ranks_per_host: int = 0
    intra_host_link: Link | None = None
    ports: int = 0
    source: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        for what in ("name", "source"):
            if not isinstance(text := getattr(self, what), str):
                raise PolicyError(f"Profile({what}={text!r}): must be a text")
        if not isinstance(self.links, Mapping):
            raise PolicyError(
                f"Profile(links={self.links!r}): must map globs over group labels to Link(...)"
            )
        inner = ("intra_host_link", self.intra_host_link)
        for what, link in (("link", self.link), inner, *self.links.items()):
            if not isinstance(link, Link) and not (what == inner[0] and link is None):
                raise PolicyError(
                    f"Profile: {what} is {link!r}, but must be a Link(alpha_us, gbytes_per_s)"
                )
        if not isinstance(self.kernels, Kernels):
            raise PolicyError(
                f"Profile(kernels={self.kernels!r}): must be Kernels(launch_us, other, rates)"
            )
        check_number("Profile(margin", self.margin)
        if self.margin > 1:
            raise PolicyError(
                f"Profile(margin={self.margin!r}): must be a share of the plain time, such as 0.1 "
                "for ten percent, and at most 1"
            )
        for name, number, of in (
            ("ranks_per_host", self.ranks_per_host, "of ranks on a host"),
            ("ports", self.ports, "of network ports of a host"),
        ):
            if not isinstance(number, int) or isinstance(number, bool) or number < 0:
                raise PolicyError(
                    f"Profile({name}={number!r}): must be a number {of}, or 0 if it is not known"
                )
        if self.ports and not self.ranks_per_host:
            raise PolicyError(
                f"Profile(ports={self.ports}): needs ranks_per_host, the ranks that share them"
            )

    @property
    def description(self) -> str:
        """Its name, and where its numbers are from."""
        return f"{self.name} ({self.source})" if self.source else self.name

    @property
    def measured(self) -> bool:
        """Whether its link was measured, not stated or assumed."""
        return bool(self.link.measured)

    def link_of(self, *labels: str, ranks: Sequence[int] = ()) -> Link:
        """Return the link between the ranks of a group with these labels; ``ranks`` are their
        global numbers, if known."""
        port = self.port_of(*labels, ranks=ranks)
        link = self.intra_host_link if port == INTRA_HOST else self.links.get(port, self.link)
        assert link is not None
        if link.island and ranks:
            link = self._in_islands(link, ranks)
        on_host = self.on_each_host(ranks)
        if port == INTRA_HOST or on_host in (0, len(ranks)):
            return link
        if not self.ports and not link.protocols:
            return dataclasses.replace(link, sharing={})
        per_port = self.ranks_per_host / self.ports if self.ports else 1.0
        times = self._sharing(link, len(ranks), on_host, per_port)
        if not link.protocols:
            return dataclasses.replace(link, sharing=times)
        times |= self._rings_on_all_ports(link, on_host, per_port)
        inside = self.intra_host_link
        return dataclasses.replace(
            link,
            on_host=on_host,
            sharing={kind: each for kind, each in times.items() if self.ports or each != 1},
            protocols=between_hosts(link.protocols, inside.protocols if inside else ()),
            least_us=max(link.least_us, inside.least_us if inside else 0.0),
        )

    def _sharing(self, link: Link, ranks: int, on_host: int, per_port: float) -> dict[str, float]:
        """Return ``sharing`` of a group with ``on_host`` of its ranks on each host.

        Of an exchange with all others, bytes inside a host pass ``intra_host_link`` meanwhile.
        """
        inside = self.intra_host_link
        if inside is None:
            return sharing(ranks, on_host, per_port)
        near = (on_host - 1) / (ranks - 1)
        least = near * link.gbytes_per_s / inside.rate_to(max(on_host - 1, 1))
        return sharing(ranks, on_host, per_port, least)

    def _rings_on_all_ports(self, link: Link, on_host: int, per_port: float) -> dict[str, float]:
        """Return ``sharing`` for the rings of a library of GPUs, by kind.

        The library divides the bytes among rings, and each ring leaves the host through another of
        the group's ports. A port carries only its ring's share of what a rank sends. But a ring is
        no faster than the link inside a host.
        """
        inside = self.intra_host_link
        least = link.gbytes_per_s / inside.gbytes_per_s if inside is not None else 1.0
        share = max(per_port / on_host, least)
        return {name: share for name, kind in KINDS.items() if not (kind.direct or kind.pairwise)}

    def _in_islands(self, link: Link, ranks: Sequence[int]) -> Link:
        """Return the link of a group that is in some of a host's islands.

        ``island`` is how many of its ranks are in each, the fewest if the number differs, and 0 if
        all are in one. Other groups use the bridge at the same time, so that the group has a share
        of it.
        """
        a_host = self.ranks_per_host or max(ranks) + 1
        counts = Counter((rank // a_host, rank % a_host // link.island) for rank in ranks)
        if len(counts) == 1:
            return dataclasses.replace(link, island=0)
        share = min(max(counts.values()) / link.island, 1.0)
        return dataclasses.replace(
            link,
            island=min(counts.values()),
            bridge_gbytes_per_s=link.bridge_gbytes_per_s * share,
        )

    def port_of(self, *labels: str, ranks: Sequence[int] = ()) -> str:
        """Return which link carries a group: the glob of an entry of ``links``, or ``INTRA_HOST``
        or ``LINK``."""
        for pattern in self.links:
            if any(fnmatchcase(label, pattern) for label in labels):
                return pattern
        if self.intra_host_link is not None and ranks and self.on_each_host(ranks) == len(ranks):
            return INTRA_HOST
        return LINK

    def scaled(self, port: str, times: float) -> Profile:
        """Return a profile in which the link of ``port`` (see ``port_of``) has ``times`` the
        bandwidth."""
        if port == LINK:
            return dataclasses.replace(self, link=self.link.scaled(times))
        if port == INTRA_HOST:
            assert self.intra_host_link is not None
            return dataclasses.replace(self, intra_host_link=self.intra_host_link.scaled(times))
        return dataclasses.replace(self, links={**self.links, port: self.links[port].scaled(times)})

    def on_cores(self, cores: float) -> Profile:
        """Return the profile of ranks that have ``cores`` processor cores each, if that is below 1.

        Such ranks wait for each other: all that a processor does takes ``1 / cores`` times as long,
        and a rank that has received a message continues after a time slice of each other one. A
        link carries bytes at the same rate.
        """
        if cores >= 1:
            return self
        times, later_us = 1 / cores, SLICE_US * (1 / cores - 1)
        inside = self.intra_host_link
        return dataclasses.replace(
            self,
            link=self.link.delayed(times, later_us),
            links={name: link.delayed(times, later_us) for name, link in self.links.items()},
            intra_host_link=inside and inside.delayed(times, later_us),
            kernels=self.kernels.slowed(times),
        )

    def with_speed(self, speed: float) -> Profile:
        """Return the profile of ranks whose kernels are ``speed`` times as fast. The processor time
        of messages stays the same."""
        return dataclasses.replace(self, kernels=self.kernels.slowed(1 / speed))

    def on_each_host(self, ranks: Sequence[int]) -> int:
        """Return how many of a group's ranks are on each of its hosts. It is 0 if the number
        differs, the ranks of a host are not consecutive in the group, or hosts are unknown."""
        return _on_each_host(self.ranks_per_host, tuple(ranks)) if self.ranks_per_host else 0


@functools.lru_cache(maxsize=256)
def _on_each_host(ranks_per_host: int, ranks: tuple[int, ...]) -> int:
    """Return what ``Profile.on_each_host`` does.

    The passes ask for every candidate, and a scan of 100,000 ranks takes 20 ms.
    """
    runs = [
        (host, len(list(run))) for host, run in groupby(rank // ranks_per_host for rank in ranks)
    ]
    hosts, sizes = {host for host, _ in runs}, {size for _, size in runs}
    return sizes.pop() if len(hosts) == len(runs) and len(sizes) == 1 else 0


@named_arguments
def ethernet(gbit_per_s: float, alpha_us: float = 60.0) -> Profile:
    """Return the profile of CPU hosts with gloo over Ethernet.

    Args:
        gbit_per_s: the speed in Gbit/s, above 0.
        alpha_us: the time to start an exchange, in microseconds.

    Raises PolicyError unless the speed is a number above 0.
    """
    check_quantity("ethernet(gbit_per_s", gbit_per_s, above=True)
    check_quantity("ethernet(alpha_us", alpha_us)
    link = Link(
        alpha_us,
        gbit_per_s / 8,
        GLOO_FACTORS,
        overhead_us=GLOO_OVERHEAD_US,
        contention_bytes=TCP_CONTENTION_BYTES,
        buffered_bytes=GLOO_BUFFERED_BYTES,
    )
    return Profile(f"ethernet-{gbit_per_s:g}g", link)


NVLINK = Profile("nvlink", gpu_link(NVLINK_FAMILY, 200.0), kernels=GPU)
"""GPUs of one host over NCCL: an assumption until it is measured on the user's machine."""

DEFAULT_CPU = ethernet(10)
"""The default if the speed of the network is not given: 10 Gbit/s between CPU hosts."""


def default_profile(device: str, card: str = "", ranks_per_host: int = 0) -> Profile:
    """Return the default profile for a device type; ``card`` is the device's name.

    With ``ranks_per_host``, there are several hosts with so many ranks each. Their GPUs have the
    network of the vendor's own systems between them. Without it, all ranks are assumed to be on one
    host.
    """
    if device == "cpu":
        return DEFAULT_CPU
    if (name := card_of(card)) is None:
        return NVLINK
    known = CARDS[name]
    inside = link_named(known.interconnect)
    if not ranks_per_host:
        return Profile(name, inside, kernels=known.kernels)
    return Profile(
        f"{name} over {known.network}",
        link_named(known.network),
        kernels=known.kernels,
        ranks_per_host=max(ranks_per_host, known.joined),
        intra_host_link=inside,
    )


def link_named(name: str) -> Link:
    """Return a link by name: ``"nvlink-4"``, ``"infiniband-ndr"``, ``"ethernet-25g"`` (of any speed
    in Gbit/s). Raises PolicyError for any other name, with the nearest one."""
    if name in INTERCONNECTS:
        return INTERCONNECTS[name].link(family_of(name))
    if name == NVLINK.name:
        return NVLINK.link
    if speed := re.fullmatch(r"ethernet-(\d+(?:\.\d+)?)g", name):
        return ethernet(float(speed.group(1))).link
    raise PolicyError(f"unknown link {name!r}{nearest(name, LINK_NAMES)}{_any_rate(name)}")


def _any_rate(name: str) -> str:
    """Return how Ethernet of any rate is named, if a wrong name may have meant it."""
    if not name.lower().startswith("eth"):
        return ""
    return " Ethernet may have any rate: 'ethernet-2.5g' has 2.5 Gbit/s."


NOMINAL = "nominal rate, not measured"
"""The source of a profile that is named for its link."""
DATA_SHEETS = "from data sheets, not measured"
"""That of a named machine."""


def profile_named(profile: str | Profile | None) -> Profile | None:
    """Return a profile by name, or the profile itself. A name is that of a machine
    (``"dgx-h100"``) or of a link: ``"nvlink-4"``, ``"infiniband-ndr"``, ``"ethernet-25g"`` (of any
    speed in Gbit/s).

    Raises PolicyError for any other name, with the nearest one.
    """
    if profile is None or isinstance(profile, Profile):
        return profile
    if not isinstance(profile, str):
        raise PolicyError(
            f"profile={profile!r}: must be a commpass.Profile(...) or one of {', '.join(NAMES)}"
        )
    if speed := re.fullmatch(r"ethernet-(\d+(?:\.\d+)?)g", profile):
        return dataclasses.replace(ethernet(float(speed.group(1))), source=NOMINAL)
    if profile in machine_names():
        return _of_machine(profile)
    if profile in LINK_NAMES:
        kernels = kernels_with(profile)
        return Profile(profile, link_named(profile), kernels=kernels, source=NOMINAL)
    raise PolicyError(
        f"unknown profile {profile!r}{nearest(profile, NAMES)}{_any_rate(profile)} Or give a"
        " commpass.Profile(...), or the path of a .json or .toml file."
    )


def _of_machine(name: str) -> Profile:
    """Return the profile of hosts of one kind, which a network connects."""
    machine = machine_named(name)
    given = msgspec.structs.asdict(machine.inside)
    inside = link_named(given.pop("base"))
    measured = {field: number for field, number in given.items() if number}
    return Profile(
        name,
        link_named(machine.network).scaled(1 / machine.oversubscription),
        kernels=CARDS[machine.card].kernels,
        ranks_per_host=machine.gpus,
        intra_host_link=dataclasses.replace(inside, **measured),
        ports=machine.ports,
        source=DATA_SHEETS,
    )


LINK_NAMES = (
    NVLINK.name,
    *INTERCONNECTS,
    "ethernet-1g",
    "ethernet-10g",
    "ethernet-25g",
    "ethernet-100g",
)
NAMES = (*machine_names(), *LINK_NAMES)
