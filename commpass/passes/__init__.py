"""The passes, one file each, and the pipeline that lists them in order."""

from commpass.passes.pipeline import PASSES, Outcome, Pass, Road, run

__all__ = ["PASSES", "Outcome", "Pass", "Road", "run"]
