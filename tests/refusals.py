"""The error messages of refused calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from commpass.errors import PolicyError


def refusals(*attempts: Callable[[], Any]) -> list[str]:
    """Return the message of the PolicyError that each attempt must raise."""
    said = []
    for attempt in attempts:
        with pytest.raises(PolicyError) as error:
            attempt()
        said.append(str(error.value))
    return said
