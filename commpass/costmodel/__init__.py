"""Predicted times of exchanges and kernels. Plain arithmetic, without graphs or torch."""

from commpass.costmodel.files import profile_from
from commpass.costmodel.kernels import KernelRate, Kernels
from commpass.costmodel.links import Link, Region
from commpass.costmodel.prices import Prices, overlapped_kernel, prices
from commpass.costmodel.profile import Profile, default_profile, ethernet, profile_named
from commpass.costmodel.timeline import HOST, Task, finished_us

__all__ = [
    "HOST",
    "KernelRate",
    "Kernels",
    "Link",
    "Prices",
    "Profile",
    "Region",
    "Task",
    "default_profile",
    "ethernet",
    "finished_us",
    "overlapped_kernel",
    "prices",
    "profile_from",
    "profile_named",
]
