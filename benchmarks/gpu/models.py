"""Run a Llama of transformers on ranks that share one GPU, tensor-parallel by DTensor: training
with kernels in Inductor's code, and inference with single kernels in CUDA graphs.

The same model without commpass, on the same GPU, is the reference.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))
Check = tuple[str, bool, str]
DEFINED = re.compile(r"\bdef (\w*(?:encode|decode|norm)\w*)\(")
LAYERS, WIDTH, HEADS, BATCH, LENGTH = 4, 512, 8, 2, 128
LOSS, GRADIENTS, LOGITS = 0.005, 0.15, 0.1
"""The largest relative distances from the model without commpass."""
CALLS = 5


def run(device: torch.device | str, seed: int) -> Iterator[Check]:
    """Yield the name of each check on this rank, whether it passed, and what was found."""
    checks: dict[str, Callable[[], Iterator[Check]]] = {
        f"Llama, {form}, {spec}": partial(_trained, form, spec, device, seed)
        for form, spec in (
            ("tensor", "int8"),
            ("tensor", "rotated"),
            ("sequence", "int8"),
            ("sequence", "fp8"),
        )
    }
    if torch.device(device).type == "cuda":
        checks["Llama, single kernels in CUDA graphs"] = partial(_served, device, seed)
    for name, check in checks.items():
        try:
            for what, passed, said in check():
                yield f"{name}: {what}", passed, said
        except Exception:
            yield f"{name}: runs", False, "\n".join(traceback.format_exc().splitlines()[-8:])


def _model(form: str, device: torch.device | str) -> nn.Module:
    import llama
    from torch.distributed.device_mesh import init_device_mesh

    cpu = torch.device(device).type == "cpu"
    mesh = init_device_mesh("cpu" if cpu else "cuda", (torch.distributed.get_world_size(),))
    model = llama.llama(2 if cpu else LAYERS, 64 if cpu else WIDTH, HEADS)
    model = model.to(device, torch.bfloat16)
    # gloo has no scatter of tensors on a GPU; all ranks have the same parameters.
    alike = partial(llama.parallelize_module, src_data_rank=None)
    with patch.object(llama, "parallelize_module", alike):
        return {"tensor": llama.tensor, "sequence": llama.sequence}[form](model, mesh)


def _tokens(device: torch.device | str, seed: int) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (BATCH, LENGTH), generator=random).to(device)


def _backend(spec: str, lowering: str, algorithm: str | None) -> Any:
    import commpass

    rule = commpass.Rule(codec=spec, algorithm=algorithm, force=True, lowering=lowering)
    return commpass.backend(commpass.Policy(rules=(rule,), max_error=1.0), strict=True)


def _trained(form: str, spec: str, device: torch.device | str, seed: int) -> Iterator[Check]:
    import commpass
    from benchmarks.gpu.graphs import with_code

    algorithm = "two_shot" if form == "tensor" else "direct"
    plain = _step(form, "inductor", device, seed)
    before = len(commpass.plans())
    coded, codes = with_code(lambda: _step(form, _backend(spec, "kernel", algorithm), device, seed))
    plans = commpass.plans()[before:]
    sites = [site for plan in plans for site in plan.sites]
    number = sum(site.codec != "none" for site in sites)
    reasons = sorted({site.reason for site in sites if site.codec == "none"})
    yield "compressed", number > 0, f"{number} of {len(sites)} sites; {reasons}"
    far = abs(coded[0] - plain[0]) / abs(plain[0])
    yield "loss", 0 < far <= LOSS, f"{coded[0]} and {plain[0]}"
    far = float((coded[1] - plain[1]).norm() / plain[1].norm())
    yield "gradients", 0 < far <= GRADIENTS, f"{far:.3f} apart"
    yield "gradients are finite", bool(coded[1].isfinite().all()), ""
    if torch.device(device).type == "cuda":
        kernels = sorted(set(DEFINED.findall("\n".join(codes))))
        yield "kernels", any("decode" in each for each in kernels), ", ".join(kernels)


def _step(form: str, backend: Any, device: torch.device | str, seed: int) -> tuple[float, Tensor]:
    """Return the loss and the gradients of a training step."""
    import llama

    torch._dynamo.reset()
    model = _model(form, device)
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
    loss, gradients = llama.step(compiled, model, _tokens(device, seed))
    return float(loss), torch.cat([each.double().cpu().reshape(-1) for each in gradients.values()])


def _served(device: torch.device | str, seed: int) -> Iterator[Check]:
    from torch._dynamo.utils import counters
    from torch._inductor import config

    import commpass
    from commpass.plan import SINGLE_KERNEL

    plain = _logits("inductor", device, seed)
    counters["inductor"].clear()
    with config.patch({"triton.cudagraphs": True, "fx_graph_cache": False}):
        found = _logits(_backend("int8", SINGLE_KERNEL, "one_shot"), device, seed)
    lowerings = {site.lowering for site in commpass.plans()[-1].sites}
    yield "all sites", lowerings == {SINGLE_KERNEL}, str(lowerings)
    skipped = counters["inductor"]["cudagraph_skips"]
    yield "captured", not skipped, f"{skipped} not captured"
    far = float((found - plain).norm() / plain.norm())
    yield "logits", 0 < far <= LOGITS, f"{far:.3f} apart"
    every: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, found.numpy().tobytes())
    yield "ranks compute the same logits", len(set(every)) == 1, ""


def _logits(backend: Any, device: torch.device | str, seed: int) -> Tensor:
    """Return the logits of several calls on different tokens."""
    torch._dynamo.reset()
    model = _model("tensor", device)
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
    with torch.no_grad():
        results = [
            compiled(input_ids=_tokens(device, seed + call)).logits.double().cpu()
            for call in range(CALLS)
        ]
    return torch.stack(results)
