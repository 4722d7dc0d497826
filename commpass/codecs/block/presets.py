"""Block codecs by name: each preset sets a transform, scale, grid and rounding."""

from __future__ import annotations

from collections.abc import Callable

from commpass.codecs.block.codec import BlockCodec
from commpass.codecs.block.grids import (
    CompandedGrid,
    Fp8Grid,
    Grid,
    IntGrid,
    LevelGrid,
    MiniFloatGrid,
    TableGrid,
    companding,
)
from commpass.codecs.block.layouts import Flat, Lanes, Layout, Pairs, Tiles
from commpass.codecs.block.noise import Nearest, Stochastic
from commpass.codecs.block.scales import (
    Absmax,
    Dual,
    LeastSquares,
    Midrange,
    Rms,
    Scale,
    SharedExponent,
    Static,
    TwoLevel,
)
from commpass.codecs.block.storage import STORED
from commpass.codecs.block.transforms import Hadamard, NoTransform
from commpass.codecs.codec import Codec
from commpass.codecs.preset import Preset
from commpass.codecs.rows import is_power_of_two
from commpass.errors import PolicyError, nearest

NEAREST, STOCHASTIC = "nearest", "stochastic"
SCALES: dict[str, Callable[[str], Scale]] = {
    "absmax": Absmax,
    "rms": Rms,
    "lsq": LeastSquares,
    "dual": Dual,
}
"""Scales by name, except the static one."""


def _integers(bits: int, block: int, doc: str) -> Callable[..., Codec]:
    """Return the builder of symmetric integers of ``bits`` bits, in blocks of ``block`` values by
    default."""

    def build(
        spec: str,
        *,
        block: int = block,
        scale: str = "absmax",
        stored: str = "fp32",
        static: float = 0.0,
        rounding: str = NEAREST,
        seed: int = 0,
    ) -> Codec:
        rule = _scale(scale, stored, static)
        grid = IntGrid(bits, marks=isinstance(rule, Static))
        stochastic = _one_of("rounding", rounding, (NEAREST, STOCHASTIC)) == STOCHASTIC
        if seed and not stochastic:
            raise PolicyError(f"seed={seed}: is for rounding={STOCHASTIC!r}")
        if stochastic and isinstance(rule, LeastSquares):
            raise PolicyError(
                "scale='lsq' fits the scale to codes rounded to the nearest; leave out"
                " rounding='stochastic'"
            )
        return BlockCodec(
            spec,
            Flat(_block(block)),
            grid,
            rule,
            rounding=Stochastic(seed) if stochastic else Nearest(),
        )

    build.__doc__ = doc
    return build


int8 = _integers(
    8, 256, "Symmetric 8-bit integers, one absmax scale a block (EQuARX, section III)."
)
int6 = _integers(6, 128, "Symmetric 6-bit integers, four in three bytes.")
int4 = _integers(
    4, 128, "Symmetric 4-bit integers, two in a byte (low-bit TP inference, section 3)."
)
int2 = _integers(2, 64, "Minus one, zero and one, four in a byte.")


def fp8(
    spec: str,
    *,
    form: str = "e4m3",
    block: int = 256,
    scale: str = "absmax",
    stored: str = "fp32",
    static: float = 0.0,
) -> Codec:
    """8-bit floats, ``form`` e4m3 or e5m2, one absmax scale per block; sent as uint8.
    ``static=1.0`` is a plain cast."""
    _one_of("form", form, ("e4m3", "e5m2"))
    rule = _scale(scale, stored, static)
    grid = Fp8Grid(form, marks=isinstance(rule, Static))
    return BlockCodec(spec, Flat(_block(block)), grid, rule)


MX_BLOCK, NVFP4_BLOCK = 32, 16
"""Values that share a scale, in the formats that hardware multiplies."""
MX_SCALES: dict[str, Scale] = {"floor": SharedExponent(), "ceil": Absmax("pow2")}
"""Power-of-two scales: rounded down as in OCP MX v1.0, or up, so that no value is clamped."""


def mxfp8(spec: str, *, form: str = "e4m3", scale: str = "floor") -> Codec:
    """MXFP8 of OCP MX v1.0: 8-bit floats e4m3 or e5m2, one e8m0 scale (a power of two) per block of
    32 values.

    ``scale="floor"`` is the standard's, which clamps values above the largest number;
    ``scale="ceil"`` is the next power of two where it would, and clamps nothing.
    """
    grid = Fp8Grid(_one_of("form", form, ("e4m3", "e5m2")))
    return _mx(spec, Flat(MX_BLOCK), grid, scale)


def mxfp6(spec: str, *, form: str = "e2m3", scale: str = "floor") -> Codec:
    """MXFP6 of OCP MX v1.0: 6-bit floats e2m3 or e3m2, one e8m0 scale per block of 32 values; see
    ``mxfp8``."""
    grid = MiniFloatGrid(_one_of("form", form, ("e2m3", "e3m2")))
    return _mx(spec, Flat(MX_BLOCK), grid, scale)


def mxfp4(spec: str, *, scale: str = "floor") -> Codec:
    """MXFP4 of OCP MX v1.0: 4-bit floats e2m1, one e8m0 scale per block of 32 values; see
    ``mxfp8``. A byte holds two neighbours, as in ``torch.float4_e2m1fn_x2``."""
    return _mx(spec, Pairs(MX_BLOCK), MiniFloatGrid("e2m1"), scale)


def nvfp4(spec: str) -> Codec:
    """NVFP4: 4-bit floats e2m1, one e4m3 scale per block of 16 values, and one float32 per row. A
    byte holds two neighbours, as in ``torch.float4_e2m1fn_x2``."""
    return BlockCodec(spec, Pairs(NVFP4_BLOCK), MiniFloatGrid("e2m1"), TwoLevel())


def _mx(spec: str, layout: Layout, grid: Grid, scale: str) -> Codec:
    return BlockCodec(spec, layout, grid, MX_SCALES[_one_of("scale", scale, tuple(MX_SCALES))])


def rotated(
    spec: str,
    *,
    bits: int = 8,
    form: str = "companded",
    block: int = 256,
    scale: str = "",
    stored: str = "bf16",
) -> Codec:
    """A Hadamard rotation with signs and one scale; by default, the grid with the least error at
    each width from 2 to 8 bits. Not from a paper.

    ``form`` is the grid: companded; int; table (Lloyd-Max, up to 6 bits, scaled by least squares);
    or e4m3 and e5m2.
    """
    _power(_block(block), block)
    grid = _grid(_one_of("form", form, ("companded", "int", "table", "e4m3", "e5m2")), bits, block)
    rule = scale or ("lsq" if form == "table" else "absmax")
    return BlockCodec(
        spec, Flat(block), grid, _scale(rule, stored, 0.0), Hadamard(block, signed=True)
    )


def table(
    spec: str, *, bits: int = 4, block: int = 256, scale: str = "rms", stored: str = "bf16"
) -> Codec:
    """A Hadamard rotation, then the Lloyd-Max levels of a Gaussian at 2 to 6 bits, scaled by the
    root mean square."""
    _power(_block(block), block)
    rule = _scale(_one_of("scale", scale, ("rms", "lsq")), stored, 0.0)
    return BlockCodec(
        spec, Flat(block), _grid("table", bits, block), rule, Hadamard(block, signed=True)
    )


def taco(
    spec: str, *, form: str = "e4m3", block: int = 256, scale: str = "dual", rotate: bool = True
) -> Codec:
    """TACO as published (section 3): root mean square, Hadamard rotation, absmax, 8-bit floats; two
    fp32 numbers per block.

    ``scale="absmax"`` is the one-scale form, which gives the same result with half the side data.
    ``form="int8"`` is for hardware without 8-bit floats, ``rotate=False`` omits the rotation; both
    are for the ablation.
    """
    _power(_block(block), block)
    grid = (
        IntGrid(8) if _one_of("form", form, ("e4m3", "e5m2", "int8")) == "int8" else Fp8Grid(form)
    )
    rule = SCALES[_one_of("scale", scale, ("dual", "absmax"))]("fp32")
    return BlockCodec(spec, Flat(block), grid, rule, Hadamard(block) if rotate else NoTransform())


def equarx(spec: str, *, block: int = 0, width: int = 0) -> Codec:
    """8-bit integers as in EQuARX, section III.B: one scale for each position of an 8 x 128
    register, 1,024 scales for a shard of any size.

    With ``block``, at most that many registers share their scales (the paper's minishards). With
    ``width``, the number of columns of the tensor, blocks are rectangles of 8 x 128 values instead.
    """
    if width < 0:
        raise PolicyError(
            f"width={width}: must be the number of columns of the tensor, or 0 for blocks of"
            " registers"
        )
    if width and block:
        raise PolicyError(f"block={block}: is for registers; leave it out with width={width}")
    lanes = Lanes(_block(block) if block else 0)
    return BlockCodec(spec, Tiles(8, 128, width) if width else lanes, IntGrid(8))


def sdp4bit(spec: str, *, part: str = "gradient", bits: int = 4, block: int = 0) -> Codec:
    """SDP4Bit as in its published code.

    ``part="gradient"``: Hadamard of width 32, groups of 128, 4 bits between nodes (``bits=8``
    inside one). ``part="weight"``: 4 bits in groups of 2048, for the *difference* to what receivers
    hold (the wrapper ``difference``).
    """
    if bits not in (4, 8):
        raise PolicyError(f"bits={bits}: must be 4 or 8")
    if _one_of("part", part, ("gradient", "weight")) == "weight":
        return BlockCodec(spec, Flat(_block(block or 2048)), IntGrid(bits))
    if _block(block or 128) % 32 != 0:
        raise PolicyError(f"block={block}: must be a multiple of 32, the width of the rotation")
    return BlockCodec(spec, Flat(block or 128), IntGrid(bits), transform=Hadamard(32))


def tahquant(
    spec: str, *, bits: int = 4, block: int = 128, stored: str = "bf16", form: str = "int"
) -> Codec:
    """TahQuant: tiles of contiguous channels, pivot swap and Hadamard rotation, asymmetric 3 or 4
    bits.

    ``form="companded"`` is not in the paper: the same wire on a grid with less error for a
    Gaussian.
    """
    if bits not in (3, 4):
        raise PolicyError(f"bits={bits}: must be 3 or 4")
    if _power(_block(block), block) > 128:
        raise PolicyError(f"block={block}: must be at most 128")
    _one_of("stored", stored, ("fp32", "bf16"))
    return BlockCodec(
        spec,
        Flat(block),
        LevelGrid(bits)
        if _one_of("form", form, ("int", "companded")) == "int"
        else CompandedGrid(bits, companding(block)),
        Absmax(stored),
        Hadamard(block, pivot=True),
        Midrange(stored),
    )


def _grid(form: str, bits: int, block: int) -> Grid:
    if form in ("e4m3", "e5m2"):
        if bits != 8:
            raise PolicyError(
                f"bits={bits} with form={form!r}: 8-bit floats have 8 bits; leave bits out"
            )
        return Fp8Grid(form)
    most = 6 if form == "table" else 8
    if not 2 <= bits <= most:
        raise PolicyError(f"bits={bits}: must be from 2 to {most}")
    if form == "companded":
        return CompandedGrid(bits, companding(block))
    return IntGrid(bits) if form == "int" else TableGrid(bits)


def _scale(rule: str, stored: str, static: float) -> Scale:
    """Return the scale of a name; a ``static`` other than 0 selects the static scale."""
    _one_of("stored", stored, tuple(STORED))
    if rule == "static" or static:
        if rule not in ("static", "absmax"):
            raise PolicyError(f"static={static}: is a scale itself; leave out scale={rule!r}")
        if (
            not 2.0**-126 <= static <= 2.0**126
        ):  # all values are divided by it, so it must be a normal float32
            raise PolicyError(f"static={static}: a static scale must be from 2^-126 to 2^126")
        return Static(static)
    return SCALES[_one_of("scale", rule, tuple(SCALES))](stored)


def _block(block: int) -> int:
    if not (8 <= block <= 65536 and block % 8 == 0):
        raise PolicyError(f"block={block}: must be a multiple of 8 from 8 to 65536")
    return block


def _power(block: int, value: int) -> int:
    if not is_power_of_two(block):
        raise PolicyError(
            f"block={value}: a Hadamard rotation needs a power of two, such as 128 or 256"
        )
    return block


def _one_of(parameter: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise PolicyError(f"{parameter}={value!r}{nearest(value, known)}")
    return value


# --- by name --------------------------------------------------------------------------------------

PRESETS = (
    Preset(
        "int8",
        int8,
        "plain integers over the largest value of each block: cheap, and near to exact",
        ("int8",),
    ),
    Preset(
        "int6", int6, "as int8 with 6 bits: where 8 are more than the error asks for", ("int6",)
    ),
    Preset("int4", int4, "as int8 with 4 bits: large error on data with outliers", ("int4",)),
    Preset("int2", int2, "as int8 with 2 bits: for comparison", ("int2",)),
    Preset(
        "fp8",
        fp8,
        "an 8-bit float: one error for small and for large values (e5m2: for wider ranges)",
        ("fp8", "fp8(form=e5m2)"),
    ),
    Preset(
        "mxfp8",
        mxfp8,
        "an 8-bit float over a power of two for 32 values (OCP MX): where matmuls take it",
        ("mxfp8",),
    ),
    Preset(
        "mxfp6",
        mxfp6,
        "as mxfp8 with 6 bits: about the same error, but no matmul of torch takes it",
        ("mxfp6",),
    ),
    Preset("mxfp4", mxfp4, "as mxfp8 with 4 bits: where matmuls take it", ("mxfp4",)),
    Preset(
        "nvfp4",
        nvfp4,
        "a 4-bit float over an 8-bit one for 16 values: where matmuls take it; less error than int4"
        " and mxfp4",
        ("nvfp4",),
    ),
    Preset(
        "rotated",
        rotated,
        "integers after a Hadamard rotation, which spreads outliers: least error of fast codecs"
        " from 4 bits on",
        (*(f"rotated(bits={bits})" for bits in range(2, 8)), "rotated"),
    ),
    Preset(
        "table",
        table,
        "Lloyd-Max levels after a rotation: least error of fast codecs at 2 and 3 bits",
        tuple(f"table(bits={bits})" for bits in (2, 3, 4, 5, 6)),
    ),
    Preset(
        "taco",
        taco,
        "rotated fp8 with two scales (TACO): activations and gradients of tensor parallelism",
        ("taco", "taco(scale=absmax)"),
    ),
    Preset(
        "equarx",
        equarx,
        "int8 in blocks of 8 x 128 (EQuARX): all_reduce of inference, pipelined",
        ("equarx",),
    ),
    Preset(
        "sdp4bit",
        sdp4bit,
        "4 bits in groups, rotated (SDP4Bit): gradients and weights of sharded data parallelism",
        ("sdp4bit", "sdp4bit(bits=8)", "sdp4bit(part=weight)"),
    ),
    Preset(
        "tahquant",
        tahquant,
        "3 to 4 bits a tile of channels, with a pivot swap (TahQuant): activations of pipeline"
        " parallelism",
        ("tahquant(bits=3)", "tahquant"),
    ),
)
