"""commpass makes the collectives of a compiled PyTorch model smaller and hides what is left.

``model = torch.compile(model, backend=commpass.backend("balanced"))``
"""

from importlib.metadata import version as _version
from typing import TYPE_CHECKING

from commpass import parallel
from commpass.annotate import apply_policy, compress, keep
from commpass.backend import backend
from commpass.calibration import Calibration, calibrate
from commpass.codecs import codec
from commpass.collectives import Handle, all_gather, all_reduce, all_to_all, reduce_scatter
from commpass.costmodel import KernelRate, Kernels, Link, Profile, Region, ethernet
from commpass.errors import (
    CalibrationError,
    CommpassError,
    DumpError,
    ParallelError,
    PlanMismatch,
    PolicyError,
    ProfileError,
    ScopeError,
    VerifyError,
)
from commpass.plan import Plan
from commpass.policy import Policy
from commpass.report.verdict import Report, log_metrics, metrics
from commpass.rules import Rule
from commpass.runtime.record import plans
from commpass.runtime.state import load_state_dict, reset_state, state_dict
from commpass.simulate import simulate
from commpass.standalone import rewrite

if TYPE_CHECKING:  # at run time it is the package itself, which can be called
    from commpass.report.verdict import report

__version__ = _version("commpass")

__all__ = [
    "Calibration",
    "CalibrationError",
    "CommpassError",
    "DumpError",
    "Handle",
    "KernelRate",
    "Kernels",
    "Link",
    "ParallelError",
    "Plan",
    "PlanMismatch",
    "Policy",
    "PolicyError",
    "Profile",
    "ProfileError",
    "Region",
    "Report",
    "Rule",
    "ScopeError",
    "VerifyError",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "apply_policy",
    "backend",
    "calibrate",
    "codec",
    "compress",
    "ethernet",
    "keep",
    "load_state_dict",
    "log_metrics",
    "metrics",
    "parallel",
    "plans",
    "reduce_scatter",
    "report",
    "reset_state",
    "rewrite",
    "simulate",
    "state_dict",
]
