"""Kernels for CPUs: C++ written from the parts of codecs, and compiled by Inductor's own builder.

supports(chain) -> "" or why it is better left to Inductor
compiled(chain) -> Compiled, which writes what a chain makes of rows into a tensor
"""

from commpass.lowering.cpu.build import Compiled, compiled
from commpass.lowering.cpu.chains import exact, source, supports

__all__ = ["Compiled", "compiled", "exact", "source", "supports"]
