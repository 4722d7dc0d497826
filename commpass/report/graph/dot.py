"""Convert a picture into Graphviz source, and into SVG by Graphviz."""

from __future__ import annotations

from collections.abc import Sequence

from commpass.errors import CommpassError
from commpass.report.graph.picture import BOX_STYLES, Box, Picture
from commpass.utils.printable import clean

INSTALL = (
    "install Graphviz (apt-get install graphviz, brew install graphviz, conda install graphviz)"
)
"""What an SVG needs besides the Python package."""


def quoted(*lines: str) -> str:
    """Return a DOT string with backslash and quote escaped, so that any name is valid."""
    return (
        '"'
        + "\\n".join(clean(line).replace("\\", "\\\\").replace('"', '\\"') for line in lines)
        + '"'
    )


def dot(picture: Picture) -> str:
    """Return Graphviz source, with the boxes of a site in one frame."""
    legend = [f"{BOX_STYLES[kind].called}: {BOX_STYLES[kind].meaning}" for kind in picture.kinds]
    if any(arrow.hidden for arrow in picture.arrows):
        legend.append("dashed arrow: by way of what is not shown")
    lines = [
        f"digraph {quoted(picture.title)} {{",
        f"  label={quoted(picture.title, '; '.join(legend), '')}; labelloc=t; fontname=Helvetica;",
        "  fontsize=12; ranksep=0.3; nodesep=0.25;",
        '  node [shape=box, style="rounded,filled", fontname=Helvetica, fontsize=10];',
        '  edge [color="#666666", arrowsize=0.7, fontname=Helvetica, fontsize=9];',
    ]
    for number, (cluster, boxes) in enumerate(_clusters(picture.boxes).items()):
        if cluster:
            lines += [
                f"  subgraph cluster_{number} {{",
                f"  label={quoted(cluster)}; labeljust=l;",
                f"  style=rounded; color={quoted('#5c9bd1')};",
            ]
        for box in boxes:
            cut = ', style="rounded,filled,dashed"' if box.cut else ""
            fill = quoted(BOX_STYLES[box.kind].colour)
            lines.append(
                f"  {quoted(box.name)} [label={quoted(*box.lines)}, fillcolor={fill}{cut}];"
            )
        if cluster:
            lines.append("  }")
    sites = {box.name for box in picture.boxes if box.kind in ("alone", "compressed")}
    for arrow in picture.arrows:
        attributes = ["style=dashed"] if arrow.hidden else []
        if {arrow.source, arrow.user} & sites:  # paths between collectives are straight
            attributes.append("weight=8")
        attributes += [f"label={quoted(arrow.label)}"] if arrow.label else []
        written = f" [{', '.join(attributes)}]" if attributes else ""
        lines.append(f"  {quoted(arrow.source)} -> {quoted(arrow.user)}{written};")
    return "\n".join([*lines, "}"])


def _clusters(boxes: Sequence[Box]) -> dict[str, list[Box]]:
    found: dict[str, list[Box]] = {}
    for box in boxes:
        found.setdefault(box.cluster, []).append(box)
    return found


def svg(picture: Picture) -> str:
    """Return the drawing as SVG text.

    Raise CommpassError if Graphviz is missing, with installation instructions.
    """
    try:
        import graphviz
    except ImportError as error:
        raise CommpassError(
            f"an SVG needs the package graphviz ({error}): pip install 'commpass[graph]', and"
            f" {INSTALL}. --dot and --text work without"
        ) from error
    try:
        return graphviz.pipe("dot", "svg", dot(picture).encode()).decode()
    except graphviz.ExecutableNotFound as error:
        raise CommpassError(
            f"an SVG needs the program dot, which is not on the PATH: {INSTALL}. --dot and --text"
            " work without"
        ) from error
    except graphviz.CalledProcessError as error:
        raise CommpassError(f"Graphviz cannot draw this graph: {error}") from error
