"""Predicted times of exchanges and kernels. Plain arithmetic: no graphs, no torch."""

from commpass.costmodel.kernels import KernelRate, Kernels
from commpass.costmodel.links import Link
from commpass.costmodel.profile import Profile, default_profile, ethernet, profile_named

__all__ = [
    "KernelRate",
    "Kernels",
    "Link",
    "Profile",
    "default_profile",
    "ethernet",
    "profile_named",
]
