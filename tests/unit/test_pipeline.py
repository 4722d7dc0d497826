"""Plans for the messages between pipeline stages, and errors of compress_pipeline."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiers import has_messages
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from typer.testing import CliRunner

import commpass
from commpass.cli import app
from commpass.codecs import codec
from commpass.costmodel import ethernet
from commpass.errors import CommpassError, PolicyError
from commpass.parallel import compress_pipeline
from commpass.parallel.pipeline.coding import Coding
from commpass.parallel.pipeline.send_recv import (
    Message,
    StageRanks,
    coding_of,
    decide_all,
    messages_of,
)
from commpass.plan import NONE
from commpass.policy import Policy, policy_named
from commpass.policy.rules import DIRECTIONS, Rule

pytestmark = has_messages
SLOW = ethernet(0.1)
CPU = torch.device("cpu")


def line(kind="send", direction="forward", shape=(4, 512, 1024), dtype=torch.float32, **more):
    source, target = (0, 1) if direction == "forward" else (1, 0)
    facts = {"source": source, "target": target, "number": 0}
    return Message(kind, direction, **facts | more, shape=shape, dtype=dtype)


def location(wanted, ranks=2):
    """This rank has the stage at one end of a line."""
    group: Any = dist.group.WORLD
    own = wanted.source if wanted.kind == "send" else wanted.target
    return StageRanks(group, {stage: (stage - own) % ranks for stage in range(4)}, CPU)


def decide(policy, *wanted, profile=SLOW, ranks=2):
    policy = policy_named(policy)
    return [decide_all([each], location(each, ranks), policy, profile)[0][0] for each in wanted]


@pytest.mark.parametrize("policy", ["tahquant", "balanced", "aggressive", "off"])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("profile", [SLOW, ethernet(1), ethernet(100)], ids=lambda p: p.name)
def test_both_ends_decide_alike(fake_group, policy, direction, profile):
    fake_group(8)
    sent, received = (
        decide(policy, line(kind, direction), profile=profile, ranks=8)[0]
        for kind in ("send", "recv")
    )
    same = ("codec", "algorithm", "lowering", "wire_bytes", "predicted_us", "plain_us", "reason")
    for field in (*same, "name", "module", "error"):
        assert getattr(sent, field) == getattr(received, field)
    assert sent.module == "stages.0"
    if profile is SLOW and policy != "off":
        assert sent.compressed
    if not sent.compressed:
        assert sent.reason
        assert sent.wire_bytes == sent.bytes == 4 * 512 * 1024 * 4


def test_preset_has_a_codec_for_each_direction(fake_group):
    fake_group(2)
    forward, backward = decide("tahquant", line(), line(direction="backward"))
    assert forward.codec == "tahquant"
    assert backward.codec == "int6(block=32, stored=bf16)"
    for site, bits in ((forward, 4.32), (backward, 6.51)):
        assert site.wire_bytes == pytest.approx(bits / 8 * site.bytes / 4, rel=0.01)
        assert site.lowering == "kernel"


def test_rules_by_edge_direction_and_size(fake_group):
    fake_group(4)
    policy = Policy(
        rules=[
            Rule(module="stages.1", keep=True),
            Rule(direction="backward", codec="int8", force=True),
            Rule(min_bytes=1 << 20, codec="int4", force=True, lowering="inline"),
        ]
    )
    chosen = decide(
        policy,
        line(),
        line(shape=(8, 8)),
        line(direction="backward"),
        line(source=1, target=2),
        line(direction="backward", source=2, target=1),
        ranks=4,
    )
    assert [site.codec for site in chosen] == ["int4", NONE, "int8", NONE, NONE]
    assert [site.lowering for site in chosen] == ["inline", "", "kernel", "", ""]
    assert "allows no codec" in chosen[1].reason
    assert all("keep" in site.reason for site in chosen[3:])


@pytest.mark.parametrize(
    ("wanted", "policy", "why"),
    [
        (line(dtype=torch.int64), "int8", "int64 values must arrive exactly"),
        (line(dtype=torch.bool), "int8", "bool values must arrive exactly"),
        (line(dtype=torch.float8_e4m3fn), "int8", "must arrive exactly"),
        (line(), "exponent", "a number of bytes that depends on the values"),
        (line(shape=(0, 4)), "int8", "no elements"),
        (line(source=0, target=2), "int8", "both stages are on this rank"),
    ],
    ids=str,
)
def test_messages_that_cannot_be_coded_are_left_alone_with_a_reason(
    fake_group, wanted, policy, why
):
    fake_group(2)
    (site,) = decide(Policy(rules=[Rule(codec=policy, force=True)]), wanted)
    assert not site.compressed
    assert why in site.reason


@pytest.mark.parametrize("spec", ["topk", "difference", "dgc"])
def test_codecs_that_need_state_are_refused(fake_group, spec):
    fake_group(2)
    (site,) = decide(Policy(codecs=(spec,)), line())
    assert not site.compressed
    assert spec in site.reason


def test_no_gain_leaves_alone_and_says_so(fake_group):
    fake_group(2)
    (site,) = decide("tahquant", line(shape=(4, 4)))
    assert not site.compressed
    assert "no fewer" in site.reason


def test_chunks_do_not_apply(fake_group):
    fake_group(2)
    (site,) = decide(Policy(rules=[Rule(codec="int8", force=True, chunks=4)]), line())
    assert site.chunks == 1
    assert "chunks=4 does not apply: a stage's message is sent whole" in site.reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("spec", ["int8", "tahquant", "int6(block=32, stored=bf16)", "bf16"])
def test_messages_have_the_planned_size_and_are_the_codecs(fake_group, spec, dtype):
    """Any shape and layout, compared with the codec's own encode and decode."""
    fake_group(2)
    wanted = line(shape=(3, 50, 7), dtype=dtype)
    rule = Rule(codec=spec, force=True, lowering="inline")
    (site,) = decide(Policy(rules=[rule]), wanted)
    coding = coding_of(wanted, site, location(wanted))
    assert isinstance(coding, Coding)
    x = torch.randn(7, 50, 3, generator=torch.Generator().manual_seed(0)).to(dtype).mT.mT
    x = x.permute(2, 1, 0)
    wire = coding.encode(x.requires_grad_())
    assert (wire.dtype, wire.shape) == (torch.uint8, (site.wire_bytes,))
    into = torch.full((7, 50, 3), 9.0, dtype=dtype).permute(2, 1, 0).requires_grad_()
    coding.decode(wire, into)
    coder = codec(spec)
    own = coder.decode(coder.encode(x.detach()))
    torch.testing.assert_close(into.detach(), own, rtol=0, atol=0)


# --- compress_pipeline ----------------------------------------------------------------------------


def stage(index=0, many=1, **more):
    return PipelineStage(nn.Linear(8, 8), index, many, CPU, **more)


def test_one_stage_works_and_says_that_nothing_is_sent(fake_group, tmp_path):
    fake_group(1)
    before = len(commpass.plans())
    only = stage()
    compress_pipeline(only, "tahquant", dump=tmp_path)
    x = torch.randn(4, 8)
    schedule = ScheduleGPipe(only, 2, loss_fn=lambda out, target: (out - target).square().mean())
    schedule.step(x, target=x)
    (plan, _) = commpass.plans()[before:]
    assert plan.graph == "stage 0 of 1"
    assert plan.fallback == "the pipeline has one stage: nothing is sent"
    assert not plan.sites
    assert only.submod.weight.grad is not None
    assert len(list(tmp_path.iterdir())) == 2


def test_dumps_are_explained(fake_group, tmp_path):
    fake_group(2)
    first = stage(0, 2, input_args=torch.zeros(2, 8), output_args=torch.zeros(2, 8))
    compress_pipeline(first, Policy(rules=[Rule(codec="int8", force=True)]), dump=tmp_path)
    from torch.distributed.pipelining._utils import InferenceMode

    first._inference_mode = InferenceMode.STATIC
    first._prepare_forward_infra(2, (torch.zeros(2, 8),), {}, has_backward=False)
    for command in (["explain"], ["explain", "--all"], ["graph"]):
        said = CliRunner().invoke(app, [*command, str(tmp_path)], env={"COLUMNS": "200"})
        assert said.exit_code == 0, said.output
        assert "int8" in said.output
        assert command != ["explain", "--all"] or "stage_0_to_1" in said.output
    sites = messages_of(first, "forward")
    assert [(each.kind, each.peer, each.shape) for each in sites] == [("send", 1, (2, 8))]


@pytest.mark.parametrize("buffer", [None, torch.zeros(2, 8)])
def test_messages_are_planned_before_a_stage_has_buffers(buffer):
    """torch 2.15 makes them when a message is asked for."""
    meta = SimpleNamespace(shape=torch.Size([2, 8]), dtype=torch.float32)
    info = SimpleNamespace(source=0, buffer=buffer, tensor_meta=meta, is_root_arg=False)
    waits = SimpleNamespace(
        stage_index=1, args_recv_info={0: (info,)}, act_send_info={}, get_outputs_meta=tuple
    )
    (message,) = messages_of(waits, "forward")
    assert (message.kind, message.source, message.shape) == ("recv", 0, (2, 8))
    assert message.dtype == torch.float32


def refused(kind, function, *parts):
    with pytest.raises(kind) as error:
        function()
    for part in parts:
        assert part in str(error.value)


def test_bad_input_is_refused(fake_group):
    fake_group(2)
    refused(
        PolicyError,
        lambda: compress_pipeline(nn.Linear(2, 2), "off"),
        "stages=Linear",
        "PipelineStage",
    )
    refused(PolicyError, lambda: compress_pipeline([], "off"), "at least one")
    refused(PolicyError, lambda: compress_pipeline(stage(0, 2), "tahqant"), "tahquant")
    twice = stage(0, 2)
    refused(PolicyError, lambda: compress_pipeline([twice, twice], "off"), "same stage twice")
    compress_pipeline(twice, "tahquant")
    refused(
        PolicyError, lambda: compress_pipeline(twice, "off"), "stage 0", "already", "'tahquant'"
    )
    refused(PolicyError, lambda: compress_pipeline(stage(0, 2), "off", timeout=-1), "timeout")
    has_run = stage(0, 2)
    has_run.args_recv_info[0] = ()
    refused(PolicyError, lambda: compress_pipeline(has_run, "off"), "before the first step")


def test_torch_with_other_stages_is_refused(fake_group, monkeypatch):
    fake_group(2)
    from torch.distributed.pipelining.stage import _PipelineStageBase

    monkeypatch.delattr(_PipelineStageBase, "_retrieve_recv_grads")
    refused(
        CommpassError,
        lambda: compress_pipeline(stage(0, 2), "off"),
        "torch 2.11 to 2.15",
        "_retrieve_recv_grads",
    )


def test_other_stages_and_the_class_are_as_they_were(fake_group):
    fake_group(2)
    before = dict(vars(PipelineStage))
    one, other = stage(0, 2), stage(1, 2)
    compress_pipeline(one, "tahquant")
    assert dict(vars(PipelineStage)) == before
    assert "get_fwd_send_ops" in vars(one)
    assert "get_fwd_send_ops" not in vars(other)
