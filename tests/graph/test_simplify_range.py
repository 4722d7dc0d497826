"""simplify and the range of a dtype: it does not change where Inf, NaN and zero appear."""

from __future__ import annotations

import pytest
import torch
from everywhere import everywhere, same
from functional_ops import ag, ar, rs
from graphs import ops

wait = ops.wait_tensor


HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32
LARGE = [[40000.0, 60000.0, 1.0, 1.0], [-40000.0, 1.0, 60000.0, 1.0]]
"""The values of two ranks: their sums are finite, but twice a value, or the sum of two of them, is
not."""
SMALL = [[2.0**-13] * 4, [2.0**-13] * 4]
"""Each times 2^-12 is 0 in float16, and their sum is not."""
IN_HALF = {
    "a sum of sums": lambda x: ar(x * 1) + ar(x.neg()),
    "a difference": lambda x: ar(x * 1) - ar(x.neg()),
    "scattered sums": lambda x: rs(x * 1) + rs(x.neg()),
    "a scale that is small": lambda x: ar(x * 1) * 2.0**-12 + ar(x.neg()) * 2.0**-12,
    "a scale that is large": lambda x: ar(x * 1) * 4.0 + ar(x.neg()),
    "means": lambda x: ar(x * 1, "avg") + ar(x * 2, "avg"),
}


@pytest.mark.few(9)
@pytest.mark.parametrize("values", [LARGE, SMALL])
@pytest.mark.parametrize("name", IN_HALF)
def test_sums_of_float16_are_not_merged(name, values):
    inputs = [[torch.tensor(mine, dtype=HALF)] for mine in values]
    ranks = everywhere(lambda rank: IN_HALF[name], inputs)
    assert ranks.rules == []
    assert same(ranks)


@pytest.mark.rest_slow(1)
@pytest.mark.few(3)
@pytest.mark.parametrize("dtype", [BFLOAT, FLOAT, torch.float64])
@pytest.mark.parametrize("name", IN_HALF)
def test_sums_in_dtypes_of_a_wide_range_are_merged(name, dtype):
    for values in (LARGE, SMALL):
        inputs = [[torch.tensor(mine, dtype=dtype)] for mine in values]
        ranks = everywhere(lambda rank: IN_HALF[name], inputs)
        assert ranks.rules == ["sum of sums"]
        for a, b in ranks.pairs:
            bound = 8 * torch.finfo(dtype).eps * max(abs(x) for mine in values for x in mine)
            assert (a - b).abs().max() <= 4 * bound
            assert b.isfinite().all()


@pytest.mark.few(6)
@pytest.mark.parametrize("scale", [2.0**40, 2.0**-40, 0.0, float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", [BFLOAT, FLOAT])
def test_scale_that_moves_values_far_is_not_moved(scale, dtype):
    function = lambda x: ar(x * 1) * scale + ar(x.sin())  # noqa: E731
    values = [
        [torch.tensor([2.0**100, 1.0], dtype=dtype)],
        [torch.tensor([-(2.0**100), 1.0], dtype=dtype)],
    ]
    ranks = everywhere(lambda rank: function, values)
    assert ranks.rules == []
    assert same(ranks)
    added = lambda x: torch.add(ar(x * 1), ar(x.sin()), alpha=scale)  # noqa: E731
    assert everywhere(lambda rank: added, values).rules == []


def test_scales_of_a_chain_count_together():
    near = lambda x: ar(x * 1) * 2.0**20 / 2.0**10 + ar(x.sin())  # noqa: E731
    far = lambda x: ar(x * 1) * 2.0**20 / 2.0**-20 + ar(x.sin())  # noqa: E731
    values = [[torch.tensor([1.5, 2.0])]] * 2
    assert everywhere(lambda rank: near, values).rules == ["sum of sums"]
    assert everywhere(lambda rank: far, values).rules == []


def test_sums_of_float16_that_are_made_in_float32_may_change():
    """The addends are the same numbers, and the sum is as wide as before."""
    generator = torch.Generator().manual_seed(0)
    values = [[torch.randn(4096, generator=generator).mul(30000).half()] for _ in range(2)]
    ranks = everywhere(lambda rank: lambda x: ar((x * 1).float()) + 1, values)
    assert ranks.rules == ["widen then reduce"]
    assert same(ranks)  # of two addends


LAID_OUT = {
    "turned": lambda x: rs(x.float().t()) + 1,
    "turned before and behind": lambda x: rs(x.t().float().t()) + 1,
    "turned, for all": lambda x: ar((x * 1).float().t()) + 1,
    "scaled": lambda x: rs(x.float() * 0.3) + 1,
    "scaled and turned": lambda x: rs((x.float() / 3.0).t() * 0.3) + 1,
    "scaled, a mean": lambda x: rs(x.float() * 0.3, "avg") + 1,
}


@pytest.mark.parametrize("name", LAID_OUT)
def test_widened_values_are_added_where_they_belong(name):
    """Operators between the cast and the sum are applied to the narrow values, or to each row that
    arrives."""
    generator = torch.Generator().manual_seed(0)
    for shape in ((8, 4), (4, 8), (8, 8)):
        values = [[torch.randn(shape, generator=generator).bfloat16()] for _ in range(2)]
        ranks = everywhere(lambda rank: LAID_OUT[name], values)
        assert ranks.rules == ["widen then reduce"]
        assert same(ranks)  # of two addends


def test_float16_is_scaled_and_narrowed_in_the_same_order_before_a_gather():
    values = [[torch.tensor([2.0**-13, 40000.0, float("inf"), 1e-3])] for _ in range(2)]
    function = lambda x: (ag(x * 1) * 2.0**-12 * 3).half() * 2  # noqa: E731
    ranks = everywhere(lambda rank: function, values)
    assert ranks.rules == ["gather then narrow"]
    assert same(ranks)


def test_parts_of_a_sum_of_float16_are_the_same_sum():
    values = [[torch.tensor(mine, dtype=HALF)] for mine in LARGE]
    ranks = everywhere(lambda rank: lambda x: ar(x * 1)[2 * rank : 2 * rank + 2] * 2, values)
    assert ranks.rules == ["scattered"]
    assert same(ranks)
