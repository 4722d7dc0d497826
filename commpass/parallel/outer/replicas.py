"""The replicas of a local-update method: a process group, or the quorum of a torchft Manager."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from commpass.distributed.adopted import AdoptedWorld
from commpass.errors import CommpassError, PolicyError, Unanswered
from commpass.parallel.outer.means import HOOK, Means
from commpass.parallel.outer.residuals import Snapshot, drop

log = logging.getLogger("commpass")

KEY = "commpass_outer"
"""The key of an integration in the state that a Manager gives to other replicas."""
LABEL = "replicate"
"""The word for the group of replicas in rules, as for the dimension of replicas of a mesh."""
IN_A_SUBPROCESS = (
    "compress_outer: {} has its process group in a subprocess, where commpass cannot compile its"
    " exchanges: give the Manager a torchft.process_group.ProcessGroupGloo or ProcessGroupNCCL"
)
NOT_SENT = "the outer step is discarded, since its exchange failed: %s"


class GroupReplicas:
    """The ranks of a process group, which are the same all the time."""

    hook = HOOK

    def __init__(self, group: dist.ProcessGroup):
        self.group = group

    def begin(self) -> None:
        """Nothing to do: the group does not change."""

    def average(self, means: Means, parameters: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Replace values by their means over the group."""
        means.average(self.group, parameters, values, self.group.size())

    def commit(self) -> bool:
        """Return True: errors were raised."""
        return True

    def close(self) -> None:
        """The group belongs to the user."""


class ManagedReplicas:
    """The participants of the current quorum of a torchft Manager.

    The Manager makes a new group for each quorum. All plans are then made anew, since replicas that
    join have none. Residuals stay with their replica. An outer step counts if ``should_commit``
    returns True: otherwise residuals are set back to those before it. A replica that takes over
    another one's state (healing) drops its residuals, which belong to parameters it no longer has.

    ``on_heal`` is called with the state that another replica returned from ``shared_state``.
    """

    def __init__(
        self,
        manager: Any,
        parameters: Sequence[Tensor],
        shared_state: Callable[[], dict[str, Any]],
        on_heal: Callable[[dict[str, Any]], None],
        on_commit: Callable[[bool], None],
    ):
        innermost_group(manager._pg)
        self.manager = manager
        shards = manager._group_world_size
        self.hook = f"{HOOK}-{manager._group_rank}" if shards > 1 else HOOK
        self._on_heal, self._on_commit = on_heal, on_commit
        self._world: AdoptedWorld | None = None
        self._parameters = parameters
        self._snapshots: list[Snapshot] = []
        self._should_commit = manager.should_commit
        manager.register_state_dict_fn(KEY, self._heal, shared_state)
        manager.should_commit = self._commit

    def begin(self) -> None:
        """Start the quorum of an outer step, and take over the state of another replica if this one
        is behind."""
        self.manager.start_quorum()

    def average(self, means: Means, parameters: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Replace values by their means over the participants.

        If the exchange fails, the Manager is told so, as by its own ``allreduce``: the step is
        discarded. Raise PolicyError or PlanMismatch if replicas have different policies or models,
        and any other error of commpass itself: the next step would fail alike.
        """
        manager = self.manager
        if manager.errored():
            return
        manager.wait_quorum()
        if not manager.is_participating():
            drop(parameters)
            for value in values:
                value.zero_()
        self._snapshots.append(Snapshot(parameters))
        try:
            world = self._adopt(means)
            with world.active():
                means.average(world.group, parameters, values, manager.num_participants())
        except Exception as error:
            log.warning(NOT_SENT, error)
            manager.report_error(error)
            self._abort()
            if isinstance(error, CommpassError) and not isinstance(error, Unanswered):
                raise

    def commit(self) -> bool:
        """Return whether the outer step counts on this replica."""
        return bool(self.manager.should_commit())

    def _commit(self, *args: Any, **kwargs: Any) -> bool:
        """Replace the Manager's ``should_commit``: settle the residuals by its result."""
        committed = False
        try:
            committed = bool(self._should_commit(*args, **kwargs))
        finally:
            if not committed:
                for snapshot in reversed(self._snapshots):
                    snapshot.restore()
            self._snapshots.clear()
            self._on_commit(committed)
        return committed

    def _heal(self, state: dict[str, Any]) -> None:
        self._snapshots.clear()
        drop(self._parameters)
        self._on_heal(state)

    def _adopt(self, means: Means) -> AdoptedWorld:
        """Return the current group, after making it known to torch and dropping plans for the
        previous one."""
        group = innermost_group(self.manager._pg)
        if group is None:
            raise RuntimeError("the Manager's process group is not configured")
        if self._world is None or self._world.group is not group:
            self._leave()
            means.clear()
            self._world = AdoptedWorld(group, _free_name(), LABEL)
        return self._world

    def _abort(self) -> None:
        """End the group of a failed exchange, so that no other replica waits for this one."""
        self._leave()
        self.manager._pg.abort()

    def _leave(self) -> None:
        if self._world is not None:
            self._world.close()
            self._world = None

    def close(self) -> None:
        """Give the Manager its own calls back."""
        self._leave()
        self.manager.__dict__.pop("should_commit", None)
        self.manager._load_state_dict_fns.pop(KEY, None)
        self.manager._user_state_dicts.pop(KEY, None)


def _free_name() -> str:
    """Return a name that no group has. Replicas that adopt as many groups get the same names."""
    used = set(dist.distributed_c10d._world.pg_names.values())
    names = (f"replicas-{number}" for number in itertools.count())
    return next(name for name in names if name not in used)


def innermost_group(group: Any) -> dist.ProcessGroup | None:
    """Return torch's process group in one of torchft; None if that is not configured yet.

    Raise PolicyError if it is in another process.
    """
    from torchft.process_group import ProcessGroup, ProcessGroupWrapper

    while isinstance(group, ProcessGroupWrapper):
        group = group._pg
    if isinstance(group, ProcessGroup):
        raise PolicyError(IN_A_SUBPROCESS.format(type(group).__name__))
    return group
