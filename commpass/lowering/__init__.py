"""Implementations of the coded operators: generated kernels for CPUs and GPUs."""

from commpass.lowering.generated import (
    caller,
    has_kernels,
    slower_reason,
    tunable,
    unsupported_decode_reason,
    unsupported_product_reason,
    unsupported_reason,
)
from commpass.lowering.kernel import (
    Form,
    Generated,
    KernelInput,
    Piece,
    Source,
    form_of,
    make,
    start_compiling,
)

__all__ = [
    "Form",
    "Generated",
    "KernelInput",
    "Piece",
    "Source",
    "caller",
    "form_of",
    "has_kernels",
    "make",
    "slower_reason",
    "start_compiling",
    "tunable",
    "unsupported_decode_reason",
    "unsupported_product_reason",
    "unsupported_reason",
]
