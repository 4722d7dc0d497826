"""Compare the loss of a calibrated mix of codecs with that of the same codec everywhere.

    python benchmarks/calibrated.py [--cases tp-4 sp-4] [--steps 300] [--json FILE]

Each case is the demo's transformer (examples/common.py) on 2 ranks over gloo, with the given number
of layers. It uses tensor parallelism as in examples/train_tp.py, or sequence parallelism as in
examples/train_sp.py. The model is first trained on the sources of Python's standard library. It is
then calibrated on 12 batches of held-out text (with --text trained: of the training text), and
compared on 4 other held-out batches. The comparison shows the loss and the relative error of the
gradients of the real rewritten graphs, with every site forced, run operator by operator. Budgets
are the errors predicted for 8 to 3 bits everywhere. The profile is the demo's, 1 Gbit/s, and both
use the same algorithms. Bytes are those that leave a rank, by the plans.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.run import main as torchrun

import commpass
from commpass.calibration import CODECS, Calibration, Solution
from commpass.calibration.all_ranks import Ranks, all_ranks
from commpass.calibration.mix import sent
from commpass.calibration.step import Step, fingerprints, replicas, step_of
from commpass.report.colours import colour_of
from commpass.report.tables import plain_table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))
RESULTS = ROOT / "benchmarks" / "results" / "calibrated.json"
PICTURE = ROOT / "docs" / "calibrated.png"
CANDIDATES = (*CODECS, "table(bits=2)", "table(bits=3)")
ROTATED = ("rotated", *(f"rotated(bits={bits})" for bits in (7, 6, 5, 4, 3)))
PLAIN = ("int8", "int4")
COLUMNS = (
    "policy",
    "bytes",
    "share of the uncompressed bytes",
    "predicted",
    "measured",
    "change of the loss",
)
MEASURED, BATCHES, WIDTH, SEED = 12, 4, 256, 0
console = Console(highlight=False, quiet=int(os.environ.get("RANK", "0")) > 0)


@dataclass(frozen=True)
class Point:
    """The results of a policy on held-out text.

    They are the bytes that leave one rank in a step, the predicted and the measured relative error
    of the gradients, the mean loss, and the number of sites by codec.
    """

    name: str
    sent_bytes: int
    predicted: float | None
    error: float
    loss: float
    codecs: dict[str, int]


def trained(division: str, layers: int, steps: int, mesh: Any, text: torch.Tensor) -> Any:
    import common
    import train_sp
    import train_tp

    torch.manual_seed(SEED)
    model = common.Transformer(layers, WIDTH)
    {"tp": train_tp, "sp": train_sp}[division].divide(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    for batch in common.batches(text, steps, SEED):
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def measured(
    ranks: Ranks, model: Any, policy: commpass.Policy, batches: list, plain: list
) -> tuple[int, float, float, dict[str, int]]:
    """Return bytes, error of the gradients and loss under a policy; ``plain`` are the uncompressed
    gradients."""
    torch._dynamo.reset()
    before = len(commpass.plans())
    backend = commpass.backend(policy, inner="eager", profile=commpass.ethernet(1.0), strict=True)
    step = prepared(ranks, model, torch.compile(model, backend=backend))
    errors, losses = [], []
    for batch, reference in zip(batches, plain, strict=True):
        loss, found = step.run(batch)
        off, whole, total = ranks.all_sums(
            [step.squares(found, reference), step.squares(reference), float(loss or 0)]
        )
        errors.append(off / whole)
        losses.append(total / ranks.size)
    sites = [site for plan in commpass.plans()[before:] for site in plan]
    codecs: dict[str, int] = {}
    for site in sites:
        name = site.codec.partition("(statistics")[0].partition("(inner=int4, st")[0]
        codecs[name] = codecs.get(name, 0) + 1
    return (
        round(sum(sent(site, site.group_size) for site in sites)),
        math.sqrt(mean(errors)),
        mean(losses),
        dict(sorted(codecs.items())),
    )


def prepared(ranks: Ranks, model: Any, compiled: Any) -> Step:
    step = step_of(model, compiled, None, None, True)
    own = fingerprints(step.parameters)
    step.weights = replicas(own, ranks.exchange(own, dict[str, str]))
    return step


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def case(name: str, steps: int, mesh: Any, text: str) -> dict[str, Any]:
    """Return all points of a case."""
    import common

    division, layers = name.split("-")
    texts = common.read_texts()
    start = time.perf_counter()
    model = trained(division, int(layers), steps, mesh, texts[0])
    console.print(f"{name}: trained in {time.perf_counter() - start:.0f} s")
    start = time.perf_counter()
    profile = commpass.ethernet(1.0)
    found = commpass.calibrate(
        model,
        [(batch,) for batch in common.batches(texts[text == "held-out"], MEASURED, SEED + 1)],
        codecs=(*CANDIDATES, *PLAIN),
        profile=profile,
    )
    seconds = time.perf_counter() - start
    console.print(f"{name}: calibrated in {seconds:.0f} s")
    batches = [(batch,) for batch in common.batches(texts[1], BATCHES, SEED)]
    points: list[Point] = []
    known = found.solve(0.0, profile=profile)
    with all_ranks(300.0) as ranks:
        step = prepared(ranks, model, model)
        runs = [step.run(batch) for batch in batches]
        plain, losses = [output for _, output in runs], [loss or 0.0 for loss, _ in runs]
        (total,) = ranks.all_sums([math.fsum(losses)])
        loss = total / ranks.size / BATCHES
        todo: list[tuple[str, float, commpass.Policy]] = []
        for codec in (*ROTATED, *PLAIN):
            alike = known.uniform(codec)
            assert alike is not None
            todo.append((codec, alike[1], everywhere(known, codec)))
            if codec in ROTATED:
                mix = found.solve(alike[1], profile=profile)
                policy = found.policy(alike[1], profile=profile, exactly=True)
                todo.append((f"mix for {codec}", mix.error, policy))
            if codec in ("rotated(bits=6)", "rotated(bits=4)"):
                budget = at_bytes(found, alike[0], profile)
                mix = found.solve(budget, profile=profile)
                policy = found.policy(budget, profile=profile, exactly=True)
                todo.append((f"mix of the bytes of {codec}", mix.error, policy))
        for what, predicted, policy in todo:
            left, error, lost, codecs = measured(ranks, model, policy, batches, plain)
            points.append(Point(what, left, predicted, error, lost, codecs))
            console.print(
                f"  {what:34} {left:>10,} bytes, error {error:.4%} (predicted {predicted:.4%}),"
                f" loss {lost:.5f} ({loss:.5f})"
            )
    return {
        "case": name,
        "calibrated_on": text,
        "steps": steps,
        "loss": loss,
        "plain_bytes": known.plain_bytes,
        "calibration_s": round(seconds, 1),
        "points": [asdict(point) for point in points],
        "places": [
            {
                "place": str(place.where[0]),
                "bytes": some[0].sent_bytes,
                "sensitivity": place.sensitivity,
            }
            for place, some in zip(known.places, known.considered, strict=True)
        ],
        "spread": spread(known),
        "candidates": candidates(found, profile),
    }


def everywhere(known: Solution, name: str) -> commpass.Policy:
    """Return a policy with one codec at all places, using the algorithms of the mixes."""
    spec = commpass.codec(name).spec
    ways = {
        way for some in known.considered for each in some if each.codec == spec
        for way in each.algorithms
    }  # fmt: skip
    rule = commpass.Rule(codec=name, algorithm=sorted(ways), force=True, max_error=1.0)
    return commpass.Policy(rules=[rule])


def at_bytes(found: Calibration, most: float, profile: Any) -> float:
    """Return the budget of the mix with the least predicted error that sends at most the given
    bytes, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(24):
        middle = (low + high) / 2
        fits = found.solve(middle, profile=profile).sent_bytes <= most
        low, high = (low, middle) if fits else (middle, high)
    return high


def spread(known: Solution) -> dict[str, float]:
    """Return how much places differ: the square root of the ratio of the arithmetic to the
    geometric mean of s^2, weighted by bytes.

    If an error halves with each bit, the error of a mix is at least the error of the same codec
    everywhere divided by this number. A mix saves at most the logarithm of this number in bits.
    """
    rows = [
        (some[0].sent_bytes, place.sensitivity**2)
        for place, some in zip(known.places, known.considered, strict=True)
    ]
    whole = math.fsum(size for size, _ in rows)
    arithmetic = math.fsum(size * square for size, square in rows) / whole
    geometric = math.exp(math.fsum(size * math.log(square) for size, square in rows) / whole)
    ratio = math.sqrt(arithmetic / geometric)
    return {"ratio": round(ratio, 3), "bits": round(math.log2(ratio), 3)}


def candidates(found: Calibration, profile: Any) -> list[dict[str, Any]]:
    """Return what several sets of candidates are predicted to give: bytes at the error of 6 bits
    everywhere, and error at the bytes of 4 bits, both relative to those."""
    even = ("rotated(bits=2)", "rotated(bits=4)", "rotated(bits=6)", "rotated")
    every = tuple(commpass.codec(each).spec for each in CODECS)
    sets = {
        "rotated, 2, 4, 6 and 8 bits": even,
        "rotated, 2 to 8 bits, and bf16": every,
        "and table, 2 and 3 bits": (*every, "table(bits=2)", "table(bits=3)"),
        "and int8, int4, outlier": None,
    }
    rows = []
    for name, specs in sets.items():
        some = narrowed(found, specs)
        known = some.solve(0.0, profile=profile)
        six, four = known.uniform("rotated(bits=6)"), known.uniform("rotated(bits=4)")
        assert six is not None
        assert four is not None
        share = some.solve(six[1], profile=profile).sent_bytes / six[0]
        error = at_bytes(some, four[0], profile) / four[1]
        rows.append({"candidates": name, "bytes": round(share, 4), "error": round(error, 4)})
    return rows


def narrowed(found: Calibration, specs: tuple[str, ...] | None) -> Calibration:
    """Return the same calibration with fewer codecs to choose from."""
    from dataclasses import replace

    places = tuple(
        replace(
            place,
            errors={
                spec: error
                for spec, error in place.errors.items()
                if specs is None or spec in specs
            },
        )
        for place in found.places
    )
    return replace(found, places=places)


def rank(cases: list[str], steps: int, text: str, out: Path, plot: Path | None) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    for name in cases:
        found = case(name, steps, mesh, text)
        if dist.get_rank() == 0:
            found["gains"] = gains(found)
            show(found)
            add(found, out, plot)
    dist.barrier()
    dist.destroy_process_group()


def gains(found: dict[str, Any]) -> dict[str, float]:
    """Return the measured gains of mixes, as shares.

    The first is the bytes of a mix with the error of 6 bits everywhere, relative to the bytes of 6
    bits. It is interpolated between the two nearest mixes (bytes over the logarithm of the error).
    The second is the error of the mix with the bytes of 4 bits, relative to the error of 4 bits.
    """
    points = {point["name"]: point for point in found["points"]}
    six, four = points["rotated(bits=6)"], points["rotated(bits=4)"]
    mixes = sorted(
        (math.log(point["error"]), point["sent_bytes"])
        for name, point in points.items()
        if name.startswith("mix")
    )
    at = math.log(six["error"])
    below = max(each for each in mixes if each[0] <= at)
    above = min(each for each in mixes if each[0] > at)
    share = (at - below[0]) / (above[0] - below[0])
    sent_bytes = below[1] + share * (above[1] - below[1])
    same = points["mix of the bytes of rotated(bits=4)"]
    return {
        "bytes_at_error_of_6": round(sent_bytes / six["sent_bytes"], 3),
        "error_at_bytes_of_4": round(same["error"] / four["error"], 3),
    }


def add(found: dict[str, Any], out: Path, plot: Path | None) -> None:
    """Write a case into the results file, replacing an older one of its name."""
    known = json.loads(out.read_text(encoding="utf-8"))["cases"] if out.is_file() else []
    cases = sorted(
        [found, *(each for each in known if each["case"] != found["case"])],
        key=lambda each: (each["case"].split("-")[0] != "tp", int(each["case"].split("-")[1])),
    )
    machine = {"torch": str(torch.__version__), "processor": platform.machine(), "ranks": 2}
    out.write_text(json.dumps({**machine, "cases": cases}, indent=1) + "\n", encoding="utf-8")
    if plot is not None:
        draw(cases, plot)


def show(found: dict[str, Any]) -> None:
    table = plain_table(*COLUMNS)
    for point in found["points"]:
        table.add_row(
            point["name"],
            f"{point['sent_bytes']:,}",
            f"{point['sent_bytes'] / found['plain_bytes']:.1%}",
            f"{point['predicted']:.3%}",
            f"{point['error']:.3%}",
            f"{point['loss'] - found['loss']:+.6f}",
        )
    console.print(
        f"\n{found['case']}: loss {found['loss']:.4f}, spread {found['spread']}",
        table,
        found["gains"],
    )


def markdown(found: dict[str, Any]) -> str:
    """Return the table of docs/calibration.md."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for point in found["points"]:
        row = (
            f"`{point['name']}`" if not point["name"].startswith("mix") else point["name"],
            f"{point['sent_bytes']:,}",
            f"{point['sent_bytes'] / found['plain_bytes']:.1%}",
            f"{point['predicted']:.2%}",
            f"{point['error']:.2%}",
            f"{point['loss'] - found['loss']:+.5f}",
        )
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


NAMES = {"tp": "tensor parallelism", "sp": "with sequence parallelism"}


def draw(found: list[dict[str, Any]], path: Path) -> None:
    """Draw the measured error of the gradients over bytes, for the same codec everywhere and for
    mixes."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MultipleLocator, NullFormatter, PercentFormatter

    figure = Figure(figsize=(4.6 * len(found), 4.4), layout="constrained")
    for axes, each in zip(
        figure.subplots(1, len(found), squeeze=False, sharex=True, sharey=True)[0],
        found,
        strict=True,
    ):
        division, layers = each["case"].split("-")
        groups = {
            "rotated, the same bits (3 to 8) everywhere": (
                "o-",
                colour_of("rotated"),
                lambda n: n in ROTATED,
            ),
            "calibrated mix": ("o-", "#cc2222", lambda n: n.startswith("mix")),
            "int8, int4": ("x", "#333333", lambda n: n in PLAIN),
        }
        for label, (style, colour, chosen) in groups.items():
            rows = sorted(
                (point["sent_bytes"] / each["plain_bytes"], point["error"], point["predicted"])
                for point in each["points"]
                if chosen(point["name"])
            )
            share, error, predicted = zip(*rows, strict=True)
            axes.plot(share, error, style, color=colour, ms=4, lw=1.3, label=label)
            if label == "calibrated mix":
                axes.plot(share, predicted, "+", color=colour, ms=9, label="mix, predicted")
        for point in each["points"]:
            if (name := point["name"]) in (*ROTATED, *PLAIN):
                text = name.removeprefix("rotated(bits=").removesuffix(")").replace("rotated", "8")
                at = (point["sent_bytes"] / each["plain_bytes"], point["error"])
                where, side = ((7, -3), "left") if name in PLAIN else ((0, 6), "center")
                if name == "rotated":  # to the left, where no other marker is
                    where, side = (-7, -9), "right"
                axes.annotate(
                    text,
                    at,
                    where,
                    textcoords="offset points",
                    ha=side,
                    fontsize=8,
                    color="#555555",
                )
        axes.margins(x=0.12, y=0.07)
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.xaxis.set_major_locator(MultipleLocator(0.05))
        axes.xaxis.set_major_formatter(PercentFormatter(1, 0))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value * 100:g}%")
        axes.set_title(f"{NAMES[division]}, {layers} layers", fontsize=10)
        axes.set_xlabel("bytes of a step, share of the uncompressed bytes")
        axes.grid(alpha=0.25, which="both")
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("relative error of the gradients")
    for axes in figure.axes:
        axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", nargs="+", default=["tp-4", "sp-4"])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--text", choices=["held-out", "trained"], default="held-out")
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--plot", type=Path, default=PICTURE)
    parser.add_argument(
        "--draw", action="store_true", help="draw --json again, and print its tables"
    )
    options = parser.parse_args()
    if options.draw:
        cases = json.loads(options.json.read_text(encoding="utf-8"))["cases"]
        draw(cases, options.plot)
        for each in cases:
            print(f"\n{each['case']}: {each['gains']}, {each['spread']}\n\n{markdown(each)}")
    elif "RANK" in os.environ:
        rank(options.cases, options.steps, options.text, options.json, options.plot)
    else:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        torchrun(["--standalone", "--nproc-per-node=2", __file__, *sys.argv[1:]])


if __name__ == "__main__":
    main()
