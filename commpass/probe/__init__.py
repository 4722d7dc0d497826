"""Measure the links and kernels of the machines that a program runs on, and create a profile."""

from commpass.probe.run import probe

__all__ = ["probe"]
