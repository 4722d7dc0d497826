"""Train on a mesh of FSDP2 and tensor parallelism, without and with compressed collectives.

    python examples/train_fsdp_tp.py
    torchrun --nproc-per-node 4 examples/train_fsdp_tp.py --policy aggressive --link-gbit 0.1

The all_reduces of tensor parallelism are in the graphs of the compiled blocks, where the backend
finds them. FSDP2 sends parameters and gradients eagerly, which ``compress_fsdp`` compresses. Both
use one policy. Only ``parallelize`` is specific to commpass.
"""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from typing import Any

import meshes
from common import Transformer, shared_options
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from train_tp import build, divide

import commpass
from commpass.parallel import compress_fsdp


def parallelize(
    model: Transformer,
    mesh: DeviceMesh,
    policy: Any,
    profile: Any,
    inner: str = "inductor",
    wrap: Callable[[nn.Module], nn.Module] = lambda block: block,
) -> Any:
    """Shard the blocks for tensor parallelism, compile them, and apply FSDP2.

    ``wrap`` is applied to a compiled block before FSDP2. Return the integration that compresses
    FSDP2's communication.
    """
    divide(model, mesh["tp"])
    backend = commpass.backend(policy, profile=profile, inner=inner)
    for name, block in list(model.blocks.named_children()):
        block.compile(backend=backend, fullgraph=True)
        wrapped = wrap(block)
        model.blocks.register_module(name, wrapped)
        fully_shard(wrapped, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return compress_fsdp(model, policy, profile=profile)


def setup(policy: str, mesh: DeviceMesh, options: Namespace) -> meshes.Training:
    model = build(options)
    integration = parallelize(model, mesh, policy, commpass.ethernet(options.link_gbit))

    def step(batch: Tensor) -> Tensor:
        integration.clear()  # so that it counts the bytes of one step
        loss = model(batch)
        loss.backward()
        return loss

    def sent(plans: meshes.Plans) -> Counter[str]:
        eager = sum(each.sent for each in integration.bytes.values())
        graphs = [plan for plan in plans if plan not in integration.plans]
        # all blocks share a graph
        return meshes.bytes_by_dimension(graphs, options.layers) + Counter(dp=eager)

    return meshes.Training(model, step, sent)


if __name__ == "__main__":
    parser = shared_options(steps=40, layers=2, width=128, ranks=4, link_gbit=0.1)
    options = parser.parse_args()
    meshes.main(__file__, setup, parser, options, meshes.mesh_shape(["dp"], parser, options))
