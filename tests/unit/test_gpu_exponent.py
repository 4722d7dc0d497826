"""The kernels of the lossless codec, interpreted, give the same used bytes as the aten form, and
decode to the same values. They leave the rest of the wire as it is."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreter import interpreted

from commpass.codecs.exponent import ExponentCodec, exponent

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
both = pytest.mark.parametrize("planes", [2, 3])
floats = pytest.mark.parametrize("dtype", DTYPES, ids=str)
examples = settings(max_examples=6, deadline=None)


def coder_of(planes: int) -> ExponentCodec:
    coder = exponent(f"exponent(planes={planes})", planes=planes)
    assert isinstance(coder, ExponentCodec)
    return coder


def raw(x: torch.Tensor) -> np.ndarray:
    """Return bytes, so that NaNs compare, and no float is changed on the way to another process."""
    return x.contiguous().reshape(-1).view(torch.uint8).numpy()


POISON = 0xA5


def poisoned(*size: Any, **how: Any) -> torch.Tensor:
    """As ``torch.empty``, but filled."""
    made = torch.zeros(*size, **how)
    made.view(-1).view(torch.uint8).fill_(POISON)
    return made


def through_kernels(
    planes: int, rows: np.ndarray, count: int, dtype: torch.dtype, tiling: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return, from the interpreter, the wire of rows, and the decoded wire."""
    from commpass.lowering.gpu import exponent as kernels

    coder, x = coder_of(planes), torch.from_numpy(rows).view(dtype).reshape(count, -1)
    shares = kernels.Tiling(columns=tiling[0], group=tiling[1])
    with patch.object(torch, "empty", poisoned):
        wire = kernels.encode_rows(coder, x, shares)
        return raw(wire), raw(kernels.decode_rows(coder, wire, x.shape[1], dtype, shares))


def with_poison(coder: ExponentCodec, wire: torch.Tensor, numel: int, dtype: torch.dtype) -> Any:
    """Return the bytes of a wire with its unused ones filled."""
    used = coder.used_bytes(wire, numel, dtype).unsqueeze(1)
    return raw(torch.where(torch.arange(wire.shape[1]) < used, wire, POISON))


def check(planes: int, x: torch.Tensor, tiling: tuple[int, int] = (128, 128)) -> np.ndarray:
    """Check that both forms of ``x [rows, n]`` are equal; return the wire."""
    coder = coder_of(planes)
    expected = with_poison(coder, coder.encode_rows(x), x.shape[1], x.dtype)
    wire, back = interpreted(through_kernels, planes, raw(x), x.shape[0], x.dtype, tiling)
    assert (wire == expected).all(), np.flatnonzero(wire != expected)[:8]
    assert (back == raw(x)).all(), np.flatnonzero(back != raw(x))[:8]
    return wire


def patterns(numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return arbitrary bits: NaNs of every payload, infinities, subnormals, both zeros."""
    bits = np.random.default_rng(seed).integers(0, 256, numel * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(bits).view(dtype)


def gaussian(numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(numel)).to(dtype)


def mixed(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return Gaussian chunks, chunks of zeros and of many zeros, and raw ones of random bits."""
    x, noise = gaussian(numel, dtype), patterns(numel, dtype, 1)
    chunk = torch.arange(numel) // 1024
    x = torch.where((chunk % 4 == 1) & (torch.arange(numel) % 3 > 0), torch.zeros_like(x), x)
    x = torch.where(chunk % 5 == 3, -torch.zeros_like(x), x)
    return torch.where(chunk % 3 == 2, noise.view(dtype), x)


@pytest.mark.slow
@pytest.mark.few(1)
@both
@floats
@pytest.mark.parametrize("numel", [1, 128, 1500])
def test_sizes(planes: int, dtype: torch.dtype, numel: int) -> None:
    check(planes, gaussian(numel, dtype).reshape(1, -1))


@pytest.mark.every
@both
@floats
def test_rows_of_tiles_of_groups(planes: int, dtype: torch.dtype) -> None:
    """Tiles of one chunk, groups of two tiles: sums over more than one round of groups, a raw chunk
    between others, and rows of an odd length."""
    check(planes, mixed(2 * 4609, dtype).reshape(2, -1), (32, 2))


@pytest.mark.slow
@pytest.mark.few(1)
@both
@floats
def test_random_bits(planes: int, dtype: torch.dtype) -> None:
    check(planes, patterns(5000, dtype).reshape(2, -1))


@pytest.mark.slow
@pytest.mark.few(1)
@both
@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, float("inf"), float("nan"), 2.0**-140])
def test_one_value(planes: int, value: float) -> None:
    check(planes, torch.full((1, 1500), value, dtype=torch.float32))


@pytest.mark.every
@both
def test_zeros_of_any_number(planes: int) -> None:
    """From none to all of a chunk, so that each mode is used."""
    x = gaussian(9 * 1024, torch.bfloat16).reshape(9, 1024)
    for number, row in enumerate(x):
        row[: number * 128] = 0.0
    x[1, 50:] = gaussian(1024 - 50, torch.bfloat16)
    check(planes, x)


@pytest.mark.slow
@pytest.mark.few(2)
@both
@pytest.mark.parametrize("many", [8, 9, 32])
def test_columns_of_escapes(planes: int, many: int) -> None:
    """Up to 8 exponents in raw form make a string of 64 bits; more in one column make several."""
    parts = torch.ones(16, 32, 2, dtype=torch.bfloat16)
    parts[: many // 2, 5] = 2.0**90
    if many % 2:
        parts[many // 2, 5, 0] = 2.0**90
    x, coder = parts.reshape(1, -1), coder_of(planes)
    wire = torch.from_numpy(check(planes, x)).reshape(1, -1)
    used = int(coder.used_bytes(wire, 1024, x.dtype)) - coder.static_bytes(1024, x.dtype)
    bits = many * {2: 2 + 3 + 8, 3: 8}[planes]
    assert used == -(-bits // 128) * 16


@pytest.mark.slow
@pytest.mark.few(2)
@both
@floats
def test_poisoned_rest(planes: int, dtype: torch.dtype) -> None:
    """What follows the used bytes is not read."""
    x = mixed(5000, dtype).reshape(1, -1)
    coder = coder_of(planes)
    wire = coder.encode_rows(x)
    used = int(coder.used_bytes(wire, x.shape[1], dtype))
    wire[:, used:] = POISON
    back = interpreted(decoded, planes, raw(wire), x.shape[1], dtype)
    assert (back == raw(x)).all()


def decoded(planes: int, wire: np.ndarray, numel: int, dtype: torch.dtype) -> np.ndarray:
    from commpass.lowering.gpu import exponent as kernels

    rows = torch.from_numpy(wire).reshape(1, -1)
    return raw(kernels.decode_rows(coder_of(planes), rows, numel, dtype))


@pytest.mark.slow
@both
def test_foreign_wires_stay_inside(planes: int) -> None:
    """Random bytes decode to some values, and nothing beyond the wire is read."""
    numel, coder = 3000, coder_of(planes)
    size = coder.wire_bytes(numel, torch.bfloat16)
    wire = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
    assert interpreted(decoded, planes, wire, numel, torch.bfloat16).size == 2 * numel


def unaligned(planes: int, numel: int) -> tuple[np.ndarray, np.ndarray]:
    from commpass.lowering.gpu import exponent as kernels

    x = gaussian(2 * numel + 1, torch.bfloat16)[1:].reshape(2, numel)
    assert x.storage_offset() == 1
    coder = coder_of(planes)
    made, right = kernels.encode_rows(coder, x), coder.encode_rows(x)
    return with_poison(coder, made, numel, x.dtype), with_poison(coder, right, numel, x.dtype)


@pytest.mark.slow
def test_rows_that_begin_between_words() -> None:
    wire, expected = interpreted(unaligned, 2, 1400)
    assert (wire == expected).all()


def what_has_no_kernels() -> list[bool]:
    from commpass.lowering.gpu import exponent as kernels

    coder = coder_of(2)
    double, nothing = torch.rand(2, 300, dtype=torch.float64), torch.zeros(2, 0)
    same = []
    for x in (double, nothing):
        wire = kernels.encode_rows(coder, x)
        same.append(torch.equal(wire, coder.encode_rows(x)))
        same.append(torch.equal(kernels.decode_rows(coder, wire, x.shape[1], x.dtype), x))
    return [
        *same,
        *(
            kernels.unsupported_reason(numel, torch.bfloat16) is not None
            for numel in (0, 127, 1 << 31)
        ),
    ]


def test_raw_rows_take_the_aten_form() -> None:
    assert all(interpreted(what_has_no_kernels))


@pytest.mark.every
@pytest.mark.few(1)
@both
@floats
@given(data=st.data())
@examples
def test_any_exponents(planes: int, dtype: torch.dtype, data: st.DataObject) -> None:
    """A few exponents in any places, many or few zeros, and any bits between."""
    numel = data.draw(st.integers(1, 3000), label="numel")
    seed = data.draw(st.integers(0, 1 << 30), label="seed")
    spread = data.draw(st.sampled_from([0, 1, 3, 8, 40]), label="spread")
    zeros = data.draw(st.sampled_from([0.0, 0.03, 0.05, 0.6, 1.0]), label="zeros")
    noise = data.draw(st.sampled_from([0.0, 0.01, 0.3]), label="noise")
    rng = np.random.default_rng(seed)
    powers = rng.integers(-spread, spread + 1, numel)
    x = torch.from_numpy(rng.standard_normal(numel) * np.exp2(powers)).to(dtype)
    x = torch.where(torch.from_numpy(rng.random(numel) < zeros), torch.zeros_like(x), x)
    x = torch.where(torch.from_numpy(rng.random(numel) < noise), patterns(numel, dtype, seed), x)
    check(planes, x.reshape(1, -1), (32, 2))
