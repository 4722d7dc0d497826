"""Run cases in compiled graphs on real ranks."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.multiprocessing as mp
from torch import Tensor

import commpass
from benchmarks.claims.cases import RANKS, Case
from benchmarks.claims.claim import Measured
from benchmarks.claims.formulas import SUMS
from benchmarks.claims.formulas.equation import relative

NAIVE = "naive fp8"
"""The codec of a case without commpass: values and every partial sum are cast to float8_e4m3fn."""


def measured(cases: Sequence[Case], inner: str) -> dict[str, Measured]:
    """Return the measurements of all cases, by name. Raise RuntimeError if a plan is not the
    requested one."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_run, (folder, [asdict(case) for case in cases], inner), nprocs=RANKS)
        found = json.loads((Path(folder) / "found.json").read_text())
    return {name: Measured(**each) for name, each in found.items()}


def _run(rank: int, folder: str, cases: list[dict[str, str]], inner: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS
    )
    found = {each["name"]: asdict(_measure(Case(**each), rank, inner)) for each in cases}
    if rank == 0:
        (Path(folder) / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _measure(case: Case, rank: int, inner: str) -> Measured:
    every = [case.values(each) for each in range(RANKS)]
    if case.codec == NAIVE:
        got, bits = _naive(every), 8.0
    else:
        got, bits = _compiled(case, every[rank], inner)
    exact = _exact(case, every, rank)
    error = got.double() - exact
    return Measured(
        error=float(error.norm() / exact.norm()),
        mse=float(error.square().mean()),
        bits=bits,
        exact=bool((error == 0).all()),
        deviation=_deviation(case, got, every),
    )


def _deviation(case: Case, got: Tensor, every: Sequence[Tensor]) -> float | None:
    if not case.reference:
        return None
    return relative(got.numpy(), SUMS[case.reference]([each.double().numpy() for each in every]))


def _exact(case: Case, every: Sequence[Tensor], rank: int) -> Tensor:
    if case.kind == "all_gather":
        return torch.cat([each.double() for each in every])
    total = torch.stack([each.double() for each in every]).sum(0)
    return total.chunk(RANKS)[rank] if case.kind == "reduce_scatter" else total


def _compiled(case: Case, x: Tensor, inner: str) -> tuple[Tensor, float]:
    """Return the result of the collective with commpass, and the bits per value on the wire."""
    torch._dynamo.reset()
    spec = case.spec()
    rule = commpass.Rule(kind=case.kind, codec=spec, algorithm=case.algorithm, force=True)
    backend = commpass.backend(commpass.Policy(rules=[rule]), inner=inner, strict=True)
    before = len(commpass.plans())
    got = torch.compile(COLLECTIVES[case.kind], backend=backend)(x)
    (plan,) = commpass.plans()[before:]
    (site,) = plan.sites
    if plan.fallback or site.codec != spec:
        raise RuntimeError(f"{case.name}: {plan.fallback or site.reason}")
    return got, 8 * site.wire_bytes / x.numel()


def _all_reduce(x: Tensor) -> Tensor:
    return functional.wait_tensor(functional.all_reduce(x * 1, "sum", dist.group.WORLD))


def _all_gather(x: Tensor) -> Tensor:
    gathered = functional.all_gather_tensor(x * 1, 0, dist.group.WORLD)
    return functional.wait_tensor(gathered)


def _reduce_scatter(x: Tensor) -> Tensor:
    scattered = functional.reduce_scatter_tensor(x * 1, "sum", 0, dist.group.WORLD)
    return functional.wait_tensor(scattered)


COLLECTIVES = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
}


def _naive(every: Sequence[Tensor]) -> Tensor:
    total = every[0].to(torch.float8_e4m3fn)
    for each in every[1:]:
        total = (total.float() + each.to(torch.float8_e4m3fn).float()).to(torch.float8_e4m3fn)
    return total.float()
