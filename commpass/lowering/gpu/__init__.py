"""Kernels in Triton: tile functions for the parts of codecs, and kernels generated from them."""
