"""Select what of a graph is shown: which level, which sites and their surroundings, folded or
not."""

from __future__ import annotations

from commpass.errors import CommpassError, nearest
from commpass.plan.dump import Dump
from commpass.report.graph import fold, labels, sites
from commpass.report.graph.picture import Picture, near, restricted
from commpass.utils.globs import covers


def of_sites(
    dump: Dump,
    side: str = "after",
    *,
    module: str | None = None,
    site: str | None = None,
    expand: tuple[str, ...] = (),
    radius: int | None = None,
    every: bool = False,
) -> Picture:
    """Return a picture with one box for each site.

    It has all sites, those of a ``module`` (a glob), or the one ``site`` (its number or name), with
    everything within ``radius`` boxes of them (default one). ``expand`` names sites whose steps are
    shown; those of ``site`` always are. More than ``fold.MANY`` sites are folded by pattern unless
    ``every`` is set. Raise CommpassError if there is no such site, or no site at all.
    """
    wanted = (*expand, *([] if site is None else [site]))
    opened = {name for each in wanted for name in sites.named(dump, side, each)}
    shown = sites.sketch(dump, side, opened)
    names = set(shown.members)
    if site is not None:
        chosen = sites.named(dump, side, site)
        names = {box for box, name in shown.sites.items() if name in chosen}
    if module is not None:
        names &= _of_module(shown, module)
    if len(names) < len(shown.members) or radius is not None:
        names &= shown.sites.keys()
        names = near(shown.edges, names, 1 if radius is None else radius)
    many = len({name for box, name in shown.sites.items() if box in names})
    if many > fold.MANY and not every and len(names) == len(shown.members):
        return fold.folded(shown)
    return restricted(labels.picture(shown), shown.edges, names, cut=False)


def _of_module(sketch: sites.Sketch, module: str) -> set[str]:
    """Return the boxes of sites in modules that a glob covers."""
    found, known = set(), set()
    for box in sketch.sites:
        modules = {node.module for node in sketch.members[box]}
        known |= modules
        if any(covers(module, each) for each in modules):
            found.add(box)
    if not found:
        raise CommpassError(
            f"no site of graph {sketch.dump.number} is in module {module!r}{nearest(module, known)}"
        )
    return found
