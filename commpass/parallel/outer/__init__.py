"""Local updates (LocalSGD, DiLoCo): the outer exchange of parameters under one policy."""

from commpass.parallel.outer.api import CompressedOuter, compress_outer

__all__ = ["CompressedOuter", "compress_outer"]
