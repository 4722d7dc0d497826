"""A lossless codec: sign and mantissa unchanged, exponents in a short code (ZipCCL)."""

from commpass.codecs.exponent.codec import ExponentCodec, exponent

__all__ = ["ExponentCodec", "exponent"]
