"""What a rank has not yet sent of one gradient: the arithmetic of Deep Gradient Compression (Lin et
al. 2018, algorithm 4).

With momentum ``m`` each rank keeps a velocity ``u = m u + g`` and a residual ``v = v + u`` of its
own gradients ``g`` (momentum correction); without, ``v = v + g`` (error feedback). What is sent is
taken out of ``v``; where a selected entry is sent, ``u`` is cleared too (momentum factor masking).
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
    """``residual`` and ``velocity`` have the shape of the gradient, in the accumulation dtype, and
    are changed in place; without momentum there is no velocity."""

    residual: Tensor
    velocity: Tensor | None = None
    momentum: float = 0.0

    def add(self, gradient: Tensor, norm: float | None = None) -> None:
        """A step's gradient, of a 2-norm of at most ``norm``."""
        gradient = gradient.to(self.residual.dtype)
        if norm is not None:
            gradient = clipped(gradient, norm)
        if self.velocity is None:
            self.residual.add_(gradient)
        else:
            self.velocity.mul_(self.momentum).add_(gradient)
            self.residual.add_(self.velocity)

    def take(self, dtype: torch.dtype) -> Tensor:
        """All of it, in ``dtype``: what is left is what rounding to that loses, and what is not
        finite does not come back in the next step."""
        whole = self.residual.to(dtype, copy=True)
        rest = self.residual - whole.to(self.residual.dtype)
        self.residual.copy_(torch.where(whole.isfinite(), rest, 0))
        if self.velocity is not None:
            self.velocity.copy_(torch.where(self.velocity.isfinite(), self.velocity, 0))
        return whole

    def select(self, coder: SparseCodec, dtype: torch.dtype, on: torch.device) -> Tensor:
        """The wire ``[1, wire_bytes]`` of what ``coder`` selects on a device, which is taken
        out."""
        row = self.residual.to(dtype).reshape(1, -1)
        wire = encoding(coder, on)(row.to(on)).to(row.device)
        indices, values = coder.decode_sparse(wire, row.shape[1], dtype)
        self.clear(indices.squeeze(0), values.squeeze(0))
        return wire

    def clear(self, indices: Tensor, values: Tensor) -> None:
        """Takes out values ``[k]`` that were sent, as ``SparseCodec.decode_sparse`` gives them. No
        step waits for a GPU: which slots are used is not read back."""
        numel, first = self.residual.numel(), indices[:1]
        nothing = first == numel  # no slot is used: a row of zeros, or, of NaN, one that is lost
        lost = nothing & ~values[:1].isfinite()
        used = indices < numel  # slots not used repeat the first
        places = torch.where(used, indices, first).clamp(max=numel - 1)
        sent = torch.where(used, values, values[:1])
        residual = self.residual.view(-1)
        held = residual[places]
        rest = torch.where(sent.isfinite(), held - sent, 0)
        residual[places] = torch.where(nothing, held, rest)
        residual.masked_fill_(lost, 0)
        if self.velocity is not None:
            velocity = self.velocity.view(-1)
            velocity[places] = torch.where(nothing, velocity[places], 0)
            velocity.masked_fill_(lost, 0)


def encoding(coder: SparseCodec, on: torch.device) -> Callable[[Tensor], Tensor]:
    """How a row is encoded on a device. A GPU is not asked for what it has counted."""
    return coder.encode_at_once if on.type == "cpu" else coder.encode_rows


def clipped(gradient: Tensor, norm: float) -> Tensor:
    """A gradient whose 2-norm is at most ``norm``. One that is not finite stays as it is."""
    have = torch.linalg.vector_norm(gradient.to(accumulation_dtype(gradient.dtype)))
    scale = torch.where(have.isfinite(), (norm / have).clamp(max=1.0), 1.0)
    return gradient * scale
