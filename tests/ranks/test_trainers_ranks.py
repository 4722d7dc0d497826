"""What the integrations with trainers share, and those of transformers and Accelerate, on ranks."""

from __future__ import annotations

import functools
import logging
import os
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from refusals import refusals
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import commpass
from commpass.errors import ParallelError
from commpass.parallel.ddp import CompressedDDP, compress_ddp
from commpass.parallel.fsdp import CompressedFSDP
from commpass.parallel.trainers import compress_wrapped, gathered_state, load_state, save_state

pytestmark = pytest.mark.xdist_group("ranks")
TOPK = commpass.Policy(rules=[commpass.Rule(codec="topk(density=0.1)", force=True)], max_error=1.0)
EAGER_DDP = functools.partial(compress_ddp, inner="eager")
EAGER = mock.patch("commpass.parallel.trainers.compress_ddp", EAGER_DDP)
"""Makes integrations with trainers run exchanges without compiling them."""


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 8))


def step(model: nn.Module, number: int) -> None:
    generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
    model(torch.randn(6, 24, generator=generator)).square().sum().backward()


def wrapped() -> tuple[nn.Module, CompressedDDP]:
    model = DDP(net(), find_unused_parameters=True)  # so that the first step is sent by plan
    return model, EAGER_DDP(model, TOPK, profile="ethernet-1g")


def kinds() -> tuple[str, str, list[str]]:
    sharded = net()
    fully_shard(sharded)
    by_fsdp = compress_wrapped("call", sharded, {"policy": "balanced"})
    by_ddp = compress_wrapped("call", DDP(net()), {"policy": "balanced"})
    told = refusals(lambda: compress_wrapped("call", net(), {"policy": "balanced"}))
    by_fsdp.close()
    by_ddp.close()
    return type(by_fsdp).__name__, type(by_ddp).__name__, told


def test_the_integration_is_that_of_the_wrapper(ranks2):
    for by_fsdp, by_ddp, told in ranks2.run(kinds):
        assert (by_fsdp, by_ddp) == (CompressedFSDP.__name__, CompressedDDP.__name__)
        assert "DistributedDataParallel" in str(told[0])


def test_one_rank_is_left_as_it_is(fake_group, caplog):
    fake_group(1)
    with caplog.at_level(logging.INFO, "commpass"):
        assert compress_wrapped("some call", net(), {"policy": "balanced"}) is None
    assert "some call: this job has one rank" in caplog.text


def gathered() -> tuple[dict, dict]:
    model, integration = wrapped()
    step(model, 0)
    own = {key: tensor.clone() for key, tensor in integration.state_dict().items()}
    found = gathered_state(model.module)
    integration.close()
    return own, found


def test_gathered_state_is_that_of_all_ranks_on_the_first(ranks2):
    (own, found), (other, nothing) = ranks2.run(gathered)
    assert nothing == {}
    assert own
    assert own.keys().isdisjoint(other)  # their names have the rank
    assert found.keys() == own.keys() | other.keys()
    for key, tensor in (own | other).items():
        assert torch.equal(found[key], tensor)


def gradients_of(model: nn.Module, number: int) -> list[torch.Tensor]:
    model.zero_grad()
    step(model, number)
    return [each.grad.clone() for each in model.parameters()]


def saved_and_loaded(folder: Path) -> tuple[bool, bool, bool]:
    model, integration = wrapped()
    save_state(integration, folder / "before")  # there is nothing yet
    step(model, 0)
    save_state(integration, folder / "after")
    expected = gradients_of(model, 1)
    integration.close()
    fresh, forgetful = wrapped()
    load_state("call", forgetful, folder / "before")
    without = gradients_of(fresh, 1)
    forgetful.close()
    again, restored = wrapped()
    load_state("call", restored, folder / "after")
    found = gradients_of(again, 1)
    restored.close()
    return (
        (folder / "before").exists(),
        all(map(torch.equal, found, expected)),
        all(map(torch.equal, without, expected)),
    )


def test_saved_state_is_loaded(ranks2, tmp_path):
    for empty_is_written, same, same_without in ranks2.run(saved_and_loaded, tmp_path):
        assert not empty_is_written
        assert same
        assert not same_without


def saved_over_another(folder: Path) -> tuple[bool, int, int]:
    model, integration = wrapped()
    step(model, 0)
    save_state(integration, folder)
    integration.close()
    fresh, forgetful = wrapped()
    save_state(forgetful, folder)  # it has no state yet
    left = folder.exists()
    step(fresh, 0)
    before = sum(bool(each.any()) for each in forgetful.state_dict().values())
    load_state("call", forgetful, folder)
    after = sum(bool(each.any()) for each in forgetful.state_dict().values())
    forgetful.close()
    return left, before, after


def test_checkpoint_without_state_removes_and_loads_none_of_another(ranks2, tmp_path):
    for left, before, after in ranks2.run(saved_over_another, tmp_path / "commpass"):
        assert not left
        assert before > 0
        assert after == 0


def residuals_after_nan() -> tuple[bool, bool]:
    model, integration = wrapped()
    weights = [torch.ones_like(each) for each in model.parameters()]
    weights[0].view(-1)[5] = float("nan")
    x = torch.zeros(6, 24)
    terms = zip(model.parameters(), weights, strict=True)
    (sum((each * weight).sum() for each, weight in terms) + 0 * model(x).sum()).backward()
    means = {name: each.grad.clone() for name, each in model.module.named_parameters()}
    left = {key.split("/")[1]: each for key, each in integration.state_dict().items()}
    first = left.get("0.weight", left.get("module.0.weight"))
    sent = means["0.weight"].isfinite() & (means["0.weight"] != 0)
    found = bool(means["0.weight"].isnan().any()), not first[sent].any()
    integration.close()
    return found


def test_nan_does_not_return_to_error_feedback_what_was_applied(ranks2):
    for has_nan, nothing_left in ranks2.run(residuals_after_nan):
        assert has_nan
        assert nothing_left  # of the values that were sent


def converted() -> tuple[str, str, str]:
    model, integration = wrapped()
    before = str(integration)
    model.bfloat16()
    model(torch.randn(6, 24, dtype=torch.bfloat16)).sum().backward()
    after = str(integration)
    integration.close()
    first = DDP(net().bfloat16(), find_unused_parameters=True)
    with EAGER_DDP(first, TOPK, profile="ethernet-1g") as right:
        first(torch.randn(6, 24, dtype=torch.bfloat16)).sum().backward()
        return before, after, str(right)


def test_model_that_is_converted_after_ddp_is_reported(ranks2):
    for before, after, right in ranks2.run(converted):
        assert "no step yet>" in before
        assert "converted to another dtype after DistributedDataParallel" in after
        assert "exchanges compressed" in right


def found_by_one(folder: Path) -> str:
    own = folder / str(dist.get_rank())
    if dist.get_rank() == 1:
        own.mkdir()
    _, integration = wrapped()
    with pytest.raises(ParallelError) as error:
        load_state("call", integration, own)
    integration.close()
    return str(error.value)


def test_state_that_only_some_ranks_can_read_is_refused_by_all(ranks2, tmp_path):
    for message in ranks2.run(found_by_one, tmp_path):
        assert "is there on rank 1, and not on the others" in message


# --- transformers ---------------------------------------------------------------------------------


def by_transformers(folder: Path, resume: str | None, policy: object) -> tuple:
    import transformers
    from train_trainer import Windows, llama

    from commpass.parallel.transformers import compress

    environment = {"LOCAL_RANK": str(dist.get_rank()), "LOCAL_WORLD_SIZE": "2"}
    text = torch.randint(0, 256, (1 << 14,), generator=torch.Generator().manual_seed(0))
    with EAGER, mock.patch.dict(os.environ, environment):
        arguments = transformers.TrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=2,
            max_steps=4,
            save_steps=2,
            logging_steps=1,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            ddp_backend="gloo",
            seed=0,
        )
        trainer = transformers.Trainer(
            model=llama(1, 64), args=arguments, train_dataset=Windows(text, 32)
        )
        trainer.remove_callback(transformers.PrinterCallback)
        callback = compress(trainer, policy, profile="ethernet-1g")
        trainer.train(resume_from_checkpoint=resume)
        first = callback.integration
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        weights = [each.detach().clone() for each in trainer.model.parameters()]
        if resume is not None:
            trainer.args.max_steps = 5
            trainer.train()
        state = len(first.state_dict())
        same = callback.integration is first
        first.close()
    return losses, weights, state, same


@pytest.mark.every
def test_trainer_continues_with_its_error_feedback(ranks2, tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    whole = ranks2.run(by_transformers, tmp_path, None, TOPK, timeout=280)
    assert (tmp_path / "checkpoint-2" / "commpass" / ".metadata").is_file()
    resume = str(tmp_path / "checkpoint-2")
    for once, again in zip(
        whole, ranks2.run(by_transformers, tmp_path, resume, TOPK, timeout=280), strict=True
    ):
        assert again[0] == once[0]
        assert all(torch.equal(a, b) for a, b in zip(once[1], again[1], strict=True))
        assert once[2] > 0
        assert again[3]  # a second train() keeps its integration


# --- Accelerate -----------------------------------------------------------------------------------


def by_accelerate(folder: Path) -> tuple[bool, int, bool]:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedDataParallelKwargs

    from commpass.parallel.accelerate import compress

    environment = {
        "LOCAL_RANK": str(dist.get_rank()),
        "LOCAL_WORLD_SIZE": "2",
        "RANK": str(dist.get_rank()),
        "WORLD_SIZE": "2",
    }
    with EAGER, mock.patch.dict(os.environ, environment):
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = Accelerator(
            cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)]
        )
        model = accelerator.prepare(net())
        integration = compress(accelerator, model, TOPK, profile="ethernet-1g")
        step(model, 0)
        before = {key: x.clone() for key, x in integration.state_dict().items()}
        accelerator.save_state(str(folder))
        step(model, 1)
        changed = any(
            not torch.equal(before[key], x) for key, x in integration.state_dict().items()
        )
        accelerator.load_state(str(folder))
        after = integration.state_dict()
        integration.close()
        AcceleratorState._reset_state()
        PartialState._reset_state()
    return changed, len(before), all(torch.equal(before[key], after[key]) for key in before)


def in_turn_by_accelerate(folder: Path) -> list[list[str]]:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, PartialState

    from commpass.parallel.accelerate import compress

    environment = {
        "LOCAL_RANK": str(dist.get_rank()),
        "LOCAL_WORLD_SIZE": "2",
        "RANK": str(dist.get_rank()),
        "WORLD_SIZE": "2",
    }
    found, models = [], []
    with EAGER, mock.patch.dict(os.environ, environment):
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = Accelerator(cpu=True)
        for number in range(4):
            model = accelerator.prepare(net())
            models.append(model)
            integration = compress(accelerator, model, TOPK, profile="ethernet-1g")
            step(model, 0)
            step(model, 1)
            accelerator.save_state(str(folder / str(number)))
            dist.barrier()
            found.append(sorted(each.name for each in (folder / str(number)).glob("commpass*")))
            if number == 1:
                integration.close()  # the next one has its folder
            if number == 2:
                accelerator.free_memory()  # the next one is the first again
        integration.close()
        AcceleratorState._reset_state()
        PartialState._reset_state()
    return found


@pytest.mark.slow
def test_models_that_an_accelerator_has_dropped_leave_their_folder(ranks2, tmp_path):
    pytest.importorskip("accelerate")
    both = ["commpass", "commpass_1"]
    for found in ranks2.run(in_turn_by_accelerate, tmp_path):
        assert found == [["commpass"], both, both, ["commpass"]]


@pytest.mark.slow
def test_accelerator_saves_and_loads_error_feedback(ranks2, tmp_path):
    pytest.importorskip("accelerate")
    for changed, tensors, same in ranks2.run(by_accelerate, tmp_path):
        assert changed
        assert tensors > 0
        assert same
