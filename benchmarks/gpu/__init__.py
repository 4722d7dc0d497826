"""Kernels on a GPU: checked against float64, timed against a copy, and against what others have.

python benchmarks/gpu/run.py
"""
