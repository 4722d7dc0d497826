"""The names of residuals, by which they are saved and read back."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from commpass.errors import PolicyError

VERSION = 2
_VERSION = re.compile(r"commpass\.v(\d+)/(.+)", re.DOTALL)
_NAME = re.compile(r"([^/]+)/([^/]+)/(.+)/(sum|avg)/(world|\d+)/(\d+)of(\d+)", re.DOTALL)


@dataclass(frozen=True)
class Name:
    """The name of a residual.

    It belongs to a site, in a function, of the instance whose first parameter is ``parameter`` ("-"
    if unknown). It is that of rank ``rank`` of the ``ranks`` of the group whose first rank is
    ``first`` ("world" for the group of all ranks). ``local_site`` is the site's number among those
    of its parameter; the name uses it if the parameter is known.
    """

    parameter: str
    function: str
    site: str
    op: str
    first: str
    rank: int
    ranks: int
    local_site: str = field(default="", compare=False)

    def __str__(self) -> str:
        parameter = self.parameter.replace("%", "%25").replace("/", "%2F")
        site = f"commpass.v{VERSION}/{parameter}/{self.place}"
        return f"{site}/{self.op}/{self.first}/{self.rank}of{self.ranks}"

    @property
    def place(self) -> str:
        """Which of a model's residuals it is, whatever the ranks and the instance."""
        known = self.local_site and self.parameter != UNKNOWN
        return f"{self.function}/{self.local_site if known else self.site}"

    @property
    def hook(self) -> str:
        """The name of the integration that keeps it, without the number of a shard."""
        return self.function.partition("-")[0]

    @property
    def label(self) -> str:
        """Which residual it is, whatever the ranks, for messages."""
        return self.place if self.parameter == UNKNOWN else f"{self.parameter}/{self.place}"

    def continues(self, saved: Name) -> bool:
        """Return whether this rank continues with what ``saved`` of the same site had not sent."""
        return saved.first == self.first and saved.rank % self.ranks == self.rank


UNKNOWN = "-"
OUTER = "outer"
OF_GRADIENTS = ("ddp", "ssfusion", OUTER)
"""Functions that are hooks, which keep one residual for each parameter's gradient."""


def parse(key: str) -> Name:
    """Return the name that is a key of saved state. Raise PolicyError if it is none."""
    versioned = _VERSION.fullmatch(key)
    version = int(versioned[1]) if versioned else VERSION
    if version > VERSION:
        raise PolicyError(
            f"{key!r}: the state is of version {version}, this commpass reads up to {VERSION}:"
            " update commpass"
        )
    if version < VERSION:
        raise PolicyError(
            f"{key!r}: the state is of version {version}, whose names depend on the order in which"
            " code was compiled, so its owner is unknown. Leave it out: the first step then begins"
            " with zeros"
        )
    found = _NAME.fullmatch(versioned[2]) if versioned else None
    if found is None:
        raise PolicyError(
            f"{key!r} is not a name of error feedback; those of commpass.state_dict() begin with"
            f" commpass.v{VERSION}/"
        )
    parameter, function, site, op, first, rank, ranks = found.groups()
    parameter = parameter.replace("%2F", "/").replace("%25", "%")
    return Name(parameter, function, site, op, first, int(rank), int(ranks))
