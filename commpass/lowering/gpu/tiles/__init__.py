"""Functions in Triton's language on tiles in registers, from which kernels are generated."""
