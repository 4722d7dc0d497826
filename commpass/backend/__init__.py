"""The torch.compile backend: runs the passes on AOTAutograd's forward and backward graphs and
compiles them.

Graphs are rewritten in ``inner_compile``, before Inductor's own compile, so that Inductor's graph
cache keys on the rewritten graph. On a hit, AOTAutograd's cache would skip that step. It is
therefore disabled, for compiles of this backend only.

``entry`` has the public functions, and ``compiler`` the Backend that torch calls. ``build`` makes
one graph: ``agree`` plans it and compares its plan with the other ranks, ``records`` reports it,
and ``calls`` wraps what is then called. ``shared`` is what all graphs of a Backend share.
"""

from commpass.backend.compiler import Backend
from commpass.backend.entry import backend, by_name
from commpass.backend.options import Compiler
from commpass.backend.shared import TracedGraph

__all__ = ["Backend", "Compiler", "TracedGraph", "backend", "by_name"]
