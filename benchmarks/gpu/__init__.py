"""Check kernels on a GPU against float64, and time them against a copy and against other libraries.

python benchmarks/gpu/run.py
"""
