"""``benchmarks.claims.experiments``: the numbers derived from the rows, and the models."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.claims.experiments import equarx_forms, lowbit_perplexity, text, zipccl_bits
from benchmarks.claims.experiments.coded import coded_sites
from benchmarks.claims.experiments.launch import launched
from benchmarks.claims.experiments.turns import PLAIN
from benchmarks.claims.experiments.zipccl_late import LATE_RANK, RANKS, ratio, splits


def row(name: str, kib: int, ms: float, gbit: float | None = 1.0) -> dict:
    return {"name": name, "kib": kib, "gbit": gbit, "ms": [ms, ms, ms], "mse": ms / 100}


# --- EQuARX ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("times", "mib"),
    [
        ({1024: 0.5, 2048: 0.5, 4096: 0.5}, 1.0),
        ({1024: 0.5, 2048: 2.0, 4096: 0.5}, 4.0),
        ({1024: 0.5, 2048: 0.5, 4096: 2.0}, None),
    ],
)
def test_crossover_is_where_all_larger_sizes_gain(times, mib):
    rows = [row(PLAIN, kib, 1.0) for kib in times] + [row("ring", k, t) for k, t in times.items()]
    assert equarx_forms.crossover_mib(rows, "ring", 1.0) == mib
    assert equarx_forms.gain(rows, "ring", 1024, 1.0) == 2.0


def test_times_of_another_link_are_not_taken():
    rows = [row("ring", 1024, 1.0, None), row("ring", 1024, 3.0)]
    assert equarx_forms.ms(rows, "ring", 1024, 1.0) == 3.0
    with pytest.raises(KeyError):
        equarx_forms.ms(rows, "ring", 2048, 1.0)


# --- ZipCCL ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("even", [True, False])
def test_splits_are_the_same_in_both_directions(even):
    by_rank = [splits(rank, 8, even) for rank in range(RANKS)]
    assert by_rank == [list(column) for column in zip(*by_rank, strict=True)]
    assert (sum(by_rank[LATE_RANK]) < sum(by_rank[0])) != even


def test_ratio_is_of_rows_of_one_lateness():
    rows = [
        {"name": name, "even": True, "late_ms": late, "ms": [0.0, ms, 9.0]}
        for late, name, ms in ((0, "a", 1.0), (0, "b", 1.0), (50, "a", 3.0), (50, "b", 2.0))
    ]
    assert ratio(rows, "a", "b", 50, True) == 1.5


def test_bits_of_a_gaussian_are_those_of_its_exponents():
    x = torch.randn(1 << 14, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = zipccl_bits.bits_of(x)
    assert found["entropy"] == pytest.approx(8 + 2.55, abs=0.02)
    assert found["one window"] == pytest.approx(11.2, abs=0.05)
    assert found["top share"] == pytest.approx(0.975, abs=0.005)
    assert found["window share"] <= found["top share"]


def test_window_of_another_size_moves_with_it_and_misses_zeros():
    x = torch.randn(1 << 14, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert zipccl_bits.one_window_bits(x * 2.0**-20) == zipccl_bits.one_window_bits(x)
    half = torch.cat([x, torch.zeros_like(x)])
    assert zipccl_bits.one_window_bits(half) >= 11 + 8 / 2


# --- low-bit --------------------------------------------------------------------------------------


def test_planted_model_computes_the_same_bits():
    torch.manual_seed(0)
    plain = text.transformer(1, lowbit_perplexity.WIDTH)
    planted = text.transformer(1, lowbit_perplexity.WIDTH)
    planted.load_state_dict(plain.state_dict())
    planted = lowbit_perplexity.plant(planted)
    batch = next(text.batches(text.texts()[0], 1, 0, size=2))
    assert torch.equal(plain(batch), planted(batch))
    seen = {}
    for name, model in (("plain", plain), ("planted", planted)):
        model.blocks[0].mlp.register_forward_hook(
            lambda _, __, out, name=name: seen.update({name: out})
        )
        model(batch)
    assert torch.equal(seen["planted"], seen["plain"] * lowbit_perplexity.factors())
    assert not torch.equal(seen["planted"], seen["plain"])


def test_cells_have_no_random_choice_of_nothing():
    found = lowbit_perplexity.cells((4,), lowbit_perplexity.SHARES, (0,))
    assert len(set(found)) == len(found) == 14
    assert ("random", 0.0, 4, 0) not in found


def test_percent_is_that_of_perplexity_without_by_seed():
    part = {
        "perplexity": 4.0,
        "rows": [
            {"how": "selected", "share": 0.0, "bits": 4, "seed": seed, "perplexity": p}
            for seed, p in enumerate((4.4, 4.6))
        ],
    }
    assert lowbit_perplexity.loss_percent(part, "random", 0.0, 4) == pytest.approx([10.0, 15.0])
    assert lowbit_perplexity.mean_percent(part, "selected", 0.0, 4) == pytest.approx(12.5)
    assert lowbit_perplexity.spread_percent(part, "selected", 0.0, 4) == pytest.approx(
        math.sqrt(12.5)
    )
    with pytest.raises(KeyError):
        lowbit_perplexity.loss_percent(part, "dynamic", 0.0, 4)


# --- all ------------------------------------------------------------------------------------------


def test_text_is_english_and_parts_do_not_overlap():
    train, held_out = text.texts()
    assert len(train) > 8 * len(held_out) > 100_000
    assert b" the " in train.numpy().tobytes()


def test_plans_that_are_not_as_asked_are_refused():
    with pytest.raises(RuntimeError, match="0 sites are coded, not 1"):
        coded_sites([], ["int8"], 1)


@pytest.mark.every
def test_ranks_that_fail_say_why():
    with pytest.raises(RuntimeError, match="no_such_module"):
        launched("benchmarks.claims.experiments.no_such_module", 1, {})
