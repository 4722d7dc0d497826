"""Block codecs in float64, written from their parts: the values of a wire, bit for bit, and the
domains.

This module uses what codecs are, but nothing of how they compute.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from commpass.codecs.block.codec import BlockCodec
from commpass.codecs.block.domain import Domain
from commpass.codecs.block.grids import (
    CompandedGrid,
    Fp8Grid,
    Grid,
    IntGrid,
    LevelGrid,
    MiniFloatGrid,
    TableGrid,
)
from commpass.codecs.block.scales import Static, TwoLevel
from commpass.codecs.block.transforms import Hadamard, Transform

REGION = 128
"""The alignment in bytes of the regions of a wire."""
BYTES = {"fp32": 4, "bf16": 2, "pow2": 1, "e4m3": 1}


def decode(coder: BlockCodec, wire: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    """Decode wires uint8 ``[rows, bytes]`` to float64 ``[rows, numel]``."""
    rows, size, blocks = wire.shape[0], coder.layout.size(numel), coder.layout.blocks(numel)
    raw, *regions = regions_of(coder, wire, numel)
    values = _levels(coder.grid, _codes(raw.reshape(rows, blocks, -1), coder.grid.bits, size))
    side = regions.pop().long() if coder.transform.side else None
    row = regions.pop() if isinstance(coder.scale, TwoLevel) else None
    stored = [coder.offset.stored] if coder.offset else []
    stored += [coder.scale.stored] * coder.scale.numbers
    numbers = [_number(*each).unsqueeze(-1) for each in zip(regions, stored, strict=True)]
    middle = numbers.pop(0) if coder.offset else 0.0
    for number in numbers:
        values = values * number
    if row is not None:
        values = values * _number(row, "fp32").unsqueeze(-1)
    values = values * coder.scale.value if isinstance(coder.scale, Static) else values
    values = _inverse(coder.transform, values + middle)
    if side is not None:
        values = _swapped(values, side)
    limit = torch.finfo(dtype).max
    return joined(coder, values.clamp(-limit, limit), numel)


def regions_of(coder: BlockCodec, wire: Tensor, numel: int) -> list[Tensor]:
    """Return the regions of wires: codes, a middle, scales, side data, each ``[rows, bytes]``."""
    found, at = [], 0
    for length in lengths(coder, numel):
        found.append(wire[:, at : at + length])
        at += -(-length // REGION) * REGION
    return found


def lengths(coder: BlockCodec, numel: int) -> list[int]:
    """Return the number of bytes of each region."""
    blocks = coder.layout.blocks(numel)
    found = [blocks * coder.layout.size(numel) * coder.grid.bits // 8]
    found += [blocks * BYTES[coder.offset.stored]] if coder.offset else []
    found += [blocks * BYTES[coder.scale.stored]] * coder.scale.numbers
    found += [4] if isinstance(coder.scale, TwoLevel) else []
    return found + ([blocks] if coder.transform.side else [])


def gaps(coder: BlockCodec, wire: Tensor, numel: int) -> Tensor:
    """Return the padding of regions: all bytes of wires that hold nothing."""
    found, at = [], 0
    for length in lengths(coder, numel):
        end = -(-(at + length) // REGION) * REGION
        found.append(wire[:, at + length : end])
        at = end
    assert at == wire.shape[1], (at, wire.shape)
    return torch.cat(found, dim=1)


def blocks_of(coder: BlockCodec, rows: Tensor) -> Tensor:
    """Reshape ``[rows, numel]`` to ``[rows, blocks, size]``, with zeros where a block is not
    full."""
    place = _places(coder, rows.shape[1], rows.device)
    padded = torch.cat([rows.new_zeros((rows.shape[0], 1)), rows], dim=1)
    return padded[:, place.flatten()].unflatten(1, tuple(place.shape))


def joined(coder: BlockCodec, blocks: Tensor, numel: int) -> Tensor:
    """The inverse of ``blocks_of``."""
    place = _places(coder, numel, blocks.device)
    rows = blocks.new_zeros((blocks.shape[0], numel + 1))
    rows[:, place.flatten()] = blocks.flatten(1)
    return rows[:, 1:].contiguous()


@lru_cache(maxsize=8)
def _places(coder: BlockCodec, numel: int, device: torch.device) -> Tensor:
    """Return for each place of a block one plus the number of its value in the row, or 0 for
    padding."""
    numbers = torch.arange(1, numel + 1, device=device).reshape(1, -1)
    return coder.layout.split(numbers)[0]


# --- parts ----------------------------------------------------------------------------------------


def _codes(raw: Tensor, bits: int, size: int) -> Tensor:
    """Return the codes of a region.

    Codes are stored in parts of 8, 4, 2 and 1 bits, low bits first. A byte holds one code of each
    of the equal parts of its block.
    """
    codes = torch.zeros((*raw.shape[:-1], size), dtype=torch.int64, device=raw.device)
    low = first = 0
    for width in (8, 4, 2, 1):
        if bits & width:
            length = size * width // 8
            part = raw[..., first : first + length].long()
            for i in range(8 // width):
                number = (part >> (width * i)) & (2**width - 1)
                codes[..., i * length : (i + 1) * length] |= number << low
            low, first = low + width, first + length
    return codes


def _levels(grid: Grid, codes: Tensor) -> Tensor:
    if isinstance(grid, IntGrid):
        found = codes.double() - 2 ** (grid.bits - 1)
        return torch.where(codes == 0, math.nan, found) if grid.marks else found
    if isinstance(grid, LevelGrid):
        return codes.double() - (2**grid.bits - 1) / 2
    if isinstance(grid, Fp8Grid):
        table = [_float8(code, grid.form) for code in range(256)]
    elif isinstance(grid, MiniFloatGrid):
        mantissa, bias = {"e2m1": (1, 1), "e2m3": (3, 1), "e3m2": (2, 3)}[grid.form]
        table = [_float(code, grid.bits, mantissa, bias) for code in range(2**grid.bits)]
    elif isinstance(grid, CompandedGrid):
        cells = 2 ** (grid.bits - 1)
        middles = [(code - cells + 0.5) / cells for code in range(2 * cells)]
        table = [grid.largest * c / math.sqrt(1 + grid.k - grid.k * c * c) for c in middles]
    else:
        assert isinstance(grid, TableGrid), grid
        table = [*(-level for level in grid.levels[::-1]), *grid.levels]
    return torch.tensor(table, dtype=torch.float64, device=codes.device)[codes]


def _float8(code: int, form: str) -> float:
    mantissa, bias = {"e4m3": (3, 7), "e5m2": (2, 15)}[form]
    if form == "e4m3" and code & 127 == 127:
        return math.nan
    if form == "e5m2" and (code & 127) >> mantissa == 31:
        return math.nan if code & 3 else math.inf * (-1.0 if code & 128 else 1.0)
    return _float(code, 8, mantissa, bias)


def _float(code: int, bits: int, mantissa: int, bias: int) -> float:
    """The value of a sign, an exponent and a mantissa, as if all exponents were of numbers."""
    sign = -1.0 if code >> (bits - 1) else 1.0
    power, rest = (code & (2 ** (bits - 1) - 1)) >> mantissa, code & (2**mantissa - 1)
    if power == 0:
        return sign * rest * 2.0 ** (1 - bias - mantissa)
    return sign * (1 + rest / 2**mantissa) * 2.0 ** (power - bias)


def _number(raw: Tensor, stored: str) -> Tensor:
    if stored == "pow2":
        power = raw.double()
        return torch.where(power == 255, math.nan, torch.where(power == 0, 0.0, 2 ** (power - 127)))
    if stored == "e4m3":
        table = [_float8(code, "e4m3") for code in range(256)]
        return torch.tensor(table, dtype=torch.float64, device=raw.device)[raw.long()]
    whole = raw.contiguous().view(torch.float32 if stored == "fp32" else torch.bfloat16)
    return whole.double()


def matrix(transform: Hadamard, device: torch.device) -> Tensor:
    """Return ``H diag(s)`` of a width in float64.

    It is the Kronecker product of two matrices of half as many bits, each with its own signs. The
    transpose times it is the width times the identity.
    """
    bits = transform.width.bit_length() - 1
    left = (bits + 1) // 2
    return torch.kron(
        _sylvester(left, transform.signed), _sylvester(bits - left, transform.signed)
    ).to(device)


def _sylvester(bits: int, signed: bool) -> Tensor:
    made = torch.ones((1, 1), dtype=torch.float64)
    for _ in range(bits):
        made = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), made)
    for place in range(2**bits if signed else 0):
        pairs = sum((place >> low) & (place >> (low + 1)) & 1 for low in range(0, bits - 1, 2))
        made[:, place] *= (-1) ** pairs
    return made


def _inverse(transform: Transform, values: Tensor) -> Tensor:
    if not isinstance(transform, Hadamard):
        return values
    parts = values.unflatten(-1, (-1, transform.width))
    return (parts @ matrix(transform, values.device)).flatten(-2)


def _forward(transform: Transform, values: Tensor) -> Tensor:
    if not isinstance(transform, Hadamard):
        return values
    parts = values.unflatten(-1, (-1, transform.width))
    return (parts @ matrix(transform, values.device).t()).flatten(-2) / transform.width


def enter(domain: Domain, rows: Tensor) -> Tensor:
    """Convert float64 rows of values to rows in a domain."""
    return _forward(domain.transform, rows)


def leave(domain: Domain, rows: Tensor) -> Tensor:
    """The inverse of ``enter``."""
    return _inverse(domain.transform, rows)


def _swapped(blocks: Tensor, place: Tensor) -> Tensor:
    made = blocks.clone()
    made[..., 0] = blocks.gather(-1, place.unsqueeze(-1)).squeeze(-1)
    made.scatter_(-1, place.unsqueeze(-1), blocks[..., :1])
    return made
