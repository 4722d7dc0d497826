"""What coded operators become."""

from commpass.lowering.generated import caller, has_kernels, obstacle, product_obstacle
from commpass.lowering.kernel import Form, Generated, Piece, Source, Taken, form_of, make

__all__ = [
    "Form",
    "Generated",
    "Piece",
    "Source",
    "Taken",
    "caller",
    "form_of",
    "has_kernels",
    "make",
    "obstacle",
    "product_obstacle",
]
