"""The output of explain, diff and graph, as readable text files. To write them anew:

PYTHONPATH=tests python tests/unit/test_snapshots.py
"""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

import pytest
from dumps import layered, node, run

from commpass import plan
from commpass.plan import dump
from commpass.plan.timeline import Timeline

FOLDER = Path(__file__).resolve().parent / "snapshots"
REDUCE = "_c10d_functional.all_reduce.default"


def backward() -> dump.Dump:
    """Return a graph in which little is compressed: one collective is eliminated, one is split."""
    one = layered(2, {"codec": "none", "algorithm": "none", "chunks": 1, "wire_bytes": 8 << 20})
    reason = "uncompressed: the link is faster than the codec"
    times = {"predicted_us": 100.0, "exposed_us": 20.0, "unmoved_us": 60.0}
    sites = [
        dataclasses.replace(
            each, **times, direction="backward", reason=reason, missed="all that is left needs it"
        )
        for each in one.plan.sites
    ]
    names = ("whole", "ar_attn_1", "ar_mlp_1", "ar_twice")
    before = [node(name, REDUCE, site=name) for name in names]
    simplified = plan.Simplification(
        rule="sent_already",
        site="ar_twice",
        into="whole, which sends the same",
        saved_bytes=8 << 20,
    )
    split = plan.Split(
        site="whole", into=("ar_attn_0", "ar_mlp_0"), rows=(64, 64), reason="12 us instead of 20"
    )
    changed = dataclasses.replace(
        one.plan, sites=tuple(sites), simplified=(simplified,), split=(split,), direction="backward"
    )
    return dataclasses.replace(one, plan=changed, before=tuple(before))


def written(folder: Path) -> dict[str, Path]:
    """Return two runs to show."""
    found = {}
    for name, change in (("int8", {}), ("int4", {"codec": "int4", "wire_bytes": 1 << 20})):
        found[name] = folder / name
        for one in (layered(2, change), backward()):
            dump.write(found[name], one)
    found["slack"] = folder / "slack"
    slack = {"ar_attn_0": 0.0, "ar_mlp_0": 0.0, "ar_attn_1": 12.5, "ar_mlp_1": 2500.0}
    slack |= {"ar_attn_2": 0.0, "ar_mlp_2": 40.0}
    dump.write(
        found["slack"],
        dataclasses.replace(layered(3), timeline=Timeline(us=900.0, slack_us=slack)),
    )
    return found


COMMANDS = {
    "explain": lambda at: ("explain", at["int8"]),
    "explain-all": lambda at: ("explain", at["int8"], "--all"),
    "explain-filtered": lambda at: ("explain", at["int8"], "--module", "**.mlp", "--kind",
                                    "all_reduce", "--direction", "forward", "--codec", "int8"),
    "explain-slack": lambda at: ("explain", at["slack"]),
    "explain-slack-all": lambda at: ("explain", at["slack"], "--all"),
    "diff": lambda at: ("diff", at["int8"], at["int4"]),
    "diff-all": lambda at: ("diff", at["int8"], at["int4"], "--all"),
    "graph": lambda at: ("graph", at["int8"], "--text", "--graph", 0),
    "graph-site": lambda at: ("graph", at["int8"], "--text", "--graph", 0, "--site", 2),
    "graph-nodes": lambda at: ("graph", at["int8"], "--text", "--graph", 0, "--level", "nodes"),
}  # fmt: skip
WIDTHS = (80, 140)


def printed(name: str, width: int, folder: Path) -> str:
    """Return the output of a command, without spaces at the ends of lines."""
    result = run(*COMMANDS[name](written(folder)), width=width)
    note = "this is graph 0 (forward) of run run-1"
    assert result.stderr.strip() == (note if name.startswith("graph") else "")
    assert result.exit_code == (1 if name.startswith("diff") else 0)
    text = result.stdout
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", COMMANDS)
def test_output_is_that_of_the_snapshot(name: str, width: int, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    was = (FOLDER / f"{name}-{width}.txt").read_text(encoding="utf-8")
    assert printed(name, width, Path("dumps")) == was


def test_snapshots_without_a_test_do_not_exist():
    known = {f"{name}-{width}.txt" for name in COMMANDS for width in WIDTHS}
    assert {path.name for path in FOLDER.iterdir()} == known


if __name__ == "__main__":
    import os

    FOLDER.mkdir(exist_ok=True)
    for each in COMMANDS:
        for columns in WIDTHS:
            with tempfile.TemporaryDirectory() as scratch:
                os.chdir(scratch)
                text = printed(each, columns, Path("dumps"))
            (FOLDER / f"{each}-{columns}.txt").write_text(text, encoding="utf-8")
