"""Run what is not a user's graph on ranks that share one GPU: collectives that are called eagerly,
and the gradients of DistributedDataParallel.

The same calls on the CPU are the reference. Inputs are not Gaussian: some rows are far larger than
others, and some values are infinite or zero.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

Check = tuple[str, bool, str]
CODECS = (
    "int8",
    "rotated",
    "fp8",
    "int4",
    "taco",
    "sdp4bit",
    "mxfp8",
    "mxfp4",
    "nvfp4",
    "exponent",
    "bf16",
)
DTYPES = (torch.bfloat16, torch.float32, torch.float16)
ROWS, WIDTH = 6, 1000
CLOSE = 0.02
"""The largest relative distance from the CPU's result: some codes are at a tie."""
STEPS = 5
DDP_CODECS = ("int8", "exponent", "topk(density=0.05)", "mxfp4")
LOSS = 0.02


def run(device: torch.device | str, seed: int) -> Iterator[Check]:
    """Yield the name of each check on this rank, whether it passed, and what was found."""
    checks: dict[str, Callable[[], Iterator[Check]]] = {}
    for spec in CODECS:
        for dtype in DTYPES:
            name = f"eager {spec} {str(dtype).removeprefix('torch.')}"
            checks[name] = partial(_collectives, name, spec, dtype, device, seed)
    for spec in DDP_CODECS:
        checks[f"DDP {spec}"] = partial(_ddp, f"DDP {spec}", spec, device, seed)
    for name, check in checks.items():
        try:
            yield from check()
        except Exception:
            yield f"{name}: runs", False, "\n".join(traceback.format_exc().splitlines()[-8:])


def _given(dtype: torch.dtype, seed: int, rank: int) -> Tensor:
    own = torch.Generator().manual_seed(seed + rank)
    sizes = torch.randn(ROWS, 1, generator=own).mul(2).exp()
    x = torch.randn(ROWS, WIDTH, generator=own) * sizes
    x[rank % ROWS, : WIDTH // 2] = 0
    return x.to(dtype)


def _collectives(
    name: str, spec: str, dtype: torch.dtype, device: torch.device | str, seed: int
) -> Iterator[Check]:
    import commpass

    x = _given(dtype, seed, torch.distributed.get_rank())
    calls: dict[str, Callable[[Tensor], Tensor]] = {
        "all_reduce": lambda x: commpass.all_reduce(x, codec=spec),
        "all_gather": lambda x: commpass.all_gather(x, codec=spec),
        "reduce_scatter": lambda x: commpass.reduce_scatter(x, codec=spec),
        "all_to_all": lambda x: commpass.all_to_all(x, codec=spec),
    }
    far = {}
    for kind, call in calls.items():
        if spec == "bf16" and dtype is not torch.float32:
            continue
        want, found = call(x), call(x.to(device)).cpu()
        size = want.double().norm()
        far[kind] = float((found.double() - want.double()).norm() / size)
    worst = max(far.values(), default=0.0)
    yield f"{name}: close to the CPU's", worst <= CLOSE, str(far)


def _ddp(name: str, spec: str, device: torch.device | str, seed: int) -> Iterator[Check]:
    """Train a few steps on a GPU and on the CPU; ranks must hold the same parameters."""
    found = _trained(spec, device, seed)
    want = _trained(spec, "cpu", seed)
    far = max(abs(a - b) / abs(b) for a, b in zip(found[0], want[0], strict=True))
    yield f"{name}: losses close to the CPU's", far <= LOSS, f"{found[0]} and {want[0]}"
    every: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, found[1].numpy().tobytes())
    yield f"{name}: ranks hold the same parameters", len(set(every)) == 1, ""
    yield f"{name}: sends less", 0 < found[2] < 0.9, f"{found[2]:.2f} of the plain bytes"


def _trained(spec: str, device: torch.device | str, seed: int) -> tuple[list[float], Tensor, float]:
    """Return the losses, the parameters, and the share of bytes that was sent."""
    from torch.nn.parallel import DistributedDataParallel

    import commpass

    torch.manual_seed(seed)
    layers = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.Linear(256, 8))
    model = DistributedDataParallel(layers.to(device))
    rule = commpass.Rule(codec=spec, force=True)
    integration = commpass.parallel.compress_ddp(
        model,
        commpass.Policy(rules=(rule,), max_error=1.0),
        inner="inductor" if torch.device(device).type == "cuda" else "aot_eager",
        strict=True,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    own = torch.Generator().manual_seed(seed + 1 + torch.distributed.get_rank())
    losses = []
    for _ in range(STEPS):
        x = torch.randn(32, 64, generator=own).exp().to(device)
        loss = (model(x) - x[:, :8].log1p()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    share = integration.bytes.sent / integration.bytes.plain
    return losses, torch.cat([p.detach().cpu().reshape(-1) for p in model.parameters()]), share
