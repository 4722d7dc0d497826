"""Reports: ``commpass.report()`` in a program, and the output of the command line."""

import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    """Make this package callable.

    ``commpass.report()`` then works together with ``import commpass.report.tables``, in either
    order.
    """

    def __call__(self) -> Any:
        from commpass.report.process_report import report

        return report()


sys.modules[__name__].__class__ = _CallablePackage
