"""Inspect compiled kernels without a GPU: registers, spills, shared memory, instructions, and the
share of a copy's bandwidth that these allow."""

from commpass.lowering.inspect.architectures import ARCHITECTURES, CARDS, Architecture, Card
from commpass.lowering.inspect.compiled import Compiled, compiled
from commpass.lowering.inspect.roofline import Prediction, predicted

__all__ = [
    "ARCHITECTURES",
    "CARDS",
    "Architecture",
    "Card",
    "Compiled",
    "Prediction",
    "compiled",
    "predicted",
]
