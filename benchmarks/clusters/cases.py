"""The simulated clusters: which model is divided how, on which machines."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod

from .models import LLAMA_8B, LLAMA_70B, LLAMA_405B, MIXTURE, Model


@dataclass(frozen=True)
class Case:
    """A model on machines of one name. ``mesh`` has the sizes of its dimensions, the last of which
    has consecutive ranks; each data-parallel rank runs ``micro_batches`` in a step."""

    model: Model
    machine: str
    mesh: tuple[tuple[str, int], ...]
    micro_batches: int

    @property
    def sizes(self) -> dict[str, int]:
        return dict(self.mesh)

    @property
    def gpus(self) -> int:
        return prod(self.sizes.values())

    @property
    def stages(self) -> int:
        return self.sizes.get("pp", 1)

    @property
    def layers(self) -> int:
        """The layers of the longest pipeline stage."""
        return ceil(self.model.layers / self.stages)

    @property
    def next_stage(self) -> int:
        """The rank of the next pipeline stage that rank 0 sends to."""
        names = list(self.sizes)
        return prod(list(self.sizes.values())[names.index("pp") + 1 :])

    @property
    def text(self) -> str:
        return " x ".join(f"{name} {size:,}" for name, size in self.mesh if size > 1)

    @property
    def inner(self) -> tuple[tuple[str, int], ...]:
        """The mesh of one replica of one stage: all that a layer depends on while gradients are not
        averaged."""
        return (("dp", 1), *((name, size) for name, size in self.mesh if name not in ("dp", "pp")))


def case(model: Model, machine: str, micro_batches: int, **mesh: int) -> Case:
    return Case(model, machine, tuple(mesh.items()), micro_batches)


CASES = (
    case(LLAMA_8B, "dgx-h100", 8, dp=1, tp=8),
    case(LLAMA_8B, "dgx-h100", 8, dp=8, tp=8),
    case(LLAMA_8B, "dgx-h100", 8, dp=128, tp=8),
    case(LLAMA_8B, "p4d.24xlarge", 8, dp=8, tp=8),
    case(LLAMA_8B, "l40s-pcie", 8, dp=1, tp=8),
    case(LLAMA_8B, "l40s-pcie", 8, dp=8, tp=8),
    case(LLAMA_70B, "dgx-h100", 32, pp=4, dp=2, tp=8),
    case(LLAMA_70B, "dgx-h100", 32, pp=4, dp=32, tp=8),
    case(LLAMA_70B, "dgx-h100", 32, pp=4, dp=256, tp=8),
    case(LLAMA_70B, "mi300x-8", 32, pp=4, dp=32, tp=8),
    case(LLAMA_405B, "dgx-h100", 32, pp=16, dp=8, tp=8),
    case(LLAMA_405B, "dgx-h100", 32, pp=16, dp=128, tp=8),
    case(LLAMA_405B, "dgx-h100", 32, pp=10, dp=1250, tp=8),
    case(LLAMA_405B, "gb300-nvl72", 32, dp=1024, pp=9, tp=8),
    case(MIXTURE, "dgx-h100", 32, pp=8, dp=1, ep=64),
    case(MIXTURE, "dgx-h100", 32, pp=8, dp=32, ep=64),
    case(MIXTURE, "dgx-h100", 32, pp=8, dp=195, ep=64),
)
"""Tensor parallelism takes the GPUs of a host, because its exchanges cannot overlap with much. The
mixture has 64-way expert parallelism over 8 hosts instead. Pipeline stages are as many as the
memory of a GPU needs."""
