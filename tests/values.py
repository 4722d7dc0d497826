"""Values for tests of codecs, and their bits."""

from __future__ import annotations

import torch


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return Gaussian values; a seed gives the same numbers, rounded, in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def bits(x: torch.Tensor) -> bytes:
    """Return the bytes of a tensor of any layout."""
    flat = x.detach().reshape(-1).clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).numpy().tobytes()
