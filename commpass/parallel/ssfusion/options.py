"""The user's options for SSFusion, checked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import optim

from commpass.codecs import codec
from commpass.codecs.sparse import SparseCodec
from commpass.errors import PolicyError, check_number
from commpass.parallel.ssfusion.plan import Settings

WARM_UP = (0.25, 0.0625, 0.015625, 0.004)
"""The successive densities of Deep Gradient Compression's warm-up (section 3.3)."""


@dataclass(frozen=True)
class Options:
    """The options of one run.

    ``settings`` are those of the plan. ``selector`` is a sparse codec. ``momentum`` and ``clip``
    are those of ``ssfusion``. The density falls to the target in ``warmup`` steps, of which
    ``step`` were done before. Times are measured in the first ``profile_steps``. ``dense`` is the
    codec of dense gradients, None for none.
    """

    settings: Settings
    selector: str = "dgc"
    momentum: float = 0.0
    clip: float | None = None
    warmup: int = 0
    step: int = 0
    profile_steps: int = 5
    dense: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(codec(self.selector), SparseCodec):
            raise PolicyError(
                f"selector={self.selector!r}: selects no entries; give one of dgc, topk, gaussiank,"
                " redsync, sidco, randomk"
            )
        check_number("momentum", self.momentum, maximum=1.0)
        if self.momentum == 1:
            raise PolicyError("momentum=1: must be below 1, such as 0.9, or velocities never end")
        if self.clip is not None:
            check_number("clip", self.clip, above=True)
        for name, least in (("warmup", 0), ("step", 0), ("profile_steps", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise PolicyError(f"{name}={value!r}: must be a number of steps, {least} or more")
        if self.dense is not None and (found := codec(self.dense)).state is not None:
            raise PolicyError(
                f"dense={self.dense!r}: {found.spec} needs {found.state}; give a codec without"
                " state, such as bf16 or int8"
            )

    def selector_at(self, density: float) -> SparseCodec:
        """Return the selector at a density."""
        found = codec(self.selector, density=density)
        assert isinstance(found, SparseCodec)
        return found

    def at(self, step: int) -> Settings:
        """Return the settings of a step.

        Their density is that of its warm-up stage, which falls exponentially to the target.
        """
        stages = [each for each in WARM_UP if each > self.settings.density]
        done = self.step + step
        if not stages or done >= self.warmup:
            return self.settings
        return replace(self.settings, density=stages[done * len(stages) // self.warmup])


def check_optimizer(optimizer: optim.Optimizer | None, momentum: float) -> None:
    """Raise PolicyError for momentum on both sides.

    The optimizer's would be applied to values that already include momentum.
    """
    if optimizer is None or not momentum:
        return
    for group in optimizer.param_groups:
        own: Any = group.get("momentum", 0) or (group.get("betas") or (0,))[0]
        if own:
            raise PolicyError(
                f"momentum={momentum:g}, but {type(optimizer).__name__} has momentum {own:g} of its"
                " own: give the optimizer momentum 0, or ssfusion(momentum=0)"
            )
