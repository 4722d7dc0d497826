"""commpass compresses the collectives of a compiled PyTorch model and overlaps what remains.

``model = torch.compile(model, backend=commpass.backend("balanced"))``

Public names are imported on first access. ``import commpass`` is therefore cheap, and the command
line reads dumps without importing torch.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from commpass import parallel
    from commpass.backend import backend
    from commpass.calibration import Calibration, calibrate
    from commpass.codecs import codec
    from commpass.collectives.handle import Handle
    from commpass.collectives.public import (
        all_gather,
        all_gather_v,
        all_reduce,
        all_to_all,
        reduce_scatter,
        reduce_scatter_v,
    )
    from commpass.costmodel import KernelRate, Kernels, Link, Profile, Region, ethernet
    from commpass.distributed.record import plans
    from commpass.distributed.state import load_state_dict, reset_state, state_dict
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
    from commpass.policy.annotate import apply_policy, compress, keep
    from commpass.policy.rules import Rule
    from commpass.report.process_report import Report, log_metrics, metrics, report
    from commpass.simulate import simulate
    from commpass.standalone import rewrite

    __version__: str

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
    "all_gather_v",
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
    "reduce_scatter_v",
    "report",
    "reset_state",
    "rewrite",
    "simulate",
    "state_dict",
]

_NAMES = {
    "policy.annotate": "apply_policy compress keep",
    "backend": "backend",
    "calibration": "Calibration calibrate",
    "codecs": "codec",
    "collectives.handle": "Handle",
    "collectives.public": "all_gather all_gather_v all_reduce all_to_all reduce_scatter"
    " reduce_scatter_v",
    "costmodel": "KernelRate Kernels Link Profile Region ethernet",
    "errors": "CalibrationError CommpassError DumpError ParallelError PlanMismatch PolicyError"
    " ProfileError ScopeError VerifyError",
    "plan": "Plan",
    "policy": "Policy",
    "report.process_report": "Report log_metrics metrics",
    "policy.rules": "Rule",
    "distributed.record": "plans",
    "distributed.state": "load_state_dict reset_state state_dict",
    "simulate": "simulate",
    "standalone": "rewrite",
}
"""The public names, by the module that defines them."""

_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}


class _Package(ModuleType):
    """The package module.

    Python sets an imported submodule as an attribute of its package. Some public names equal a
    submodule's name (``backend``, ``simulate``). For these, the attribute keeps the public object.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if name not in _MODULE_OF or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package

if not TYPE_CHECKING:  # if False, type checkers would accept any attribute name

    def __getattr__(name: str) -> object:
        if name in _MODULE_OF:
            found = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        elif name == "__version__":
            from importlib.metadata import version

            found = version(__name__)
        else:
            found = _submodule(name)
        globals()[name] = found  # cache the lookup
        return found


def _submodule(name: str) -> ModuleType:
    """Import ``parallel`` or any other submodule of the package."""
    where = f"{__name__}.{name}"
    try:
        if not name.startswith("_"):
            return import_module(where)
    except ModuleNotFoundError as error:
        if error.name != where:
            raise
    here = sys.modules[__name__]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=here)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
