"""What a rank has not yet sent of one gradient, as in Deep Gradient Compression (Lin et al. 2018,
algorithm 4).

With momentum ``m`` each rank keeps a velocity ``u = m u + g`` and a residual ``v = v + u`` of its
own gradients ``g`` (momentum correction). Without momentum, ``v = v + g`` (error feedback). Sent
values are subtracted from ``v``. Where a selected entry is sent, ``u`` is cleared too (momentum
factor masking).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from commpass.codecs.codec import accumulation_dtype
from commpass.codecs.sparse import SparseCodec


@dataclass(frozen=True)
class Memory:
    """The residual and velocity of one gradient.

    ``residual`` and ``velocity`` have the shape of the gradient, in the accumulation dtype, and are
    changed in place. Without momentum there is no velocity.
    """

    residual: Tensor
    velocity: Tensor | None = None
    momentum: float = 0.0

    def add(self, gradient: Tensor, norm: float | None = None) -> None:
        """Add a step's gradient, clipped to a 2-norm of at most ``norm``."""
        gradient = gradient.to(self.residual.dtype)
        if norm is not None:
            gradient = clip_to_norm(gradient, norm)
        if self.velocity is None:
            self.residual.add_(gradient)
        else:
            self.velocity.mul_(self.momentum).add_(gradient)
            self.residual.add_(self.velocity)

    def take(self, dtype: torch.dtype) -> Tensor:
        """Take all of it, in ``dtype``.

        The rounding error stays in the residual. Values that are not finite do not come back in the
        next step.
        """
        whole = self.residual.to(dtype, copy=True)
        rest = self.residual - whole.to(self.residual.dtype)
        self.residual.copy_(torch.where(whole.isfinite(), rest, 0))
        if self.velocity is not None:
            self.velocity.copy_(torch.where(self.velocity.isfinite(), self.velocity, 0))
        return whole

    def select(self, codec: SparseCodec, dtype: torch.dtype, on: torch.device) -> Tensor:
        """Return the wire ``[1, wire_bytes]`` of what ``codec`` selects on a device, and subtract
        it."""
        row = self.residual.to(dtype).reshape(1, -1)
        wire = encoding(codec, on)(row.to(on)).to(row.device)
        indices, values = codec.decode_sparse(wire, row.shape[1], dtype)
        self.clear(indices.squeeze(0), values.squeeze(0))
        return wire

    def clear(self, indices: Tensor, values: Tensor) -> None:
        """Subtract values ``[k]`` that were sent, as ``SparseCodec.decode_sparse`` returns them.

        It never synchronizes with a GPU: the number of used slots is not read back.
        """
        numel, first = self.residual.numel(), indices[:1]
        nothing = first == numel  # no slot is used: a row of zeros, or a lost row of NaN
        lost = nothing & ~values[:1].isfinite()
        used = indices < numel  # unused slots repeat the first
        positions = torch.where(used, indices, first).clamp(max=numel - 1)
        sent = torch.where(used, values, values[:1])
        residual = self.residual.view(-1)
        values_before = residual[positions]
        rest = torch.where(sent.isfinite(), values_before - sent, 0)
        residual[positions] = torch.where(nothing, values_before, rest)
        residual.masked_fill_(lost, 0)
        if self.velocity is not None:
            velocity = self.velocity.view(-1)
            velocity[positions] = torch.where(nothing, velocity[positions], 0)
            velocity.masked_fill_(lost, 0)


def encoding(codec: SparseCodec, on: torch.device) -> Callable[[Tensor], Tensor]:
    """Return the function that encodes a row on a device. On a GPU it does not read back counts."""
    return codec.encode_eagerly if on.type == "cpu" else codec.encode_rows


def clip_to_norm(gradient: Tensor, norm: float) -> Tensor:
    """Clip a gradient to a 2-norm of at most ``norm``. A norm that is not finite leaves it
    unchanged."""
    current_norm = torch.linalg.vector_norm(gradient.to(accumulation_dtype(gradient.dtype)))
    scale = torch.where(current_norm.isfinite(), (norm / current_norm).clamp(max=1.0), 1.0)
    return gradient * scale
