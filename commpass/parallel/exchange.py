"""One collective of a hook, written as a graph and compiled with the passes.

Hooks of FSDP2 and DDP send eagerly what never reaches a graph. Each such exchange is written as a
graph of one collective and compiled by the same backend as any other. So policies, the cost model,
plans, dumps, agreement between ranks, error feedback and kernels work as for all graphs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from commpass.backend import Backend
from commpass.distributed import record
from commpass.distributed.calls import Raising, with_boxed_args
from commpass.distributed.origin import origin_of_hook
from commpass.distributed.owners import HookCalls
from commpass.errors import CommpassError
from commpass.parallel.compile_cache import CompileCache, with_fakes
from commpass.passes.fx.marks import MARK
from commpass.passes.fx.meta import LABEL, PLACE
from commpass.plan import Plan
from commpass.policy.annotate import KEY, outside_scopes
from commpass.utils.ambient import ambient_free, without_ambient_state


@dataclass(frozen=True)
class Exchange:
    """What a hook sends.

    - ``kind`` and ``op``: as in a site, over the group named ``group`` of ``ranks`` ranks, for the
      module at ``module``, in ``direction``.
    - ``hook``: the integration that sends it, as named in its state.
    - ``annotation``: the annotation by ``compress`` or ``keep``, as JSON.
    - ``unsupported_reason``: why it must be sent uncompressed, if it must.
    - ``flat``: it sends the gradients of its parameters one after another; then state is kept by
      parameter.
    - ``recomputed``: backward sends again what forward sent, and must get the same bits.
    - ``parameters``: the names of those that it carries; they distinguish it from others of the
      module.
    - ``parts``: the ranges of a rank's row that are sent together, each as (begin, end), if not all
      of the row is. No block of codes then holds values of two parts.
    - ``wide``: the dtype of the result if ``x`` has narrower values, which are widened before the
      sum; ``factor`` is what they are multiplied by then.

    A mean (``op="avg"``) is the sum of values that each rank has multiplied by 1 / ``ranks`` before
    it sends them, as in DDP. So the library does not need to support means, and no sum overflows
    unless its mean does.
    """

    kind: str
    group: str
    ranks: int
    module: str
    direction: str
    hook: str
    op: str = "sum"
    annotation: str | None = None
    unsupported_reason: str | None = None
    flat: bool = False
    recomputed: bool = False
    parameters: tuple[str, ...] = ()
    parts: tuple[tuple[tuple[int, int], ...], ...] = ()
    wide: torch.dtype | None = None
    factor: float = 1.0

    @property
    def scale(self) -> float:
        """The factor of each value before the sum."""
        return self.factor / self.ranks if self.op == "avg" else self.factor

    @property
    def label(self) -> str:
        """What reports call it: the parameters of a bucket, or the root module. "" if its module
        says it."""
        if self.flat and self.parameters:
            first, last, many = self.parameters[0], self.parameters[-1], len(self.parameters)
            return first if many == 1 else f"{first} to {last}, {many} parameters"
        return "" if self.module else "(the root module)"

    def graph(self, inplace: bool) -> fx.GraphModule:
        """Return the graph ``x -> None``, which puts the result into ``x``, or ``(x, out) ->
        None``.

        All are flat tensors.
        """
        graph = fx.Graph()
        x = graph.placeholder("x")
        out = x if inplace else graph.placeholder("out")
        custom = {PLACE: self.module} | ({KEY: self.annotation} if self.annotation else {})
        custom |= {LABEL: self.label} if self.label else {}
        sent = x
        if self.wide is not None:
            convert = torch.ops.prims.convert_element_type.default
            sent = graph.call_function(convert, (sent, self.wide))
        # also for one rank: the result is then not ``x`` itself
        if self.op == "avg" or self.scale != 1.0:
            sent = graph.call_function(torch.ops.aten.mul.Tensor, (sent, self.scale))
        done = self._in_parts(graph, sent) if self.parts else self._sent(graph, sent)
        graph.call_function(torch.ops.aten.copy_.default, (out, done))
        for node in graph.nodes:
            if node.op == "call_function":
                node.meta["custom"] = dict(custom)
        graph.output(())
        return fx.GraphModule(torch.nn.Module(), graph)

    def _sent(self, graph: fx.Graph, x: fx.Node) -> fx.Node:
        """Add the collective of a flat tensor. Return its flat result."""
        functional = torch.ops._c10d_functional
        calls: dict[str, tuple[Any, tuple[Any, ...]]] = {
            "all_reduce": (functional.all_reduce.default, (x, "sum", self.group)),
            "all_gather": (
                functional.all_gather_into_tensor.default,
                (x, self.ranks, self.group),
            ),
            "reduce_scatter": (
                functional.reduce_scatter_tensor.default,
                (x, "sum", self.ranks, self.group),
            ),
        }
        target, args = calls[self.kind]
        started = graph.call_function(target, args)
        return graph.call_function(functional.wait_tensor.default, (started,))

    def _in_parts(self, graph: fx.Graph, x: fx.Node) -> fx.Node:
        """Add a collective for each part of a rank's row. Return their results in the order of the
        row."""
        aten = torch.ops.aten

        def rows(flat: fx.Node, count: int) -> fx.Node:
            return graph.call_function(aten.reshape.default, (flat, [count, -1]))

        def flat(rows: fx.Node) -> fx.Node:
            return graph.call_function(aten.reshape.default, (rows, [-1]))

        def joined(pieces: Sequence[fx.Node]) -> fx.Node:
            return graph.call_function(aten.cat.default, (list(pieces), 1))

        def cut(rows: fx.Node, begin: int, end: int) -> fx.Node:
            return graph.call_function(aten.slice.Tensor, (rows, 1, begin, end))

        given = rows(x, self.ranks if self.kind == "reduce_scatter" else 1)
        pieces: dict[int, fx.Node] = {}
        for part in self.parts:
            one = joined([cut(given, *piece) for piece in part])
            result = rows(self._sent(graph, flat(one)), self._result_rows)
            place = 0
            for begin, end in part:
                pieces[begin] = cut(result, place, place + end - begin)
                place += end - begin
        return flat(joined([pieces[begin] for begin in sorted(pieces)]))

    @property
    def _result_rows(self) -> int:
        return self.ranks if self.kind == "all_gather" else 1


@dataclass(frozen=True)
class Compiled:
    """A compiled exchange: its function, its current plan and the owner of its calls.

    If ``is_refused``, ``run`` raises the reason, and nothing may be sent.
    """

    run: Callable[..., Any]
    current_plan: Callable[[], Plan]
    calls: HookCalls
    is_refused: bool

    @property
    def plan(self) -> Plan:
        """The plan by which it is executed now."""
        return self.current_plan()

    @property
    def is_untouched(self) -> bool:
        """Whether it may be sent as without commpass: nothing was compiled for it."""
        return not self.plan.changed and not self.is_refused


@dataclass
class Exchanges:
    """The compiled exchanges of one hook, each compiled at its first use, on all ranks alike.

    They are keyed by what is sent and by parameter names, since a model may get other parameters of
    the same names (``load_state_dict(assign=True)``).
    """

    backend: Backend
    compiled: dict[Any, Compiled] = field(default_factory=dict)
    narrow: dict[Any, bool] = field(default_factory=dict)
    shared: CompileCache = field(default_factory=CompileCache)

    def run(
        self, exchange: Exchange, x: Tensor, out: Tensor | None = None, of: Sequence[Tensor] = ()
    ) -> None:
        """Send ``x`` and put the result into ``out``, or into ``x`` itself; the two do not overlap.

        ``of`` are the current parameters of ``exchange.parameters``. Their state is kept, if the
        codec has any.
        """
        self.get(exchange, x, out, of).run(*([x] if out is None else [x, out]))

    def get(
        self, exchange: Exchange, x: Tensor, out: Tensor | None = None, of: Sequence[Tensor] = ()
    ) -> Compiled:
        """Return the compiled exchange."""
        shape = None if out is None else tuple(out.shape)
        key = (exchange, tuple(x.shape), x.dtype, x.device, shape, len(of))
        if key not in self.compiled:
            self.compiled[key] = self._compile(exchange, x, out, of)
        compiled = self.compiled[key]
        compiled.calls.set_parameters(of)
        return compiled

    def narrows(self, exchange: Exchange, x: Tensor, out: Tensor) -> bool:
        """Return whether simplify turns an exchange of widened values into one of narrow values."""
        key = (exchange, tuple(x.shape), x.dtype, x.device)
        if key not in self.narrow:
            self.narrow[key] = self._narrows(exchange, x, out)
        return self.narrow[key]

    @ambient_free
    def _narrows(self, exchange: Exchange, x: Tensor, out: Tensor) -> bool:
        gm = exchange.graph(inplace=False)
        with_fakes(gm, [x, out])
        with outside_scopes():
            return bool(self.backend.simplified(gm, exchange.direction))

    def clear(self, *, reuse_code: bool = False) -> None:
        """Drop all plans for a group that is no longer used, and what was compiled.

        With ``reuse_code`` the code of graphs is kept, for another group of the same name.
        """
        self.backend.step_log.retire()
        self.compiled.clear()
        self.narrow.clear()
        if reuse_code:
            self.shared.drop_single_kernels()
        else:
            self.shared.made.clear()

    @ambient_free
    def _compile(
        self, exchange: Exchange, x: Tensor, out: Tensor | None, of: Sequence[Tensor]
    ) -> Compiled:
        before = len(record.plans())
        gm = exchange.graph(out is None)
        with_fakes(gm, [x] if out is None else [x, out])
        origin = origin_of_hook(
            exchange.hook, exchange.kind, exchange.op, exchange.module, exchange.parameters
        )
        calls = HookCalls(
            exchange.direction, exchange.hook, of, exchange.flat, exchange.recomputed, origin
        )
        inductor = self.backend.inner == "inductor"

        def compile_graph(
            gm: fx.GraphModule, more: Sequence[Any], pinned: bool, changed: bool
        ) -> Any:
            if not inductor or not any(MARK in node.meta for node in gm.graph.nodes):
                return with_boxed_args(gm.forward)
            return self.shared.compiled(gm, pinned)

        with outside_scopes():
            function = self.backend.of_hook(
                gm, exchange.direction, calls, compile_graph, exchange.unsupported_reason
            )
        made = record.plans()[before:]
        if len(made) != 1:
            raise CommpassError(f"the exchange of {exchange} made {len(made)} plans instead of one")

        def run(*tensors: Tensor) -> None:
            with without_ambient_state(), outside_scopes():
                function(list(tensors))

        plan = functools.partial(self.backend.step_log.current, made[0])
        return Compiled(run, plan, calls, isinstance(function, Raising))

    @property
    def plans(self) -> list[Plan]:
        """The plan of each exchange, in the order in which they first happened."""
        return [each.plan for each in self.compiled.values()]
