"""``commpass simulate``: the function of a file, what a step takes under each policy, a picture."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from commpass.errors import CommpassError, nearest
from commpass.report.tables import plain_table, size
from commpass.simulate import Build, Simulated, simulate

Sweep = tuple[str, Sequence[float]]


def run(
    where: str,
    profile: str,
    mesh: str,
    policies: Sequence[str],
    sweep: str | None,
    *,
    train: bool,
    plot: Path | None,
    json: bool,
) -> None:
    found = simulate(
        build_of(where),
        profile,
        mesh_of(mesh),
        policies,
        sweep=sweep_of(sweep) if sweep else None,
        train=train,
    )
    for each in found:
        for remark in each.remarks:
            typer.echo(f"policy {each.policy!r}: {remark}", err=True)
    if json:
        typer.echo(msgspec.json.format(msgspec.json.encode(found), indent=1))
    else:
        Console().print(table(found))
    if plot is not None:
        draw(found, plot)
        typer.echo(f"wrote {plot}", err=json)


def build_of(where: str) -> Build:
    """The function that ``FILE.py:NAME`` means."""
    path, _, name = where.rpartition(":")
    if not path.endswith(".py") or not name:
        raise CommpassError(f"{where!r}: must be FILE.py:FUNCTION, such as model.py:build")
    if not Path(path).is_file():
        raise CommpassError(f"{path}: there is no such file")
    names = vars(_module(Path(path)))
    if not callable(names.get(name)):
        known = [each for each, value in names.items() if callable(value) and each[0] != "_"]
        raise CommpassError(f"{path} has no function {name!r}{nearest(name, known)}")
    return names[name]


def _module(path: Path) -> ModuleType:
    """The module that a file is, with a name under which Dynamo finds it, and with its neighbours
    to import from."""
    spec = importlib.util.spec_from_file_location(f"simulated_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    sys.path.insert(0, str(path.resolve().parent))  # as ``python FILE.py`` would
    spec.loader.exec_module(module)
    return module


def mesh_of(text: str) -> dict[str, int]:
    """``dp=8,tp=8`` as sizes by name."""
    found: dict[str, int] = {}
    for part in text.split(","):
        name, _, many = part.partition("=")
        if not name.isidentifier() or not many.isdigit() or not int(many) or name in found:
            raise CommpassError(f"mesh {text!r}: must be sizes by name, such as dp=8,tp=8")
        found[name] = int(many)
    return found


def sweep_of(text: str) -> Sweep:
    """``tp=2,4,8`` as a name and values."""
    name, _, values = text.partition("=")
    try:
        found = [float(value) for value in values.split(",")]
    except ValueError:
        found = []
    if not name.isidentifier() or not found:
        raise CommpassError(f"sweep {text!r}: must be a name and values, such as tp=2,4,8")
    return name, found


def table(found: Sequence[Simulated]) -> Table:
    """A row for each policy; what was swept stands first."""
    name = found[0].swept[0] if found[0].swept else None
    columns = ("ranks", "policy", "step ms", "x first", "exposed ms", "compressed", "sent")
    made = plain_table(*([name] if name and name != "ranks" else []), *columns)
    for each in found:
        first = next(one for one in found if one.swept == each.swept)
        row = (
            f"{each.ranks:,}",
            each.policy,
            f"{each.step_ms:,.3g}" if each.step_ms < 1000 else f"{each.step_ms:,.0f}",
            f"{first.step_ms / each.step_ms:.2f}" if each.step_ms else "-",
            f"{each.exposed_ms:,.3g}",
            f"{each.compressed} of {each.sites}",
            size(each.wire_bytes),
        )
        made.add_row(*map(Text, ((f"{each.swept[1]:g}",) if each.swept else ()) + row))
    return made


def draw(found: Sequence[Simulated], path: Path) -> None:
    """Step times by policy: bars, or lines over what was swept; exposed communication below."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise CommpassError("a picture needs: pip install 'commpass[graph]'") from error
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    names = list(dict.fromkeys(each.policy for each in found))
    if found[0].swept is None:
        axes.bar(names, [each.step_ms for each in found], color="#9db4cf", label="step")
        axes.bar(names, [each.exposed_ms for each in found], color="#cc2222", label="exposed")
    else:
        for number, name in enumerate(names):
            some = [each for each in found if each.policy == name]
            at = [each.swept[1] for each in some if each.swept]
            colour = f"C{number}"
            axes.plot(at, [each.step_ms for each in some], "o-", color=colour, label=name)
            axes.plot(at, [each.exposed_ms for each in some], "o:", color=colour)
        axes.set_xscale("log", base=2)
        axes.set_xlabel(f"{found[0].swept[0]} (dotted: exposed)")
        ticks = sorted({each.swept[1] for each in found if each.swept})
        axes.set_xticks(ticks, [f"{value:g}" for value in ticks])
    axes.set(ylabel="ms", ylim=(0, None), title="a step, predicted")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=110)
