"""Data parallelism in the graph as an integration: its exchanges are sites of compiled graphs."""

from __future__ import annotations

from torch import nn

from commpass.distributed import record
from commpass.distributed.integration import Integration
from commpass.parallel.in_graph.reading import exchanged_parameters
from commpass.plan import Plan


class InGraph(Integration):
    """A view of a model that ``replicate`` or ``shard`` made data-parallel.

    ``commpass.backend`` has the policy and compiles the exchanges. So there is nothing to close.
    Raise ParallelError for another model.

    Args:
        model: a model that was passed to ``replicate`` or ``shard``.
    """

    call = "replicate or shard"

    def __init__(self, model: nn.Module):
        super().__init__(model)
        self._groups = {exchanged.how.group for exchanged, _ in exchanged_parameters(model)}

    @property
    def plans(self) -> list[Plan]:
        """The plans of this process's graphs that send over the mesh dimension of the model."""
        return [
            plan
            for plan in record.plans()
            if any(site.group in self._groups for site in plan.sites)
        ]
