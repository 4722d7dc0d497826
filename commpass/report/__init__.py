"""What commpass shows: ``commpass.report()`` in a program, and what the command line prints."""

import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    """This package, which can be called: ``commpass.report()`` works beside ``import
    commpass.report.tables``, whichever comes first."""

    def __call__(self) -> Any:
        from commpass.report.verdict import report

        return report()


sys.modules[__name__].__class__ = _CallablePackage
