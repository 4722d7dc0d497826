"""SSFusion: sparsified gradients in fusion buffers, for data-parallel training."""

from commpass.parallel.ssfusion.api import SSFusion, ssfusion

__all__ = ["SSFusion", "ssfusion"]
