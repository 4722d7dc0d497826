"""What coded operators become."""

from commpass.lowering.kernel import Kernel, kernel_of

__all__ = ["Kernel", "kernel_of"]
