"""Control flow around training: evaluation, code on one rank only, late ranks, new groups."""

from __future__ import annotations

import os
import tempfile
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn

import commpass
from commpass import Policy, Rule
from scenarios.parts import Net, Replica, RowParallel, total, world
from scenarios.scenario import Job, Results, Scenario, batches, random, train

WIDTH = 32


class Both(nn.Module):
    """Sums in forward and of gradients."""

    def __init__(self, width: int):
        super().__init__()
        self.data, self.tensor = Replica(width), RowParallel(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.tensor(self.data(x))


def evaluated_first(job: Job) -> Results:
    """Evaluate before training and between the steps, with other batches."""
    model = Net(WIDTH, block=Both)
    compiled = job.compile(model)
    found: Results = {}
    for step in range(3):
        model.eval()
        with torch.no_grad():
            found[f"out/evaluated/{step}"] = compiled(batches(0, 12, WIDTH)[step])
        model.train()
        found |= train(job, model, batches(0, 8, WIDTH)[step : step + 1], compiled, first=step)
    return found


def evaluated_alone(job: Job) -> Results:
    """Evaluate a model without collectives on rank 0 while the others go on."""
    model, alone = Net(WIDTH, block=Both), Net(WIDTH)
    compiled, compiled_alone = job.compile(model), job.compile(alone)
    found: Results = {}
    for step in range(3):
        found |= train(job, model, batches(0, 8, WIDTH)[step : step + 1], compiled, first=step)
        if job.rank == 0:
            with torch.no_grad():
                found[f"exact/alone/{step}"] = compiled_alone(batches(7, 12, WIDTH)[step])
    return found


class Printing(nn.Module):
    """Rank 0 prints a value: its graph breaks there, and those of other ranks do not."""

    def __init__(self, early: bool):
        super().__init__()
        self.net, self.early = Net(WIDTH, block=Both), early

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.net.layers
        x = first(x)
        if self.early:
            look(x)
        x = second(x)
        if not self.early:
            look(x)
        return x * 2


def look(x: Tensor) -> None:
    if dist.get_rank() == 0:
        with open(os.devnull, "w") as nowhere:
            print(x.mean().item(), file=nowhere)


def printed(early: bool):
    def run(job: Job) -> Results:
        return train(job, Printing(early), batches(0, 8, WIDTH))

    return run


def late(job: Job) -> Results:
    """Let one rank be three seconds late, like a rank that reads data, or compiles cold."""
    model = Net(WIDTH, block=Both)
    if job.rank == 0:
        time.sleep(3)
    return train(job, model, batches(0, 8, WIDTH))


def new_groups(job: Job) -> Results:
    """Destroy all groups and create them again, in one launch; training goes on."""
    found: Results = {}
    launch = launch_store()
    for step in range(2):
        start(launch, step)
        torch._dynamo.reset()
        model = Net(WIDTH, block=Both)
        found |= train(job, model, batches(0, 8, WIDTH)[step : step + 1], first=step)
    return found


def other_policies(codecs: list[str]) -> float:
    """Check that new groups do not reuse agreements of old ones.

    Return the error of a sum with this rank's entry of ``codecs``, after all ranks had int8.
    """
    launch, found = launch_store(), 0.0
    x = random(20, 50, dist.get_rank())
    for step, codec in enumerate(("int8", codecs[dist.get_rank()])):
        start(launch, step)
        torch._dynamo.reset()
        policy = Policy(rules=[Rule(codec=codec, force=True)])
        backend = commpass.backend(policy, inner="eager", timeout=20)
        exact = total(x, world())
        got = torch.compile(lambda x: total(x * 1, world()), backend=backend)(x)
        found = ((got - exact).norm() / exact.norm()).item()
    return found


class Launch(dist.Store):
    """The store of a launch, which outlives its groups.

    gloo finds its peers by keys that it reuses, and sometimes finds peers that no longer exist. Its
    keys are therefore valid for one ``start`` only.
    """

    def __init__(self, store: dist.Store, start: int):
        super().__init__()
        self.store, self.start = store, start
        KEPT.append(self)

    def _own(self, key: str) -> str:
        return key if "commpass" in key else f"start {self.start}/{key}"

    def set(self, key, value):
        self.store.set(self._own(key), value)

    def get(self, key):
        return self.store.get(self._own(key))

    def add(self, key, value):
        return self.store.add(self._own(key), value)

    def check(self, keys):
        return self.store.check([self._own(key) for key in keys])

    def compare_set(self, key, expected, desired):
        return self.store.compare_set(self._own(key), expected, desired)

    def delete_key(self, key):
        return self.store.delete_key(self._own(key))

    def wait(self, keys, *timeout):
        self.store.wait([self._own(key) for key in keys], *timeout)


KEPT: list[Launch] = []
"""torch does not keep a reference to the Python part of a store."""


def launch_store() -> dist.Store:
    folder = [tempfile.mkdtemp(prefix="launch")]
    dist.broadcast_object_list(folder)
    return dist.FileStore(os.path.join(folder[0], "store"), dist.get_world_size())


def start(launch: dist.Store, number: int) -> None:
    """Destroy all groups, and create the group of all ranks again."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    store = Launch(launch, number)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)


SCENARIOS = (
    Scenario(
        name="evaluated first",
        run=evaluated_first,
        sites=6,
        gradients=2,
        replicated=("out",),
    ),
    Scenario(
        name="evaluated alone",
        run=evaluated_alone,
        sites=4,
        gradients=2,
        replicated=("out",),
    ),
    Scenario(name="printed at the end", run=printed(False), differ=True, replicated=("out",)),
    Scenario(name="printed half-way", run=printed(True), differ=True, replicated=("out",)),
    Scenario(name="late", run=late, sites=4, gradients=2, replicated=("out",)),
    Scenario(name="new groups", run=new_groups, sites=8, gradients=4, replicated=("out",)),
)
