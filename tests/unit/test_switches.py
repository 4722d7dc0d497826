"""The switches of two papers, as the cost model's decisions on the same information.

The links have only alpha and beta, and coding takes no time. The formulas are the papers'.
"""

from __future__ import annotations

import pytest
import torch
from deciding import decide
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiers import examples

from commpass import Policy
from commpass.codecs import codec
from commpass.costmodel import KernelRate, Kernels, Link, Profile, Region
from commpass.plan import NONE, Site

tried = settings(max_examples=examples(40, 120), deadline=None)
FREE = Kernels(launch_us=0.0, other=KernelRate(0, 0))


def site(kind: str, nbytes: int, ranks: int, dtype: str = "bfloat16") -> Site:
    numel = nbytes // (2 if dtype == "bfloat16" else 4)
    return Site(
        name="s",
        kind=kind,
        group="17",
        group_size=ranks,
        reduce_op="sum",
        dtype=dtype,
        shape=(numel,),
        bytes=nbytes,
        group_label="dp",
        direction="backward",
        stateless="",  # error feedback has a place
    )


def coded(of: Site, spec: str, algorithm: str, link: Link) -> tuple[bool, float]:
    """Return whether it is coded, and the bytes that it would send."""
    policy = Policy(codecs=spec, algorithms=algorithm, max_error=None)
    profile = Profile("two lines", link, kernels=FREE, margin=0.0)
    (found,) = decide([of], policy, profile)
    return found.codec != NONE, found.predicted_us


times = st.floats(1, 500)
rates = st.floats(0.5, 200)


@tried
@given(times, rates, times, rates, st.integers(10, 24), st.sampled_from([2, 4, 8, 16]))
@example(1.0, 0.5, 1.0, 1.0, 10, 16)  # shards of half a chunk
def test_zipccl_switches_back_to_the_plain_reduce_scatter(a1, b1, a2, b2, power, ranks):
    """ZipCCL, section 4: a reduce_scatter of d bytes takes ``alpha + beta d``.

    A compressed all_to_all takes ``alpha' + beta' e d``, where e is the share of bytes that are
    left. The faster one is used. Ours sends the part of known size first, so alpha' counts twice,
    and pads each shard to whole chunks of 1,024 values.
    """
    nbytes = 2**power * 16
    measured = {"reduce_scatter": (Region(0, a1, b1),), "all_to_all": (Region(0, a2, b2),)}
    done, _ = coded(
        site("reduce_scatter", nbytes, ranks), "exponent", "direct", Link(1, 1, measured=measured)
    )
    part = (ranks - 1) / ranks
    padded = max(nbytes // 2 // ranks, 1024)  # powers of two
    left = ranks * codec("exponent").expected_bytes(padded, torch.bfloat16)
    plain = a1 * (ranks - 1) + part * nbytes / (b1 * 1e3)
    compressed = 2 * a2 * (ranks - 1) + part * left / (b2 * 1e3)
    if abs(plain - compressed) > 0.02 * plain:
        assert done == (compressed < plain)


@tried
@given(
    times,
    rates,
    st.integers(16, 26),
    st.sampled_from([2, 4, 8, 16, 64, 256]),
    st.sampled_from([0.001, 0.01, 0.1]),
)
def test_ssfusion_sends_dense_where_its_all_gather_would_take_longer(
    alpha, beta, power, ranks, density
):
    """SSFusion, section 2: a dense all_reduce of D bytes takes
    ``2 (P - 1) alpha + 2 (P - 1) / P D beta``.

    An all_gather of a part s takes ``(P - 1) (alpha + s beta)``. It grows with P, and above some P
    the dense one is faster.
    """
    nbytes = 2**power
    of = site("all_reduce", nbytes, ranks, "float32")
    spec = f"topk(density={density})"
    done, _ = coded(of, spec, "sparse", Link(alpha, beta))
    part = codec(spec).expected_bytes(nbytes // 4, torch.float32)
    dense = 2 * (ranks - 1) * alpha + 2 * (ranks - 1) / ranks * nbytes / (beta * 1e3)
    sparse = (ranks - 1) * (alpha + part / (beta * 1e3))
    if abs(dense - sparse) > 0.02 * dense:
        assert done == (sparse < dense)


@pytest.mark.parametrize("ranks", [8, 64])
def test_growth_from_8_to_64_ranks(ranks):
    """If only bytes take time, an all_gather grows 9 times from 8 to 64 ranks, an all_reduce 1.125
    times (SSFusion, section 2)."""
    link, nbytes = Link(0, 10), 2**20
    assert link.time_us("all_gather", nbytes, ranks) == pytest.approx((ranks - 1) * nbytes / 1e4)
    whole = 2 * (ranks - 1) / ranks * nbytes / 1e4
    assert link.time_us("all_reduce", nbytes, ranks) == pytest.approx(whole)
