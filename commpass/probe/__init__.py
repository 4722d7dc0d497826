"""Measures the links and kernels of the machines that a program runs on, and makes a profile of
them."""

from commpass.probe.run import probe

__all__ = ["probe"]
