"""A picture as a table: one line a box, with the lines of those that it waits for."""

from __future__ import annotations

import io

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from commpass.report.graph.picture import LOOKS, Picture, in_order
from commpass.report.tables import WIDE, plain_table


def text(shown: Picture) -> RenderableType:
    """The title, the legend and the table."""
    return Group(Text(shown.title, style="bold"), Text(_legend(shown)), Text(), table_of(shown))


def plain(shown: Picture) -> str:
    """The same as lines of plain text, as long as they need to be."""
    file = io.StringIO()
    Console(file=file, width=WIDE, no_color=True).print(text(shown))
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def table_of(shown: Picture) -> Table:
    """The boxes in an order in which they may run. A number in brackets is that of a line that
    comes by way of what is not shown."""
    edges: dict[str, list[str]] = {box.name: [] for box in shown.boxes}
    for arrow in shown.arrows:
        edges[arrow.user].append(arrow.source)
    boxes = {box.name: box for box in shown.boxes}
    order = in_order(edges) or list(boxes)
    line = {name: str(at) for at, name in enumerate(order, 1)}
    after: dict[str, list[str]] = {name: [] for name in order}
    for arrow in shown.arrows:
        number = line[arrow.source]
        after[arrow.user].append(f"({number})" if arrow.hidden else number)
    table = plain_table("", "", "what", "after", folded=("what", "after"))
    for name in order:
        box = boxes[name]
        label = " · ".join(box.lines)
        what = f"{box.cluster}: {label}" if box.cluster else label
        style = "green" if box.kind in ("compressed", "inserted") else ""
        cells = (line[name], LOOKS[box.kind].mark, what, ", ".join(after[name]) or "-")
        table.add_row(*map(Text, cells), style=style)
    return table


def _legend(shown: Picture) -> str:
    looks = [f"{LOOKS[kind].mark} {LOOKS[kind].meaning}" for kind in shown.kinds if kind != "plain"]
    if any(arrow.hidden for arrow in shown.arrows):
        looks.append("(n) by way of what is not shown")
    return "  ".join(looks)
