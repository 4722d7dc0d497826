"""The command line: reads arguments, hands the work on. Results go to stdout, errors as one line to
stderr."""

from __future__ import annotations

import gc
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.progress import Progress
from rich.text import Text
from typer.core import TyperGroup

from commpass import dump
from commpass.dump import Dump
from commpass.errors import CommpassError
from commpass.report import compared, tables
from commpass.report import doctor as checks_of
from commpass.report import measured as traces
from commpass.report import timeline as timelines
from commpass.report.choice import Choice, only
from commpass.report.explained import explain as explanation
from commpass.report.graph import dot as drawings
from commpass.report.graph import nodes
from commpass.report.graph import text as boxes
from commpass.report.graph.fold import MANY
from commpass.report.graph.view import of_sites
from commpass.report.why import candidates, considered, refusals, title
from commpass.report.why import table_of as candidates_table


class Commands(TyperGroup):
    """Every command tells an error of ours as one line, with exit status 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except CommpassError as error:
            typer.echo(f"commpass: {' '.join(str(error).splitlines())}", err=True)
            raise typer.Exit(2) from error


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

DumpPath = Annotated[
    Path,
    typer.Argument(metavar="DUMP", help="A dump folder, or one file of it.", show_default=False),
]
RunName = Annotated[
    str | None,
    typer.Option("--run", metavar="ID", help="Which run of the folder (default: newest)."),
]
Module = Annotated[
    str | None,
    typer.Option("--module", metavar="GLOB", help="Sites of these modules: layers.*.mlp."),
]
Kind = Annotated[
    str | None, typer.Option("--kind", metavar="KIND", help="Sites of this kind: all_reduce.")
]
Direction = Annotated[
    str | None, typer.Option("--direction", metavar="NAME", help="forward or backward.")
]
CodecName = Annotated[
    str | None,
    typer.Option("--codec", metavar="CODEC", help="Sites with this codec (none: left alone)."),
]
Every = Annotated[
    bool, typer.Option("--all", help="Each site on its own (default: by pattern of modules).")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


def print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"commpass {metadata.version('commpass')}")
        raise typer.Exit


@app.callback()
def commpass(
    version: Annotated[
        bool,
        typer.Option("--version", callback=print_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Says what commpass did to the collectives of a compiled model, and why.

    Dumps are written by backend(..., dump="folder"), or with COMMPASS_DUMP=folder, and can be read
    anywhere.
    """


@app.command()
def explain(
    path: DumpPath,
    *,
    why: Annotated[
        str | None,
        typer.Option(
            "--why",
            metavar="NAME",
            help="All candidates of a site, or of the sites of modules (a name or glob).",
        ),
    ] = None,
    every: Every = False,
    module: Module = None,
    kind: Kind = None,
    direction: Direction = None,
    codec: CodecName = None,
    run: RunName = None,
    json: Json = False,
) -> None:
    """Show the collectives, what was decided about them, and the reasons."""
    choice = Choice(module, kind, direction, codec)
    dumps = only(load(path, run), choice)
    if why is not None:
        show_candidates(dumps, why, json)
        return
    if json:
        plans = msgspec.json.encode([one.plan for one in dumps])
        typer.echo(msgspec.json.format(plans, indent=1))
        return
    shown = [tables.sites_table(one.plan.sites, wide=True) for one in dumps if every]
    console = tables.console_for(*shown, whole=False)
    if not choice.everything:
        console.print(Text(f"only {choice}", style="bold"))
    for part in explanation(dumps, console, every=every):
        console.print(part)


def show_candidates(dumps: list[Dump], name: str, json: bool) -> None:
    """What was considered for the sites of a name, best first."""
    found = considered(dumps, name)
    if json:
        rows = [
            {"graph": one.number, "site": site, "candidates": candidates(one, site)}
            for one, site in found
        ]
        typer.echo(msgspec.json.format(msgspec.json.encode(rows), indent=1))
        return
    shown = [candidates_table(one, site) for one, site in found]
    console = tables.console_for(*shown, whole=False)
    for one, site in found:
        console.print(title(one, site))
        if one.plan.fallback:
            console.print(Text(f"The untouched graph was compiled: {one.plan.fallback}"), "")
            continue
        console.print(candidates_table(one, site), "", Text(site.reason), "", sep="\n")
        if (table := refusals(one, site)).row_count:
            console.print(table, "")


@app.command()
def graph(
    path: DumpPath,
    *,
    number: Annotated[
        int | None,
        typer.Option("--graph", metavar="N", help="Which graph, by its number (default: newest)."),
    ] = None,
    text: Annotated[bool, typer.Option("--text", help="One line a box (default).")] = False,
    dot: Annotated[bool, typer.Option("--dot", help="Graphviz source.")] = False,
    svg: Annotated[bool, typer.Option("--svg", help="A drawing; always a file.")] = False,
    level: Annotated[
        str,
        typer.Option(
            metavar="sites|nodes", help="One box a site (default), or one a node of the graph."
        ),
    ] = "sites",
    site: Annotated[
        str | None,
        typer.Option(metavar="N", help="One site, opened, and its surroundings: number or name."),
    ] = None,
    module: Annotated[
        str | None,
        typer.Option(metavar="GLOB", help="The sites of these modules and their surroundings."),
    ] = None,
    expand: Annotated[
        list[str] | None,
        typer.Option(metavar="SITE", help="Open this site's box: encode, exchange, decode. Again."),
    ] = None,
    every: Annotated[
        bool,
        typer.Option("--all", help=f"Repeated layers each (default: folded above {MANY} sites)."),
    ] = False,
    before: Annotated[bool, typer.Option("--before", help="The graph as it was found.")] = False,
    after: Annotated[
        bool, typer.Option("--after", help="The graph with coded operators (default).")
    ] = False,
    lowered: Annotated[
        bool, typer.Option("--lowered", help="The graph as it was compiled.")
    ] = False,
    around: Annotated[
        str | None,
        typer.Option(
            metavar="K|all",
            help="Only what is within K arrows of a site (default: all; of --site, --module 1).",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write to this file.")
    ] = None,
    run: RunName = None,
) -> None:
    """Show a graph: its collectives, what was done to them, and what is computed between them."""
    if text + dot + svg > 1:
        raise typer.BadParameter("choose one of them", param_hint="--text/--dot/--svg")
    if before + after + lowered > 1:
        raise typer.BadParameter("choose one of them", param_hint="--before/--after/--lowered")
    if level not in ("sites", "nodes"):
        raise typer.BadParameter(f"{level!r} is neither sites nor nodes", param_hint="--level")
    if level == "nodes" and (site, module, expand, every) != (None, None, None, False):
        raise typer.BadParameter(
            "are of the level sites; with --level nodes say --around K",
            param_hint="--site, --module, --expand and --all",
        )
    if around not in (None, "all") and not around.isdecimal():
        raise typer.BadParameter(
            f"{around!r} is neither a number of arrows nor 'all'", param_hint="--around"
        )
    ending = ".svg" if svg else ".dot" if dot else ""
    if ending and output is not None and output.suffix.lower() != ending:
        what = "a drawing in SVG" if svg else "Graphviz source"
        raise typer.BadParameter(
            f"--{ending[1:]} writes {what}: {str(output)!r} must end in {ending}",
            param_hint="--output",
        )
    one = newest(load(path, run), number)
    side = "before" if before else "lowered" if lowered else "after"
    steps = None if around in (None, "all") else int(around)
    if level == "nodes" and not ending:
        written = nodes.text(one, side, steps)
        if output is None:
            typer.echo(written)
            return
    else:
        drawn = (
            nodes.picture(one, side, steps)
            if level == "nodes"
            else of_sites(
                one,
                side,
                module=module,
                site=site,
                expand=tuple(expand or ()),
                around=steps,
                every=every,
            )
        )
        if not ending:
            console = tables.console_for(boxes.table_of(drawn), whole=False)
            if output is None:
                console.print(boxes.text(drawn))
                return
            written = boxes.plain(drawn)
        else:
            written = drawings.svg(drawn) if svg else drawings.dot(drawn)
            if dot and output is None:
                typer.echo(written)
                return
    output = output or Path(f"graph-{one.number:04d}-{one.plan.direction}-{side}.svg")
    try:
        output.write_text(written.rstrip("\n") + "\n", encoding="utf-8")
    except OSError as error:
        raise CommpassError(f"{output}: cannot be written: {error.strerror}") from error
    typer.echo(f"wrote {output}")


@app.command()
def timeline(
    path: DumpPath,
    *,
    number: Annotated[
        int | None, typer.Option("--graph", metavar="N", help="Which graph (default: all).")
    ] = None,
    measured: Annotated[
        Path | None,
        typer.Option(
            metavar="TRACE",
            help="A step's trace by torch.profiler, of the same ranks (.json or .json.gz).",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Draw it, as .png or .html (default: a table)."
        ),
    ] = None,
    run: RunName = None,
) -> None:
    """Show what a rank computes while exchanges travel, and where it stands still."""
    dumps = load(path, run)
    times = traces.measured(measured, dumps) if measured is not None else {}
    dumps = dumps if number is None else [pick(dumps, number)]
    shown = timelines.timelines(dumps, times)
    for line in timelines.left_out(dumps):
        typer.echo(line, err=True)
    if output is not None:
        timelines.write(shown, output)
        typer.echo(f"wrote {output}")
        return
    console = tables.console_for(*map(timelines.table, shown), whole=False)
    for one in shown:
        for picture in one.pictures:
            console.print(Text(picture.title, style="bold"))
        console.print(timelines.table(one), "")


@app.command()
def report(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="DUMP...", help="Dump folders, or files.", show_default=False),
    ],
    *,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The page to write (.html).")
    ] = Path("report.html"),
    measured: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="TRACE",
            help="A step's trace by torch.profiler of the first run; again: of the next one.",
        ),
    ] = None,
    names: Annotated[
        list[str] | None,
        typer.Option("--run", metavar="ID", help="Which run of one folder; may be given again."),
    ] = None,
) -> None:
    """Write one HTML page about a run, or about several: then the first two are compared."""
    from commpass.report import html

    html.check(output)
    if names and len(paths) > 1:
        raise typer.BadParameter("picks runs of one DUMP, not of several", param_hint="--run")
    found = [(path, load(path, name)) for path in paths for name in names or (None,)]
    html.write(html.runs(found, measured or ()), output)
    typer.echo(f"wrote {output}")


@app.command()
def diff(
    left: Annotated[
        Path, typer.Argument(metavar="DUMP_A", help="A dump folder, or one file of it.")
    ],
    right: Annotated[Path, typer.Argument(metavar="DUMP_B", help="The one to compare it with.")],
    *,
    every: Every = False,
    module: Module = None,
    kind: Kind = None,
    direction: Direction = None,
    codec: CodecName = None,
    left_run: Annotated[
        str | None, typer.Option("--run-a", metavar="ID", help="Which run of DUMP_A.")
    ] = None,
    right_run: Annotated[
        str | None, typer.Option("--run-b", metavar="ID", help="Which run of DUMP_B.")
    ] = None,
    json: Json = False,
) -> None:
    """Show what two plans say differently. The exit status is 0 if nothing, 1 if something, 2 on
    an error."""
    a, b = load(left, left_run), load(right, right_run)
    found = compared.compared(a, b, Choice(module, kind, direction, codec))
    if json:
        told = compared.to_json(a, b, found)
        typer.echo(msgspec.json.format(msgspec.json.encode(told), indent=1))
    else:
        parts = list(compared.differences(found, every=every))
        console = tables.console_for(*parts, whole=False)
        for part in (*compared.heads(a, b, (str(left), str(right))), *parts):
            console.print(part)
        if not found:
            console.print("no differences")
    if found:
        raise typer.Exit(1)


@app.command()
def codecs(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CODEC]...", help="Which (default: all named ones)."),
    ] = None,
    data: Annotated[
        str,
        typer.Option(
            metavar="FILE.safetensors|gaussian|laplace|student|outliers|gradients",
            help="What to encode.",
        ),
    ] = "gaussian",
    dtype: Annotated[str, typer.Option(help="Dtype of the data; a file has its own.")] = "float32",
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw error against bits.")
    ] = None,
    speed: Annotated[
        bool,
        typer.Option(
            "--speed/--no-speed", help="Compile and time each codec (takes seconds each)."
        ),
    ] = True,
    json: Json = False,
) -> None:
    """Measure codecs: bits, error, distance to the bound 2^-b, speed on this machine."""
    from commpass.report import glosses, scatter, survey

    tensors = survey.tensors(data, dtype)
    rows = []
    specs = names or survey.STANDARD
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(specs))
        for spec in specs:
            progress.update(task, description=spec)
            rows.append(survey.measure(spec, tensors, timed=speed))
            progress.advance(task)
    if json:
        typer.echo(msgspec.json.format(msgspec.json.encode(rows), indent=1))
    else:
        made, words = survey.table_of(rows), glosses.table_of(row.codec for row in rows)
        tables.console_for(made).print(made, "", words, sep="\n")
    if plot is not None:
        scatter.plot(rows, f"codecs on {Path(data).name}", plot)
        typer.echo(f"wrote {plot}", err=json)


@app.command()
def probe(
    output: Annotated[
        Path, typer.Option("-o", "--output", help="The profile to write (.json).")
    ] = Path("cluster.json"),
    seconds: Annotated[
        float, typer.Option(min=1, help="About how long to measure the links.")
    ] = 40.0,
    plot: Annotated[Path | None, typer.Option(help="Draw times and fits (.png).")] = None,
    kernels: Annotated[
        bool, typer.Option("--kernels", help="Also compile and time codecs (takes a minute more).")
    ] = False,
    json: Json = False,
) -> None:
    """Measure links (and kernels), and write a profile. Run it on every rank, as torchrun does."""
    from commpass.report import probed

    probed.run(output, seconds, kernels=kernels, plot=plot, json=json)


@app.command()
def breakeven(
    links: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[LINK]...",
            help="Names (ethernet-25g, nvlink-4, ...), or profiles (.toml, .json).",
        ),
    ] = None,
    *,
    ranks: Annotated[str, typer.Option(help="Numbers of ranks.")] = "2,8,64",
    dtype: Annotated[str, typer.Option(help="Dtypes of the tensor.")] = "float32,bfloat16",
    kind: Annotated[str, typer.Option(help="The collective.")] = "all_reduce",
    policy: Annotated[str, typer.Option(help="A preset or .toml file.")] = "balanced",
    at: Annotated[str, typer.Option("--size", help="The tensor that is timed.")] = "16MiB",
    gpus: Annotated[bool, typer.Option("--gpus", help="Codecs run on GPUs, also here.")] = False,
    json: Json = False,
) -> None:
    """Show from which size on compressing pays, by link, ranks and dtype. A prediction: needs no
    network."""
    from commpass.report import breakeven as table

    chosen = links or table.LINKS
    table.run(chosen, ranks, dtype, kind, policy, at, gpus=gpus, json=json)


@app.command()
def simulate(
    build: Annotated[
        str,
        typer.Argument(
            metavar="FILE.py:FUNCTION",
            help="FUNCTION(mesh) gives a model, divided over the mesh, and its inputs.",
            show_default=False,
        ),
    ],
    mesh: Annotated[str, typer.Option(help="Sizes of the mesh by name: dp=8,tp=8.")],
    profile: Annotated[str, typer.Option(help="A name, a .toml or .json file.")],
    policy: Annotated[
        list[str] | None, typer.Option(help="A preset or .toml file; may be given again.")
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(
            help="A dimension of the mesh, gbit, inside_gbit or an argument of FUNCTION, and its"
            " values: tp=2,4,8."
        ),
    ] = None,
    train: Annotated[
        bool, typer.Option("--train/--inference", help="With or without backward.")
    ] = True,
    plot: Annotated[Path | None, typer.Option(help="Draw the steps (.png).")] = None,
    json: Json = False,
) -> None:
    """Predict a step of a model on a cluster that is not there, under several policies."""
    from commpass.report import simulated

    chosen = policy or ["off", "lossless", "balanced"]
    simulated.run(build, profile, mesh, chosen, sweep, train=train, plot=plot, json=json)


@app.command()
def calibrate(
    build: Annotated[
        str | None,
        typer.Argument(
            metavar="FILE.py:FUNCTION",
            help="FUNCTION(mesh) gives a model, batches (tuples of its inputs), and maybe a loss.",
            show_default=False,
        ),
    ] = None,
    *,
    max_error: Annotated[
        float, typer.Option(help="Largest relative error of the gradients (inference: outputs).")
    ],
    mesh: Annotated[str | None, typer.Option(help="Sizes of the mesh by name: tp=2.")] = None,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="The policy to write (.toml).")
    ] = Path("calibrated.toml"),
    source: Annotated[
        Path | None, typer.Option("--from", help="Use what was measured before (.json).")
    ] = None,
    json: Annotated[
        Path | None, typer.Option("--json", help="Write what was measured (.json).")
    ] = None,
    codecs: Annotated[
        list[str] | None, typer.Option("--codec", help="A choice; may be given again.")
    ] = None,
    policy: Annotated[
        str, typer.Option(help="What holds where nothing was measured, and what is kept.")
    ] = "lossless",
    profile: Annotated[str | None, typer.Option(help="A name, a .toml or .json file.")] = None,
    cheapest: Annotated[str, typer.Option(help="What is made small: bytes or time.")] = "bytes",
    train: Annotated[
        bool, typer.Option("--train/--inference", help="With or without backward.")
    ] = True,
    plot: Annotated[Path | None, typer.Option(help="Draw the sensitivities (.png).")] = None,
) -> None:
    """Measure how much a model minds errors of each collective, and choose codecs by that. Run it
    on every rank, as torchrun does."""
    from commpass.report import calibrated

    calibrated.run(
        build,
        mesh,
        max_error,
        output,
        source=source,
        json=json,
        codecs=codecs or (),
        policy=policy,
        profile=profile,
        cheapest=cheapest,
        train=train,
        plot=plot,
    )


@app.command()
def lower(
    spec: Annotated[
        str | None, typer.Option("--codec", metavar="SPEC", help="The kernels of this codec.")
    ] = None,
    *,
    kernel: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=(
                "encode, decode, decode_sum, decode_sum_encode or matmul_encode (default: all that"
                " there are)."
            ),
        ),
    ] = None,
    arch: Annotated[
        str, typer.Option(metavar="ARCH", help="sm_80, sm_90, sm_100 or gfx942.")
    ] = "sm_90",
    dtype: Annotated[str, typer.Option(help="Dtype of the values.")] = "bfloat16",
    ranks: Annotated[int, typer.Option(min=1, help="Rows that are summed.")] = 8,
    path: Annotated[
        Path | None,
        typer.Option("--dump", metavar="DIR", help="Those of a planned site in this dump."),
    ] = None,
    site: Annotated[str | None, typer.Option(metavar="NAME", help="The site's name.")] = None,
    run: RunName = None,
    triton: Annotated[bool, typer.Option("--triton", help="The kernel in Triton.")] = False,
    ptx: Annotated[
        bool, typer.Option("--ptx", help="The kernel in PTX, or AMD's assembly.")
    ] = False,
    sass: Annotated[bool, typer.Option("--sass", help="NVIDIA's machine code.")] = False,
    json: Json = False,
) -> None:
    """Show what the kernels of a codec become: registers, spills, memory accesses, and how near to
    a copy's bandwidth they can come. Needs no GPU."""
    from commpass.report import lowered

    chosen = [name for name, on in zip(lowered.TEXTS, (triton, ptx, sass), strict=True) if on]
    if len(chosen) + json > 1:
        raise typer.BadParameter("choose one of them", param_hint="--triton/--ptx/--sass/--json")
    asked = lowered.Asked(spec, kernel, dtype, ranks, path, site, run)
    lowered.run(asked, arch, text="".join(chosen), json=json)


@app.command()
def doctor(json: Json = False) -> None:
    """Show what this installation can do. The exit status is 1 if commpass cannot work here, and 2
    if COMMPASS_PROFILE names what is no profile."""
    found = checks_of.checks()
    if json:
        typer.echo(msgspec.json.format(msgspec.json.encode(found), indent=1))
    else:
        made = checks_of.table_of(found)
        tables.console_for(made).print(made)
    if any(check.needed and not check.ok for check in found):
        raise typer.Exit(1)
    if wrong := next((check.wrong for check in found if check.wrong), ""):
        raise CommpassError(wrong)


def load(path: Path, run: str | None) -> list[Dump]:
    """One run of a dump. Where the folder has others and none was asked for, that is said on
    stderr."""
    dumps = dump.read_run(path, run)
    gc.freeze()  # a command ends soon: what it read need not be looked through for garbage
    if run is None and path.is_dir():
        runs = list(dict.fromkeys(dump.runs(path).values()))
        if len(runs) > 1:
            others = ", ".join(runs[:-1])
            typer.echo(
                f"{path} has {len(runs)} runs; this is the newest, {runs[-1]}. --run picks:"
                f" {others}",
                err=True,
            )
    return dumps


def newest(dumps: list[Dump], number: int | None) -> Dump:
    """The graph of that number; without one the newest. Where there are others, that is said on
    stderr."""
    if number is not None:
        return pick(dumps, number)
    if others := ", ".join(f"{one.number} ({one.plan.direction})" for one in dumps[:-1]):
        last = dumps[-1]
        typer.echo(
            f"this is graph {last.number} ({last.plan.direction}), the newest of {len(dumps)};"
            f" --graph picks: {others}",
            err=True,
        )
    return dumps[-1]


def pick(dumps: list[Dump], number: int) -> Dump:
    """The graph of that number."""
    known = ", ".join(f"{one.number} ({one.plan.direction})" for one in dumps)
    for one in dumps:
        if one.number == number:
            return one
    raise CommpassError(f"no graph {number} here; there are: {known}")


def main() -> None:
    app()
