"""Use a process group that another library made as if it were that of a whole job.

torchft connects ranks of separate jobs. Their group is unknown to ``torch.distributed``, whose
default group has the ranks of one job. While an ``AdoptedWorld`` is active, that group is the
default one: its ranks are numbered as in the group, and plans are compared in its own store.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from commpass.distributed import origin, plan_store

_names: set[str] = set()


def is_adopted(name: str) -> bool:
    """Return whether a group of this name is adopted now."""
    return name in _names


class AdoptedWorld:
    """A group that is registered under a ``name`` and, while it is active, is the default group.

    ``label`` is a word for it in rules. ``close`` must be called before another group of that name
    is adopted.
    """

    def __init__(self, group: dist.ProcessGroup, name: str, label: str):
        self.group, self.name = group, name
        torch_c10d: Any = dist.distributed_c10d
        registered: Any = group
        self._stores: list[plan_store.PlanStore] = []
        self._calls: Counter[str] = Counter()
        world = torch_c10d._world
        devices = [device.type for device in group._device_types]
        carriers = [f"{each}:{group._get_backend(torch.device(each)).name()}" for each in devices]
        registered._set_group_name(name)
        group._set_group_desc(f"mesh_{label}")
        store = group.get_group_store()
        world.pg_map[group] = (",".join(carriers), store)
        world.pg_names[group] = name
        world.pg_group_ranks[group] = {rank: rank for rank in range(group.size())}
        world.pg_backend_config[group] = ",".join(carriers)
        world.pg_to_tag[group] = f"user:{name}"
        world.tags_to_pg.setdefault(f"user:{name}", []).append(group)
        torch_c10d._register_process_group(name, group)
        _names.add(name)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make it the default group, for this process and until the block ends.

        No other thread may use ``torch.distributed`` meanwhile, other than by the groups that it
        holds.
        """
        world: Any = dist.distributed_c10d._world
        before = world.default_pg, plan_store._stores[:], Counter(origin._calls)
        world.default_pg, plan_store._stores[:] = self.group, self._stores
        _replace(origin._calls, self._calls)
        try:
            yield
        finally:
            self._stores, self._calls = plan_store._stores[:], Counter(origin._calls)
            world.default_pg, plan_store._stores[:] = before[0], before[1]
            _replace(origin._calls, before[2])

    def close(self) -> None:
        """Remove the group from ``torch.distributed`` again. Its owner ends it."""
        _names.discard(self.name)
        torch_c10d: Any = dist.distributed_c10d
        world = torch_c10d._world
        for mapping in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_to_tag):
            mapping.pop(self.group, None)
        world.pg_backend_config.pop(self.group, None)
        world.tags_to_pg.pop(f"user:{self.name}", None)
        torch_c10d._unregister_process_group(self.name)


def _replace(counter: Counter[str], values: Counter[str]) -> None:
    counter.clear()
    counter.update(values)
