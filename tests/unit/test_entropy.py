"""Codec ecq: its tables, its wire read by a decoder that is written from the format, its bytes in
C++ and in tensor operations, its error."""

from __future__ import annotations

import math
import os
import struct
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples
from values import gaussian

import commpass
from commpass.codecs.block import transforms
from commpass.codecs.entropy import coder, cpp, operators, rotation
from commpass.codecs.entropy.coder import BLOCK, CHUNK, Form
from commpass.codecs.entropy.tables import HALF, PER_OCTAVE, TOTAL, tables
from commpass.errors import PolicyError

RATIOS = [-24, -9, -8, 0, 5, 8, 15, 16, 31, 40, 47, 48, 100, 128]


def below(x: np.ndarray) -> np.ndarray:
    """The distribution function of a Gaussian."""
    return np.array([0.5 * math.erfc(-each / math.sqrt(2)) for each in x])


def by_cpp(x: torch.Tensor, form: Form) -> torch.Tensor:
    """Encode whole blocks that are not rotated by C++."""
    blocks = x.shape[1] // BLOCK
    code = x.new_empty((x.shape[0], blocks * form.nbytes), dtype=torch.uint8)
    side = x.new_empty((x.shape[0], math.ceil(blocks / 64)), dtype=torch.uint8)
    assert cpp.encode(x, form, False, code, side)
    return code


def from_cpp(code: torch.Tensor, form: Form) -> torch.Tensor:
    """The inverse, with scales of 1."""
    blocks = code.shape[1] // form.nbytes
    side = code.new_full((code.shape[0], math.ceil(blocks / 64)), 127)
    rows = torch.empty(code.shape[0], blocks * BLOCK)
    assert cpp.decode(code, side, form, False, torch.finfo(torch.float32).max, rows)
    return rows


def scaled(x: torch.Tensor) -> torch.Tensor:
    """Rows whose chunks are divided by the power of two that is not below their largest value."""
    done = []
    for chunk in x.split(CHUNK, dim=1):
        peak = chunk.abs().amax(1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
        done.append(chunk / 2.0 ** peak.double().log2().ceil().float())
    return torch.cat(done, dim=1)


def numbered(ratio: int, dithered: bool) -> int:
    """The number of a table, as the docstring of ``tables`` says."""
    return ratio + 24 if not dithered or ratio >= 8 or ratio < -8 else 153 + ratio + 8


@pytest.mark.parametrize("chunk_dithered", [False, True])
@pytest.mark.parametrize("ratio", RATIOS)
def test_frequencies_are_those_of_a_gaussian(ratio, chunk_dithered):
    """With dither, they are means over its values. Those of octaves above the fifth repeat."""
    table = tables()[numbered(ratio, chunk_dithered)]
    assert table.dithered == (ratio >= (-8 if chunk_dithered else 8))
    assert table.low == max(0, ratio // PER_OCTAVE - 1)
    assert sum(table.frequencies) == TOTAL
    ratio, low = (ratio, table.low) if ratio < 48 else (40 + ratio % 8, 4)
    step = 2.0 ** (-ratio / PER_OCTAVE)
    dither = (np.arange(256) + 0.5) / 256 - 0.5 if table.dithered else np.zeros(1)
    first = (np.arange(-HALF, HALF) * 2**low - 0.5)[:, None] - dither
    inside = [below((each + 2**low) * step) - below(each * step) for each in first.T]
    wanted = TOTAL * np.mean(inside, axis=0)
    found = np.array(table.frequencies)
    tails = np.sum(np.maximum(1 - wanted, 0))  # each class has a frequency
    slack = np.where(wanted == wanted.max(), 2 + tails, 0.51) + 0.012 * wanted
    assert (abs(found - np.maximum(wanted, 1)) <= slack).all()


@pytest.mark.parametrize("chunk_dithered", [False, True])
@pytest.mark.parametrize("ratio", [-24, -16, -9, -8, 0, 4, 8])
def test_level_has_the_least_error_for_a_gaussian(ratio, chunk_dithered):
    table = tables()[numbered(ratio, chunk_dithered)]
    step = 2.0 ** (-ratio / PER_OCTAVE)
    g = torch.Generator().manual_seed(0)
    x = torch.randn(1 << 21, generator=g, dtype=torch.float64)
    d = torch.rand(x.shape, generator=g, dtype=torch.float64) - 0.5 if table.dithered else 0.0
    q = (x / step + d).round() - d
    best = float((x * q).sum() / (q * q).sum() / step)
    assert table.level == pytest.approx(best, rel=0.02)


def read(wire: bytes, blocks: int, even: int) -> np.ndarray:
    """Decode a chunk value by value, as the docstring of ``coder`` says."""
    step, dithered = divmod(struct.unpack_from("<h", wire)[0], 2)
    sizes = wire[2 : 2 + blocks]
    at = 2 + blocks + blocks % 2
    lanes = max(n for n in (1, 2, 4, 8, 16) if n <= blocks)
    states = list(struct.unpack_from(f"<{lanes}I", wire, at))
    words = iter(np.frombuffer(wire[at + 4 * lanes :], dtype="<u2").tolist())
    values = []
    for size in sizes:
        fine = -(2 - even) * 4 * size - step if size < 255 else -9999
        table = tables()[numbered(min(max((fine + 4) // 8, -24), 128), bool(dithered))]
        unit = 2.0 ** ((step - even * 4 * size) / 64)
        starts = np.cumsum((0, *table.frequencies))
        for _ in range(BLOCK // lanes):
            numbers = []
            for lane in range(lanes):
                slot = states[lane] % TOTAL
                number = int(np.searchsorted(starts, slot, side="right")) - 1
                often = table.frequencies[number]
                states[lane] = often * (states[lane] // TOTAL) + slot - int(starts[number])
                if states[lane] < 1 << 16:
                    states[lane] = states[lane] << 16 | next(words)
                numbers.append(number - HALF)
            for lane in range(lanes):
                if table.low:
                    low = states[lane] % 2**table.low
                    numbers[lane] = numbers[lane] * 2**table.low + low
                    states[lane] >>= table.low
                    if states[lane] < 1 << 16:
                        states[lane] = states[lane] << 16 | next(words)
            for number in numbers:
                dither = (159 * (len(values) % 256) % 256 + 0.5) / 256 - 0.5
                values.append((number - dither * table.dithered) * unit * table.level)
    assert all(state == 1 << 16 for state in states), "what the encoder began with"
    assert not any(words)
    return np.array(values)


def data(kind: str, rows: int, numel: int, seed: int) -> torch.Tensor:
    """Float32 rows of at most 1."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, numel, generator=g)
    if kind == "sizes":
        x = x * torch.exp(3 * torch.randn(rows, numel // BLOCK, generator=g)).repeat_interleave(
            BLOCK, 1
        )
    elif kind == "spikes":
        x = torch.where(torch.rand(x.shape, generator=g) < 1e-3, x, x * 1e-4)
    elif kind == "signs":
        x = x.sign()
    elif kind == "zeros":
        x = x * 0
    elif kind == "half zeros":
        x[:, numel // 2 :] = 0
    elif kind == "one":
        x = x * 0
        x[:, numel // 3] = 1.0
    elif kind == "tiny":
        x = x * 1e-20
        x[:, 0] = 1.0
    return (
        x / x.abs().amax().clamp_min(1.0) if kind == "tiny" else x / x.abs().amax().clamp_min(1e-30)
    )


KINDS = ["gaussian", "sizes", "spikes", "signs", "zeros", "half zeros", "one", "tiny"]
forms = st.builds(Form, st.integers(24, 192).map(lambda half: 2 * half), st.integers(0, 2))


@settings(max_examples=examples(6, 60), deadline=None)
@given(forms, st.sampled_from(KINDS), st.integers(1, 9), st.integers(0, 99))
def test_wire_is_read_by_its_description(form, kind, blocks, seed):
    x = data(kind, 1, blocks * BLOCK, seed)
    wire = by_cpp(x, form)
    wanted = read(wire[0].numpy().tobytes(), blocks, form.even)
    np.testing.assert_allclose(from_cpp(wire, form)[0].numpy(), wanted, rtol=1e-6, atol=1e-30)


@settings(max_examples=examples(4, 60), deadline=None)
@given(forms, st.sampled_from(KINDS), st.sampled_from([1, 2, 5, 16, 67]), st.integers(0, 99))
def test_cpp_makes_the_bytes_of_the_plain_form(form, kind, blocks, seed):
    x = data(kind, 1 + seed % 2, blocks * BLOCK, seed)
    wire = by_cpp(x, form)
    assert torch.equal(wire, coder.encode(scaled(x), form))
    assert torch.equal(from_cpp(wire, form), coder.decode(wire, form))


@settings(max_examples=examples(3, 60), deadline=None)
@given(forms, st.sampled_from([1, 3, 20]), st.integers(0, 99))
def test_any_bytes_decode_to_the_same_finite_numbers(form, blocks, seed):
    g = torch.Generator().manual_seed(seed)
    wire = torch.randint(0, 256, (2, blocks * form.nbytes), generator=g, dtype=torch.uint8)
    wire[:, 1] = wire[:, 1].to(torch.int8).clamp(-16, 2).to(torch.uint8)  # steps that exist
    found = from_cpp(wire, form)
    assert torch.equal(found, coder.decode(wire, form))
    assert found.isfinite().all()


@pytest.mark.parametrize("bits", [1.5, 2, 2.5, 3.1875, 4, 6, 8, 12])
@pytest.mark.parametrize("numel", [0, 1, 255, 256, 300, CHUNK, CHUNK + 1])
def test_wire_has_the_same_size_for_any_values(bits, numel):
    made = commpass.codec("ecq", bits=bits)
    blocks, chunks = math.ceil(numel / BLOCK), math.ceil(numel / CHUNK)
    wanted = sum(128 * math.ceil(size / 128) for size in (int(blocks * BLOCK * bits / 8), chunks))
    assert made.wire_bytes(numel, torch.float32) == wanted
    for x in (gaussian(numel), torch.zeros(numel), torch.full((numel,), math.inf)):
        assert made.encode(x).payload.numel() == wanted


@pytest.mark.parametrize("bits", [1.5, 2, 2.5, 3, 4, 5.5, 6, 8])
def test_distance_to_the_bound_of_a_gaussian_is_about_a_third_of_a_bit(bits):
    """All side data is counted. Uniform steps with an ideal entropy code need 0.254 bits."""
    x = gaussian(4 * CHUNK)
    made = commpass.codec("ecq", bits=bits)
    error = float((made.decode(made.encode(x)) - x).norm() / x.norm())
    assert made.bits_per_value(4 * CHUNK, x.dtype) + math.log2(error) < 0.36


@pytest.mark.parametrize("kind", ["laplace", "signs", "spikes", "constant", "integers", "ramp"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_error_is_no_larger_for_values_that_are_not_gaussian(bits, kind):
    n, g = 2 * CHUNK, torch.Generator().manual_seed(1)
    x = {
        "laplace": lambda: torch.empty(n).exponential_(generator=g) * data("signs", 1, n, 1)[0],
        "signs": lambda: data("signs", 1, n, 1)[0],
        "spikes": lambda: data("spikes", 1, n, 1)[0],
        "constant": lambda: torch.full((n,), 0.3),
        "integers": lambda: torch.randint(0, 100, (n,), generator=g).float(),
        "ramp": lambda: torch.linspace(-1, 1, n),
    }[kind]()
    made = commpass.codec("ecq", bits=bits)
    error = float((made.decode(made.encode(x)) - x).norm() / x.norm())
    assert error < 2.0 ** (0.40 - bits)


def test_blocks_with_larger_values_get_more_bits():
    """Reverse water-filling: with sizes of ``exp(N(0, 1))`` the error falls to ``exp(-1/2)`` times
    the largest size's share, here by a factor above 2."""
    x = data("gaussian", 1, 8 * CHUNK, 0)[0]
    g = torch.Generator().manual_seed(2)
    sizes = torch.exp(torch.randn(8 * CHUNK // BLOCK, generator=g)).repeat_interleave(BLOCK)
    errors = {}
    for even in (0, 0.5, 1):
        made = commpass.codec("ecq", even=even)
        found = made.decode(made.encode(x * sizes)) - x * sizes
        errors[even] = float(found.norm() / (x * sizes).norm())
        of_blocks = found.view(-1, BLOCK).norm(dim=1) / (x * sizes).view(-1, BLOCK).norm(dim=1)
        spread = float(of_blocks.log2().std())
        assert spread == pytest.approx((1 - even) / math.log(2), abs=0.25)
    assert 2 * errors[0] < errors[1]
    assert errors[0] < errors[0.5] < errors[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_nonfinite_values_affect_no_other_chunk(dtype):
    x = gaussian(3 * CHUNK).to(dtype)
    x[7], x[CHUNK + 9] = math.nan, -math.inf
    made = commpass.codec("ecq")
    back = made.decode(made.encode(x))
    assert not back[: 2 * CHUNK].isfinite().any()
    assert back[2 * CHUNK :].isfinite().all()


@pytest.mark.parametrize("numel", [1, 200, 700, 5000, CHUNK + 5])
def test_doubles_of_any_size_are_coded(numel):
    made = commpass.codec("ecq", bits=8)
    for scale in (1e300, 1.0, 1e-300):
        x = gaussian(numel).double() * scale
        back = made.decode(made.encode(x))
        assert float((back / scale - x / scale).norm() / (x / scale).norm()) < 2.0 ** (1 - 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("even", [0, 0.5, 1])
@pytest.mark.parametrize("bits", [1.5, 4, 12])
def test_zeros_and_blocks_far_below_the_largest_one_become_zeros(bits, even, dtype):
    """Their dither would otherwise be values: Adam would move parameters that have no gradient."""
    x = gaussian(CHUNK + 700).to(dtype)
    blocks = torch.arange(len(x)) // BLOCK % 4
    x = torch.where(blocks == 0, x, torch.where(blocks == 1, x * 1e-30, 0.0))
    made = commpass.codec("ecq", bits=bits, even=even)
    back = made.decode(made.encode(x))
    assert bool((back[blocks > 0] == 0).all())
    assert bool(back[blocks == 0].any())


@pytest.mark.parametrize("bits", [1.5, 1.8125, 2.875])
def test_error_of_a_single_rotated_value_is_within_the_bound(bits):
    """Values of two sizes do not fit at first, so that their chunk is dithered. A zero then has the
    error of its dither."""
    g = torch.Generator().manual_seed(0)
    turned = torch.where(torch.rand(64, BLOCK, generator=g) < 0.5, 1.0, -1.0)
    turned[:8] = 0
    turned[torch.arange(8), torch.arange(8)] = 2.0 ** torch.linspace(0, 3, 8)
    x = transforms.inverse(operators.ROTATION, turned, None)
    made = commpass.codec("ecq", bits=bits)
    wire = made.encode(x)
    assert wire.payload[0] % 2 == 1, "dithered"
    errors = (made.decode(wire) - x).norm(dim=1) / x.norm(dim=1)
    assert 1.05 < float(errors.max()) <= made.bound


def test_doubles_below_the_normal_numbers_do_not_grow():
    x = torch.tensor([5e-324, 1e-320, -3e-310], dtype=torch.float64)
    made = commpass.codec("ecq")
    assert made.decode(made.encode(x)).tolist() == [0, 0, 0]


@pytest.mark.parametrize("scale", [3e38, 1e30, 1.0, 1e-30, 1e-38, 1e-43, 0.0])
@pytest.mark.parametrize("numel", [1, 200, 5000])
def test_finite_values_stay_finite_and_errors_within_the_bound(scale, numel):
    x = gaussian(numel).clamp(-1, 1) * scale
    made = commpass.codec("ecq", bits=2)
    error = made.decode(made.encode(x)) - x
    assert error.isfinite().all()
    padded = torch.nn.functional.pad(torch.stack([x, error]).double(), (0, -numel % BLOCK))
    values, errors = padded.unflatten(1, (-1, BLOCK)).norm(dim=2)
    assert bool((errors <= made.bound * values + made.floor(x.dtype) * math.sqrt(BLOCK)).all())


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"bits": 1}, "must be from 1.5 to 12"),
        ({"bits": 13}, "must be from 1.5 to 12"),
        ({"bits": 4.1}, r"a multiple of 1/16, such as 4\.125"),
        ({"even": 0.3}, "must be 0, 0.5 or 1"),
        ({"bit": 4}, "did you mean 'bits'"),
        ({"bits": "4"}, "bits='4' should be like bits=4.0"),
    ],
)
def test_wrong_parameters_are_refused(given, why):
    with pytest.raises(PolicyError, match=why):
        commpass.codec("ecq", **given)


@pytest.mark.parametrize(
    "text", ["ecq", "ecq(bits=2)", "ecq(bits=3.1875, even=0.5)", "ecq(even=1)"]
)
def test_text_names_the_codec(text):
    made = commpass.codec(text)
    assert made.spec == made.wire_spec == text
    assert commpass.codec(text.replace("=2", "=2.0")) == made


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_operators_keep_what_torch_expects_of_them(dtype):
    ours = torch.ops.commpass
    x = gaussian(3 * 1000).view(3, 1000).to(dtype)
    torch.library.opcheck(ours.entropy_encode.default, (x, 128, 0, True))
    code, side = ours.entropy_encode(x, 128, 0, True)
    given = (128, 0, True, 1000, dtype)
    torch.library.opcheck(ours.entropy_decode.default, (code, side, *given))
    strided = torch.stack([code, code], dim=2)[:, :, 0]
    whole = ours.entropy_decode(code, side, *given)
    assert torch.equal(ours.entropy_decode(strided, side, *given), whole)
    code, side = ours.entropy_encode(x.t().contiguous().t(), 128, 0, True)
    assert torch.equal(ours.entropy_decode(code, side, *given), whole)


def spiky(kind: str, numel: int) -> torch.Tensor:
    """A row for the rotation."""
    x = gaussian(numel).view(1, -1)
    return {
        "gaussian": lambda: x,
        "largest": lambda: x.sign() * torch.finfo(torch.float32).max,
        "sizes": lambda: x * 10.0 ** (torch.arange(numel) // BLOCK % 13 - 6),
        "subnormal": lambda: x * 1e-40,
        "one value": lambda: torch.where(torch.arange(numel) % BLOCK == 3, x * 100, 0.0),
        "infinite": lambda: torch.where(torch.arange(numel) == numel // 2, math.inf, x),
        "bits": lambda: x.view(torch.int32).mul(0x3C6EF35F).view(torch.float32),
    }[kind]()


SPIKY = ["gaussian", "largest", "sizes", "subnormal", "one value", "infinite", "bits"]


def check_same_bits(form: Form, kind: str, numel: int, rotated: bool, dtype: torch.dtype) -> None:
    """Encode and decode with and without C++."""
    x, given = spiky(kind, numel), (form.nbytes, form.even, rotated)
    code, side = torch.ops.commpass.entropy_encode(x, *given)
    rows = torch.ops.commpass.entropy_decode(code, side, *given, numel, dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpp, "_entry", lambda: None)
        plain_code, plain_side = torch.ops.commpass.entropy_encode(x, *given)
        plain = torch.ops.commpass.entropy_decode(code, side, *given, numel, dtype)
    assert torch.equal(code, plain_code)
    assert torch.equal(side, plain_side)
    assert torch.equal(rows.view(torch.int32), plain.view(torch.int32))


@settings(max_examples=examples(3, 60), deadline=None)
@given(
    forms,
    st.sampled_from(SPIKY),
    st.sampled_from([1, 256, 300, 2000]),
    st.booleans(),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
def test_ranks_without_a_compiler_hold_the_same_bits(form, kind, numel, rotated, dtype):
    check_same_bits(form, kind, numel, rotated, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gaussian", "sizes", "infinite"])
def test_ranks_without_a_compiler_hold_the_same_bits_of_several_chunks(kind):
    check_same_bits(Form(128, 1), kind, CHUNK + 300, True, torch.float32)


@pytest.mark.slow
def test_without_a_directory_for_compiled_code_it_warns_and_runs(tmp_path):
    """In its own process, as Inductor makes its directory when it is imported."""
    (tmp_path / "file").touch()
    code = "import torch, commpass; c = commpass.codec('ecq', bits=8); x = torch.ones(300)"
    for _ in range(2):  # an import that failed once leaves parts of Inductor behind
        code += "; print(bool((c.decode(c.encode(x)) - x).abs().max() < 0.02))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "file")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["True", "True"], done.stderr
    assert "set TORCHINDUCTOR_CACHE_DIR to a directory that can be written" in done.stderr


def test_rotation_is_that_of_its_domain():
    x = gaussian(4 * BLOCK).view(2, 2, BLOCK).double()
    turned = transforms.forward(operators.ROTATION, x)[0]
    torch.testing.assert_close(rotation.forward(x), turned, rtol=0, atol=1e-15)
    torch.testing.assert_close(rotation.inverse(turned), x, rtol=0, atol=1e-13)


@pytest.mark.slow
def test_compiled_code_for_any_size_gives_the_bytes_of_eager_code():
    made = commpass.codec("ecq", bits=3)
    encode = torch.compile(made.encode_rows, dynamic=True, fullgraph=True)
    decode = torch.compile(made.decode_rows, dynamic=True, fullgraph=True)
    for numel in (700, 1025, CHUNK + 300):
        rows = gaussian(2 * numel).view(2, numel)
        wire = made.encode_rows(rows)
        assert torch.equal(encode(rows), wire)
        wanted = made.decode_rows(wire, numel, rows.dtype)
        assert torch.equal(decode(wire, numel, rows.dtype), wanted)


def test_device_without_a_kernel_is_warned_about_once():
    operators._warn_once.cache_clear()
    with pytest.warns(UserWarning, match="codec 'ecq' on cuda: no Triton. Each encode"):
        operators._warn_once("cuda", "no Triton")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        operators._warn_once("cuda", "no Triton")


def test_roots_are_those_of_two():
    assert coder.roots() == pytest.approx([2.0 ** (part / 64) for part in range(64)], rel=2**-24)


def test_without_a_compiler_a_warning_names_it(monkeypatch):
    from torch._inductor.codecache import CppPythonBindingsCodeCache
    from torch._inductor.exc import InvalidCxxCompiler

    def none(*args: object) -> None:
        raise InvalidCxxCompiler

    monkeypatch.setattr(CppPythonBindingsCodeCache, "load_pybinding", none)
    monkeypatch.setattr(cpp, "_entry", cpp._entry.__wrapped__)
    made, x = commpass.codec("ecq"), gaussian(300)
    with pytest.warns(UserWarning, match="codec 'ecq' runs without its C"):
        back = made.decode(made.encode(x))
    assert float((back - x).norm() / x.norm()) < 0.2
