"""Handwritten dumps, and the command line run on them."""

from __future__ import annotations

import dataclasses
import re

from typer.testing import CliRunner

from commpass import plan
from commpass.cli import app
from commpass.plan import dump
from commpass.plan.stage import Stage

LONG = (
    "uncompressed: the rule for 'layers.*.attn' says keep, and the link is "
    + "very " * 30
    + "fast in truth"
)
ODD = "L['self'].layers[0].\"mlp\"\\x"


def run(*args: object, width: int = 120):
    return CliRunner().invoke(app, [str(arg) for arg in args], env={"COLUMNS": str(width)})


def site(name: str, **changes: object) -> plan.PlannedSite:
    fields = {
        "name": name,
        "kind": "all_reduce",
        "reduce_op": "sum",
        "group": "7",
        "group_label": "tp",
        "group_size": 8,
        "dtype": "torch.bfloat16",
        "shape": (4096, "s0"),
        "bytes": 8 << 20,
        "module": ODD,
        "wire_bytes": 8 << 20,
        "plain_us": 100.0,
        "predicted_us": 100.0,
        "reason": LONG,
    }
    return plan.PlannedSite(**(fields | changes))


SMALL = {
    "codec": "int8",
    "algorithm": "two-shot",
    "chunks": 3,
    "wire_bytes": 2 << 20,
    "predicted_us": 40.0,
    "error": 0.008,
    "stages": (
        Stage(role="encode", values=4 << 20, codec="int8"),
        Stage(role="exchange", kind="all_to_all", nbytes=1 << 20, leaving=7 << 17, peers=7),
        Stage(role="exchange", kind="all_gather", nbytes=1 << 20, leaving=1 << 20),
    ),
}
SITES = (site("all_reduce"), site("all_reduce_1", **SMALL, reason="saves 60 us [really]"))


def node(name: str, target: str, *inputs: str, **changes: object) -> dump.GraphNode:
    op = "placeholder" if target == name else "call_function"
    facts = {"value": "bf16[4096, s0]", "module": ODD} | changes
    return dump.GraphNode(name=name, op=op, target=target, inputs=inputs, **facts)


def chain(length: int) -> tuple[dump.GraphNode, ...]:
    """x and w, a compressed all_reduce, and ``length`` plain nodes after it that use x too."""
    nodes = [
        node("x", "x"),
        node(ODD, ODD),
        node("mm", "aten.mm.default", "x", ODD),
        node("encode", "commpass.encode.default", "mm", site="all_reduce_1", inserted=True),
        node(
            "gather",
            "_c10d_functional.all_gather_into_tensor.default",
            "encode",
            site="all_reduce_1",
            inserted=True,
        ),
        node("decode", "aten.view.default", "gather", site="all_reduce_1", inserted=True),
        node("all_reduce", "_c10d_functional.all_reduce.default", "decode", site="all_reduce"),
    ]
    for index in range(length):
        nodes.append(node(f"add_{index}", "aten.add.Tensor", nodes[-1].name, "x"))
    return tuple(nodes)


def make(
    direction: str = "forward", sites=SITES, *, name: str = "run-1", nodes=None, fallback: str = ""
) -> dump.Dump:
    return dump.Dump(
        run=name,
        commpass="0.1.0",
        torch="2.13.0",
        rank=0,
        world_size=8,
        written="2026-01-01T10:00:00Z",
        plan=plan.Plan(
            graph="g",
            direction=direction,
            policy="balanced",
            profile="h100",
            sites=tuple(sites),
            fallback=fallback,
        ),
        before=(
            node("x", "x"),
            node("all_reduce", "_c10d_functional.all_reduce.default", "x", site="all_reduce"),
        ),
        after=chain(3) if nodes is None else nodes,
    )


def words(text: str) -> str:
    return " ".join(text.split())


def fails(result, *said: str) -> None:
    """Check for a clean error: one line on stderr, nothing on stdout, exit code 2."""
    assert result.exit_code == 2
    assert result.stdout == ""
    assert re.fullmatch(r"commpass: [^\n]+\n", result.stderr), result.stderr
    for part in said:
        assert part in result.stderr


def layered(layers: int, changes: dict | None = None, **more: object) -> dump.Dump:
    """A model with a residual stream and a loss.

    Each layer has an attention and an mlp that end in a compressed all_reduce.
    """
    nodes, sites, last = [node("x", "x", module="")], [], "x"
    for layer in range(layers):
        for part in ("attn", "mlp"):
            module, name = f"layers.{layer}.{part}", f"{part}_{layer}"
            nodes += [
                node(f"mm_{name}", "aten.mm.default", last, module=module),
                node(f"act_{name}", "aten.relu.default", f"mm_{name}", module=module),
                *coded(f"ar_{name}", f"act_{name}", f"{module}.o"),
                node(f"sum_{name}", "aten.add.Tensor", last, f"decode_ar_{name}", module=module),
            ]
            last = f"sum_{name}"
            sites.append(site(f"ar_{name}", **SMALL | {"module": f"{module}.o"} | (changes or {})))
    nodes.append(node("loss", "aten.mm.default", last, module="head"))
    reduce = "_c10d_functional.all_reduce.default"
    before = tuple(node(each.name, reduce, site=each.name, module=each.module) for each in sites)
    return dataclasses.replace(make(sites=sites, nodes=tuple(nodes), **more), before=before)


def coded(name: str, source: str, module: str) -> list[dump.GraphNode]:
    """The nodes of a compressed collective on the middle level."""
    mark = {"site": name, "inserted": True, "module": module}
    gather = "commpass.all_gather_into_tensor.default"
    return [
        node(f"view_{name}", "aten.view.default", source, role="layout", **mark),
        node(f"encode_{name}", "commpass.encode.default", f"view_{name}", role="encode", **mark),
        node(f"send_{name}", gather, f"encode_{name}", role="exchange", **mark),
        node(f"wait_{name}", "c10d.wait", f"send_{name}", role="wait", **mark),
        node(f"decode_{name}", "commpass.decode.default", f"wait_{name}", role="decode", **mark),
    ]
