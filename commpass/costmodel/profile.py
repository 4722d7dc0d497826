"""What the cost model knows about a machine: its links by group, its kernels, and how far to trust both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from commpass.costmodel.kernels import CPU, GPU, Kernels
from commpass.costmodel.links import Link

GLOO_FACTORS = {"reduce_scatter": 2.0, "all_to_all": 2.0}
"""gloo's reduce_scatter sends twice the necessary bytes; its all_to_all of large messages is half duplex."""


@dataclass(frozen=True)
class Profile:
    """Links and kernels. ``links`` maps a glob over group labels (such as ``tp``) to a link; the first that fits counts.

    ``node`` is the number of ranks of a group that follow one another on one host (0: not known), and ``inside`` the link
    between them: algorithm ``hierarchical`` is then a choice. ``margin`` is how unsure the model is, as a share of the plain
    time: a site is compressed only if it gains more (law 10).
    """

    name: str
    link: Link
    links: Mapping[str, Link] = field(default_factory=dict)
    kernels: Kernels = CPU
    margin: float = 0.1
    node: int = 0
    inside: Link | None = None

    def link_of(self, group_label: str) -> Link:
        """The link between the ranks of a group with this label."""
        for pattern, link in self.links.items():
            if fnmatchcase(group_label, pattern):
                return link
        return self.link


def ethernet(gbit_per_s: float, alpha_us: float = 60.0) -> Profile:
    """Ranks on CPU hosts over gloo and Ethernet of this speed."""
    link = Link(alpha_us, gbit_per_s / 8, GLOO_FACTORS)
    return Profile(f"ethernet-{gbit_per_s:g}g", link)


NVLINK = Profile("nvlink", Link(8.0, 200.0), kernels=GPU)
"""GPUs of one host over NCCL: an assumption until it is measured on the user's machine."""

DEFAULT_CPU = ethernet(10)
"""What stands in when nobody says how fast the network is: 10 Gbit/s between CPU hosts."""


def default_profile(device: str) -> Profile:
    """The profile for a device type when the user gives none."""
    return DEFAULT_CPU if device == "cpu" else NVLINK
