"""Pipeline stages that send codes: gradients, what travels, and what goes wrong."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from counting import CountingGroup, counting_group
from processes import Ranks, RanksFailed
from tiers import rarely
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

import commpass
from commpass.codecs import codec
from commpass.errors import CommpassError, PlanMismatch, PolicyError
from commpass.parallel import compress_pipeline
from commpass.plan import NONE
from commpass.policy import Policy, Rule

pytestmark = pytest.mark.xdist_group("ranks")
WIDTH, BATCH, MICROBATCHES = 96, 8, 4


def forced(forward="int8", backward="int8", **more):
    """Codecs by direction, whatever they gain; run operator by operator unless it is told."""
    rules = [
        Rule(kind=("send", "recv"), direction=direction, codec=name, force=True)
        for direction, name in (("forward", forward), ("backward", backward))
        if name
    ]
    return Policy(name="forced", rules=rules, **{"lowering": "inline", **more})


class Block(nn.Module):
    def __init__(self, number: int, dtype: torch.dtype):
        super().__init__()
        torch.manual_seed(number)
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=dtype)

    def forward(self, x):
        return torch.tanh(self.linear(x)) + x


def loss(output, target):
    return (output.float() - target.float()).square().mean()


def data(dtype=torch.float32):
    generator = torch.Generator().manual_seed(7)
    shape = (BATCH, 5, WIDTH)
    return tuple(torch.randn(shape, generator=generator).to(dtype) for _ in range(2))


class RoundTrip(torch.autograd.Function):
    """What a message does to an activation and to its gradient, from the codecs alone."""

    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.backward_codec = backward
        return trip(x, forward)

    @staticmethod
    def backward(ctx, grad):
        return trip(grad, ctx.backward_codec), None, None


def trip(x, name):
    if not name:
        return x.clone()
    coder = codec(name)
    return coder.decode(coder.encode(x.contiguous()))


def unpipelined(stages, dtype, forward, backward, apart=lambda stage: True):
    """Gradients and outputs of the whole model, microbatch by microbatch; between two stages on
    different ranks what a message does happens to the values."""
    blocks = [Block(number, dtype) for number in range(stages)]
    x, target = data(dtype)
    outputs = []
    for part, wanted in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
        for number, block in enumerate(blocks):
            part = block(part)
            if number < stages - 1 and apart(number):
                part = RoundTrip.apply(part, forward, backward)
        outputs.append(part.detach())
        (loss(part, wanted) / MICROBATCHES).backward()
    return [[p.grad for p in block.parameters()] for block in blocks], torch.cat(outputs)


LOOPED = {"Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble"}
V_SHAPED = {"ZBVZeroBubble", "DualPipeV"}


def own_stages(name: str) -> tuple[int, list[int]]:
    """The number of stages, and those of this rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if name in LOOPED:
        return 2 * ranks, [rank, rank + ranks]
    if name in V_SHAPED:
        return 2 * ranks, [rank, 2 * ranks - 1 - rank]
    return ranks, [rank]


def pipeline(name, policy, dtype=torch.float32, group=None, with_loss=True, make=Block, **more):
    """A schedule and its stages on this rank."""
    many, mine = own_stages(name)
    stages = [
        PipelineStage(make(number, dtype), number, many, torch.device("cpu"), group=group)
        for number in mine
    ]
    if policy is not None:
        compress_pipeline(stages, policy, **more)
    schedule = getattr(schedules, f"Schedule{name}")
    given = stages if name in LOOPED | V_SHAPED else stages[0]
    return schedule(given, MICROBATCHES, loss_fn=loss if with_loss else None), stages


def step(schedule, stages, x, target, run="step"):
    """One step; the outputs on the last stage's rank."""
    inputs = (x,) if any(stage.is_first for stage in stages) else ()
    wanted = {"target": target} if any(stage.is_last for stage in stages) else {}
    return getattr(schedule, run)(*inputs, **wanted)


def grads_of(stages):
    return {
        stage.stage_index: [p.grad.clone() for p in stage.submod.parameters()] for stage in stages
    }


def run(name, policy, dtype=torch.float32, steps=2, **more):
    """The gradients of the last of some steps by stage, the output, and the plans."""
    before = len(commpass.plans())
    schedule, stages = pipeline(name, policy, dtype, **more)
    for _ in range(steps):
        for stage in stages:
            stage.submod.zero_grad()
        output = step(schedule, stages, *data(dtype))
    dist.barrier()
    return grads_of(stages), output, commpass.plans()[before:]


def compare(found, stages, dtype, forward, backward, apart=lambda stage: True, **close):
    wanted, outputs = unpipelined(stages, dtype, forward, backward, apart)
    grads = {index: grad for grads, _, _ in found for index, grad in grads.items()}
    assert sorted(grads) == list(range(stages))
    for index, own in enumerate(wanted):
        torch.testing.assert_close(grads[index], own, **close)
    (output,) = [output for _, output, _ in found if output is not None]
    torch.testing.assert_close(output, outputs, **close)


SCHEDULES = [
    "GPipe",
    "1F1B",
    "Interleaved1F1B",
    rarely("LoopedBFS"),
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    rarely("DualPipeV"),
]
EXACT = {"rtol": 1e-5, "atol": 1e-6}


@pytest.mark.parametrize("name", SCHEDULES)
def test_gradients_are_those_of_the_whole_model_with_its_messages_coded(ranks2: Ranks, name):
    found = ranks2.run(run, name, forced("int8", "int6(block=32)"))
    many = len(found[0][0]) * 2

    def apart(stage):  # the two stages at the turn of a V are on one rank
        return not (name in V_SHAPED and stage == many // 2 - 1)

    compare(found, many, torch.float32, "int8", "int6(block=32)", apart, **EXACT)
    with pytest.raises(AssertionError):  # and not those of a model that sends values
        compare(found, many, torch.float32, "", "", **EXACT)
    for _, _, plans in found:
        assert {plan.direction for plan in plans} == {"forward", "backward"}
        for site in (site for plan in plans for site in plan):
            together = site.reason == "both stages are on this rank: nothing is sent"
            spec = "int8" if site.direction == "forward" else "int6(block=32)"
            assert site.codec == (NONE if together else spec)


@pytest.mark.parametrize("policy", ["off", forced("exponent", "exponent")])
def test_lossless_is_exact(ranks2: Ranks, policy):
    found = ranks2.run(run, "1F1B", policy)
    compare(found, 2, torch.float32, "", "", **EXACT)
    plain = ranks2.run(run, "1F1B", None)
    for (grads, _, plans), (others, _, none) in zip(found, plain, strict=True):
        assert not none
        torch.testing.assert_close(grads, others, rtol=0, atol=0)
        for site in (site for plan in plans for site in plan):
            assert site.codec == NONE
            assert site.reason
            assert site.wire_bytes == site.bytes


def counted(name, policy, dtype):
    """What the group carries in the second step, and what the plans say of each microbatch."""
    group = counting_group()
    assert isinstance(group, CountingGroup)
    before = len(commpass.plans())
    schedule, stages = pipeline(name, policy, dtype, group)
    step(schedule, stages, *data(dtype))
    dist.barrier()
    group.seen.clear()
    step(schedule, stages, *data(dtype))
    dist.barrier()
    sites = [site for plan in commpass.plans()[before:] for site in plan]
    return sorted((k, str(d), n) for k, d, n in group.seen), [
        (s.kind, s.codec, s.dtype, s.bytes, s.wire_bytes) for s in sites
    ]


@pytest.mark.parametrize(
    ("name", "policy", "dtype"),
    [
        ("1F1B", forced(), torch.float32),
        ("Interleaved1F1B", forced("tahquant", ""), torch.bfloat16),
        rarely("GPipe", forced("int4", "fp8"), torch.float16),
    ],
)
def test_what_travels_is_what_the_plan_says(ranks2: Ranks, name, policy, dtype):
    for seen, sites in ranks2.run(counted, name, policy, dtype):
        wanted = []
        for kind, chosen, plain, nbytes, wire_bytes in sites:
            assert (wire_bytes < nbytes / 1.8) == (chosen != NONE)
            sent = ("torch.uint8" if chosen != NONE else f"torch.{plain}", wire_bytes)
            wanted += [(kind, *sent)] * MICROBATCHES
        assert seen == sorted(wanted)
        assert any(chosen != NONE for _, chosen, *_ in sites)
