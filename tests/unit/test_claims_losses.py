"""``benchmarks.claims``: the claims on trainings, without training."""

from __future__ import annotations

import math
from statistics import stdev

import pytest
import torch

import benchmarks.claims.experiments  # noqa: F401 (finds the folders of tests and examples)
from benchmarks.claims.experiments.english import english
from benchmarks.claims.experiments.losses import (
    mean_percent,
    percents,
    run_of,
    spread_percent,
)
from benchmarks.claims.experiments.ssfusion_training import buffers_of, not_sent
from benchmarks.claims.sizes import SMALL, small_percents, tensor_sizes
from benchmarks.claims.suites.losses import Trained
from commpass.codecs import codec

TRAINED = Trained("some", "forms", "off", "small", ("more",))


def runs(*losses: float | None) -> list[dict]:
    return [{"seed": seed, "validation": loss} for seed, loss in enumerate(losses)]


def found(**forms: list[dict]) -> dict:
    return {"some": stored(**forms)}


def stored(steps: int = 2, **forms: list[dict]) -> dict:
    return {
        "setup": {"steps": steps},
        "forms": {name: {"runs": each} for name, each in forms.items()},
    }


def test_run_has_means_of_tenths_and_what_diverged_is_none():
    run = run_of(3, [float(n) for n in range(20)], 2.0, math.nan)
    assert run["losses"] == [0.5 + 2 * n for n in range(10)]
    assert (run["seed"], run["validation"], run["test"]) == (3, 2.0, None)
    assert run_of(0, [1.0, math.inf], 2.0)["losses"] == [1.0, None]


def test_losses_are_compared_seed_by_seed():
    base, form = runs(2.0, 4.0), runs(2.1, 4.4)
    assert percents(form, base) == pytest.approx([5.0, 10.0])
    assert mean_percent(form, base) == pytest.approx(7.5)
    assert spread_percent(form, base) == pytest.approx(stdev([5.0, 10.0]))
    assert percents(form[1:], base) == pytest.approx([10.0])
    assert spread_percent(form[1:], base) is None


def test_losses_that_diverged_are_infinitely_far():
    base, form = runs(2.0, 4.0), runs(2.1, None)
    assert mean_percent(form, base) == math.inf
    assert spread_percent(form, base) is None


def test_order_of_losses_holds_if_it_does_with_each_seed():
    seen = found(off=runs(2.0, 4.0), bad=runs(2.1, 4.1), mixed=runs(2.1, 3.9))
    assert TRAINED.is_above(seen, "bad", "off")
    assert not TRAINED.is_above(seen, "mixed", "off")
    assert not TRAINED.is_above(seen, "off", "bad")
    assert TRAINED.percent(seen, "bad") == pytest.approx((5 + 2.5) / 2)


def test_claim_of_a_loss_has_its_numbers_and_its_scale():
    seen = found(off=runs(2.0, 4.0), bad=runs(2.1, 4.1))
    claim = TRAINED.loss("P", "table 1", "bad", 3.0, "bad", note="on purpose")
    assert claim.measure(seen) == pytest.approx(3.75)
    assert claim.spread(seen) == pytest.approx(stdev([5.0, 2.5]))
    assert (claim.kind, claim.experiments) == ("loss", ("some",))
    assert claim.note == "on purpose; small"
    over = TRAINED.loss("P", "w", "t", 0.0, "bad", base="bad")
    assert over.measure(seen) == 0.0


def test_form_of_another_experiment_has_the_setup_of_the_base():
    seen = found(off=runs(2.0)) | {"more": stored(part=runs(2.2))}
    assert TRAINED.percent(seen, "part") == pytest.approx(10.0)
    with pytest.raises(RuntimeError, match="more has not the setup of some"):
        TRAINED.percent(seen | {"more": stored(3, part=runs(2.2))}, "part")
    with pytest.raises(KeyError):
        TRAINED.percent(seen | {"more": None}, "part")
    claim = TRAINED.loss("P", "w", "t", 9.9, "part", needs="more")
    assert claim.experiments == ("some", "more")


def test_english_is_divided_into_parts_without_a_common_topic():
    parts = [bytes(part.numpy()) for part in vars(english()).values()]
    train, validation, test = parts
    assert len(train) > 5 * len(validation) > 0 < len(test)
    paragraphs = [{each for each in part.split(b"\n\n") if len(each) > 400} for part in parts]
    assert all(paragraphs)
    assert not paragraphs[1] & paragraphs[2]


def test_tensors_are_missing_where_a_buffer_is_selected_from_as_a_whole():
    large, small = torch.arange(1.0, 101), torch.full((100,), 0.5)
    row, coder = torch.cat([large, small, small])[None], codec("topk", density=0.1)
    assert not_sent(coder.encode_rows(row), coder, [100, 100, 100]) == 2
    assert not_sent(coder.encode_rows(row), coder, [90, 10, 200]) == 1
    assert not_sent(coder.encode_rows(row), coder, [300]) == 0


@pytest.mark.parametrize(("degree", "lengths"), [(0.0, [1, 1, 1, 1]), (0.5, [2, 1, 1]), (1.0, [4])])
def test_fused_are_the_last_tensors(degree, lengths):
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 4))
    made = buffers_of(model, degree)
    assert list(map(len, made)) == lengths
    flat = [each for some in made for each in some]
    assert all(a is b for a, b in zip(flat, reversed(list(model.parameters())), strict=True))


@pytest.mark.slow
def test_small_tensors_are_counted():
    sizes = tensor_sizes("GPT2-large")
    assert (len(sizes), sum(size < SMALL for size in sizes)) == (2 + 12 * 36 + 2, 2 + 8 * 36)
    number, size = small_percents("GPT2-large")
    assert number == pytest.approx(100 * 290 / 436)
    # Everything in a layer except its four matrices, and the last norm.
    assert size == pytest.approx(100 * (36 * 13 * 1280 + 2 * 1280) / sum(sizes))
