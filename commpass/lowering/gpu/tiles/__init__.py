"""Functions in Triton's language on tiles in registers, of which kernels are generated."""
