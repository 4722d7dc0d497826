"""Predicted times of exchanges and kernels. Plain arithmetic: no graphs, no torch."""

from commpass.costmodel.kernels import KernelRate, Kernels
from commpass.costmodel.links import Link
from commpass.costmodel.profile import Profile, default_profile, ethernet, profile_named
from commpass.costmodel.timeline import HOST, Task, finished_us

__all__ = [
    "HOST",
    "KernelRate",
    "Kernels",
    "Link",
    "Profile",
    "Task",
    "default_profile",
    "ethernet",
    "finished_us",
    "profile_named",
]
