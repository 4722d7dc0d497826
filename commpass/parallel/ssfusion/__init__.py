"""SSFusion: sparsified gradients in fusion buffers, for data-parallel training."""

from commpass.parallel.ssfusion.face import SSFusion, door_for, ssfusion

__all__ = ["SSFusion", "door_for", "ssfusion"]
