"""What an operator does, by its name in a graph or in a trace."""

from __future__ import annotations

import re

from commpass.plan.kinds import KERNEL, KIND_OF, NAMESPACES, WAITS, without_form
from commpass.plan.timeline import WAIT


def operation_kind(name: str) -> str:
    """Return the kind of exchange that an operator starts, ``WAIT``, ``KERNEL``, or "" for others.

    Graphs contain ``commpass.kernel_.default``, traces ``commpass::kernel_``.
    """
    namespace, operator, *_ = [*re.split(r"::|\.", name), ""]
    if namespace not in NAMESPACES:
        return ""
    if operator in WAITS:
        return WAIT
    return KERNEL if operator == KERNEL else KIND_OF.get(without_form(operator), "")
