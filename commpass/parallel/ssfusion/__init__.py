"""SSFusion: sparsified gradients in fusion buffers, for data-parallel training."""

from commpass.parallel.ssfusion.face import SSFusion, ssfusion

__all__ = ["SSFusion", "ssfusion"]
