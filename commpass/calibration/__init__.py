"""Which errors a model minds: measured where each collective stands, and spent by a policy."""

from commpass.calibration.data import Calibration, Carried, Level, Place, Where
from commpass.calibration.mix import Chosen, Solution
from commpass.calibration.run import CODECS, calibrate

__all__ = [
    "CODECS",
    "Calibration",
    "Carried",
    "Chosen",
    "Level",
    "Place",
    "Solution",
    "Where",
    "calibrate",
]
