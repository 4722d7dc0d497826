"""The passes, one file each, and the pipeline that runs them in order."""

from commpass.passes.pipeline import PASSES, Pass, PassContext, PassResult, run

__all__ = ["PASSES", "Pass", "PassContext", "PassResult", "run"]
