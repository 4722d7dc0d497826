"""Kernels for CPUs: C++ generated from the parts of codecs, and compiled by Inductor's builder.

- ``unsupported_reason(chain)`` returns why there is no C++ for a chain, or "".
- ``compile_chain(chain)`` returns a ``Compiled``, which runs the chain on rows and writes into a
  tensor.
- ``start_compiling(chains)`` starts the compiler for several at once, and
  ``precompile_headers()`` for torch's headers.
"""

from commpass.lowering.cpu.build import Compiled, compile_chain, precompile_headers, start_compiling
from commpass.lowering.cpu.chains import is_exact, source, unsupported_reason

__all__ = [
    "Compiled",
    "compile_chain",
    "is_exact",
    "precompile_headers",
    "source",
    "start_compiling",
    "unsupported_reason",
]
