"""What compress_outer refuses before it needs other ranks, and how it makes buckets."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from refusals import refusals
from torch import nn

from commpass.distributed.flat import views_of
from commpass.distributed.owners import owner_of
from commpass.distributed.state import load_state_dict, state_dict
from commpass.distributed.state.names import Name
from commpass.errors import CommpassError, Unanswered
from commpass.parallel import compress_outer
from commpass.parallel.outer import means
from commpass.parallel.outer.checks import Target
from commpass.parallel.outer.means import HOOK
from commpass.parallel.outer.replicas import KEY, ManagedReplicas
from commpass.parallel.outer.residuals import Snapshot, drop


def test_targets_that_cannot_be_averaged_are_refused():
    model, frozen = nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)
    wrong, no_group, both, model_twice, no_manager = refusals(
        lambda: compress_outer("model", "off"),
        lambda: compress_outer(model, "off"),
        lambda: compress_outer(model, "off", group=object(), manager=object()),
        lambda: compress_outer(model, "off", model=model),
        lambda: compress_outer(frozen, "off", manager=object()),
    )
    assert "target=str" in wrong
    assert "LocalSGD or DiLoCo" in wrong
    assert "init_process_group" in no_group
    assert "not both" in both
    assert "leave it out for a module" in model_twice
    assert "a Manager of torchft" in no_manager


def test_parameters_that_cannot_be_sent_are_refused():
    complex_model = nn.Module()
    complex_model.register_parameter("phase", nn.Parameter(torch.zeros(3, dtype=torch.complex64)))
    with mock.patch("commpass.parallel.outer.checks.need_group"):
        with mock.patch("torch.distributed.ProcessGroup", object):
            frozen, is_complex, no_values = refusals(
                lambda: compress_outer(nn.Linear(2, 2).requires_grad_(False), "off", group=1),
                lambda: compress_outer(complex_model, "off", group=1),
                lambda: compress_outer(nn.Linear(2, 2, device="meta"), "off", group=1),
            )
        (group,) = refusals(lambda: compress_outer(nn.Linear(2, 2), "off", group=1))
    assert "no parameter that requires a gradient" in frozen
    assert "phase is torch.complex64" in is_complex
    assert "weight is on the meta device" in no_values
    assert "group=int" in group


@pytest.mark.parametrize(
    ("most", "wanted"),
    [(10**6, [[1], [0, 2, 4]]), (48, [[1], [0], [2, 4]]), (1, [[1], [0], [2], [4]])],
)
def test_buckets_have_one_dtype_and_a_limited_size(most, wanted):
    sizes = [(10, torch.float32), (9, torch.bfloat16), (8, torch.float32), (0, torch.float32)]
    sizes += [(4, torch.float32)]
    values = [torch.zeros(size, dtype=dtype) for size, dtype in sizes]
    with mock.patch.object(means, "BUCKET_BYTES", most):
        assert list(means.buckets(values, values)) == wanted


def test_step_that_does_not_count_leaves_what_no_group_has_sent_so_far():
    """Of two groups, the residuals of both are kept, as their sum in the current one."""
    parameter = nn.Parameter(torch.zeros(3))
    current, former = (
        (Name("-", HOOK, "m/0", "sum", "world", 0, ranks), torch.full((3,), value))
        for ranks, value in ((2, 1.0), (4, 2.0))
    )
    owner_of([parameter]).state.update({2: current, 4: former})
    before = Snapshot([parameter])
    current[1].fill_(7.0)
    former[1].fill_(9.0)
    before.restore()
    assert current[1].tolist() == [3.0] * 3
    assert former[1].tolist() == [0.0] * 3


def test_dropping_residuals_includes_those_loaded_and_not_used_yet():
    """A replica that takes over another one's state has loaded a checkpoint before."""
    model, other = nn.Linear(2, 3), nn.Linear(2, 3)
    names = [f"commpass.v2/weight/{hook}/gradient/0/sum/world/0of1" for hook in ("outer-1", "ddp")]
    for each in (model, other):
        load_state_dict({name: torch.ones(3, 2) for name in names}, each)
    drop(model.parameters())
    outer, ddp = (state_dict(model)[name] for name in names)
    assert not outer.any()
    assert ddp.all()
    assert all(tensor.all() for tensor in state_dict(other).values())


def test_frozen_parameters_are_not_copied(fake_group):
    """Else a replica would get back the values that it had before another one's state."""
    model = nn.Linear(4, 4)
    model.bias.requires_grad_(False)
    outer = compress_outer(model, "off", group=fake_group(1))
    weight, bias = outer.averaged()
    assert weight.data_ptr() != model.weight.data_ptr()
    assert bias.data_ptr() == model.bias.data_ptr()


@pytest.mark.parametrize(
    ("error", "raised"),
    [(CommpassError("strict"), True), (Unanswered("late"), False), (OSError("closed"), False)],
)
def test_errors_of_commpass_are_not_tried_again(error, raised):
    """Any other error of an exchange discards the step, since a replica may have died."""
    replicas, told = ManagedReplicas.__new__(ManagedReplicas), mock.Mock()
    told.errored.return_value = None
    replicas.manager, replicas._snapshots, replicas._world = told, [], None
    expected = pytest.raises(CommpassError) if raised else nullcontext()
    with mock.patch.object(ManagedReplicas, "_adopt", side_effect=error), expected:
        replicas.average(mock.Mock(), [], [])
    told.report_error.assert_called_once_with(error)
    told._pg.abort.assert_called_once_with()


def test_second_model_of_a_manager_is_refused():
    model, manager = nn.Linear(2, 2), SimpleNamespace(_user_state_dicts={KEY: None})
    found = Target(model, "Linear", manager=manager)
    with mock.patch("commpass.parallel.outer.checks._module", return_value=found):
        (refused,) = refusals(lambda: compress_outer(model, "off", manager=manager))
    assert "this Manager already has the outer steps of another model" in refused


def test_views_have_the_layout_of_parameters():
    parameters = [torch.empty(2, 3), torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)]
    flat = torch.arange(126.0)
    views = views_of(flat, parameters)
    assert [view.shape for view in views] == [each.shape for each in parameters]
    assert [view.stride() for view in views] == [each.stride() for each in parameters]
    assert sorted(torch.cat([view.reshape(-1) for view in views]).tolist()) == flat.tolist()


@pytest.mark.parametrize("ranks", [1, 2])
def test_replica_that_is_alone_counts_no_bytes(ranks, fake_group):
    model = nn.Linear(32, 32, bias=False)
    outer = compress_outer(model, "off", group=fake_group(ranks))
    model.weight.data.add_(1.0)
    outer.step()
    assert outer.bytes.plain == (0 if ranks == 1 else 32 * 32 * 4)
