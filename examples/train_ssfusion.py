"""Train with data parallelism that sends one gradient entry in a hundred (SSFusion), and compare it
with DistributedDataParallel, which sends all of them.

    python examples/train_ssfusion.py
    torchrun --nproc-per-node 4 examples/train_ssfusion.py --density 0.02 --link-gbit 0.1

Entries that are not sent are added to later gradients, so that nothing is lost. The optimizer is
SGD with momentum 0.9. With sparse gradients, ``ssfusion`` applies the momentum, and SGD has none.
With another ``--policy``, gradients go through ``compress_ddp``.
"""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from functools import partial

import meshes
import torch
from common import shared_options
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from train_tp import build

import commpass
from commpass.parallel import compress_ddp, ssfusion

MOMENTUM = 0.9


def sgd(model: nn.Module, momentum: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=momentum, foreach=False)


def setup(policy: str, mesh: DeviceMesh, options: Namespace) -> meshes.Training:
    model, profile = build(options), commpass.ethernet(options.link_gbit)
    if policy == "ssfusion":
        settings = {name: getattr(options, name) for name in ("density", "selector", "force")}
        ssfusion(model, **settings, momentum=MOMENTUM, group=mesh, profile=profile)
    else:
        model = DistributedDataParallel(model, device_mesh=mesh)
        if policy != "off":
            integration = compress_ddp(model, policy, profile=profile)

    def step(batch: Tensor) -> Tensor:
        loss = model(batch)
        loss.backward()
        return loss

    def sent(plans: meshes.Plans) -> Counter[str]:
        if policy == "off":
            return Counter(dp=sum(weight.nbytes for weight in model.parameters()))
        if policy == "ssfusion":
            return meshes.bytes_by_dimension(plans[-1:])  # earlier plans are of the measuring steps
        return Counter(dp=integration.bytes.sent)

    momentum = 0.0 if policy == "ssfusion" else MOMENTUM
    return meshes.Training(model, step, sent, partial(sgd, momentum=momentum))


if __name__ == "__main__":
    parser = shared_options(
        steps=100, layers=2, width=128, ranks=2, link_gbit=0.1, policy="ssfusion"
    )
    parser.add_argument(
        "--density", type=float, default=0.01, help="share of gradient entries to send"
    )
    parser.add_argument("--selector", default="topk", help="sparse codec that selects the entries")
    parser.add_argument(
        "--force", action="store_true", help="send sparse gradients even if dense ones are as fast"
    )
    options = parser.parse_args()
    meshes.main(__file__, setup, parser, options, {"dp": options.ranks})
