"""Codecs by name, and the functions and classes that codecs are composed of."""

from commpass.codecs import exponent_operators, operators
from commpass.codecs.block.domain import VALUES, Domain
from commpass.codecs.cast import CastCodec
from commpass.codecs.codec import FLOATS, Codec, Wire, accumulation_dtype
from commpass.codecs.dispatch import warm_up
from commpass.codecs.raw import RawCodec
from commpass.codecs.registry import NAMES, PRESETS, codec
from commpass.codecs.rows import ALIGNMENT, cut, cut_apart, pad
from commpass.codecs.sparse import SparseCodec, sum_by_index
from commpass.codecs.wrappers.difference import (
    DifferenceCodec,
    add_to_reference,
    next_reference,
    subtract_reference,
)

__all__ = [
    "ALIGNMENT",
    "FLOATS",
    "NAMES",
    "PRESETS",
    "VALUES",
    "CastCodec",
    "Codec",
    "DifferenceCodec",
    "Domain",
    "RawCodec",
    "SparseCodec",
    "Wire",
    "accumulation_dtype",
    "add_to_reference",
    "codec",
    "cut",
    "cut_apart",
    "exponent_operators",
    "next_reference",
    "operators",
    "pad",
    "subtract_reference",
    "sum_by_index",
]

warm_up()
