"""One page that shows what was done to the collectives of one run or several: an HTML file that
needs nothing beside itself."""

from commpass.report.html.page import check, write
from commpass.report.html.runs import Read, runs

__all__ = ["Read", "check", "runs", "write"]
