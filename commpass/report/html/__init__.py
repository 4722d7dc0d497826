"""Write an HTML page about the collectives of one run or several, as one self-contained file."""

from commpass.report.html.page import check, write
from commpass.report.run import Run, runs

__all__ = ["Run", "check", "runs", "write"]
