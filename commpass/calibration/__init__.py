"""Measure how sensitive a model is to errors of each collective, and choose codecs accordingly."""

from commpass.calibration.data import Address, Calibration, Carried, Level, Place
from commpass.calibration.mix import Solution, Treatment
from commpass.calibration.run import CODECS, calibrate

__all__ = [
    "CODECS",
    "Address",
    "Calibration",
    "Carried",
    "Level",
    "Place",
    "Solution",
    "Treatment",
    "calibrate",
]
