"""Measure how sensitive a model is to errors of each collective, and choose codecs accordingly."""

from commpass.calibration.data import Address, Calibration, CountedSite, ErrorLevel, MeasuredSites
from commpass.calibration.mix import CodecOption, Solution
from commpass.calibration.run import CODECS, calibrate
from commpass.utils.deprecated import old_names

__all__ = [
    "CODECS",
    "Address",
    "Calibration",
    "CodecOption",
    "CountedSite",
    "ErrorLevel",
    "MeasuredSites",
    "Solution",
    "calibrate",
]

__getattr__ = old_names(
    __name__,
    {
        "Carried": "CountedSite",
        "Level": "ErrorLevel",
        "Place": "MeasuredSites",
        "Treatment": "CodecOption",
    },
)
