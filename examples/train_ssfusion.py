"""Data-parallel training that sends one gradient entry in a hundred (SSFusion), beside
DistributedDataParallel, which sends all of them.

    python examples/train_ssfusion.py
    torchrun --nproc-per-node 4 examples/train_ssfusion.py --density 0.02 --link-gbit 0.1

What is not sent is added to the next gradient of its entry, so that none is lost. All that is
particular to commpass is the call of ``ssfusion``. With another ``--policy`` gradients go through
``compress_ddp``.
"""

from __future__ import annotations

from argparse import Namespace
from collections import Counter

import meshes
from common import shared_options
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from train_tp import build

import commpass
from commpass.parallel import compress_ddp, ssfusion


def setup(policy: str, mesh: DeviceMesh, options: Namespace) -> meshes.Training:
    model, profile = build(options), commpass.ethernet(options.link_gbit)
    if policy == "ssfusion":
        ssfusion(
            model, density=options.density, warmup=options.warmup, group=mesh, profile=profile
        )
    else:
        model = DistributedDataParallel(model, device_mesh=mesh)
        if policy != "off":
            door = compress_ddp(model, policy, profile=profile)
    def step(batch: Tensor) -> Tensor:
        loss = model(batch)
        loss.backward()
        return loss

    def sent(plans: meshes.Plans) -> Counter[str]:
        if policy == "off":
            return Counter(dp=sum(weight.nbytes for weight in model.parameters()))
        return meshes.sent(plans[-1:])

    return meshes.Training(model, step, sent)


if __name__ == "__main__":
    parser = shared_options(
        steps=100, layers=2, width=128, ranks=4, link_gbit=0.1, policy="ssfusion"
    )
    parser.add_argument("--density", type=float, default=0.01, help="share of gradients sent")
    parser.add_argument("--warmup", type=int, default=0, help="steps until that density")
    options = parser.parse_args()
    meshes.main(__file__, setup, parser, options, {"dp": options.ranks})
