"""Sparse codecs by name: each preset sets a selector."""

from __future__ import annotations

from collections.abc import Callable
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


def _sparse(
    resolve: Resolve, spec: str, selector: Selector, density: float, values: str, indices: str
) -> Codec:
    chosen = density_of(density)
    inner = inner_codec(resolve, "values", values)
    index = index_code(Fraction(chosen.numerator, chosen.denominator), indices)
    return SparseCodec(spec, selector, chosen, inner, index)


def _selecting(name: str, selector: Selector, doc: str) -> Callable[..., Codec]:
    def build(
        resolve: Resolve,
        spec: str,
        *,
        density: float = 0.01,
        values: str = "raw",
        indices: str = "least",
    ) -> Codec:
        return _sparse(resolve, spec, selector, density, values, indices)

    build.__name__, build.__doc__ = name, doc
    return build


topk = _selecting(
    "topk",
    TopK(),
    "The ``ceil(density * n)`` entries of largest magnitude, exactly. The caller handles error"
    " feedback.",
)
dgc = _selecting(
    "dgc", Dgc(), "Entries above the threshold of a 1 % sample (Deep Gradient Compression)."
)
gaussiank = _selecting("gaussiank", GaussianK(), "Entries above the threshold for a Gaussian.")
redsync = _selecting(
    "redsync", RedSync(), "Entries above a threshold bisected between mean and maximum."
)
sidco = _selecting(
    "sidco", Sidco(), "Entries above the threshold for an exponential distribution, in stages."
)


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
