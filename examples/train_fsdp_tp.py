"""FSDP2 and tensor parallelism on one mesh."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter

from common import Transformer, shared_options
from meshes import Training, compare, sent
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from train_tp import build, divide

import commpass
from commpass.parallel import compress_fsdp

TP = 2


def setup(policy: str, mesh: DeviceMesh, options: Namespace) -> Training:
    model, profile = build(options), commpass.ethernet(options.link_gbit)
    divide(model, mesh["tp"])
    backend = commpass.backend(policy, profile=profile)
    for block in model.blocks:
        block.compile(backend=backend, fullgraph=True)
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    door = compress_fsdp(model, policy, profile=profile)
    earlier = len(commpass.plans())

    def step(batch: Tensor) -> Tensor:
        door.clear()
        loss = model(batch)
        loss.backward()
        return loss

    def of_a_step() -> Counter[str]:
        graphs = [plan for plan in commpass.plans()[earlier:] if plan not in door.plans]
        print(len(graphs), [p.direction for p in graphs])
        eager = sum(each.sent for each in door.bytes.values())
        return sent(graphs, options.layers) + Counter({"dp": eager})

    return Training(model, step, of_a_step)


if __name__ == "__main__":
    parser = shared_options(steps=40, layers=2, width=128, ranks=4, link_gbit=0.1)
    compare(__file__, setup, build, parser, lambda o: {"dp": o.ranks // TP, "tp": TP})
