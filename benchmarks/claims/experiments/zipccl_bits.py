"""Measure the bits per value of a small model's weights, gradients and activations in bfloat16 as
it trains.

Two ranks train one model each, on different text. At some steps they gather the weight, the input
and both gradients of the first matmul of the first MLP (ZipCCL's figure 16) through a compiled
graph whose all_gather is coded. Their process group counts the bytes that a rank sends, and the
gathered values must have the bits that were sent. The results also have the bits with the paper's
single window for a whole tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from counting import CountingGroup, counting_group
from torch import Tensor, nn
from torch.nn import functional

import commpass
from benchmarks.claims.experiments import text
from benchmarks.claims.experiments.coded import coded_sites, forced
from benchmarks.claims.experiments.experiment import Experiment
from benchmarks.claims.experiments.launch import launched
from benchmarks.claims.formulas.zipccl import EXPONENTS, best_start

CODECS = ("exponent", "exponent(planes=3)")
"""Ours, and the paper's: one window for each 1,024 values."""
RANKS, LAYERS, WIDTH, STEPS = 2, 2, 256, 300
MEASURED = (0, 10, 30, 100, 200, 300)
OF = ("weights", "gradients", "activations", "activation gradients")
VALUES = 3 * WIDTH * WIDTH
"""Number of values of the weight; as many activations are gathered."""
ONE_WINDOW = "one window"


# --- bits of a tensor -----------------------------------------------------------------------------


def one_window_bits(x: Tensor) -> float:
    """Return the bits per value by the paper's table.

    These are 11 bits per value, and 8 more for each value outside the window of seven exponents
    that equation 5 gives for the tensor's deviation.
    """
    return 11 + 8 * (1 - window_share(x))


def window_share(x: Tensor) -> float:
    """Return the share of values whose exponents are in that window."""
    values = x.detach().float().flatten()
    start = round(best_start(float(values.std())))
    exponents = torch.frexp(values).exponent - 1
    inside = (exponents >= start) & (exponents < start + EXPONENTS) & (values != 0)
    return float(inside.double().mean())


def top_share(x: Tensor, k: int = EXPONENTS) -> float:
    """Return the share of values that have one of the ``k`` most common exponents, as counted in
    table 1."""
    exponents = (x.detach().flatten().view(torch.int16).to(torch.int32) >> 7) & 0xFF
    counts = torch.bincount(exponents, minlength=256).sort(descending=True).values
    return float(counts[:k].sum()) / x.numel()


def entropy_bits(x: Tensor) -> float:
    """Return 8 bits of sign and mantissa plus the entropy of the exponents: the least that a code
    of single exponents can take."""
    exponents = (x.detach().flatten().view(torch.int16).to(torch.int32) >> 7) & 0xFF
    shares = torch.bincount(exponents, minlength=256).double() / x.numel()
    shares = shares[shares > 0]
    return 8 + float(-(shares * shares.log2()).sum())


def bits_of(x: Tensor) -> dict[str, float]:
    """Return what is known of a tensor without a graph."""
    return {
        ONE_WINDOW: one_window_bits(x),
        "entropy": entropy_bits(x),
        "window share": window_share(x),
        "top share": top_share(x),
    }


# --- on a rank ------------------------------------------------------------------------------------


def coded_gather(codec: str, inner: str, group: CountingGroup) -> Callable[[Tensor], Tensor]:
    """Return a compiled all_gather of ``VALUES`` bfloat16 values over a group, by a codec."""
    ops, name = torch.ops._c10d_functional, group.group_name

    def all_gather(x: Tensor) -> Tensor:
        return ops.wait_tensor(ops.all_gather_into_tensor(x, group.size(), name))

    torch._dynamo.reset()
    backend = commpass.backend(forced(codec, "direct", lowering="kernel"), inner=inner, strict=True)
    gather = torch.compile(all_gather, backend=backend, dynamic=False)
    before = len(commpass.plans())
    gather(torch.randn(VALUES).bfloat16())
    coded_sites(commpass.plans()[before:], [codec], 1)
    return gather


class Float32Linear(nn.Linear):
    """A linear layer with bfloat16 values and gradients, whose matmuls are computed in float32 and
    rounded once.

    Matrix units do the same. A CPU without them takes ten times as long for a matmul of bfloat16.
    """

    def forward(self, input: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.float()
        return functional.linear(input.float(), self.weight.float(), bias).to(input.dtype)


def bfloat16_model() -> nn.Module:
    model = text.transformer(LAYERS, WIDTH).bfloat16()
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Float32Linear
    return model


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return a dictionary that receives the input of the first MLP (with its gradient) in a step.

    A hook on the MLP fills it.
    """
    seen: dict[str, Tensor] = {}

    def keep(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        inputs[0].retain_grad()
        seen["activations"] = inputs[0]

    model.blocks[0].mlp.gate.register_forward_pre_hook(keep)
    return seen


def on_rank(steps: int, measured: list[int], inner: str) -> list[dict[str, Any]]:
    """Return a row for each step and tensor: bits on this rank's wire by codec, and the values of
    ``bits_of``.

    Raise RuntimeError if a gathered bit differs.
    """
    group = counting_group()
    gathers = {codec: coded_gather(codec, inner, group) for codec in CODECS}
    model, rows = bfloat16_model(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    gate, seen = model.blocks[0].mlp.gate, tensors(model)
    for step, batch in enumerate(text.batches(text.texts()[0], steps + 1, dist.get_rank())):
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        if step in measured:
            x = seen["activations"]
            found = dict(zip(OF, (gate.weight, gate.weight.grad, x, x.grad), strict=True))
            for of, values in found.items():
                flat = values.detach().flatten()[:VALUES].clone()
                wire = {codec: _wire_bits(gather, flat, group) for codec, gather in gathers.items()}
                rows.append({"step": step, "of": of, **wire, **bits_of(flat)})
            rows.append({"step": step, "of": "loss", "loss": float(loss.detach())})
        optimizer.step()
    return rows


def _wire_bits(gather: Callable[[Tensor], Tensor], values: Tensor, group: CountingGroup) -> float:
    """Return the bits per value that this rank sends in collectives of the group."""
    group.seen.clear()
    own = gather(values).view(group.size(), -1)[group.rank()]
    if not torch.equal(own.view(torch.int16), values.view(torch.int16)):
        raise RuntimeError("an all_gather gave other bits than were sent")
    return 8 * sum(nbytes for _, _, nbytes in group.seen) / values.numel()


# --- results from the rows ------------------------------------------------------------------------


def by_step(rows: Sequence[dict[str, Any]], of: str, how: str) -> dict[int, float]:
    """Return a number by step: the bits of a codec, or one of ``bits_of``."""
    return {row["step"]: row[how] for row in rows if row["of"] == of}


def run(
    steps: int = STEPS, measured: Sequence[int] = MEASURED, inner: str = "inductor"
) -> dict[str, Any]:
    options = {"steps": steps, "measured": list(measured), "inner": inner}
    facts = {"layers": LAYERS, "width": WIDTH, "steps": steps, "text": text.digest()}
    return facts | {"values": VALUES, "rows": launched(__name__, RANKS, options)}


EXPERIMENT = Experiment(
    "zipccl_bits",
    "bits of weights, gradients and activations by training step, bfloat16, on the wire",
    6,
    run,
)
