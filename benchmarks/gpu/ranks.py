"""Run compiled graphs on two ranks of one GPU, compressed and not: a step of a tensor-parallel MLP,
and graphs of other kinds.

Exchanges go over gloo, which moves the GPU's tensors through the host. This shows that compiled
graphs with the kernels are right, not that they are fast.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import re
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import eager, graphs, models
from benchmarks.gpu.bench import Bench

RANKS = 2
WIDTH, HIDDEN, TOKENS = 512, 1024, 1024
CODECS = ("int8", "rotated")
DEFINED = re.compile(r"\bdef ((?:enter_|matmul_)?encode|decode_\w+|decode)\(")
"""Matches kernels in the code that Inductor makes. A two-shot has three: one that encodes,
separately or after a matmul, one that decodes, sums and encodes, and one that decodes."""
FIRST, MIDDLE = {"encode", "enter_encode", "matmul_encode"}, "decode_sum_encode"
PATIENCE_S = 300
GATHERS = torch.library.Library("_c10d_functional", "IMPL")
GROUP = "0"
"""torch's name of the group of all ranks."""
CHECKS = {
    "graphs": graphs.run,
    "single": graphs.run_single,
    "eager": eager.run,
    "models": models.run,
}


def run(bench: Bench) -> None:
    """Run a training step with compressed all_reduces, and report what the ranks found."""
    found = _answers(bench, "steps")
    if len(found) == RANKS:
        for spec in CODECS:
            _compare(bench, spec, [answer[spec] for answer in found])


def run_graphs(bench: Bench) -> None:
    """Run graphs of many kinds (``graphs.cases``), and report what the ranks found."""
    _told_each(bench, "graphs")


def run_eager(bench: Bench) -> None:
    """Run collectives and DistributedDataParallel (``eager.run``)."""
    _told_each(bench, "eager")


def run_models(bench: Bench) -> None:
    """Run a Llama of transformers (``models.run``)."""
    _told_each(bench, "models")


def run_single(bench: Bench) -> None:
    """Run graphs with single kernels over symmetric memory (``graphs.single_cases``). They need a
    GPU."""
    if bench.device.type == "cuda":
        _told_each(bench, "single")


def run_ordered(bench: Bench) -> None:
    """Time a graph whose exchanges overlap, with the pass ``order`` and without it
    (``graphs.ordered``). Exchanges over gloo are slow: the difference counts, not the times."""
    for rank, answer in enumerate(_told_each(bench, "ordered")):
        with_order, without = answer["times"]
        said = f"rank {rank}: {with_order:.0f} us, {without:.0f} us without it"
        bench.note("overlapped graph with the pass order", said, us=with_order, without_us=without)


def _told_each(bench: Bench, what: str) -> list[dict[str, Any]]:
    answers = _answers(bench, what)
    for rank, answer in enumerate(answers):
        for name, passed, said in answer["checks"]:
            bench.check(f"{RANKS} ranks on one card, {name}", passed, f"rank {rank}: {said}")
    return answers


def _answers(bench: Bench, what: str) -> list[dict[str, Any]]:
    """Start the ranks, and return the answers of those that ended well. Report the others."""
    context = multiprocessing.get_context("spawn")
    folder = Path(tempfile.mkdtemp(prefix="ranks"))
    before = os.environ.pop("TRITON_INTERPRET", None)
    members = [
        context.Process(
            target=_member, args=(rank, str(folder), bench.device.type, bench.seed, what)
        )
        for rank in range(RANKS)
    ]
    try:
        for member in members:
            member.start()
    finally:
        if before is not None:
            os.environ["TRITON_INTERPRET"] = before
    patience = min(PATIENCE_S, max(bench.until - time.time(), 1))
    until = time.time() + patience
    for member in members:
        member.join(max(until - time.time(), 0.1))
        if member.is_alive():
            member.kill()
            member.join()
    answers = [_answer(folder / f"{rank}.json") for rank in range(RANKS)]
    for rank, answer in enumerate(answers):
        if answer is None and bench.late(f"rank {rank} of {bench.job}"):
            continue
        if answer is None or "error" in answer:
            code = members[rank].exitcode
            silent = (
                f"rank {rank} gave no answer in {patience:.0f} s, its process ended with {code}"
            )
            said = answer["error"] if answer else silent
            bench.check(f"{bench.job}: rank {rank}", False, said)
    return [answer for answer in answers if answer and "error" not in answer]


def _answer(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text()) if path.exists() else None


def _compare(bench: Bench, spec: str, found: list[dict[str, Any]]) -> None:
    name = f"{RANKS} ranks on one card, {spec}"
    for what in ("result", "gradient"):
        digests = {each[f"{what} digest"] for each in found}
        bench.check(f"{name}: ranks hold the same {what}", len(digests) == 1)
        for rank, each in enumerate(found):
            error, bound = each[f"{what} error"], each[f"{what} bound"]
            said = f"rank {rank}: error {error:.2e}, bound {bound:.2e}"
            bench.check(f"{name}: {what} within the bound", 0 < error <= bound, said)
    for rank, each in enumerate(found):
        said = f"rank {rank}: {each['reasons']}"
        bench.check(f"{name}: all sites are compressed", each["sites"] == each["coded"] > 0, said)
        if bench.device.type == "cuda":
            kernels = set(each["kernels"])
            last = {kernel for kernel in kernels if kernel.startswith("decode")} - {MIDDLE}
            said = f"rank {rank}: {', '.join(sorted(kernels))}"
            whole = bool(kernels & FIRST and MIDDLE in kernels and last)
            bench.check(f"{name}: compiled code has the kernels", whole, said)
            ran = [n for n in each["launched"] if any(kernel in n for kernel in kernels)]
            bench.note(f"{name}: kernels that the profiler saw", f"rank {rank}: {ran}")


# --- one rank -------------------------------------------------------------------------------------


def _member(rank: int, folder: str, device: str, seed: int, what: str) -> None:
    answer: dict[str, Any] = {}
    try:
        _join(rank, folder)
        place = torch.device(device, 0) if device == "cuda" else torch.device(device)
        if what == "ordered":
            answer["checks"], answer["times"] = graphs.ordered(place, seed)
        elif what in CHECKS:
            answer["checks"] = list(CHECKS[what](place, seed))
        else:
            answer = _measure(rank, place, seed)
        torch.distributed.barrier()
    except BaseException:
        answer["error"] = "\n".join(traceback.format_exc().splitlines()[-8:])
    path = Path(folder) / f"{rank}.json"
    path.with_suffix(".part").write_text(json.dumps(answer))
    path.with_suffix(".part").rename(path)
    if torch.distributed.is_initialized() and "error" not in answer:
        torch.distributed.destroy_process_group()
    os._exit("error" in answer)  # threads that wait for a dead peer would keep this process alive


def _join(rank: int, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    torch.set_num_threads(2)
    store = torch.distributed.FileStore(os.path.join(folder, "store"), RANKS)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    world = torch.distributed.group.WORLD
    assert world is not None
    assert world.group_name == GROUP
    if torch.cuda.is_available():
        GATHERS.impl("all_gather_into_tensor", _gather_on_host, "CUDA")


def _gather_on_host(x: Tensor, ranks: int, group: str) -> Tensor:
    """Gather on the CPU: gloo's gather of tensors on a GPU ends the process (torch 2.11)."""
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_gather_into_tensor(x.cpu(), ranks, group)).to(x.device)


def _measure(rank: int, device: Any, seed: int) -> dict[str, Any]:
    import commpass
    from commpass.codecs import codec

    common = torch.Generator().manual_seed(seed)
    own = torch.Generator().manual_seed(seed + 1 + rank)

    def normal(*shape: int, by: torch.Generator) -> Tensor:
        return torch.randn(shape, generator=by).to(device, torch.bfloat16)

    x, back = normal(TOKENS, WIDTH, by=common), normal(TOKENS, WIDTH, by=common)
    weights = normal(WIDTH, HIDDEN, by=own) / 16, normal(HIDDEN, WIDTH, by=own) / 16
    answer: dict[str, Any] = {}
    plain, gradient, parts = _stepped(x, back, weights, "inductor")
    for spec in CODECS:
        rule = commpass.Rule(codec=spec, force=True, algorithm="two_shot", lowering="kernel")
        backend = commpass.backend(commpass.Policy(rules=(rule,)), strict=True)
        before = len(commpass.plans())
        (result, its_gradient, _), codes = graphs.with_code(
            lambda b=backend: _stepped(x, back, weights, b)
        )
        sites = [site for plan in commpass.plans()[before:] for site in plan.sites]
        bound = codec(spec).bound
        answer[spec] = {
            "sites": len(sites),
            "coded": sum(site.codec != "none" for site in sites),
            "reasons": "; ".join(dict.fromkeys(site.reason for site in sites)),
            "kernels": sorted(set(DEFINED.findall("\n".join(codes)))),
            "launched": _launched(lambda b=backend: _stepped(x, back, weights, b)),
            **_told("result", result, plain, parts[0], bound),
            **_told("gradient", its_gradient, gradient, parts[1], bound),
        }
    return answer


def _told(what: str, found: Tensor, plain: Tensor, parts: float, bound: float) -> dict[str, Any]:
    """Return the error of an all_reduce by two shots, and its bound.

    It encodes each rank's part once, and their sum once. ``parts`` is the sum of the norms of the
    parts. Both forms round sums to bf16.
    """
    norm, rounding = float(plain.float().norm()), 2**-7
    raw = found.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes()
    return {
        f"{what} error": float((found.float() - plain.float()).norm()) / norm,
        f"{what} bound": bound * (parts / norm + 1 + bound * parts / norm) + rounding,
        f"{what} digest": hashlib.sha256(raw).hexdigest(),
    }


class _Copied(torch.autograd.Function):
    """Copied to all ranks; gradients are summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _sum(gradient)


class _Summed(torch.autograd.Function):
    """Summed over all ranks; gradients are copied."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _sum(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _sum(x: Tensor) -> Tensor:
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_reduce(x.contiguous(), "sum", GROUP))


def _mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return _Summed.apply(torch.nn.functional.gelu(_Copied.apply(x) @ up) @ down)


def _stepped(
    x: Tensor, back: Tensor, weights: tuple[Tensor, Tensor], backend: Any
) -> tuple[Tensor, Tensor, tuple[float, float]]:
    """Run forward and backward.

    Return the result, the gradient of ``x``, and the sums over ranks of the norms of what is summed
    in each.
    """
    torch._dynamo.reset()
    x = x.clone().requires_grad_()
    up, down = (weight.clone().requires_grad_() for weight in weights)
    result = torch.compile(_mlp, backend=backend)(x, up, down)
    result.backward(back)
    with torch.no_grad():
        inside = (x.float() @ up.float()).requires_grad_()
    with torch.enable_grad():
        made = torch.nn.functional.gelu(inside)
    (slope,) = torch.autograd.grad(made, inside, (back @ down.t()).float())
    own = torch.stack([(made.detach() @ down.float()).norm(), (slope @ up.float().t()).norm()])
    norms = own.detach().cpu()
    torch.distributed.all_reduce(norms)
    assert x.grad is not None
    return result.detach(), x.grad, (float(norms[0]), float(norms[1]))


def _launched(call: Any) -> list[str]:
    """Return the names of kernels that ran on a GPU, if the profiler has access."""
    if not torch.cuda.is_available():
        return []
    from torch.profiler import ProfilerActivity, profile

    try:
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            call()
            torch.cuda.synchronize()
        return sorted({event.key for event in seen.key_averages()})
    except RuntimeError as error:
        return [f"no profile: {error}"]
