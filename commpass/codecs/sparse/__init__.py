"""Sparse codecs: send a few entries of a row and their indices."""

from commpass.codecs.sparse.codec import SparseCodec, dense, residual, sum_by_index

__all__ = ["SparseCodec", "dense", "residual", "sum_by_index"]
