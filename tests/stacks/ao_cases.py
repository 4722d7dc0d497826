"""The cases of ``check_ao.py``, run by each rank: ``torchrun ao_cases.py NAME ...``.

Rank 0 prints a line of JSON for each case and policy.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ao_small import (
    MIXED,
    PLAIN,
    Result,
    float8,
    infer,
    infer_local,
    quantised,
    sequence_parallel,
    tensor_parallel,
    train,
    train_fsdp,
)
from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp
from torchao.prototype.quantized_training import (
    bitnet_training,
    int8_mixed_precision_training,
    int8_weight_only_quantized_training,
    precompute_bitnet_scale_for_fsdp,
)
from torchao.quantization import (
    Float8DynamicActivationFloat8WeightConfig,
    Float8WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    PerRow,
    PerTensor,
)

POLICIES = (PLAIN, "lossless", "balanced")


@dataclass(frozen=True)
class Case:
    """A run under a policy, and what is expected of it.

    - ``stops``: a part of torchao's or torch's error, if the case does not run without commpass.
    - ``plain_stops``: such an error without commpass, where the case runs with it.
    - ``simplified``: a rule that ``"lossless"`` applies, if any.
    - ``ratio``: at most this part of the bytes is sent under ``"balanced"``.
    """

    run: Callable[[str], Result]
    ranks: int = 2
    stops: str = ""
    plain_stops: str = ""
    simplified: str = ""
    ratio: float = 1.0
    policies: tuple[str, ...] = field(default=POLICIES)


in_float8 = partial(sequence_parallel, in_float8=True)
bf16 = torch.bfloat16
no_change = {"set_inductor_config": False}
int8_weights = Int8WeightOnlyConfig(**no_change)
int8_dynamic = Int8DynamicActivationInt8WeightConfig(**no_change)
float8_weights = Float8WeightOnlyConfig(**no_change)
gathered = {"enable_fsdp_float8_all_gather": True}
precompute = precompute_float8_dynamic_scale_for_fsdp
NO_CUDA = "requires CUDA compute capability"


def _case(function: Callable[..., Result], *args: Any, **expected: Any) -> Case:
    options = {
        name: expected.pop(name)
        for name in ("mixed", "after_step", "tensor_parallel_ranks", "quantise_first")
        if name in expected
    }
    return Case(lambda policy: function(policy, *args, **options), **expected)


CODES, AS_BYTES = "quantised before gather", "as bytes"
CASES = {
    # float8 training, tensor parallelism
    "float8 tensorwise, SP": _case(
        train, float8("tensorwise"), sequence_parallel, bf16, ratio=0.55
    ),
    "float8 rowwise, SP": _case(train, float8("rowwise"), sequence_parallel, ratio=0.3),
    "float8 rowwise_with_gw_hp, SP": _case(
        train, float8("rowwise_with_gw_hp"), sequence_parallel, ratio=0.3
    ),
    "float8 tensorwise, TP": _case(train, float8("tensorwise"), tensor_parallel, ratio=0.3),
    "Float8ColwiseParallel, TP": _case(
        train, float8("tensorwise"), partial(tensor_parallel, in_float8=True), ratio=0.3
    ),
    "PrepareFloat8ModuleInput, SP": _case(
        train,
        float8("tensorwise"),
        in_float8,
        plain_stops="Invalid scalar type",
        simplified=AS_BYTES,
        ratio=0.3,
    ),
    "PrepareFloat8ModuleInput, SP, bfloat16, 4 ranks": _case(
        train,
        float8("tensorwise"),
        in_float8,
        bf16,
        ranks=4,
        plain_stops="Invalid scalar type",
        simplified=AS_BYTES,
        ratio=0.55,
    ),
    # float8 training, FSDP2
    "float8 tensorwise, FSDP2": _case(train_fsdp, float8("tensorwise"), ratio=0.2),
    "float8 all_gather, FSDP2": _case(train_fsdp, float8("tensorwise", **gathered), ratio=0.3),
    "float8 all_gather, precomputed scales, FSDP2": _case(
        train_fsdp, float8("tensorwise", **gathered), after_step=precompute, ratio=0.3
    ),
    "float8 all_gather, precomputed scales, FSDP2 in bfloat16": _case(
        train_fsdp, float8("tensorwise", **gathered), mixed=MIXED, after_step=precompute, ratio=0.5
    ),
    "float8 all_gather, precomputed scales, FSDP2 x TP": _case(
        train_fsdp,
        float8("tensorwise", **gathered),
        after_step=precompute,
        tensor_parallel_ranks=2,
        ranks=4,
        ratio=0.3,
    ),
    # int8 training prototypes
    "int8 mixed precision, FSDP2 in bfloat16": _case(
        train_fsdp, quantised(int8_mixed_precision_training()), mixed=MIXED, ratio=0.5
    ),
    "bitnet, precomputed scales, FSDP2": _case(
        train_fsdp,
        quantised(bitnet_training()),
        after_step=precompute_bitnet_scale_for_fsdp,
        ratio=0.3,
    ),
    "int8 weights trained, FSDP2": _case(
        train_fsdp, quantised(int8_weight_only_quantized_training()), stops="aten.mul_"
    ),
    "int8 weights trained, TP": _case(
        train, quantised(int8_weight_only_quantized_training()), tensor_parallel, stops="empty_like"
    ),
    "int8 mixed precision, TP": _case(
        train,
        quantised(int8_mixed_precision_training(module_swap=True)),
        tensor_parallel,
        stops="Failed to convert args/kwargs to proxy",
    ),
    # inference
    "Int8WeightOnly, TP": _case(infer, int8_weights, tensor_parallel, ratio=0.55),
    "Int8WeightOnly, SP": _case(infer, int8_weights, sequence_parallel, ratio=0.55),
    "Float8WeightOnly, SP": _case(infer, float8_weights, sequence_parallel, ratio=0.55),
    "Int8WeightOnly before TP": _case(
        infer, int8_weights, tensor_parallel, quantise_first=True, stops="aten.split"
    ),
    "Int8DynamicActivationInt8Weight, TP": _case(
        infer, int8_dynamic, tensor_parallel, stops="aten._int_mm"
    ),
    "Int8DynamicActivationInt8Weight, own parts": _case(
        infer_local, int8_dynamic, torch.float32, simplified=CODES, ratio=0.3
    ),
    "Int8DynamicActivationInt8Weight, own parts, bfloat16": _case(
        infer_local, int8_dynamic, bf16, simplified="quantised in 16 bits before gather", ratio=0.55
    ),
    "Int8WeightOnly, own parts": _case(infer_local, int8_weights, bf16, ratio=0.55),
    "Float8DynamicActivationFloat8Weight, tensorwise": _case(
        infer,
        Float8DynamicActivationFloat8WeightConfig(granularity=PerTensor(), **no_change),
        tensor_parallel,
        stops=NO_CUDA,
    ),
    "Float8DynamicActivationFloat8Weight, rowwise": _case(
        infer,
        Float8DynamicActivationFloat8WeightConfig(granularity=PerRow(), **no_change),
        tensor_parallel,
        stops=NO_CUDA,
    ),
}


def outcome(case: Case, policy: str) -> dict[str, Any]:
    """Return what a case gave under a policy, or the error that ended it and its line."""
    began = time.monotonic()
    try:
        result = case.run(policy)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        ours = [each for each in frames if "site-packages/torchao" in each.filename] or frames
        line = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}"
        return {"error": f"{type(error).__name__}: {error}", "line": line}
    sites = [site for plan in result.plans for site in plan]
    removed = [step for plan in result.plans for step in plan.simplified]
    plain = sum(site.bytes for site in sites) + sum(step.saved_bytes for step in removed)
    sent = sum(site.wire_bytes for site in sites)
    return {
        "losses": result.losses,
        "sites": len(sites),
        "compressed": sum(site.compressed for site in sites),
        "fallback": [plan.fallback for plan in result.plans if plan.fallback],
        "simplified": sorted({step.rule for step in removed}),
        "reasons": sorted({f"{site.kind} {site.dtype}: {site.reason}" for site in sites}),
        "unexplained": [site.name for site in sites if not site.reason],
        "bytes": result.fsdp or (plain, sent),
        "seconds": round(time.monotonic() - began, 1),
    }


def main() -> None:
    dist.init_process_group("gloo")
    for name in sys.argv[1:]:
        case = CASES[name]
        for policy in (PLAIN,) if case.stops else case.policies:
            found = outcome(case, policy)
            if dist.get_rank() == 0:
                print(json.dumps({"case": name, "policy": policy} | found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
