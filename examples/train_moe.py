"""Trains one small language model twice, without and with compressed collectives, and compares the
two: expert parallelism.

    torchrun --nproc-per-node 2 examples/train_moe.py
    python examples/train_moe.py --ranks 2 --policy aggressive --link-gbit 0.1

The MLPs are mixtures of experts, of which each rank has some. Every rank has text of its own, and a
copy of all that is not an expert. A router sends each token to one expert: an all_to_all takes the
tokens to the ranks of their experts (dispatch) and another one brings the results back (combine);
in backward the gradients go the same ways. How many tokens go where is known only when they are
routed: the ranks tell each other the numbers first, and one compiled graph serves all of them.

You see the losses of both runs side by side, every collective with what was decided about it and
why, the bytes of a step before and after, and commands that show more.
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

LOCAL = 2  # experts of one rank
TOKENS = BATCH * CONTEXT  # of one rank, in one step


class Experts(nn.Module):
    """A mixture of MLPs: all of them until it is divided, then those of this rank."""

    def __init__(self, width: int):
        super().__init__()
        self.router = nn.Linear(width, LOCAL * RANKS, bias=False)
        self.up = nn.Parameter(torch.randn(LOCAL * RANKS, width, 3 * width) * width**-0.5)
        self.down = nn.Parameter(torch.randn(LOCAL * RANKS, 3 * width, width) * (3 * width) ** -0.5)

    def divide(self) -> None:
        mine = slice(LOCAL * RANK, LOCAL * (RANK + 1))
        self.up, self.down = (
            nn.Parameter(weight[mine].detach().clone()) for weight in (self.up, self.down)
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        chances = self.router(tokens).softmax(-1)
        chance, expert = chances.max(-1)
        order = expert.argsort(
            stable=True
        )  # an expert's tokens, and so a rank's, one after the other
        counts = (expert.unsqueeze(1) == torch.arange(LOCAL * RANKS)).sum(0)
        # the smallest where all experts get as much; the mean chance of each is what can be trained
        self.imbalance = (counts / TOKENS * chances.mean(0)).sum() * len(counts)

        arriving = wait_tensor(all_to_all_single(counts, None, None, dist.group.WORLD)).view(
            RANKS, LOCAL
        )
        sent, received, each = (
            numbers(sums, most)
            for sums, most in (
                (counts.view(RANKS, LOCAL).sum(1), TOKENS),
                (arriving.sum(1), TOKENS),
                (arriving.sum(0), RANKS * TOKENS),
            )
        )
        total = sum(received)
        torch._check(sum(sent) == TOKENS)
        torch._check(sum(each) == total)

        inbox = exchange(tokens[order], sent, received)
        # they come by rank and then by expert, and are wanted by expert
        owner = (
            torch.arange(LOCAL)
            .repeat(RANKS)
            .repeat_interleave(arriving.flatten(), output_size=total)
        )
        by_expert = owner.argsort(stable=True)
        parts = zip(inbox[by_expert].split(each), self.up, self.down, strict=True)
        outbox = torch.cat([silu(part @ up) @ down for part, up, down in parts])[
            by_expert.argsort()
        ]
        back = exchange(outbox, received, sent)
        return (back[order.argsort()] * chance.unsqueeze(1)).view_as(x)


def numbers(sums: Tensor, most: int) -> list[int]:
    """The values of a tensor, as numbers of which the compiler knows no more than their bounds."""
    values = sums.tolist()
    for value in values:
        torch._check(value >= 0)
        torch._check(value <= most)
    return values


def exchange(rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
    """The first ``sent[0]`` rows to rank 0, the next ones to rank 1, and so on; and those that come
    from there."""
    return wait_tensor(all_to_all_single_autograd(rows, received, sent, dist.group.WORLD))


class Mixture(Transformer):
    def forward(self, text: Tensor) -> Tensor:
        """As Transformer's; the gradient, but not the value, has a share that draws the experts'
        loads together."""
        loss = super().forward(text)
        imbalance = sum(block.mlp.imbalance for block in self.blocks)
        return loss + 0.01 * (imbalance - imbalance.detach())


def build(options: Namespace) -> Mixture:
    return Mixture(options.layers, options.width, Experts)


def divide(model: Mixture, mesh: DeviceMesh) -> None:
    """Leaves of each mixture the experts of this rank; all else is on every rank."""
    for block in model.blocks:
        block.mlp.divide()


def average_gradients(model: nn.Module) -> None:
    """The gradients of the mean loss of all ranks. Experts have had tokens of all ranks; for what
    is copied, ranks must sum."""
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
    torch._dynamo.config.capture_scalar_outputs = True  # numbers of tokens stay in the graph
    main(
        __file__, Example(build, divide, average_gradients, data_parallel=True, steps=60, layers=2)
    )
