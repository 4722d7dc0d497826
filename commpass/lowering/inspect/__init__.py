"""Reading what a kernel becomes, without a GPU: its registers, spills, shared memory, instructions,
and how near to a copy's bandwidth these let it come."""

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
