"""All integrations have the members of one base, as the table in docs/parallel.md says."""

from __future__ import annotations

import inspect
import pickle
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import commpass
from commpass.distributed.integration import Bytes, Integration, Sent, refuse_if_exchanged
from commpass.errors import ParallelError, PolicyError
from commpass.parallel import InGraph, SSFusion
from commpass.parallel.ddp import CompressedDDP
from commpass.parallel.fsdp import CompressedFSDP
from commpass.parallel.outer import CompressedOuter
from commpass.parallel.pipeline import CompressedPipeline
from commpass.parallel.vllm import CollectivePass
from commpass.policy import Policy
from commpass.tensorrt import Engines

ALL = (
    *(CompressedDDP, CompressedFSDP, CompressedPipeline, SSFusion),
    *(CompressedOuter, InGraph, CollectivePass, Engines),
)
FOR_AUTHORS = {"acquire", "call", "per"}
NOTHING = "–"


def table() -> tuple[list[str], dict[str, list[str]]]:
    """The classes, and what is said of each by member."""
    text = (Path(__file__).parents[2] / "docs" / "parallel.md").read_text()
    _, _, section = text.partition("## What every integration has")
    lines = section.partition("\n## ")[0].splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("|")]
    (_, *columns), _, *members = [["", *rows[0]], *rows[1:]]
    named = {re.findall(r"`(\w+)", first)[0]: cells for first, *cells in members}
    return [column.strip("`") for column in columns], named


def test_table_has_every_class_and_every_member():
    columns, members = table()
    assert columns == [kind.__name__ for kind in ALL]
    every = {*vars(Integration), *vars(Integration()), *inspect.get_annotations(Integration)}
    assert set(members) | FOR_AUTHORS == {name for name in every if not name.startswith("_")}
    assert all(len(cells) == len(ALL) for cells in members.values())


def overrides(kind: type[Integration], member: str) -> bool:
    return inspect.getattr_static(kind, member) is not inspect.getattr_static(Integration, member)


@pytest.mark.parametrize(("member", "by"), [("plans", "plans"), ("close", "_stop")])
def test_table_says_who_has_more_than_the_default(member, by):
    said = [cell != NOTHING for cell in table()[1][member]]
    assert said == [overrides(kind, by) for kind in ALL]


@pytest.mark.parametrize("kind", ALL)
def test_members_are_those_of_the_base(kind):
    assert issubclass(kind, Integration)
    assert kind.call
    for member in ("acquire", "close", "load_state_dict", "state_dict", "__enter__", "__repr__"):
        assert not overrides(kind, member), member


def test_defaults_are_those_of_one_that_has_nothing():
    class Nothing(Integration):
        call = "nothing"

    with Nothing() as handle:
        assert handle.plans == []
        assert handle.bytes == {}
        assert handle.bytes.plain == handle.bytes.sent == 0
        assert handle.state_dict() == {}
        handle.load_state_dict({})
        with pytest.raises(PolicyError, match="nothing keeps no state, but was given 1 tensors"):
            handle.load_state_dict({"x": torch.zeros(1)})
        assert repr(handle) == "<nothing: nothing sent yet>"
    assert handle.closed


def test_engines_and_other_passes_have_nothing_to_close(monkeypatch):
    # The module as it is now: tests of old names import it again.
    from commpass.parallel.vllm import CollectivePass

    monkeypatch.setattr("importlib.import_module", lambda name: None)
    for handle in (Engines(), pickle.loads(pickle.dumps(CollectivePass("off")))):
        assert handle.plans == []
        assert handle.state_dict() == {}
        handle.close()


@pytest.mark.parametrize("name", ["api._hook", "checks.Released"])
def test_names_in_saved_ddp_models_stay(name):
    module, _, attribute = f"commpass.parallel.ddp.{name}".rpartition(".")
    assert callable(pickle.loads(f"c{module}\n{attribute}\n.".encode()))


def test_bytes_are_counted_by_kind():
    counted = Bytes()
    counted.add("all_gather", 100, 30)
    counted.add("all_gather", 100, 40)
    counted.add("reduce_scatter", 0, 4, calls=0)
    assert counted == {"all_gather": Sent(2, 200, 70), "reduce_scatter": Sent(0, 0, 4)}
    assert (counted.plain, counted.sent) == (200, 74)


class Stopping(Integration):
    call, per = "stopping", " a step"
    stops = 0

    def _stop(self) -> None:
        self.stops += 1


def test_what_is_exchanged_is_refused_until_it_is_closed():
    model, policy = nn.Sequential(nn.Linear(2, 2)), Policy.from_preset("balanced")
    handle = Stopping(model, policy)
    handle.acquire(model, model)
    assert repr(handle) == "<stopping, policy 'balanced': no step yet>"
    refuse_if_exchanged(nn.Linear(2, 2), "", "other", ("stopping",))
    refuse_if_exchanged(model, "", "other", ("another",))
    for one in (model, model[0]):
        with pytest.raises(PolicyError, match=r"^other: .*weight of this model is exchanged by"):
            refuse_if_exchanged(one, "", "other", ("stopping",))
    with pytest.raises(PolicyError, match=r"stopping of a Sequential already, under .*'balanced'"):
        refuse_if_exchanged(model, "", "other", ("stopping",))
    handle.close()
    handle.close()
    assert handle.stops == 1
    refuse_if_exchanged(model, "", "other", ("stopping",))


def test_object_that_is_not_a_module_is_refused_by_its_name():
    class Unit:
        pass

    unit, handle = Unit(), Stopping()
    handle.acquire(unit, nn.Linear(1, 1))
    with pytest.raises(PolicyError, match=r"layers\.0 is exchanged by .* of a Linear already"):
        refuse_if_exchanged(unit, "layers.0", "stopping", ("stopping",))
    refuse_if_exchanged(Unit(), "layers.0", "stopping", ("stopping",))


def test_model_that_is_gone_is_not_exchanged_any_more():
    model = nn.Linear(2, 2)
    weight, handle = model.weight, Stopping(model)
    handle.acquire(model, model)
    del model
    other = nn.Linear(2, 2)
    other.weight = weight
    refuse_if_exchanged(other, "", "other", ("stopping",))
    assert handle.model is None
    assert handle.state_dict() == {}
    handle.close()


@pytest.mark.slow
def test_model_in_the_graph_has_one_as_well(fake_group):
    from torch.distributed.device_mesh import init_device_mesh

    fake_group(2)
    with pytest.raises(ParallelError, match="not data-parallel in the graph"):
        InGraph(nn.Linear(2, 2))
    model = nn.Linear(64, 64)
    commpass.parallel.replicate(model, init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
    handle, before = InGraph(model), len(commpass.plans())
    assert handle.model is model
    rule = commpass.Rule(codec="int8", force=True)
    compiled = torch.compile(model, backend=commpass.backend(Policy(rules=[rule]), inner="eager"))
    compiled(torch.ones(2, 64)).sum().backward()
    made = [plan for plan in commpass.plans()[before:] if plan.sites]
    assert made
    assert handle.plans[-len(made) :] == made
    assert "exchanges compressed" in repr(handle)


@pytest.mark.parametrize("call", ["state_dict", "load_state_dict"])
def test_residuals_of_what_is_no_module(call):
    arguments = ({}, "x") if call == "load_state_dict" else ("x",)
    with pytest.raises(PolicyError, match=rf"commpass.{call}\(model=str\): must be a module"):
        getattr(commpass, call)(*arguments)
