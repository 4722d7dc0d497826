"""``commpass.calibrate`` on real ranks.

Sensitivities are compared with those computed in float64, and must be equal on all ranks. The
resulting policy is tested as well.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from doc_blocks import blocks_of
from processes import Ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import commpass
from commpass.calibration import Calibration
from commpass.codecs import codec
from commpass.errors import CalibrationError, CommpassError
from commpass.policy import Policy

pytestmark = pytest.mark.xdist_group("ranks")
CODECS = ("rotated", "rotated(bits=6)", "rotated(bits=4)")
PROBES = ("rotated(bits=6)", "rotated(bits=4)", "rotated(bits=2)")
WIDTH, INNER, ROWS = 128, 256, 32


class Model(nn.Module):
    """``pre`` is replicated; ``a`` is sharded by columns and ``b`` by rows: a sum after ``b``, and
    in backward one before ``a``."""

    def __init__(self) -> None:
        super().__init__()
        self.pre, self.a = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, INNER, bias=False)
        self.b, self.post = nn.Linear(INNER, WIDTH, bias=False), nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.post(self.b(torch.tanh(self.a(self.pre(x)))))


def whole() -> Model:
    torch.manual_seed(7)
    return Model()


def batches(many: int = 2) -> list[tuple[Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(ROWS, WIDTH, generator=generator),) for _ in range(many)]


def divided() -> Model:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    plan = {"a": ColwiseParallel(), "b": RowwiseParallel()}
    return parallelize_module(whole(), mesh, plan)


def squared(given: Tensor) -> Tensor:
    return given.square().mean()


# --- against float64 -------------------------------------------------------------------------


def lost(parts: list[Tensor], name: str) -> tuple[Tensor, float, float]:
    """Return the error of the sum of some separately coded tensors, and the squares of the errors
    and of the tensors."""
    coder = codec(name)
    each = [part.detach().float() for part in parts]
    errors = [coder.decode(coder.encode(part)).double() - part.double() for part in each]
    squares = sum(float(error.square().sum()) for error in errors)
    return sum(errors), squares, sum(float(part.double().square().sum()) for part in each)


def by_hand(
    place: str, batch: Tensor, train: bool, disturbed: bool, name: str
) -> tuple[Tensor, float]:
    """Return the results of the whole model in float64, on the parts of 2 ranks.

    If a place is ``disturbed``, it has an error there, which is also returned, relative to what is
    sent.
    """
    model, half, errors = whole().double(), INNER // 2, [math.nan]

    def off(parts: list[Tensor]) -> Tensor | float:
        found, squares, values = lost(parts, name)
        errors[0] = math.sqrt(squares / values)
        return found if disturbed else 0.0

    def before_a(grad: Tensor) -> Tensor:
        """Return what backward sums there: each rank has the gradients of one half of the output of
        ``a``."""
        rows = model.a.weight.detach().split(half)
        return grad + off(
            [part @ row for part, row in zip(kept[0].split(half, 1), rows, strict=True)]
        )

    kept: list[Tensor] = []
    x = model.pre(batch.double()).clone()
    inner = model.a(x)
    if place == "a":
        x.register_hook(before_a)
        inner.register_hook(kept.append)
    h = torch.tanh(inner)
    z = model.b(h)
    if place == "b":
        columns = model.b.weight.split(half, 1)
        z = z + off([part @ w.T for part, w in zip(h.split(half, 1), columns, strict=True)])
    out = model.post(z)
    if not train:
        return out.detach(), errors[0]
    squared(out).backward()
    return torch.cat([each.grad.flatten() for each in model.parameters()]), errors[0]


def expected(place: str, train: bool, name: str = PROBES[0]) -> float:
    squares = []
    for (batch,) in batches():
        plain, error = by_hand(place, batch, train, False, name)
        disturbed, _ = by_hand(place, batch, train, True, name)
        squares.append(float((disturbed - plain).norm() / plain.norm() / error) ** 2)
    return math.sqrt(sum(squares) / len(squares))


def calibrated(train: bool = True) -> str:
    model = divided()
    found = commpass.calibrate(
        model, batches(), loss=lambda out, _: squared(out), codecs=CODECS, train=train
    )
    assert all(each.grad is None for each in model.parameters())
    return found.to_json()


@pytest.fixture(scope="module")
def trained(ranks2, tmp_path_factory) -> Calibration:
    first, second = ranks2.run(calibrated)
    assert first == second
    path = tmp_path_factory.mktemp("calibration") / "c.json"
    path.write_text(first)
    return Calibration.read(path)


@pytest.mark.slow
def test_sensitivities_of_gradients_are_those_in_float64(trained):
    assert [each.where[0].module for each in trained.places] == ["a", "b"]
    assert [each.where[0].direction for each in trained.places] == ["backward", "forward"]
    for place in trained.places:
        assert place.where[0].group == "tp"
        assert place.bytes == ROWS * WIDTH * 4
        assert tuple(each.codec for each in place.levels) == PROBES
        for level in place.levels:
            by_float64 = expected(place.where[0].module, True, level.codec)
            assert math.isclose(level.sensitivity, by_float64, rel_tol=1e-3)
    assert trained.places[0].loss == 0  # backward comes after the loss
    assert trained.places[1].loss > 0


def test_errors_are_those_of_what_is_really_sent(trained):
    model, squares, values = whole(), 0.0, 0.0
    for (batch,) in batches():
        h = torch.tanh(model.a(model.pre(batch)))
        parts = [x @ w.T for x, w in zip(h.chunk(2, 1), model.b.weight.chunk(2, 1), strict=True)]
        _, error, value = lost(parts, "rotated(bits=4)")
        squares, values = squares + error / value, values + 1
    found = trained.places[1].errors["rotated(bits=4)"]
    assert math.isclose(found, math.sqrt(squares / values), rel_tol=1e-4)


@pytest.mark.slow
def test_sensitivities_of_outputs(ranks2, tmp_path):
    first, second = ranks2.run(calibrated, False)
    assert first == second
    (tmp_path / "c.json").write_text(first)
    (place,) = Calibration.read(tmp_path / "c.json").places
    assert place.loss is None
    assert math.isclose(place.sensitivity, expected("b", train=False), rel_tol=1e-3)


def test_codec_that_keeps_some_channels_is_a_choice(trained):
    for place in trained.places:
        specs = [each for each in place.errors if each.startswith("outlier")]
        assert [bool(codec(spec).channels.ranges) for spec in sorted(specs, key=len)] == [
            False,
            True,
        ]
        for spec in specs:
            assert 0.05 < place.errors[spec] < 0.2
            assert len(codec(spec).channels.kept) == math.ceil(WIDTH / 64)


# --- the policy ------------------------------------------------------------------------------


def under(text: str, budget: float) -> list[tuple[str, str]]:
    Path(text).parent.mkdir(exist_ok=True)
    policy = Calibration.read(text).policy(budget, exactly=True)
    before = len(commpass.plans())
    step = torch.compile(divided(), backend=commpass.backend(policy, inner="eager", strict=True))
    squared(step(*batches()[0])).backward()
    return sorted((s.module, s.codec) for plan in commpass.plans()[before:] for s in plan)


@pytest.mark.slow
def test_plans_have_the_chosen_codecs(ranks2, trained, tmp_path):
    trained.write(tmp_path / "c.json")
    alike = trained.solve(0.0).uniform("rotated(bits=6)")
    for budget in (0.0, alike[1]):
        found = trained.solve(budget)
        modules = [place.where[0].module for place in found.places]
        wanted = sorted(zip(modules, [each.codec for each in found.chosen], strict=True))
        assert ranks2.run(under, str(tmp_path / "c.json"), budget) == [wanted] * 2
    assert found.error <= alike[1]


def spread(rows: int = 64) -> list[tuple[Tensor]]:
    """Return batches with a row and a channel far above the others."""
    generator = torch.Generator().manual_seed(3)
    made = [torch.randn(rows, WIDTH, generator=generator) for _ in range(2)]
    for each in made:
        each[:, 3] *= 1e3
        each[5] *= 50
    return [(each,) for each in made]


def after_the_check(budget: float) -> tuple[list[str], list[str]]:
    """Train with a calibrated policy on the data that it was calibrated with. Return codecs and
    reasons of the plans that run at the end."""
    model = divided()
    found = commpass.calibrate(model, spread(), loss=lambda out, _: squared(out))
    before = len(commpass.plans())
    chosen = commpass.backend(found.policy(budget), profile="ethernet-0.01g", inner="aot_eager")
    step = torch.compile(model, backend=chosen)
    for _ in range(3):
        for (batch,) in spread():
            squared(step(batch)).backward()
    sites = [site for plan in commpass.plans()[before:] for site in plan]
    return [site.codec for site in sites], [site.reason for site in sites]


@pytest.mark.slow
@pytest.mark.parametrize("budget", [0.002, 0.02, 0.2])
def test_error_check_passes_on_the_calibrated_values(budget, ranks2):
    for codecs, reasons in ranks2.run(after_the_check, budget):
        assert len(codecs) == 2
        assert not any("real error" in each or "are lost" in each for each in reasons), reasons
        assert any(not codec(each).lossless for each in codecs if each != "none")


class Summed(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return funcol.all_reduce(super().forward(x), "sum", dist.group.WORLD)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Summed(64, 64), Summed(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) + self.right(x)


def sums_of_two() -> list[list[str]]:
    torch.manual_seed(dist.get_rank())
    found = commpass.calibrate(Two(), [torch.randn(64, 64)], train=False, codecs=CODECS)
    rules = found.policy(0.1).rules
    assert len({rule.codec for rule in rules}) == 1
    return [[where.module for where in place.where] for place in found.places]


@pytest.mark.slow
def test_places_that_simplify_merges_are_one(ranks2):
    both = ranks2.run(sums_of_two)
    assert both[0] == both[1]
    assert both[0] == [["left", "right"]]


class Noisy(nn.Module):
    """A model with dropout, and with statistics that each step changes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(0.3)
        self.inner = divided()

    def forward(self, x: Tensor) -> Tensor:
        return squared(self.inner(self.drop(self.norm(x))))


def as_it_was() -> tuple[float, bool, bool]:
    model = Noisy()
    state = {name: each.clone() for name, each in model.norm.state_dict().items()}
    for each in model.parameters():
        each.grad = torch.ones_like(each)
    kept = [each.grad for each in model.parameters()]
    torch.manual_seed(11)
    found = commpass.calibrate(model, batches(1), codecs=("rotated",), probes=["rotated"])
    same = all(torch.equal(value, state[name]) for name, value in model.norm.state_dict().items())
    grads = all(each.grad is old for each, old in zip(model.parameters(), kept, strict=True))
    return max(place.sensitivity for place in found.places), same, grads


@pytest.mark.every
def test_dropout_and_buffers_are_the_same_in_every_run(ranks2):
    for most, same, grads in ranks2.run(as_it_was):
        assert 0 < most < 3  # with another dropout mask the error would be a hundred times as large
        assert same
        assert grads


class Untidy(nn.Module):
    """It changes its input in place, replaces a buffer, and uses Python's random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = divided()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        return squared(self.inner(x.mul_(0.5)) * self.count)


def shaken(output: Tensor, *_: Tensor) -> Tensor:
    return output * (1 + random.random())


def left_behind() -> tuple[list[float], dict[str, bool]]:
    words = {"loss": shaken, "codecs": ("rotated",), "probes": ["rotated"]}
    model, some = Untidy(), batches(1)
    was, state = some[0][0].clone(), random.getstate()
    first = commpass.calibrate(model, some, parameters=[model.inner.pre.weight], **words)
    given = batches(1)[0][0].requires_grad_()
    words["parameters"] = list(model.parameters())
    second = commpass.calibrate(lambda x: squared(model.inner(x)), [(given,)], **words)
    same = {
        "the input": torch.equal(some[0][0], was),
        "its gradient": given.grad is None,
        "random numbers": random.getstate() == state,
        "gradients": all(each.grad is None for each in model.parameters()),
        "the buffer": bool(model.count == 0),
    }
    return [max(p.sensitivity for p in each.places) for each in (first, second)], same


def time_outs() -> tuple[set[str], set[str]]:
    """Return the time-outs of all process groups before and after a calibration."""
    before = {str(each) for each in of_groups()}
    model = divided()
    commpass.calibrate(model, batches(), loss=lambda out, _: squared(out), codecs=CODECS, timeout=9)
    return before, {str(each) for each in of_groups()}


def of_groups() -> Iterator[object]:
    for group in dist.distributed_c10d._world.pg_map:
        for device in group._device_types:
            yield group._get_backend(device).options._timeout


@pytest.mark.slow
def test_time_outs_of_groups_are_as_before(ranks2):
    """Also if one backend serves several devices, as gloo does CPUs and GPUs."""
    for before, after in ranks2.run(time_outs):
        assert before == after


@pytest.mark.every
def test_model_that_changes_things_finds_them_as_they_were(ranks2):
    for sensitivities, same in ranks2.run(left_behind):
        assert all(same.values()), same
        for each in sensitivities:
            # with other inputs or numbers the error would be a hundred times as large
            assert 0 < each < 3


def on_a_mesh(shape: tuple[int, ...]) -> list[float]:
    """All ranks have the same batch, and the same gradients, whatever the second dimension is."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    model = whole()
    parallelize_module(model, mesh["tp"], {"a": ColwiseParallel(), "b": RowwiseParallel()})
    found = commpass.calibrate(
        model, batches(1), loss=lambda y, *_: squared(y), codecs=("int4",), probes=("int4",)
    )
    return [place.sensitivity for place in found.places]


@pytest.mark.every
def test_parameters_on_several_ranks_count_once_however_they_are_held(ranks2, ranks4):
    alone, together = ranks2.run(on_a_mesh, (1, 2))[0], ranks4.run(on_a_mesh, (2, 2))[0]
    assert alone == pytest.approx(together, rel=1e-6)


# --- errors ----------------------------------------------------------------------------------


def refused(what: str) -> str:
    model, rows, more = divided(), batches(), {"loss": lambda out, _: squared(out)}
    mine = dist.get_rank() == 1
    if what == "nan" and mine:
        rows[1][0][3, 3] = math.nan
    if what == "batches" and mine:
        rows = rows[:1]
    if what == "alone":
        model = nn.Linear(WIDTH, 8)
    if what == "function":
        model = model.forward
    if what == "frozen":
        model.requires_grad_(False)
    if what == "detached":
        more = {"loss": lambda out, _: squared(out).detach()}
    try:
        commpass.calibrate(model, rows, codecs=CODECS, timeout=30, **more)
    except CalibrationError as error:
        return str(error)
    return "nothing was wrong"


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("nan", "batch 1: the loss is nan"),
        ("batches", "batches of each rank: [2, 1]"),
        ("alone", "no collective was found"),
        ("function", "say parameters="),
        ("frozen", "no parameter that needs a gradient"),
        ("detached", "calibrate inference"),
    ],
)
def test_all_ranks_refuse_alike(what, said, ranks2):
    for each in ranks2.run(refused, what):
        assert said in each


WRONG_HERE = {
    "codec": ({"codecs": ("int9",)}, "unknown codec 'int9'"),
    "probe": ({"probes": ("exponent",)}, "give one codec or several that lose something"),
    "policy": ({"policy": "/nowhere/policy.toml"}, "/nowhere/policy.toml"),
    "profile": ({"profile": "/nowhere/profile.toml"}, "/nowhere/profile.toml"),
    "timeout": ({"timeout": -1}, "timeout"),
}
OTHERS_HERE = {
    "codecs": ({"codecs": ("int4",)}, "codecs is ['int8'] on rank 0, and ['int4'] on rank 1"),
    "train": ({"train": False}, "train is True on rank 0, and False on rank 1"),
    "policies": ({"policy": "balanced"}, "policy is {'name': 'lossless'"),
    "profiles": ({"profile": "ethernet-1g"}, "profile is None on rank 0, and {'name': 'ether"),
}


def argument_of_one_rank(wrong: int, given: dict) -> str:
    arguments = {"codecs": ("int8",), "timeout": 20}
    arguments |= given if dist.get_rank() == wrong else {}
    start = time.monotonic()
    try:
        commpass.calibrate(divided(), batches(), loss=lambda out, _: squared(out), **arguments)
    except CommpassError as error:
        assert time.monotonic() - start < 15
        return str(error)
    return "nothing was wrong"


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [0, 1])
@pytest.mark.parametrize("what", WRONG_HERE)
def test_wrong_argument_of_one_rank_is_an_error_on_all(what, wrong, ranks2):
    given, said = WRONG_HERE[what]
    found = ranks2.run(argument_of_one_rank, wrong, given)
    assert said in found[wrong]
    assert f"rank {wrong} failed: " in found[1 - wrong]
    assert said in found[1 - wrong]


@pytest.mark.slow
@pytest.mark.parametrize("what", OTHERS_HERE)
def test_arguments_that_differ_between_ranks_are_refused_on_all(what, ranks2):
    given, said = OTHERS_HERE[what]
    for found in ranks2.run(argument_of_one_rank, 1, given):
        assert "ranks have different arguments: " + said in found


class Failing(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.calls = inner, 0

    @torch._dynamo.disable
    def count(self) -> None:
        self.calls += 1
        if dist.get_rank() == 1 and self.calls == 4:
            raise ValueError("the disk is full")

    def forward(self, x: Tensor) -> Tensor:
        self.count()
        return squared(self.inner(x))


def failing() -> str:
    """The process of the failing rank stays alive: the other one does not learn of it by its
    end."""
    model = Failing(divided())
    try:
        commpass.calibrate(model, batches(), codecs=CODECS, timeout=60)
    except (CalibrationError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was wrong"


@pytest.fixture
def own_ranks() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.stop()


@pytest.mark.every
def test_rank_that_fails_lets_the_others_go(own_ranks):
    waiting, failed = own_ranks.run(failing)
    assert failed == "ValueError: the disk is full"
    assert waiting == "CalibrationError: rank 1 failed: ValueError: the disk is full"


# --- places without a measured effect, and models without a loss -----------------------------


class Bare(nn.Module):
    """In backward, the sum before ``a`` reaches the input alone. The gradients of a summed output
    do not depend on it, and so not on the sum after ``b``."""

    def __init__(self) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        torch.manual_seed(5)
        self.a, self.b = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        parallelize_module(self, mesh, {"a": ColwiseParallel(), "b": RowwiseParallel()})

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


def bare(with_loss: bool) -> str:
    rows = [(batch.requires_grad_(),) for (batch,) in batches()]
    loss = (lambda out, _: squared(out)) if with_loss else None
    try:
        return commpass.calibrate(Bare(), rows, loss=loss, codecs=(*CODECS, "exponent")).to_json()
    except CalibrationError as error:
        return str(error)


class Gated(nn.Module):
    """A model whose sums change nothing for batches of zeros, as experts without tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.other = Bare(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x) * x.abs().max() + self.other(x + 1)


def gated() -> float:
    (first,), *others = batches()
    rows = [(first * 0,), (first,), *others]
    found = commpass.calibrate(Gated(), rows, loss=lambda out, _: squared(out), codecs=CODECS)
    return max(level.sensitivity for place in found.places for level in place.levels)


@pytest.mark.slow
def test_first_batch_may_be_one_that_no_error_changes(ranks2):
    assert min(ranks2.run(gated)) > 0


@pytest.mark.slow
def test_model_that_no_error_changes_is_refused(ranks2):
    for each in ranks2.run(bare, False):
        assert "no error at the 2 places changes the gradients of the parameters" in each
        assert "the sum of the model's output was used" in each
        assert "loss=" in each


@pytest.mark.slow
def test_place_that_reaches_no_parameter_gets_lossless_codecs(ranks2, tmp_path):
    first, second = ranks2.run(bare, True)
    assert first == second
    found = read(first, tmp_path / "c.json")
    assert [place.without_effect for place in found.places] == [True, False]
    (remark,) = found.remarks
    assert remark.startswith("only lossless codecs: all_reduce of a (backward, tp): no error there")
    rules = {rule.module: rule for rule in found.policy(0.1).rules}
    assert all(codec(spec).lossless for spec in rules["a"].codec)
    assert not all(codec(spec).lossless for spec in rules["b"].codec)


def summed() -> tuple[str, ...]:
    words = {"codecs": ("rotated",), "probes": ["rotated"]}
    alone = commpass.calibrate(divided(), batches(1), **words)
    with_loss = commpass.calibrate(Noisy(), batches(1), **words)
    return *alone.remarks, "", *with_loss.remarks


@pytest.mark.slow
def test_sum_in_place_of_a_loss_is_told(ranks2):
    for each in ranks2.run(summed):
        remark, rest = each
        assert remark.startswith("there is no loss, so the sum of the model's output was used")
        assert rest == ""


# --- progress --------------------------------------------------------------------------------


def progress_of(folder: str, terminal: bool, text: str) -> str:
    """Return what ``commpass calibrate`` writes to stderr on this rank."""
    from commpass.report.calibrate import run

    path = Path(folder) / f"model_{dist.get_rank()}.py"
    path.write_text(text)
    codecs, error = ("rotated",), io.StringIO()
    options = {"codecs": codecs, "policy": "lossless", "profile": None, "cheapest": "bytes"}
    options |= {"source": None, "measurements": None, "train": True, "plot": None, "json": False}
    environment = {"FORCE_COLOR": "1"} if terminal else {}
    with patch.dict(os.environ, environment), contextlib.redirect_stderr(error):
        run(f"{path}:build", "tp=2", 0.01, Path(folder) / "p.toml", **options)
    return error.getvalue()


@pytest.mark.slow
def test_runs_are_counted_on_a_terminal_of_the_first_rank(ranks2, tmp_path):
    first, second = ranks2.run(progress_of, str(tmp_path), True, FILE)
    assert "finds the collectives" in first
    assert "run 14 of 14" in first  # 2 batches, each once, and for 2 places and 3 codecs
    assert second == ""


@pytest.mark.slow
def test_elsewhere_no_runs_are_counted(ranks2, tmp_path):
    assert ranks2.run(progress_of, str(tmp_path), False, FILE) == ["", ""]


@pytest.mark.slow
def test_example_of_the_page_has_a_loss_and_no_place_without_effect(ranks2, tmp_path):
    text = blocks_of("docs/calibration.md", "python")[0][1]
    assert ranks2.run(progress_of, str(tmp_path), False, text) == ["", ""]
    rules = Policy.from_toml(tmp_path / "p.toml").rules
    assert {rule.module for rule in rules} == {"1", "3"}


# --- the command line ------------------------------------------------------------------------

FILE = f"""
import sys
import time
sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1])]!r}
from test_calibrate import batches, divided, squared

def build(mesh):
    return divided(), batches(), lambda out, _: squared(out)

def wrong(mesh):
    return divided()
"""


def launch(*wanted: str) -> subprocess.CompletedProcess:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    return subprocess.run(
        [*torchrun, "-m", "commpass", "calibrate", *wanted],
        check=False,
        capture_output=True,
        text=True,
        timeout=180,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"},
    )


@pytest.mark.every
def test_command_line_gives_the_same(tmp_path, trained):
    (tmp_path / "model.py").write_text(FILE)
    out, data = tmp_path / "p.toml", tmp_path / "c.json"
    codecs = [word for name in CODECS for word in ("--codec", name)]
    done = launch(
        *(f"{tmp_path}/model.py:build", "--mesh", "tp=2", "--max-error", "0.01", "-o", str(out)),
        *("--measurements", str(data), *codecs),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("rotated(bits=4) everywhere") == 1  # only rank 0 prints it
    found = Calibration.read(data)
    assert found.digest() == trained.digest()
    assert Policy.from_toml(out) == found.policy(0.01, name="p")


@pytest.mark.every
@pytest.mark.parametrize(
    ("function", "mesh", "said"),
    [("wrong", "tp=2", "must give a model, batches"), ("build", "tp=4", "a mesh of 4 ranks")],
)
def test_requirements_of_a_file(function, mesh, said, tmp_path):
    (tmp_path / "model.py").write_text(FILE)
    file = f"{tmp_path}/model.py:{function}"
    done = launch(file, "--mesh", mesh, "--max-error", "0.01", "-o", str(tmp_path / "p.toml"))
    assert done.returncode != 0
    assert said in done.stderr


# --- bits of lossless codecs -----------------------------------------------------------------


class Narrow(nn.Module):
    """Sends values of one exponent on the left, and of 13 on the right."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Scaled(0.0), Scaled(6.0)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(x), self.right(x)


class Scaled(nn.Module):
    """An all_reduce of values whose exponents span a given number of powers of two."""

    def __init__(self, spread: float) -> None:
        super().__init__()
        self.spread = spread

    def forward(self, x: Tensor) -> Tensor:
        sent = (1 + x.abs() % 1) * torch.exp2(torch.round(self.spread * torch.sin(9 * x)))
        return funcol.all_reduce(sent.bfloat16(), "sum", dist.group.WORLD)


def uniform_values() -> Tensor:
    return torch.randn(64, 64, generator=torch.Generator().manual_seed(dist.get_rank()))


def bits_of_both(codecs: tuple[str, ...]) -> tuple[str, dict[str, float]]:
    """Return the calibration, and by module the bits per value in the wire of this rank's
    values."""
    found = commpass.calibrate(Narrow(), [uniform_values()], train=False, codecs=codecs)
    own = {}
    for name, layer in (("left", Scaled(0.0)), ("right", Scaled(6.0))):
        x = uniform_values()
        sent = (1 + x.abs() % 1) * torch.exp2(torch.round(layer.spread * torch.sin(9 * x)))
        wire = codec("exponent").encode(sent.bfloat16())
        own[name] = 8 * wire.payload.numel() / x.numel()
    return found.to_json(), own


def exponents(place) -> list[str]:
    return [each for each in place.errors if each.startswith("exponent")]


def read(text: str, path: Path) -> Calibration:
    path.write_text(text)
    return Calibration.read(path)


@pytest.mark.slow
def test_bits_of_a_lossless_codec_are_those_of_the_values_of_all_ranks(ranks2, tmp_path):
    (first, own), (second, others) = ranks2.run(bits_of_both, ("exponent",))
    assert first == second
    found = read(first, tmp_path / "c.json")
    assert [place.where[0].module for place in found.places] == ["left", "right"]
    measured = {}
    for place in found.places:
        name = place.where[0].module
        (spec,) = exponents(place)
        assert place.errors == {spec: 0.0}
        assert place.levels == ()
        measured[name] = codec(spec).bits
        mean = (own[name] + others[name]) / 2
        assert mean <= measured[name] < mean + 0.01
    assert measured["left"] < 10.5 < 11.5 < measured["right"] < 15


def sizes_under(text: str, budget: float) -> dict[str, tuple[str, int]]:
    """Return by module the codec and the bytes of a rank in a plan, under a calibration's policy
    that was written as TOML."""
    path = Path(text).with_suffix(".toml")
    if dist.get_rank() == 0:
        path.write_text(Calibration.read(text).policy(budget, exactly=True).to_toml())
    dist.barrier()
    before = len(commpass.plans())
    model = torch.compile(Narrow(), backend=commpass.backend(path, inner="eager", strict=True))
    x = uniform_values()
    exact = Narrow()(x)
    got = model(x)
    assert all(torch.equal(a, b) for a, b in zip(got, exact, strict=True))
    return {s.module: (s.codec, s.wire_bytes) for p in commpass.plans()[before:] for s in p}


@pytest.mark.slow
def test_policies_have_the_measured_bits_of_each_place(ranks2, tmp_path):
    (text, _), _ = ranks2.run(bits_of_both, ("exponent",))
    found = read(text, tmp_path / "c.json")
    solved, policy = found.solve(0.0), found.policy(0.0)
    assert [each.codec for each in solved.chosen] == [exponents(p)[0] for p in found.places]
    (tmp_path / "p.toml").write_text(policy.to_toml())
    rules = {rule.module: rule.codec for rule in Policy.from_toml(tmp_path / "p.toml").rules}
    assert rules == {p.where[0].module: tuple(exponents(p)) for p in found.places}
    left, right = (each.sent_bytes for each in solved.chosen)
    assert left < right  # a two-shot sends as many values
    assert solved.uniform("exponent") == (left + right, 0.0)


@pytest.mark.every
def test_plans_take_the_measured_bits_of_each_place(ranks2, tmp_path):
    (text, _), _ = ranks2.run(bits_of_both, ("exponent",))
    found = read(text, tmp_path / "c.json")
    plans, others = ranks2.run(sizes_under, str(tmp_path / "c.json"), 0.0)
    assert plans == others
    assert {name: spec for name, (spec, _) in plans.items()} == {
        place.where[0].module: exponents(place)[0] for place in found.places
    }
    for spec, nbytes in plans.values():  # all values are sent once, in rows padded to 16 bytes
        assert abs(nbytes - codec(spec).bits * 64 * 64 / 8) <= 32
    gaussian = codec("exponent").expected_bytes(64 * 64, torch.bfloat16)
    assert plans["left"][1] < gaussian < plans["right"][1]


@pytest.mark.slow
def test_lossless_and_lossy_codecs_are_measured_together(ranks2, tmp_path):
    (text, _), _ = ranks2.run(bits_of_both, ("exponent", "rotated"))
    for place in read(text, tmp_path / "c.json").places:
        (spec,) = exponents(place)
        assert place.errors[spec] == 0.0 < place.errors["rotated"]
        assert len(place.levels) == len(PROBES)
