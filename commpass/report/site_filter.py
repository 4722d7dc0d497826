"""Select the sites of a dump that are shown: by module, kind, direction or codec."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from commpass.errors import CommpassError, nearest
from commpass.plan import PlannedSite
from commpass.plan.dump import Dump
from commpass.plan.kinds import KINDS
from commpass.utils.globs import covers

DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True)
class SiteFilter:
    """The conditions for a site to be shown; None means no condition.

    ``module`` is a glob as in a rule; ``codec`` is a name with or without its parameters. Raise
    CommpassError for an unknown kind or direction, with the nearest name.
    """

    module: str | None = None
    kind: str | None = None
    direction: str | None = None
    codec: str | None = None

    def __post_init__(self) -> None:
        for name, known in (("kind", KINDS), ("direction", DIRECTIONS)):
            given = getattr(self, name)
            if given is not None and given not in known:
                raise CommpassError(f"--{name} {given}: there is none{nearest(given, known)}")

    @property
    def everything(self) -> bool:
        return self == SiteFilter()

    def __str__(self) -> str:
        given = ((f.name, getattr(self, f.name)) for f in dataclasses.fields(self))
        return " ".join(f"--{name} {value}" for name, value in given if value is not None)

    def accepts(self, site: PlannedSite) -> bool:
        return all(test(site) for _, test in self._tests())

    def _tests(self) -> Iterable[tuple[str, Callable[[PlannedSite], bool]]]:
        """Yield each condition by name."""
        module, codec = self.module, self.codec
        if module is not None:
            yield "module", lambda site: covers(module, site.module)
        if self.kind is not None:
            yield "kind", lambda site: site.kind == self.kind
        if self.direction is not None:
            yield "direction", lambda site: site.direction == self.direction
        if codec is not None:
            yield "codec", lambda site: codec in (site.codec, site.codec.partition("(")[0])


def select(dumps: Sequence[Dump], site_filter: SiteFilter) -> list[Dump]:
    """Return the same graphs with only the selected sites; a graph without any is left out.

    Simplified, grouped or split sites are not reported there, since they have no module. Raise
    CommpassError if nothing is left, with the names that exist.
    """
    if site_filter.everything:
        return list(dumps)
    check(dumps, site_filter)
    found = []
    for dump in dumps:
        if sites := tuple(site for site in dump.plan.sites if site_filter.accepts(site)):
            plan = dataclasses.replace(dump.plan, sites=sites, simplified=(), grouped=(), split=())
            found.append(dataclasses.replace(dump, plan=plan))
    return found


def check(dumps: Sequence[Dump], site_filter: SiteFilter) -> None:
    """Raise CommpassError if no site is selected.

    The message names the values that exist for each condition that no site meets.
    """
    sites = [site for dump in dumps for site in dump.plan.sites]
    if any(map(site_filter.accepts, sites)):
        return
    if not sites:
        raise CommpassError(f"{site_filter}: there are no sites here")
    parts = []
    for name, test in site_filter._tests():
        if not any(map(test, sites)):
            known = {getattr(site, name) for site in sites}
            parts.append(f"no site with {name} {getattr(site_filter, name)!r}")
            parts[-1] += nearest(getattr(site_filter, name), known)
    raise CommpassError(
        " ".join(parts) or f"no site meets all of {site_filter}, though each of them has some"
    )
