"""The passes, one file each, and the manager that runs them in order."""

from commpass.passes.context import GraphInput, PassContext, PassResult
from commpass.passes.contract import Pass
from commpass.passes.manager import PASSES, run

__all__ = ["PASSES", "GraphInput", "Pass", "PassContext", "PassResult", "run"]
