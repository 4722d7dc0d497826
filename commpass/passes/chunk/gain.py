"""The gain of chunks of rows: a pipeline of matmul, exchange and matmul, compared with their
sequence."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import fx

from commpass.costmodel import HOST, Profile, Task, finished_us
from commpass.passes.chunk.region import Region
from commpass.passes.fx import meta
from commpass.passes.fx.costs import NodeTimes
from commpass.passes.fx.ops import is_heavy, is_matmul
from commpass.plan import SINGLE_KERNEL, Candidate, Site

EXCHANGE = "exchange"
WAVE = 132 * 128 * 128
"""The values of a matmul's result that a GPU computes at once, on an H100: a tile of 128 x 128 on
each of its multiprocessors. Fewer values take as long."""


def part_of(site: Site, region: Region) -> Site:
    """Return the site of the largest chunk."""
    axis = region.product.axis
    ends = region.cut(region.product.input, axis)
    largest = max(end - begin for begin, end in itertools.pairwise(ends))
    sizes = enumerate(site.shape)
    shape = tuple(largest * axis.blocks if at == axis.dim else size for at, size in sizes)
    return dataclasses.replace(
        site,
        shape=shape,
        bytes=site.bytes * largest // ends[-1],
        width=math.prod(int(size) for size in shape[1:]),
    )


def pipeline_us(
    region: Region,
    chunks: int,
    exchange: Task,
    joined: Sequence[fx.Node],
    cut: Mapping[fx.Node, Sequence[fx.Node]],
    times: NodeTimes,
    us_of: Callable[[fx.Node], float],
) -> float:
    """Return the microseconds until the matmuls after a collective are done.

    ``exchange`` is the exchange of one of ``chunks`` chunks. ``joined`` are the nodes whose chunks
    are joined afterwards. ``cut`` maps the join of an already cut matmul to its chunks. ``us_of``
    gives the time of a node.
    """
    nodes = [node for each in region.product.nodes for node in cut.get(each, (each,))]
    before_us = _part_us(nodes, chunks, times, us_of)
    after_us = _part_us(region.consumers, chunks, times, us_of)
    copied_us = 0.0
    if chunks > 1:
        nbytes = meta.total_nbytes([node.meta["val"] for node in (*joined, *_sliced(region))])
        copied_us = times.profile.kernels.compute_us(0, nbytes)
    return _finished_us(chunks, before_us, after_us, exchange, copied_us)


@functools.lru_cache(maxsize=1024)
def _finished_us(
    chunks: int, before_us: float, after_us: float, exchange: Task, copied_us: float
) -> float:
    """Return the end of a pipeline whose chunks take these times before and after the exchange.
    Layers repeat them."""
    tasks: list[Task] = []
    for number in range(chunks):
        tasks.append(Task(HOST, before_us))
        tasks.append(dataclasses.replace(exchange, after=(2 * number,)))
    tasks += [Task(HOST, after_us, after=(2 * number + 1,)) for number in range(chunks)]
    if chunks > 1:
        tasks.append(Task(HOST, copied_us))
    return finished_us(tasks)


def _sliced(region: Region) -> Iterable[fx.Node]:
    """Yield matmul inputs that are sliced in several blocks, and therefore copied."""
    for node in filter(is_matmul, (*region.product.nodes, *region.consumers)):
        for each, axis in zip(node.args, region.rows[node].takes, strict=False):
            if isinstance(each, fx.Node) and axis and axis.blocks > 1 and each not in region.rows:
                yield each


def exchange_of(best: Candidate, profile: Profile) -> Task:
    """Return a site's candidate as one task. Encodes, decodes and single kernels occupy the
    rank."""
    if best.lowering == SINGLE_KERNEL:
        return Task(EXCHANGE, 0.0, overhead_us=best.predicted_us)
    coded = sum(
        profile.kernels.time_us(stage.codec, stage.role, stage.values)
        for stage in best.stages
        if stage.role in ("encode", "decode")
    )
    busy = min(coded, best.predicted_us)
    return Task(EXCHANGE, best.predicted_us - busy, overhead_us=busy)


class OverlappingCompute:
    """The computation that can overlap a collective: matmuls that neither precede it nor depend on
    it.

    Reachability is stored as bit sets, with one bit per matmul.
    """

    def __init__(self, graph: fx.Graph, us_of: Callable[[fx.Node], float]):
        nodes = list(graph.nodes)
        heavy = filter(is_heavy, nodes)
        self.bits = {node: 1 << number for number, node in enumerate(heavy)}
        self.by_us: dict[float, int] = defaultdict(int)  # matmuls by their time
        for node, bit in self.bits.items():
            self.by_us[us_of(node)] |= bit
        self.before = self._reached(nodes, lambda node: node.all_input_nodes)
        self.after = self._reached(reversed(nodes), lambda node: node.users)

    def _reached(
        self, nodes: Iterable[fx.Node], step: Callable[[fx.Node], Iterable[fx.Node]]
    ) -> dict[fx.Node, int]:
        found: dict[fx.Node, int] = {}
        for node in nodes:
            found[node] = self.bits.get(node, 0)
            for each in step(node):
                found[node] |= found[each]
        return found

    def time_us(self, start: fx.Node) -> float:
        """Return the microseconds of computation that can overlap the collective starting here."""
        related = self.before[start] | self.after[start]
        return sum(us * (bits & ~related).bit_count() for us, bits in self.by_us.items())


def _part_us(
    nodes: Iterable[fx.Node], chunks: int, times: NodeTimes, us_of: Callable[[fx.Node], float]
) -> float:
    """Return the time of one chunk: its share, and a launch for each kernel."""
    us = 0.0
    for node in nodes:
        launch = times.profile.kernels.launch_us * times.kernels(node)
        us += (us_of(node) - launch) * _share(node, chunks) + launch
    return us


def _share(node: fx.Node, chunks: int) -> float:
    """Return the share of a node's time that one of its chunks takes: on a GPU, at least that of
    ``WAVE`` values."""
    if not is_matmul(node) or node.meta["val"].device.type == "cpu":
        return 1 / chunks
    return max(1 / chunks, min(WAVE / max(node.meta["val"].numel(), 1), 1.0))
