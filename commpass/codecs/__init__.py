"""Encode and decode: the parts, their composition, and codecs by name."""

from commpass.codecs.codec import FLOATS, Codec, Wire, accumulation_dtype
from commpass.codecs.names import NAMES, codec
from commpass.codecs.packing import cut, cut_apart, pad

__all__ = ["FLOATS", "NAMES", "Codec", "Wire", "accumulation_dtype", "codec", "cut", "cut_apart", "pad"]
