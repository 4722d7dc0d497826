"""Define the measured cases: a collective of some data, coded under a policy, in a compiled
graph."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from commpass.codecs import codec
from commpass.codecs.wrappers.outlier import Running, calibrate

RANKS, TOKENS, WIDTH = 4, 128, 1024


@dataclass(frozen=True)
class Case:
    """One measured collective.

    ``data`` names a function of this file. ``codec`` may begin with ``calibrated:``; the rest then
    tells how ``outlier`` is calibrated on other data of the same kind. ``reference`` names a
    formula (``formulas.SUMS``) whose result the collective should have.
    """

    name: str
    codec: str
    algorithm: str
    data: str = "gaussian"
    kind: str = "all_reduce"
    dtype: str = "float32"
    reference: str = ""

    def spec(self) -> str:
        """Return the text of the codec, with its calibration."""
        how = self.codec.removeprefix("calibrated:")
        if how == self.codec:
            return codec(self.codec).spec
        seen = []
        for rank in range(RANKS):
            running = Running.start(DATA[self.data](rank, 1))
            for seed in range(2, 8):
                running = running.update(DATA[self.data](rank, seed))
            seen.append(running)
        options = {
            "each": {},
            "shared": {"shared": True},
            "random": {"seed": 3},
            "none": {"keep": 0.0},
        }
        return codec("outlier", statistics=calibrate(seen, **options[how]).to_text()).spec

    def values(self, rank: int) -> Tensor:
        return DATA[self.data](rank, 0).to(getattr(torch, self.dtype))


def _normal(rank: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(TOKENS, WIDTH, generator=generator)


def gaussian(rank: int, seed: int) -> Tensor:
    """Return samples of N(0, 1)."""
    return _normal(rank, seed)


def channels(rank: int, seed: int) -> Tensor:
    """Return activations: one channel in 64 is 30 times as large, and ranks differ by a third."""
    generator = torch.Generator().manual_seed(7)
    size = torch.rand(WIDTH, generator=generator) + 0.5
    far = torch.randperm(WIDTH, generator=generator) < WIDTH // 64
    return _normal(rank, seed) * size * torch.where(far, 30.0, 1.0) * (0.85 + 0.1 * rank)


def gradients(rank: int, seed: int) -> Tensor:
    """Return gradients with heavy tails around 1e-5: the product of two Gaussians, with rows of
    widely different sizes."""
    generator = torch.Generator().manual_seed(9000 + 1000 * seed + rank)
    rows = torch.randn(TOKENS, 1, generator=generator).exp() * 1e-5
    return _normal(rank, seed) * torch.randn(TOKENS, WIDTH, generator=generator) * rows


DATA = {"gaussian": gaussian, "channels": channels, "gradients": gradients}
