"""Explain why a site was given its candidate, and why each other one lost."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from math import inf

import msgspec
from rich.table import Table
from rich.text import Text

from commpass.costmodel.files import profile_of
from commpass.errors import CommpassError, nearest
from commpass.plan import SINGLE_KERNEL, Candidate, PlannedSite
from commpass.plan.dump import Dump
from commpass.report.explain import in_words_of_slack
from commpass.report.graph.picture import inputs_of, waits
from commpass.report.numbers import micros, ratio, size
from commpass.report.run import slack_of_sites
from commpass.report.site_text import form_of
from commpass.report.tables import plain_table
from commpass.utils.globs import covers
from commpass.utils.printable import brief


def considered(dumps: Sequence[Dump], name: str) -> list[tuple[Dump, PlannedSite]]:
    """Return the sites of this name or glob in the graphs of a run, or of modules that it covers.

    Modules match as in a rule (``layers.*`` and all that is inside). A grouped or split site is
    replaced by its results. Raise CommpassError if there is none, with the nearest name, or if the
    dump has no candidates.
    """
    found = [
        (dump, site)
        for dump in dumps
        for site in dump.plan.sites
        if name == site.name.rpartition(".")[0]
        or any(fnmatchcase(text, name) for text in names_of(dump, site))
        or any(covers(name, path) for path in modules_of(dump, site))
    ]
    if not found:
        sites = [(dump, site) for dump in dumps for site in dump.plan.sites]
        known = {text for each in sites for text in (*names_of(*each), *modules_of(*each))} - {""}
        raise CommpassError(f"no site {name!r} in this run{nearest(name, sorted(known))}")
    if not any(dump.considered or dump.plan.fallback for dump, _ in found):
        raise CommpassError(
            f"no candidates of {name!r} in this dump: it was written before dumps had them. Write"
            " it again with backend(..., dump=...)"
        )
    return found


def names_of(dump: Dump, site: PlannedSite) -> tuple[str, ...]:
    """Return its name, and those of the original sites that were grouped into it, or split."""
    grouped = [name for each in dump.plan.grouped if each.into == site.name for name in each.sites]
    split = [each.site for each in dump.plan.split if site.name in each.into]
    return (site.name, *grouped, *split)


def modules_of(dump: Dump, site: PlannedSite) -> tuple[str, ...]:
    """Return its module, and those of the original sites."""
    grouped = (each.modules for each in dump.plan.grouped if each.into == site.name)
    return (site.module, *next(grouped, ()))


def candidates(dump: Dump, site: PlannedSite) -> list[Candidate]:
    """Return the candidates of a site, best first, refused ones last."""
    found = next((each.candidates for each in dump.considered if site.name in each.sites), ())
    return sorted(found, key=lambda each: (bool(each.refused), each.predicted_us, each.wire_bytes))


def lost(candidate: Candidate, site: PlannedSite) -> str:
    """Return why a candidate was not chosen, or "chosen"."""
    if candidate.refused:
        return candidate.refused
    names = [
        (each.codec, each.algorithm, each.chunks, each.lowering == SINGLE_KERNEL)
        for each in (candidate, site)
    ]
    if names[0] == names[1]:
        return "chosen"
    slower = candidate.predicted_us - site.predicted_us
    if slower > 0:
        return f"{slower:,.0f} us slower"
    if not candidate.compressed:
        return "a codec is forced here"
    if not site.compressed:
        gain = -slower / site.plain_us if site.plain_us else 0.0
        return f"a gain of {gain:.1%}, not above the model's margin"
    return "as fast, with no fewer bytes on the wire"


def scored(dump: Dump, site: PlannedSite) -> list[tuple[Candidate, str]]:
    """Return the candidates of a site that have a score, best first, and why each lost."""
    return [(each, lost(each, site)) for each in candidates(dump, site) if not each.refused]


def refused(dump: Dump, site: PlannedSite) -> dict[str, list[Candidate]]:
    """Return the refused candidates of a site by reason."""
    found: dict[str, list[Candidate]] = {}
    for each in candidates(dump, site):
        if each.refused:
            found.setdefault(each.refused, []).append(each)
    return found


def _gains_from(dump: Dump, site: PlannedSite) -> str:
    """Return from which size on the chosen codec, or else the best candidate, is faster."""
    from commpass.passes.breakeven import (  # traces the algorithm: needs torch
        break_even,
        explanation,
    )

    possible = (each for each in candidates(dump, site) if each.compressed and not each.refused)
    best = site if site.compressed else next(possible, None)
    if best is None or dump.plan.fallback or best.lowering == SINGLE_KERNEL:
        return ""
    try:
        profile = profile_of(dump.profile)
        nbytes = break_even(site, best.algorithm, best.codec, profile, chunks=best.chunks)
    except (msgspec.ValidationError, CommpassError) as error:
        return f"from which size on it gains cannot be told from this dump: {error}"
    if nbytes is None:
        return ""
    what = f"{brief(best.codec)} by {best.algorithm}"
    if nbytes == inf:
        return f"{what} gains at no size"
    text = explanation(site, nbytes)
    at = f"from {size(nbytes)} on" + (f" ({text})" if text else "") if nbytes else "at any size"
    return f"{what} gains {at}"


def dependents(dump: Dump, site: PlannedSite) -> tuple[int, int, int, int] | None:
    """Return how much of a graph depends on a site.

    The result is the number of dependent sites, of all other sites, of dependent other operators,
    and of all other operators. None if a dump has no graph in order.
    """
    import networkx as nx

    nodes = dump.lowered or dump.after
    try:
        edges = inputs_of(nodes)
    except CommpassError:
        return None
    name = site.name.partition(".")[0]
    own = {node.name for node in nodes if node.site and node.site.partition(".")[0] == name}
    if not own:
        return None
    graph = nx.DiGraph((source, user) for user, sources in edges.items() for source in sources)
    graph.add_edges_from((site, each) for each in own)  # one source for all its nodes
    found = nx.descendants(graph, site)
    others = [
        node
        for node in nodes
        if node.name not in own and node.op not in NO_OPERATORS and not waits(node)
    ]
    sites = {node.site for node in others if node.site}
    needing = {node.site for node in others if node.site and node.name in found}
    operators = [node.name for node in others if not node.site]
    return len(needing), len(sites), sum(each in found for each in operators), len(operators)


NO_OPERATORS = ("placeholder", "get_attr", "output")
"""Nodes that compute nothing, by ``op``."""


COLUMNS = ("codec", "algorithm", "on the wire", "ratio", "error", "time", "why not")
RIGHT = ("on the wire", "ratio", "error", "time")


def title(dump: Dump, site: PlannedSite) -> Text:
    text = (
        f"{site.name}: {site.kind} of {size(site.bytes)} in {site.module or 'the root module'},"
        f" graph {dump.number} ({dump.plan.direction})"
    )
    for each in dump.plan.grouped:
        if each.into == site.name:
            text += f", grouped of {', '.join(each.sites)}"
    for split in dump.plan.split:
        if site.name in split.into:
            number, rows = split.into.index(site.name) + 1, " + ".join(map(str, split.rows))
            text += f", chunk {number} of {len(split.into)} of {split.site} (rows {rows}:"
            text += f" {split.reason})"
    if gain := _gains_from(dump, site):
        text += f"\n{gain}"
    if slack := slack_of_sites(dump):
        us = dict(zip((each.name for each in dump.plan.sites), slack, strict=True)).get(site.name)
        if us is not None:
            text += f"\n{in_words_of_slack(us)}"
    if (found := dependents(dump, site)) is not None:
        sites, all_sites, operators, all_operators = found
        text += (
            f"\n{sites} of {all_sites} other sites and {operators} of {all_operators} other"
            " operators depend on its result"
        )
    if site.lowering == SINGLE_KERNEL:  # it says in which stream
        text += f"\n{site.reason}"
    if site.missed:
        text += f"\npredicted to be exposed for {micros(site.exposed_us)}: {site.missed}"
    return Text(text, style="bold")


def table_of(dump: Dump, site: PlannedSite) -> Table:
    """Return the candidates of a site that have a score, best first."""
    table = plain_table(*COLUMNS, folded={*COLUMNS} - {*RIGHT}, right=RIGHT)
    for each, why in scored(dump, site):
        more = f", {each.chunks} chunks" if each.chunks > 1 else ""
        more += form_of(site if why == "chosen" else each)
        cells = (
            brief(each.codec),
            each.algorithm + more if each.compressed else "uncompressed",
            size(each.wire_bytes),
            ratio(each.wire_bytes, site.bytes),
            f"{each.error:.3%}",
            f"{each.predicted_us:,.0f} us",
            why,
        )
        table.add_row(*map(Text, cells), style="bold green" if why == "chosen" else "")
    return table


def refusals(dump: Dump, site: PlannedSite) -> Table:
    """Return the refused candidates of a site and the reasons, each reason once."""
    table = plain_table("not possible", "why", folded=("not possible", "why"))
    for why, some in refused(dump, site).items():
        names = (f"{brief(each.codec)} by {each.algorithm}{form_of(each)}" for each in some)
        table.add_row(Text(", ".join(names)), Text(brief(why)))
    return table
