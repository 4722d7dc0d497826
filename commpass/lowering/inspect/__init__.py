"""Inspect compiled kernels without a GPU: registers, spills, shared memory, instructions, and the
share of a copy's bandwidth that these allow."""

from commpass.lowering.inspect.architectures import ARCHITECTURES, CARDS, Architecture, Card
from commpass.lowering.inspect.compiled import Compiled, compile_kernel
from commpass.lowering.inspect.roofline import Prediction, predict

__all__ = [
    "ARCHITECTURES",
    "CARDS",
    "Architecture",
    "Card",
    "Compiled",
    "Prediction",
    "compile_kernel",
    "predict",
]
