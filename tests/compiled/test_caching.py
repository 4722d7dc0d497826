"""Inductor's caches and policies: a warm cache never applies an old policy, and still saves the
compile."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import Ranks
from tiers import rarely
from torch._inductor.runtime.cache_dir_utils import cache_dir

import commpass
from commpass.policy import Policy
from commpass.policy.rules import Rule

pytestmark = pytest.mark.xdist_group("ranks")
ops = torch.ops._c10d_functional

CODECS = {"A": "int8", "B": "int4"}


def own_cache(folder: Path) -> dict[str, str]:
    """Return the environment of a process with separate caches.

    Compiled headers of torch, which take the compiler longer than all graphs here, are shared with
    other tests.
    """
    headers = Path(cache_dir()) / "precompiled_headers"
    headers.mkdir(parents=True, exist_ok=True)
    folder.mkdir()
    (folder / headers.name).symlink_to(headers)
    return {"TORCHINDUCTOR_CACHE_DIR": str(folder), "TORCHINDUCTOR_FX_GRAPH_CACHE": "1"}


class Layer(torch.nn.Module):
    def forward(self, x):
        return ops.wait_tensor(ops.all_reduce(x * 3, "sum", dist.group.WORLD.group_name)).sin()


def run_policies(order: str, training: bool) -> list[tuple[str, str, bool, int, int]]:
    """Return for each policy in turn: the plan, whether the values are those of its codec, cache
    hits and misses."""
    from torch._dynamo.utils import counters

    x = torch.randn(3000, generator=torch.Generator().manual_seed(dist.get_rank()))
    rows = []
    for name in order:
        torch._dynamo.reset()
        counters.clear()
        codec = CODECS[name]
        policy = Policy(name=name, rules=[Rule(codec=codec, force=True, algorithm="one_shot")])
        function = torch.compile(Layer(), backend=commpass.backend(policy, strict=True))
        y = x.clone().requires_grad_(training)
        got = function(y)
        if training:
            got.sum().backward()
        expected = commpass.all_reduce(x * 3, codec=codec, algorithm="one_shot").sin()
        plan = commpass.plans()[-1]
        right = torch.equal(got.detach(), expected) or bool(
            (got.detach() - expected).abs().max() < 1e-6
        )
        hits = counters["inductor"]
        rows.append(
            (
                name,
                plan.sites[0].codec,
                right,
                hits["fxgraph_cache_hit"],
                hits["fxgraph_cache_miss"],
            )
        )
    return rows


@pytest.mark.every
@pytest.mark.parametrize("training", [False, rarely(True)])
def test_policies_in_turn_give_their_own_numbers_and_plans_with_cache_hits_in_two_processes(
    training, tmp_path
):
    graphs = 1 + training  # forward and backward
    environment = own_cache(tmp_path / "cache")
    ranks = Ranks(2, environment)
    try:
        first = ranks.run(run_policies, "ABA", training)
    finally:
        ranks.stop()
    for rows in first:
        assert [(name, codec, right) for name, codec, right, _, _ in rows] == [
            ("A", "int8", True),
            ("B", "int4", True),
            ("A", "int8", True),
        ]
        assert rows[2][3:] == (graphs, 0)  # from the second time on
    ranks = Ranks(2, environment)
    try:
        second = ranks.run(run_policies, "BA", training)
    finally:
        ranks.stop()
    for rows in second:
        assert [(name, codec, right) for name, codec, right, _, _ in rows] == [
            ("B", "int4", True),
            ("A", "int8", True),
        ]
        assert [(hits, misses) for *_, hits, misses in rows] == [(graphs, 0), (graphs, 0)]


def run_sharded() -> tuple[list[float], int, int]:
    """Train a step of a model of DTensors, and return its loss and gradients, cache hits and
    misses."""
    from torch._dynamo.utils import counters
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16))
    mesh = init_device_mesh("cpu", (2,))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    policy = Policy(rules=[Rule(codec="int8", force=True)], max_error=0.1)
    compiled = torch.compile(model, backend=commpass.backend(policy, strict=True))
    loss = compiled(torch.randn(8, 16)).square().mean()
    loss.backward()
    found = counters["inductor"]
    gradients = [p.grad.full_tensor().sum().item() for p in model.parameters()]
    return (
        [loss.item(), *gradients],
        found["fxgraph_cache_hit"],
        found["fxgraph_cache_miss"],
    )


@pytest.mark.slow
def test_graphs_of_dtensors_are_compiled_by_one_rank_and_once_for_all_starts(tmp_path):
    """A DeviceMesh among the inputs of a graph does not change its key in Inductor's cache."""
    environment, results = own_cache(tmp_path / "cache"), []
    for misses in (2, 0):  # forward and backward
        ranks = Ranks(2, environment)
        try:
            found = ranks.run(run_sharded)
        finally:
            ranks.stop()
        assert [hits + misses for _, hits, misses in found] == [2, 2]
        assert sum(misses for _, _, misses in found) == misses
        results += [values for values, _, _ in found]
    assert all(values == results[0] for values in results)


def run_kernels() -> tuple[set[str], list[float], int, int]:
    """Return how three equal sites are lowered, their results, cache hits and misses."""
    from torch._dynamo.utils import counters

    x = torch.randn(3000, generator=torch.Generator().manual_seed(dist.get_rank()))
    policy = Policy(rules=[Rule(codec="int8", force=True, algorithm="two_shot")])
    layer = Layer()
    with torch.no_grad():
        compiled = torch.compile(
            lambda x: layer(layer(layer(x))), backend=commpass.backend(policy, strict=True)
        )
        found = compiled(x)
    (plan,) = commpass.plans()
    said = counters["inductor"]
    return (
        {site.lowering for site in plan},
        found.tolist(),
        said["fxgraph_cache_hit"],
        said["fxgraph_cache_miss"],
    )


@pytest.mark.every
def test_kernels_come_from_the_cache_in_a_second_process(tmp_path):
    folder = tmp_path / "cache"
    environment, runs, libraries = own_cache(folder), [], []
    for _ in range(2):
        ranks = Ranks(2, environment)
        try:
            runs.append(ranks.run(run_kernels))
        finally:
            ranks.stop()
        libraries.append({(each, each.stat().st_mtime_ns) for each in folder.rglob("*.so")})
    assert all(forms == {"kernel"} for run in runs for forms, *_ in run)
    (_, sums, *_), *others = (row for run in runs for row in run)
    assert all(found == sums for _, found, *_ in others)
    ((*_, hits, misses), *_), second = runs
    assert hits + misses == 2  # the graph and the encode, which pads; the others are generated C++
    assert [row[2:] for row in second] == [(2, 0)] * 2
    assert libraries[0]
    assert libraries[1] == libraries[0]  # nothing is compiled again


def decorator_alone() -> list[tuple[str, float]]:
    """Change only the decorator on the same class: the compiled code must change with it."""
    x = torch.randn(3000, generator=torch.Generator().manual_seed(dist.get_rank()))
    rows = []
    for word in (None, "int8", "int4", "int8", None):
        torch._dynamo.reset()

        class Inner(torch.nn.Module):
            def forward(self, x):
                return ops.wait_tensor(
                    ops.all_reduce(x * 3, "sum", dist.group.WORLD.group_name)
                ).sin()

        if word is not None:
            Inner = commpass.compress(codec=word, force=True)(Inner)
        with torch.no_grad():
            got = torch.compile(Inner(), backend=commpass.backend("lossless", strict=True))(x)
        rows.append(
            (commpass.plans()[-1].sites[0].codec, round((got - Layer()(x)).norm().item(), 4))
        )
    return rows


@pytest.mark.every
def test_policy_change_by_decorator_alone_is_not_served_from_the_cache(tmp_path):
    ranks = Ranks(2, own_cache(tmp_path / "cache"))
    try:
        rows = ranks.run(decorator_alone)[0]
    finally:
        ranks.stop()
    assert [codec for codec, _ in rows] == ["none", "int8", "int4", "int8", "none"]
    errors = [error for _, error in rows]
    assert errors[0] == errors[4] == 0
    assert 0 < errors[1] == errors[3] < errors[2]


ONE_RANK = """
import sys
import torch
import torch.distributed as dist
import commpass

assert commpass.__file__.startswith(sys.argv[1]), commpass.__file__
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
x = torch.randn(300, generator=torch.Generator().manual_seed(0))
function = lambda x: commpass.all_reduce(x * 2, codec="int4", algorithm="one_shot")
compiled, eager = torch.compile(function, fullgraph=True)(x), function(x)
from torch._dynamo.utils import counters
hits = counters["aot_autograd"]["autograd_cache_hit"]
print(bool(torch.equal(compiled, eager)), hits, float(eager.abs().sum()))
"""


@pytest.mark.every
def test_cache_serves_nothing_that_another_commpass_compiled(tmp_path):
    shutil.copytree(
        Path(commpass.__file__).parent,
        tmp_path / "commpass",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    environment = {
        **os.environ,
        "PYTHONPATH": str(tmp_path),
        **own_cache(tmp_path / "cache"),
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
    }

    def run() -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", ONE_RANK, str(tmp_path)],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    first, again = run(), run()
    assert first[:2] == ["True", "0"]
    assert again == ["True", "1", first[2]]  # the cache serves the same version of commpass
    grids = tmp_path / "commpass" / "codecs" / "block" / "grids.py"
    text, largest = grids.read_text(), "float(2 ** (self.bits - 1) - 1)"
    assert largest in text
    grids.write_text(text.replace(largest, "float(2 ** (self.bits - 1) - 2)"))
    other = run()
    assert other[:2] == ["True", "0"]
    assert other[2] != first[2]  # and the other version does compute something else
