"""Lossless: sign and mantissa as they are, exponents by a short code (ZipCCL)."""

from commpass.codecs.exponent.codec import ExponentCodec, exponent

__all__ = ["ExponentCodec", "exponent"]
