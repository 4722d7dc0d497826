"""The kernels of codec ``ecq``: interpreted, they give the same bytes and values as the C++, and
compiled for GPUs that need not be present, they do not spill."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from interpreter import interpreted
from tiers import rarely

from commpass.codecs import codec
from commpass.codecs.entropy import operators
from commpass.codecs.entropy.codec import EntropyCodec
from commpass.codecs.entropy.coder import Form
from commpass.costmodel.cards import GPU
from commpass.lowering import entropy, has_kernels

pytest.importorskip("triton", reason="kernels are written in Triton: pip install commpass[kernels]")

ops = torch.ops.commpass
LIMIT = torch.finfo(torch.bfloat16).max
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def encoded(rows: np.ndarray, dtype: str, form: Form, rotated: bool) -> tuple[np.ndarray, ...]:
    from commpass.lowering.gpu import entropy as kernels

    made = kernels.encode_rows(torch.from_numpy(rows).to(DTYPES[dtype]), form, rotated)
    return tuple(each.numpy() for each in made)


def decoded(
    code: np.ndarray, side: np.ndarray, form: Form, rotated: bool, numel: int, offset: int = 0
) -> np.ndarray:
    from commpass.lowering.gpu import entropy as kernels

    whole = torch.zeros(code.size + offset, dtype=torch.uint8)
    at = whole[offset:].view(code.shape).copy_(torch.from_numpy(code))
    given = (form, rotated, LIMIT, numel)
    return kernels.decode_rows(at, torch.from_numpy(side), *given).numpy()


def check(
    x: torch.Tensor, form: Form, rotated: bool = True, dtype: str = "f32", offset: int = 0
) -> torch.Tensor:
    """Check that both forms are equal for rows ``x``; return the decoded rows."""
    given = (form.nbytes, form.even, rotated)
    code, side = ops.entropy_encode(x.to(DTYPES[dtype]), *given)
    ours = interpreted(encoded, x.numpy(), dtype, form, rotated)
    assert (side.numpy() == ours[1]).all()
    assert (code.numpy() == ours[0]).all(), np.flatnonzero(code.numpy() != ours[0])[:8]
    numel = x.shape[1]
    rows = ops.entropy_decode(code, side, *given, numel, torch.bfloat16)
    back = interpreted(decoded, code.numpy(), side.numpy(), form, rotated, numel, offset)
    assert np.array_equal(rows.numpy().view(np.int32), back.view(np.int32))
    return rows


def gaussian(*shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(sum(shape)).standard_normal(shape)).float()


@pytest.mark.parametrize(
    ("numel", "form"),
    [
        (300, Form(128, 0)),  # two states, and a block with zeros behind its values
        rarely(1, Form(48, 0)),
        rarely(1500, Form(64, 1)),
        rarely(256 * 9 + 3, Form(256, 2)),
        rarely(256 * 65, Form(128, 0)),
        rarely(256 * 17, Form(384, 1)),
    ],
)
def test_bytes_and_values_of_cpp(numel: int, form: Form) -> None:
    check(gaussian(1, numel), form)


def not_gaussian() -> dict[str, torch.Tensor]:
    x = gaussian(300)
    place = torch.arange(300)
    return {
        "heavy tails": x**5,
        "a block of zeros": torch.where(place < 250, 0.0, x),
        "one value": torch.where(place == 7, 3.0, 0.0),
        "subnormal": x * 2.0**-130,
        "large": x * 2.0**120,
        "equal": torch.ones(300),
        "two sizes": torch.where(place < 100, x, x * 1e-6),
        "one in seven": torch.where(place % 7 > 0, 0.0, x),
    }


@pytest.mark.slow
@pytest.mark.few(4)
@pytest.mark.parametrize("kind", not_gaussian())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotated", [True, False])
def test_values_that_are_not_gaussian(rotated: bool, dtype: str, kind: str) -> None:
    check(not_gaussian()[kind][None], Form(96, 0), rotated, dtype)


@pytest.mark.slow
def test_what_is_not_finite() -> None:
    x = gaussian(3, 200)
    x[0, 5], x[1, 199] = float("inf"), float("nan")
    rows = check(x, Form(128, 0), offset=3)
    assert rows[:2].isnan().all()
    assert rows[2].isfinite().all()


@pytest.mark.slow
def test_a_chunk_that_fits_only_with_dither() -> None:
    """Values of one size, for which no attempt without dither fits (``coder.ATTEMPTS``)."""
    x = torch.where(torch.arange(256) % 2 > 0, 1.0, -1.0)[None]
    code, _ = ops.entropy_encode(x, 64, 0, False)
    assert int(code[0, 0]) & 1, "the mark of such a chunk"
    check(x, Form(64, 0), rotated=False)


@pytest.mark.parametrize("arch", ["sm_90", rarely("sm_80"), rarely("sm_100"), rarely("gfx942")])
def test_compiled_kernels_do_not_spill(arch: str) -> None:
    from commpass.lowering.inspect.kernels import kernels_named
    from commpass.lowering.inspect.lowerable import lower

    for name in ("encode", "decode"):
        blocks, chunks = kernels_named(name, codec("ecq"), torch.bfloat16, 8, arch)[:2]
        for each in (blocks, chunks):
            found = lower(each, arch).compiled
            assert found.spills == 0, each.name
            assert found.registers <= 64, each.name


# --- the operators --------------------------------------------------------------------------------


@pytest.fixture
def cpu_as_gpu(monkeypatch):
    """Take the CPU for a GPU, and its kernels for those of commpass."""
    monkeypatch.setattr(operators, "_is_cpu", lambda device: False)


@pytest.mark.usefixtures("cpu_as_gpu")
def test_operators_run_the_kernels(monkeypatch) -> None:
    x, coder = gaussian(1, 200), codec("ecq")
    assert isinstance(coder, EntropyCodec)
    called = []

    def encode(*given):
        called.append("encode")
        return tuple(
            map(torch.from_numpy, interpreted(encoded, given[0].numpy(), "f32", *given[1:]))
        )

    def decode(code, side, form, rotated, limit, numel):
        called.append("decode")
        assert limit == LIMIT
        given = (code.numpy(), side.numpy(), form, rotated, numel)
        return torch.from_numpy(interpreted(decoded, *given))

    ours = operators.Kernels(encode, decode, lambda device, numel: "")
    monkeypatch.setattr(operators, "KERNELS", [ours])
    wire = coder.encode_rows(x)
    rows = coder.decode_rows(wire, 200, torch.bfloat16)
    assert called == ["encode", "decode"]
    monkeypatch.undo()
    assert torch.equal(wire, coder.encode_rows(x))
    assert torch.equal(rows, coder.decode_rows(wire, 200, torch.bfloat16))


@pytest.mark.parametrize(
    ("dtype", "why"),
    [
        (torch.float32, "cpu has no kernel"),
        (torch.float64, "no kernel for torch.float64"),
    ],
)
@pytest.mark.usefixtures("cpu_as_gpu")
def test_without_kernels_operators_warn_and_run(monkeypatch, dtype, why) -> None:
    monkeypatch.setattr(operators, "KERNELS", [])  # as before the first call
    operators._warn_once.cache_clear()
    x = gaussian(1, 300).to(dtype)
    with pytest.warns(UserWarning, match=why):
        wire = codec("ecq").encode_rows(x)
    monkeypatch.undo()
    assert torch.equal(wire, codec("ecq").encode_rows(x))


def test_gpus_have_kernels() -> None:
    card = torch.device("cuda")
    assert has_kernels(codec("ecq"), 1 << 20, card)
    assert not has_kernels(codec("ecq"), 1 << 30, card)
    assert "more than" in entropy.unsupported_reason(card, 1 << 30)
    assert entropy.unsupported_reason(torch.device("mps"), 1) == "mps has no kernel for it"
    assert GPU.time_us("ecq", "encode", 1e3) < 1e3
