"""Pipeline stages that send codes: gradients, bytes, and errors."""

from __future__ import annotations

import gc
import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from counting import CountingGroup, counting_group
from processes import Ranks, RanksFailed
from tiers import has_messages, rarely
from torch import nn
from torch.distributed.pipelining import PipelineStage, SplitPoint, schedules
from torch.distributed.pipelining import pipeline as split_model

import commpass
from commpass.codecs import codec
from commpass.errors import CommpassError, PlanMismatch
from commpass.parallel import compress_pipeline
from commpass.plan import NONE
from commpass.policy import Policy
from commpass.policy.rules import Rule

pytestmark = [pytest.mark.xdist_group("ranks"), has_messages]
WIDTH, BATCH, MICROBATCHES = 96, 8, 4


def forced(forward="int8", backward="int8", **more):
    """Return a policy that forces codecs by direction, whatever they gain; graphs run operator by
    operator by default."""
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
    """The effect of a message on an activation and on its gradient, from the codecs alone."""

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
    """Return gradients and outputs of the whole model, microbatch by microbatch.

    Between two stages on different ranks, the values go through ``RoundTrip``.
    """
    blocks = [Block(number, dtype) for number in range(stages)]
    x, target = data(dtype)
    outputs = []
    for part, wanted in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
        y = part
        for number, block in enumerate(blocks):
            y = block(y)
            if number < stages - 1 and apart(number):
                y = RoundTrip.apply(y, forward, backward)
        outputs.append(y.detach())
        (loss(y, wanted) / MICROBATCHES).backward()
    return [[p.grad for p in block.parameters()] for block in blocks], torch.cat(outputs)


LOOPED = {"Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble"}
V_SHAPED = {"ZBVZeroBubble", "DualPipeV"}


def own_stages(name: str) -> tuple[int, list[int]]:
    """Return the number of stages, and the stages of this rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if name in LOOPED:
        return 2 * ranks, [rank, rank + ranks]
    if name in V_SHAPED:
        return 2 * ranks, [rank, 2 * ranks - 1 - rank]
    return ranks, [rank]


def pipeline(name, policy, dtype=torch.float32, group=None, with_loss=True, make=Block, **more):
    """Return a schedule and its stages on this rank."""
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
    """Run one step; return the outputs on the last stage's rank."""
    inputs = (x,) if any(stage.is_first for stage in stages) else ()
    wanted = {"target": target} if any(stage.is_last for stage in stages) else {}
    return getattr(schedule, run)(*inputs, **wanted)


def grads_of(stages):
    return {
        stage.stage_index: [p.grad.clone() for p in stage.submod.parameters()] for stage in stages
    }


def run(name, policy, dtype=torch.float32, steps=2, **more):
    """Return the gradients of the last of some steps by stage, the output, and the plans."""
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


@pytest.mark.few(2)
@pytest.mark.parametrize("name", SCHEDULES)
def test_gradients_are_those_of_the_whole_model_with_its_messages_coded(ranks2: Ranks, name):
    found = ranks2.run(run, name, forced("int8", "int6(block=32)"))
    many = len(found[0][0]) * 2

    def apart(stage):  # the two stages at the turn of a V are on one rank
        return not (name in V_SHAPED and stage == many // 2 - 1)

    compare(found, many, torch.float32, "int8", "int6(block=32)", apart, **EXACT)
    with pytest.raises(AssertionError):  # nor those of a model that sends values
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
    """Return the bytes of the group in the second step, and those in the plans of each
    microbatch."""
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
def test_bytes_that_travel_are_those_of_the_plan(ranks2: Ranks, name, policy, dtype):
    for seen, sites in ranks2.run(counted, name, policy, dtype):
        wanted = []
        for kind, chosen, plain, nbytes, wire_bytes in sites:
            assert (wire_bytes < nbytes / 1.6) == (chosen != NONE)
            sent = ("torch.uint8" if chosen != NONE else f"torch.{plain}", wire_bytes)
            wanted += [(kind, *sent)] * MICROBATCHES
        assert seen == sorted(wanted)
        assert any(chosen != NONE for _, chosen, *_ in sites)


def coded_how(policy):
    grads, output, plans = run("1F1B", policy, torch.bfloat16)
    return grads, output, {site.lowering for plan in plans for site in plan}


@pytest.mark.every
def test_kernels_give_the_same_bits(ranks2: Ranks):
    by_kernels, by_operators = (
        ranks2.run(coded_how, forced("int8", "int6(block=32, stored=bf16)", lowering=how))
        for how in (None, "inline")
    )
    for (grads, output, how), (others, other, plain) in zip(by_kernels, by_operators, strict=True):
        assert (how, plain) == ({"kernel"}, {"inline"})
        torch.testing.assert_close((grads, output), (others, other), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["1F1B", rarely("Interleaved1F1B"), rarely("ZBVZeroBubble")])
def test_four_ranks(ranks4: Ranks, name):
    found = ranks4.run(run, name, forced("int8", "int8"))
    many = 4 if name == "1F1B" else 8
    turn = 3 if name == "ZBVZeroBubble" else -1
    compare(found, many, torch.float32, "int8", "int8", lambda stage: stage != turn, **EXACT)


# --- messages other than activations --------------------------------------------------------------


class Several(nn.Module):
    """Returns a non-contiguous activation, one of another dtype, a mask, numbers, and a float that
    needs no gradient."""

    arrived = odd = True

    def __init__(self, number: int, dtype: torch.dtype):
        super().__init__()
        self.block, self.number = Block(number, dtype), number

    def forward(self, x, half=None, mask=None, places=None, fixed=None):
        if self.number:
            assert half.dtype == torch.bfloat16
            assert mask.dtype == torch.bool
            assert places.dtype == torch.int64
            numbers = torch.arange(places.numel()).view_as(places)
            Several.arrived = bool((places == numbers).all() and (mask == (numbers % 3 == 0)).all())
            assert not fixed.requires_grad
            x = x + half.float() + fixed * mask
        y = self.block(x)
        if self.number == 1:
            return y
        places = torch.arange(y.numel()).view(y.shape)
        first = y.mT.contiguous().mT if Several.odd else y  # torch alone rejects it
        return first, (y / 2).bfloat16(), places % 3 == 0, places, y.detach() * 2


def several(policy):
    Several.odd = policy != "off"
    grads, output, plans = run("GPipe", policy, make=Several)
    # in the last step: the first one sends arbitrary values to learn the shapes
    assert Several.arrived
    sites = {(s.name, s.kind, s.direction): s for plan in plans for s in plan}
    return grads, output, sites


def test_masks_and_numbers_travel_as_they_are(ranks2: Ranks):
    coded, plain = (ranks2.run(several, policy) for policy in (forced(), "off"))
    for (grads, _, sites), (others, _, _) in zip(coded, plain, strict=True):
        for found, wanted in zip(grads.values(), others.values(), strict=True):
            for a, b in zip(found, wanted, strict=True):
                assert 0 < float((a - b).norm() / b.norm()) < 0.03
        by_number = {name: site for (name, _, way), site in sites.items() if way == "forward"}
        names = [f"stage_0_to_1{end}" for end in ("", ".1", ".2", ".3", ".4")]
        assert [by_number[name].dtype for name in names] == [
            "float32",
            "bfloat16",
            "bool",
            "int64",
            "float32",
        ]
        assert [by_number[name].compressed for name in names] == [True, True, False, False, True]
        assert "must arrive exactly" in by_number[names[2]].reason
        gradients = [site for (_, _, way), site in sites.items() if way == "backward"]
        assert [site.dtype for site in gradients] == ["float32", "bfloat16"]
        assert all(site.compressed for site in gradients)


class Odd(nn.Module):
    def forward(self, x):
        x = x.clone()
        x.flatten()[[3, 900]] = torch.tensor([float("nan"), float("inf")])
        return x


class OddThenBlock(nn.Sequential):
    def __init__(self, number: int, dtype: torch.dtype):
        super().__init__(*([Odd()] if number == 0 else []), nn.Identity())


def not_finite(policy):
    schedule, stages = pipeline("1F1B", policy, with_loss=False, make=OddThenBlock)
    output = step(schedule, stages, *data())
    dist.barrier()
    return None if output is None else output.isfinite().reshape(MICROBATCHES, -1)


@pytest.mark.parametrize("name", ["int8", "mixed", rarely("tahquant"), rarely("rotated(bits=4)")])
def test_non_finite_values_stay_so(ranks2: Ranks, name):
    _, finite = ranks2.run(not_finite, forced(name, name))
    assert not finite[:, [3]].any()
    assert finite.float().mean() < 1


def by_turns(policy):
    """Train, evaluate, train: return the outputs of each, and the gradients of both trainings."""
    schedule, stages = pipeline("Interleaved1F1B", policy)
    outputs, grads = [], []
    for how in ("step", "eval", "step"):
        for stage in stages:
            stage.submod.zero_grad()
        with torch.set_grad_enabled(how == "step"):
            outputs.append(step(schedule, stages, *data(), run=how))
        grads.append(grads_of(stages) if how == "step" else None)
    dist.barrier()
    return outputs, grads


def test_evaluation_between_steps(ranks2: Ranks):
    for outputs, (first, _, last) in ranks2.run(by_turns, forced()):
        if outputs[0] is not None:
            torch.testing.assert_close(outputs[1], outputs[0].detach(), rtol=0, atol=0)
            torch.testing.assert_close(outputs[2], outputs[0], rtol=0, atol=0)
        torch.testing.assert_close(first, last, rtol=0, atol=0)


def reported(policy):
    gc.collect()  # models of other tests
    before = commpass.report()
    schedule, stages = pipeline("1F1B", policy)
    step(schedule, stages, *data())
    dist.barrier()
    found = commpass.report()
    assert found.elsewhere == before.elsewhere
    return [
        (site.kind, site.direction, site.codec, site.wire_bytes, site.unmeasured)
        for graph in found.graphs[len(before.graphs) :]
        for site in graph.sites
    ]


def test_messages_of_stages_are_in_the_report(ranks2: Ranks):
    first, last = ranks2.run(reported, forced())
    assert [site[:3] for site in first] == [
        ("send", "forward", "int8"),
        ("recv", "backward", "int8"),
    ]
    assert [site[:3] for site in last] == [
        ("recv", "forward", "int8"),
        ("send", "backward", "int8"),
    ]
    assert first[0][3] == last[0][3] > 0
    assert all("not sampled" in site[4] for site in (*first, *last))


# --- errors ---------------------------------------------------------------------------------------


def several_pipelines(policy):
    """Two pipelines of one group, in which only some stages have the same numbers."""
    for name in ("GPipe", "Interleaved1F1B", "GPipe"):
        schedule, stages = pipeline(name, policy, timeout=20)
        step(schedule, stages, *data())
    return grads_of(stages)


def test_pipelines_of_other_numbers_of_stages_are_not_mistaken(ranks2: Ranks):
    alone = ranks2.run(run, "GPipe", forced(), torch.float32, 1)
    found = ranks2.run(several_pipelines, forced())
    for (want, _, _), got in zip(alone, found, strict=True):
        assert {k: [g.tolist() for g in v] for k, v in want.items()} == {
            k: [g.tolist() for g in v] for k, v in got.items()
        }


def raised(kind, function, *args, **more):
    try:
        function(*args, **more)
    except kind as error:
        return str(error)
    finally:
        dist.barrier()
    return ""


def mismatched(policies):
    return raised(PlanMismatch, run, "1F1B", policies[dist.get_rank()])


@pytest.mark.parametrize("policies", [(forced(), "off"), (forced("int8"), forced("int4"))])
def test_ranks_that_plan_differently_both_say_so(ranks2: Ranks, policies):
    for said in ranks2.run(mismatched, policies):
        assert "stage 0 to stage 1" in said
        assert "rank 0 sends stage_0_to_1" in said
        assert "rank 1 receives stage_0_to_1" in said
        assert "codec is 'int8' at the sender" in said
        assert "same policy" in said


def one_sided():
    """Rank 1 compresses nothing. Neither rank waits longer than its group's time-out."""
    group = dist.new_group(timeout=timedelta(seconds=3))
    policy = forced() if dist.get_rank() == 0 else None
    schedule, stages = pipeline("GPipe", policy, group=group)
    return raised(RuntimeError, step, schedule, stages, *data())


@pytest.mark.every
def test_rank_that_compresses_nothing_is_named(ranks2: Ranks):
    said, other = ranks2.run(one_sided, timeout=60)
    assert "rank 1 did not publish within 3 s" in said
    assert "compress_pipeline" in said
    assert other


def dies():
    schedule, stages = pipeline("1F1B", forced())
    step(schedule, stages, *data())
    if dist.get_rank() == 1:
        os._exit(3)
    step(schedule, stages, *data())


def test_rank_that_dies_is_an_error_on_the_other():
    ranks = Ranks(2)
    try:
        with pytest.raises(RanksFailed, match="exit code 3") as error:
            ranks.run(dies, timeout=60)
    finally:
        ranks.stop()
    assert "RuntimeError" in str(error.value)


def other_shapes():
    """The second step has shorter sequences, for which torch prepares nothing."""
    group = dist.new_group(timeout=timedelta(seconds=3))
    schedule, stages = pipeline("GPipe", forced(), with_loss=False, group=group)
    x, _ = data()
    step(schedule, stages, x, None)
    errors = (RuntimeError, CommpassError)
    return raised(errors, step, schedule, stages, x[:, :3], None)


@pytest.mark.slow
def test_other_shapes_are_an_error_and_corrupt_nothing(ranks2: Ranks):
    said, other = ranks2.run(other_shapes, timeout=60)
    assert "planned to send float32[2, 5, 96] (rank 1) forward" in said
    assert "torch asks it to send float32[2, 3, 96] (rank 1)" in said
    assert other


def another_group():
    schedule, stages = pipeline("1F1B", forced())
    step(schedule, stages, *data())
    for stage in stages:
        stage.group = dist.new_group()
    return raised(CommpassError, step, schedule, stages, *data())


def test_another_group_is_refused(ranks2: Ranks):
    for said in ranks2.run(another_group, timeout=60):
        assert "was given another process group after compress_pipeline" in said


# --- stages that torch makes of a traced model ----------------------------------------------------


class Chained(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(number, torch.float32) for number in range(2)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def traced(policy):
    x, target = data()
    split = {"blocks.1": SplitPoint.BEGINNING}
    pipe = split_model(Chained(), (x[: BATCH // MICROBATCHES],), split_spec=split)
    stage = pipe.build_stage(dist.get_rank(), torch.device("cpu"))
    compress_pipeline(stage, policy)
    schedule = schedules.Schedule1F1B(stage, MICROBATCHES, loss_fn=loss)
    output = step(schedule, [stage], x, target)
    dist.barrier()
    return grads_of([stage]), output, commpass.plans()[-2:]


@pytest.mark.slow
def test_stages_of_a_traced_model(ranks2: Ranks):
    found = ranks2.run(traced, forced())
    compare(found, 2, torch.float32, "int8", "int8", **EXACT)
    assert all(site.codec == "int8" for *_, plans in found for plan in plans for site in plan)


def frozen(policy):
    """The first stage is frozen: no gradient is sent back to it."""
    schedule, stages = pipeline("1F1B", policy)
    for stage in stages:
        stage.submod.requires_grad_(stage.stage_index > 0)
    before = len(commpass.plans())
    step(schedule, stages, *data())
    dist.barrier()
    sites = [(s.kind, s.direction) for plan in commpass.plans()[before:] for s in plan]
    return sites, [p.grad is not None for stage in stages for p in stage.submod.parameters()]


def test_stages_without_gradients_send_none_back(ranks2: Ranks):
    assert ranks2.run(frozen, forced()) == [
        ([("send", "forward")], [False, False]),
        ([("recv", "forward")], [True, True]),
    ]


class WithCount(Block):
    """A block whose result has a count beside the field."""

    def forward(self, x):
        return super().forward(x) + 1e6 * (torch.arange(WIDTH) == 0)


def over_budget(name, calls):
    """Return the outputs of each step, those without compression, and the codecs of each step's
    forward plan."""
    policy = Policy(codecs=("int8",), max_error=0.02, check_calls=calls)
    slow = commpass.ethernet(1e-4)
    schedule, stages = pipeline(name, policy, make=WithCount, profile=slow)
    plain, plain_stages = pipeline(name, None, make=WithCount)
    outputs, codecs = [], []
    before = len(commpass.plans())
    for _ in range(4):
        outputs.append((step(schedule, stages, *data()), step(plain, plain_stages, *data())))
        sites = [site for plan in commpass.plans()[before:] for site in plan.sites]
        codecs.append({site.codec for site in sites if site.direction == "forward" and site.bytes})
    dist.barrier()
    return outputs, codecs


@pytest.mark.parametrize("name", ["1F1B", rarely("InterleavedZeroBubble"), rarely("GPipe")])
def test_messages_over_their_budget_are_left_alone_at_both_ends(ranks2: Ranks, name):
    for outputs, codecs in ranks2.run(over_budget, name, 2):
        assert codecs == [{"int8"}, *[{"none"}] * 3]
        for found, wanted in outputs[1:]:
            if wanted is not None:
                torch.testing.assert_close(found, wanted, **EXACT)
    for _, codecs in ranks2.run(over_budget, name, 0):
        assert codecs == [{"int8"}] * 4


class ZeroAtFirst(WithCount):
    """Its result is zero in the first steps."""

    scale = 0.0

    def forward(self, x):
        return self.scale * super().forward(x)


def with_nothing_to_measure(name):
    """Return the codecs of each step's forward plan, if messages are zero in the first two
    steps."""
    policy = Policy(codecs=("int8",), max_error=0.02)
    profile = commpass.ethernet(1e-4)
    schedule, stages = pipeline(name, policy, make=ZeroAtFirst, profile=profile)
    codecs = []
    before = len(commpass.plans())
    for number in range(6):
        ZeroAtFirst.scale = float(number >= 2)
        step(schedule, stages, *data())
        sites = [site for plan in commpass.plans()[before:] for site in plan.sites]
        codecs.append({site.codec for site in sites if site.direction == "forward" and site.bytes})
    dist.barrier()
    return codecs


@pytest.mark.parametrize("name", ["1F1B", rarely("InterleavedZeroBubble")])
def test_steps_with_nothing_to_measure_do_not_end_the_check(ranks2: Ranks, name):
    for codecs in ranks2.run(with_nothing_to_measure, name):
        assert codecs == [{"int8"}] * 4 + [{"none"}] * 2
