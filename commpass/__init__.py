"""commpass compresses the collectives of a compiled PyTorch model and overlaps what remains.

``model = torch.compile(model, backend=commpass.backend("balanced"))``

Public names are imported on first access. ``import commpass`` is therefore cheap, and the command
line reads dumps without importing torch.
"""

import difflib
import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from commpass import parallel as parallel
    from commpass.backend import backend as backend
    from commpass.calibration import Calibration as Calibration, calibrate as calibrate
    from commpass.codecs import codec as codec
    from commpass.collectives.handle import Handle as Handle
    from commpass.collectives.public import (
        all_gather as all_gather,
        all_gather_v as all_gather_v,
        all_reduce as all_reduce,
        all_to_all as all_to_all,
        reduce_scatter as reduce_scatter,
        reduce_scatter_v as reduce_scatter_v,
    )
    from commpass.costmodel import (
        KernelRate as KernelRate,
        Kernels as Kernels,
        Link as Link,
        Profile as Profile,
        Region as Region,
        ethernet as ethernet,
    )
    from commpass.distributed.record import plans as plans
    from commpass.distributed.state import (
        load_state_dict as load_state_dict,
        reset_state as reset_state,
        state_dict as state_dict,
    )
    from commpass.distributed.step_times import step as step
    from commpass.errors import (
        CalibrationError as CalibrationError,
        CommpassError as CommpassError,
        DumpError as DumpError,
        ParallelError as ParallelError,
        PlanMismatch as PlanMismatch,
        PolicyError as PolicyError,
        ProfileError as ProfileError,
        ScopeError as ScopeError,
        VerifyError as VerifyError,
    )
    from commpass.plan import Plan as Plan
    from commpass.policy import Policy as Policy
    from commpass.policy.annotate import (
        apply_policy as apply_policy,
        compress as compress,
        keep as keep,
    )
    from commpass.policy.rules import Rule as Rule
    from commpass.report.process_report import (
        Report as Report,
        log_metrics as log_metrics,
        metrics as metrics,
        report as report,
    )
    from commpass.simulate import simulate as simulate
    from commpass.standalone import rewrite as rewrite

    __version__: str

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
    "distributed.step_times": "step",
    "simulate": "simulate",
    "standalone": "rewrite",
}
"""The public names, by the module that defines them. The imports above are for type checkers, which
need ``as`` to export a name."""

_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted([*_MODULE_OF, "parallel", "report"])  # noqa: PLE0605 (a list, made by a call)


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
            found = import_module(f"{__name__}.utils.version").own_version()
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
    text = f"module {__name__!r} has no attribute {name!r}{_hint(name)}"
    raise AttributeError(text, name=name, obj=here)


def _hint(name: str) -> str:
    """Return where a name of ``commpass.parallel`` is, as the end of a message. Python itself
    suggests names of this module."""
    if name.startswith("_"):
        return ""
    names = import_module(f"{__name__}.parallel").__all__
    close = difflib.get_close_matches(name, names, 1, 0.8)
    return f": write commpass.parallel.{close[0]}" if close else ""


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
