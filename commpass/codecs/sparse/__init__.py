"""A few entries of a row and where they lie."""

from commpass.codecs.sparse.codec import SparseCodec, dense, residual, sum_by_index

__all__ = ["SparseCodec", "dense", "residual", "sum_by_index"]
