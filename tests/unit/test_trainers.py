"""What the integrations with trainers do without ranks: refusals, and Lightning's callback."""

from __future__ import annotations

import importlib
import sys
import types
from unittest import mock

import pytest
from refusals import refusals
from torch import nn

from commpass.distributed.integration import Integration
from commpass.errors import PolicyError
from commpass.parallel import compress_ddp, compress_fsdp
from commpass.parallel.trainers import checked_options


def test_options_are_checked_before_there_is_a_model():
    assert checked_options("call", {"policy": "balanced"}) == {"policy": "balanced"}
    assert checked_options("call", {"profile": "ethernet-1g"})["policy"] == "lossless"
    told = refusals(
        lambda: checked_options("some.call", {"profil": "ethernet-1g"}),
        lambda: checked_options("some.call", {"policy": "balance"}),
    )
    assert "some.call has no option 'profil'" in told[0]
    assert told[0].count("timeout") == 1  # the options are listed once
    assert "'profile'" in told[0]
    assert "balanced" in told[1]


def test_engine_of_deepspeed_is_refused_with_what_to_do():
    engine = type("DeepSpeedEngine", (nn.Linear,), {"__module__": "deepspeed.runtime.engine"})(2, 2)
    for call in (compress_ddp, compress_fsdp):
        with pytest.raises(PolicyError, match=r"DeepSpeed's engine.*engine\.no_sync\(\)"):
            call(engine, "balanced")


@pytest.fixture
def by_lightning(monkeypatch):
    """The module of Lightning's callback, without Lightning."""
    names = {name: type(name, (), {}) for name in ("Callback", "LightningModule", "Trainer")}
    stub = types.ModuleType("lightning.pytorch")
    vars(stub).update(names)
    monkeypatch.setitem(sys.modules, "lightning", types.ModuleType("lightning"))
    monkeypatch.setitem(sys.modules, "lightning.pytorch", stub)
    monkeypatch.delitem(sys.modules, "commpass.parallel.lightning", raising=False)
    yield importlib.import_module("commpass.parallel.lightning")
    sys.modules.pop("commpass.parallel.lightning", None)


def test_a_checkpoint_of_an_exception_waits_for_no_rank(by_lightning, monkeypatch, caplog):
    monkeypatch.setattr(by_lightning, "compress_wrapped", lambda *_: Integration())
    monkeypatch.setattr(by_lightning, "gathered_state", lambda _: {"of": "all ranks"})
    module, trainer = nn.Linear(2, 2), mock.Mock()
    callback = by_lightning.Compress("balanced")
    callback.setup(trainer, module, "fit")
    callback.on_fit_start(trainer, module)
    assert callback.state_dict() == {"of": "all ranks"}
    callback.on_exception(trainer, module, RuntimeError())
    assert callback.state_dict() == {}
    assert "without error feedback" in caplog.text
    callback.setup(trainer, module, "fit")
    assert callback.state_dict() == {"of": "all ranks"}


def test_a_checkpoint_without_state_starts_with_none(by_lightning, monkeypatch):
    loaded = []
    monkeypatch.setattr(by_lightning, "compress_wrapped", lambda *_: Integration())
    monkeypatch.setattr(by_lightning, "load_state_dict", lambda state, _: loaded.append(state))
    module, trainer = nn.Linear(2, 2), mock.Mock()
    callback = by_lightning.Compress("balanced")

    def fit(checkpoint: dict | None) -> None:
        callback.setup(trainer, module, "fit")
        if checkpoint is not None:
            callback.on_load_checkpoint(trainer, module, {})
            if checkpoint:  # Lightning loads no empty state
                callback.load_state_dict(checkpoint)
        callback.on_fit_start(trainer, module)
        callback.on_train_start(trainer, module)

    fit(None)
    assert loaded == []
    fit({})
    fit({"some": 1})
    assert loaded == [{}, {"some": 1}]
