"""What all graphs of a backend share, and one graph that it compiles."""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import fx
from torch._guards import TracingContext

from commpass import groups
from commpass.backend.options import SAMPLING_COMPILERS, Compiler
from commpass.costmodel import Profile
from commpass.distributed import agreement, step_log
from commpass.distributed.budget import Key
from commpass.distributed.checked import Checked
from commpass.distributed.origin import Origin
from commpass.distributed.owners import Calls
from commpass.distributed.plan_store import publish_hello
from commpass.distributed.step_timer import StepTimer
from commpass.distributed.summary import Summary
from commpass.lowering.timed import Timed
from commpass.plan import Plan
from commpass.policy import Policy


class Shared:
    """The settings of a backend, what its ranks have agreed on, and its reports."""

    def __init__(
        self,
        policy: Policy,
        inner: str | Compiler,
        profile: Profile | None,
        strict: bool,
        dump: Path | None,
        timeout: float | None,
        autotune: bool | float | None = None,
    ):
        self.__name__ = "commpass"
        self.policy, self.inner, self.profile = policy, inner, profile
        self.strict, self.dump, self.timeout, self.autotune = strict, dump, timeout, autotune
        self.run = uuid.uuid4().hex[:8]
        self.graphs = self.resets = 0
        self.warned_of_reordering = self.logged_untimed = False
        # As the ranks agreed, because a rank may compile alone.
        self.hidden: dict[tuple[Any, ...], bool] = {}
        self.densities: dict[tuple[Any, ...], float] = {}
        self.over: dict[tuple[Any, Key], str] = {}  # sites over their error budget
        self.tile_sizes: dict[str, Timed] = {}  # by the identity of a kernel call
        self.checked: dict[tuple[Any, ...], weakref.WeakSet[Checked]] = {}
        self.step_log = step_log.open_log(policy.name)
        self.summary, self.step_timer = Summary(policy), StepTimer(self.step_log.facts)
        weakref.finalize(self, self.summary.report)
        publish_hello()

    @property
    def samples(self) -> bool:
        """Whether the inner compiler knows the operator that samples errors."""
        return self.inner in SAMPLING_COMPILERS

    def reset(self) -> None:
        """Forget agreed values, so that graphs are compiled and compared again.
        ``torch._dynamo.reset`` calls this."""
        self.resets += 1
        self.hidden.clear()
        self.densities.clear()
        self.over.clear()
        self.checked.clear()
        self.tile_sizes.clear()

    def patience(self, plan: Plan) -> float:
        """Return the seconds to wait for what other ranks publish."""
        some = (groups.group_named(name) for name in {site.group for site in plan.sites})
        known = [group for group in some if group is not None]
        return self.timeout or agreement.longest_timeout(known)


@dataclass(frozen=True, kw_only=True)
class TracedGraph:
    """A forward or backward graph, and how to compile it.

    If there is an ``unsupported_reason``, no collective is changed. ``autotune_s`` are the seconds
    in which its kernels may be timed.
    """

    gm: fx.GraphModule
    number: str
    direction: str
    calls: Calls
    stateless: str | None
    compile_graph: Compiler
    decompositions: Callable[[], Any] | None = None
    unsupported_reason: str | None = None
    autotune_s: float = 0.0

    @property
    def place(self) -> tuple[Any, ...]:
        """A key of the code that is recompiled for other inputs: code object and direction. Each
        hook has a graph and a key of its own."""
        return (self.calls.code, self.direction, self.number if self.calls.hook else "")


@dataclass(frozen=True, kw_only=True)
class Job(TracedGraph):
    """A graph to compile, with its profile, and torch's tracing context, which is needed to compile
    it again."""

    profile: Profile
    origin: Origin
    context: TracingContext | None
