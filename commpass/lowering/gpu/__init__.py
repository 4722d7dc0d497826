"""Kernels in Triton: tile functions for the parts of codecs, and what is generated from them."""
