"""Train a language model with expert parallelism, without and with compressed collectives.

    torchrun --nproc-per-node 2 examples/train_moe.py
    python examples/train_moe.py --ranks 2 --policy aggressive --link-gbit 0.1

The MLPs are mixtures of experts, and each rank has some of the experts. Every rank has its own
text, and a copy of everything that is not an expert. A router assigns each token to one expert. One
all_to_all sends the tokens to the ranks of their experts (dispatch), and another one sends the
results back (combine). In backward, the gradients take the same two steps. The number of tokens for
each rank is known only after routing. The ranks therefore exchange these numbers first, and one
compiled graph handles all of them.

The output shows the losses of the runs side by side, every collective with the decision and its
reason, the bytes of a step before and after, and commands that show more.
"""

from __future__ import annotations

from argparse import Namespace

import torch
import torch.distributed as dist
from common import BATCH, CONTEXT, RANK, RANKS, Example, Transformer, main
from torch import Tensor, nn
from torch.distributed._functional_collectives import (
    all_to_all_single,
    all_to_all_single_autograd,
    wait_tensor,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import silu

LOCAL = 2  # experts per rank
TOKENS = BATCH * CONTEXT  # per rank and step


class Experts(nn.Module):
    """A mixture of MLPs: all experts, or only those of this rank after ``divide``."""

    def __init__(self, width: int):
        super().__init__()
        self.router = nn.Linear(width, LOCAL * RANKS, bias=False)
        self.up = nn.Parameter(torch.randn(LOCAL * RANKS, width, 3 * width) * width**-0.5)
        self.down = nn.Parameter(torch.randn(LOCAL * RANKS, 3 * width, width) * (3 * width) ** -0.5)

    def divide(self) -> None:
        own_experts = slice(LOCAL * RANK, LOCAL * (RANK + 1))
        self.up, self.down = (
            nn.Parameter(weight[own_experts].detach().clone()) for weight in (self.up, self.down)
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        probabilities = self.router(tokens).softmax(-1)
        probability, expert = probabilities.max(-1)
        order = expert.argsort(stable=True)  # tokens in order of experts, and so of ranks
        counts = (expert.unsqueeze(1) == torch.arange(LOCAL * RANKS)).sum(0)
        # minimal if the experts are equally loaded; gradients flow through the mean probabilities
        self.imbalance = (counts / TOKENS * probabilities.mean(0)).sum() * len(counts)

        arriving = wait_tensor(all_to_all_single(counts, None, None, dist.group.WORLD)).view(
            RANKS, LOCAL
        )
        sent, received, per_expert = (
            bounded_list(sums, upper)
            for sums, upper in (
                (counts.view(RANKS, LOCAL).sum(1), TOKENS),
                (arriving.sum(1), TOKENS),
                (arriving.sum(0), RANKS * TOKENS),
            )
        )
        total = sum(received)
        torch._check(sum(sent) == TOKENS)
        torch._check(sum(per_expert) == total)

        inbox = exchange(tokens[order], sent, received)
        # tokens arrive ordered by rank, then expert; the split below needs them by expert
        owner = (
            torch.arange(LOCAL)
            .repeat(RANKS)
            .repeat_interleave(arriving.flatten(), output_size=total)
        )
        by_expert = owner.argsort(stable=True)
        parts = zip(inbox[by_expert].split(per_expert), self.up, self.down, strict=True)
        outbox = torch.cat([silu(part @ up) @ down for part, up, down in parts])[
            by_expert.argsort()
        ]
        back = exchange(outbox, received, sent)
        return (back[order.argsort()] * probability.unsqueeze(1)).view_as(x)


def bounded_list(sums: Tensor, upper: int) -> list[int]:
    """Return the values of a tensor as integers of which the compiler knows only the bounds."""
    values = sums.tolist()
    for value in values:
        torch._check(value >= 0)
        torch._check(value <= upper)
    return values


def exchange(rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
    """Send the first ``sent[0]`` rows to rank 0, the next ones to rank 1, and so on; return the
    rows received."""
    return wait_tensor(all_to_all_single_autograd(rows, received, sent, dist.group.WORLD))


class Mixture(Transformer):
    def forward(self, text: Tensor) -> Tensor:
        """Return the loss of Transformer, with a term that balances the experts' loads.

        The term changes the gradient only, not the value of the loss.
        """
        loss = super().forward(text)
        imbalance = sum(block.mlp.imbalance for block in self.blocks)
        return loss + 0.01 * (imbalance - imbalance.detach())


def build(options: Namespace) -> Mixture:
    return Mixture(options.layers, options.width, Experts)


def divide(model: Mixture, mesh: DeviceMesh) -> None:
    """Keep only this rank's experts in each mixture; everything else stays on every rank."""
    for block in model.blocks:
        block.mlp.divide()


def average_gradients(model: nn.Module) -> None:
    """Average the gradients over the ranks.

    An expert has seen the tokens of all ranks, so its gradient is already a sum. The gradients of
    replicated weights are summed here.
    """
    copied = [
        weight.grad
        for name, weight in model.named_parameters()
        if not name.endswith(("mlp.up", "mlp.down"))
    ]
    flat = torch.cat([grad.flatten() for grad in copied])
    dist.all_reduce(flat)
    for grad, whole in zip(copied, flat.split([grad.numel() for grad in copied]), strict=True):
        grad.copy_(whole.view_as(grad))
    for weight in model.parameters():
        weight.grad /= RANKS


if __name__ == "__main__":
    torch._dynamo.config.capture_scalar_outputs = True  # token counts stay in the graph
    main(__file__, Example(build, divide, average_gradients, data_parallel=True))
