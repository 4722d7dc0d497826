"""The old name of ``commpass.parallel.vllm``: ``commpass.doors.vllm``, for one version."""

from __future__ import annotations

import sys

from commpass.parallel import vllm
from commpass.utils.deprecated import warn_renamed

__all__ = ["vllm"]

sys.modules[f"{__name__}.vllm"] = vllm
warn_renamed("commpass.doors.vllm", "commpass.parallel.vllm")
