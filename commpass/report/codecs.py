"""``commpass codecs``: measure bits, error and speed of codecs on user data or known
distributions."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.table import Table
from rich.text import Text
from torch import Tensor

from commpass.codecs import FLOATS, PRESETS, Codec, codec
from commpass.errors import PolicyError, nearest
from commpass.report.tables import plain_table

STANDARD = tuple(spec for preset in PRESETS for spec in preset.measured)
"""The codecs that are measured by default."""
PURPOSES = {preset.name: preset.purpose for preset in PRESETS}
"""What each codec is for, by its name without parameters."""

VALUES = 1 << 20
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in FLOATS}


def gaussian(generator: torch.Generator) -> Tensor:
    return torch.randn(VALUES, generator=generator)


def laplace(generator: torch.Generator) -> Tensor:
    sides = torch.rand(2, VALUES, generator=generator).clamp_min(1e-9).log()
    return sides[0] - sides[1]


def student(generator: torch.Generator) -> Tensor:
    """Student's t with 3 degrees of freedom: heavy tails."""
    squares = torch.randn(3, VALUES, generator=generator).square().sum(dim=0)
    return torch.randn(VALUES, generator=generator) / (squares / 3).sqrt()


def outliers(generator: torch.Generator) -> Tensor:
    """Activations of 1,024 channels; one channel in 64 is 30 times as large as the others."""
    x = torch.randn(VALUES // 1024, 1024, generator=generator)
    x[:, 11::64] *= 30
    return x


def gradients(generator: torch.Generator) -> Tensor:
    """Small and heavy-tailed values, 30 times as large in one channel of 64.

    They are below the range of a plain 8-bit float.
    """
    x = student(generator).reshape(VALUES // 1024, 1024) * 1e-4
    x[:, 11::64] *= 30
    return x


def tokens(generator: torch.Generator) -> Tensor:
    """Tokens of 256 Gaussian values, whose sizes differ by ``exp(N(0, 1))``."""
    sizes = torch.exp(torch.randn(VALUES // 256, 1, generator=generator))
    return sizes * torch.randn(VALUES // 256, 256, generator=generator)


DATA: dict[str, Callable[[torch.Generator], Tensor]] = {
    "gaussian": gaussian,
    "laplace": laplace,
    "student": student,
    "outliers": outliers,
    "gradients": gradients,
    "tokens": tokens,
}


@dataclass(frozen=True)
class Measured:
    """The measurements of a codec on some data.

    ``bits`` are those of a value, side data included. ``error`` and ``cosine`` are relative to the
    data. ``distance`` is the number of bits above the lower bound for the same error. The bound of
    a Gaussian is ``-log2(error)`` (lossy); the lossless bound is the entropy of the exponents and
    all other bits. Speeds are GB/s of input; None if not timed.
    """

    codec: str
    bits: float
    error: float
    cosine: float
    bound: float
    distance: float
    lossless: bool
    encode_gbs: float | None = None
    decode_gbs: float | None = None


def dtype_of(name: str) -> torch.dtype:
    """Return a dtype that codecs take, by name. Raise PolicyError for another one."""
    if name not in DTYPES:
        raise PolicyError(f"unknown dtype {name!r}{nearest(name, DTYPES)}")
    return DTYPES[name]


def tensors(source: str, dtype: str) -> list[Tensor]:
    """Return data by name, or the float tensors of a safetensors file.

    Raise PolicyError if there are none.
    """
    of = dtype_of(dtype)
    if source in DATA:
        return [DATA[source](torch.Generator().manual_seed(0)).to(of)]
    path = Path(source)
    if path.suffix != ".safetensors":
        raise PolicyError(
            f"unknown data {source!r}{nearest(source, DATA)} A file must end in .safetensors."
        )
    return list(_read(path))


def title_of(source: str) -> str:
    """Return the title of a picture of codecs on the data of ``tensors``."""
    names = {"gaussian": "Gaussian", "laplace": "Laplace", "student": "Student's t"}
    what = f"{names.get(source, source)} data" if source in DATA else Path(source).name
    return f"Error of codecs on {what}"


def _read(path: Path) -> Iterator[Tensor]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise PolicyError(
            "reading a safetensors file needs: pip install 'commpass[data]'"
        ) from error
    found = False
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (no mapping)
                tensor = file.get_tensor(name)
                if tensor.dtype in FLOATS and tensor.numel():
                    found = True
                    yield tensor
    except (OSError, SafetensorError) as error:
        raise PolicyError(f"{path}: cannot be read as safetensors: {error}") from error
    if not found:
        raise PolicyError(f"{path}: holds no tensor of {', '.join(DTYPES)}")


def measure(spec: str, data: Sequence[Tensor], *, timed: bool = False) -> Measured:
    """Measure one codec on all tensors: bits and errors over all of them, speed on the largest."""
    coder = codec(spec)
    wire = values = 0
    off = size = other = dot = floor = 0.0
    for x in data:
        sent = coder.encode(x)
        wire += sent.payload.numel()
        values += x.numel()
        back, exact = coder.decode(sent).double(), x.double()
        off += float((back - exact).square().sum())
        size += float(exact.square().sum())
        other += float(back.square().sum())
        dot += float((back * exact).sum())
        floor += exponent_bits(x) * x.numel() if coder.lossless else 0.0
    bits, error = 8 * wire / values, math.sqrt(off / size) if size else 0.0
    distance = (
        bits - floor / values if coder.lossless else bits + math.log2(error) if error else 0.0
    )
    cosine = dot / math.sqrt(size * other) if size * other else 1.0
    encode, decode = speeds(coder, max(data, key=Tensor.numel)) if timed else (None, None)
    return Measured(
        coder.spec, bits, error, cosine, coder.bound, distance, coder.lossless, encode, decode
    )


def exponent_bits(x: Tensor) -> float:
    """Return the least bits of a value if only its exponent is coded.

    That is the entropy of the exponents, and all other bits.
    """
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    mantissa = round(-math.log2(torch.finfo(x.dtype).eps))
    exponents = 8 * x.element_size() - 1 - mantissa
    counts = torch.bincount(
        ((x.reshape(-1).view(whole) >> mantissa) & (2**exponents - 1)).long()
    ).double()
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * shares.log2()).sum()) + 1 + mantissa


def speeds(codec: Codec, x: Tensor, *, repeats: int = 7) -> tuple[float, float]:
    """Return GB/s of input of the compiled encode and decode.

    Dynamo is reset first: it compiles the same code eight times, and runs all further versions
    eagerly.
    """
    torch._dynamo.reset()
    rows, dtype = x.reshape(1, -1), x.dtype
    numel = rows.shape[1]
    encode = torch.compile(codec.encode_rows, dynamic=False)
    decode = torch.compile(
        lambda wire: codec.decode_rows(wire, numel, dtype).to(dtype), dynamic=False
    )
    wire = encode(rows)
    size = rows.numel() * rows.element_size()
    return size / seconds(lambda: encode(rows), repeats) / 1e9, size / seconds(
        lambda: decode(wire), repeats
    ) / 1e9


def seconds(run: Callable[[], Any], repeats: int) -> float:
    """Return the median time of a call, after two that do not count."""
    times = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return median(times[2:])


def table_of(rows: Sequence[Measured]) -> Table:
    """Return a table of codecs on some data, one for each line."""
    timed = any(row.encode_gbs is not None for row in rows)
    numbers = ["bits", "error", "cosine", "bound", "above"]
    numbers += ["encode GB/s", "decode GB/s"] if timed else []
    table = plain_table("codec", *numbers, right=numbers)
    table.caption_justify = "left"
    table.caption = (
        "error: relative, in the 2-norm; cosine: of the angle between values and decoded values;\n"
        "bound: the largest error that a block of any values can have, 1 for 100 %;\n"
        "above: bits above 2^-b, the least for a Gaussian (lossless: above the entropy of the"
        " exponents)"
    )
    for row in rows:
        speeds = [f"{speed:.2f}" for speed in (row.encode_gbs, row.decode_gbs) if speed is not None]
        error = "lossless" if row.lossless else f"{row.error:.3%}"
        bound = "" if row.lossless else f"{row.bound:.2f}"
        table.add_row(
            row.codec,
            f"{row.bits:.3f}",
            error,
            f"{row.cosine:.6f}",
            bound,
            f"{row.distance:.2f}",
            *speeds,
        )
    return table


def purposes_of(specs: Iterable[str]) -> Table:
    """Return what some codecs are for, one line for each name."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name in dict.fromkeys(spec.partition("(")[0] for spec in specs):
        if name in PURPOSES:
            table.add_row(Text(name), Text(PURPOSES[name]))
    return table
