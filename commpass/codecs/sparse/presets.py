"""Sparse codecs by name: each preset sets a selector."""

from __future__ import annotations

from fractions import Fraction

from commpass.codecs.codec import Codec
from commpass.codecs.preset import Preset
from commpass.codecs.sparse.codec import SparseCodec
from commpass.codecs.sparse.indices import index_code
from commpass.codecs.sparse.select import (
    Dgc,
    GaussianK,
    RandomK,
    RedSync,
    Selector,
    Sidco,
    TopK,
    density_of,
)
from commpass.codecs.wrappers.inner import Resolve, inner_codec
from commpass.errors import PolicyError


def topk(
    resolve: Resolve,
    spec: str,
    *,
    density: float = 0.01,
    values: str = "raw",
    indices: str = "least",
) -> Codec:
    """The ``ceil(density * n)`` entries of largest magnitude, exactly. The caller handles error
    feedback."""
    return _sparse(resolve, spec, TopK(), density, values, indices)


def randomk(
    resolve: Resolve,
    spec: str,
    *,
    density: float = 0.01,
    values: str = "raw",
    indices: str = "least",
    seed: int = 0,
) -> Codec:
    """Random entries, unscaled: unbiased only with error feedback. For comparison."""
    if not 0 <= seed < 2**32:
        raise PolicyError(f"seed={seed}: must be from 0 to 4294967295")
    return _sparse(resolve, spec, RandomK(seed), density, values, indices)


def dgc(
    resolve: Resolve,
    spec: str,
    *,
    density: float = 0.01,
    values: str = "raw",
    indices: str = "least",
) -> Codec:
    """Entries above the threshold of a 1 % sample (Deep Gradient Compression)."""
    return _sparse(resolve, spec, Dgc(), density, values, indices)


def gaussiank(
    resolve: Resolve,
    spec: str,
    *,
    density: float = 0.01,
    values: str = "raw",
    indices: str = "least",
) -> Codec:
    """Entries above the threshold for a Gaussian."""
    return _sparse(resolve, spec, GaussianK(), density, values, indices)


def redsync(
    resolve: Resolve,
    spec: str,
    *,
    density: float = 0.01,
    values: str = "raw",
    indices: str = "least",
) -> Codec:
    """Entries above a threshold bisected between mean and maximum."""
    return _sparse(resolve, spec, RedSync(), density, values, indices)


def sidco(
    resolve: Resolve,
    spec: str,
    *,
    density: float = 0.01,
    values: str = "raw",
    indices: str = "least",
) -> Codec:
    """Entries above the threshold for an exponential distribution, in stages."""
    return _sparse(resolve, spec, Sidco(), density, values, indices)


def _sparse(
    resolve: Resolve, spec: str, selector: Selector, density: float, values: str, indices: str
) -> Codec:
    chosen = density_of(density)
    inner = inner_codec(resolve, "values", values)
    index = index_code(Fraction(chosen.numerator, chosen.denominator), indices)
    return SparseCodec(spec, selector, chosen, inner, index)


PRESETS = tuple(
    Preset(build.__name__, build, purpose, (build.__name__,), has_inner=True)
    for build, purpose in (
        (
            topk,
            "the largest values alone, exactly, with error feedback: gradients of data parallelism",
        ),
        (randomk, "values chosen at random, with error feedback: for comparison"),
        (dgc, "about the largest values, by a sampled threshold (Deep Gradient Compression)"),
        (gaussiank, "about the largest values, by the threshold of a Gaussian (Gaussian-k)"),
        (redsync, "about the largest values, by a threshold that is bisected (RedSync)"),
        (sidco, "about the largest values, by a threshold fitted in stages (SIDCo)"),
    )
)
