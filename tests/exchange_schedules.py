"""Run the kernel of an exchange on all ranks in one process, by a random schedule over weak memory.

Each program of each rank is a coroutine of Triton's interpreter: a thread that runs only when it is
told to, up to its next access of the ranks' memory. All functions here run in a process that
interprets (``tests/interpreter.py``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from exchanging import exchange_of, part_of, plain
from torch import Tensor
from weak_memory import Agent, Memory

from commpass.codecs import codec

LONG = 1 << 30
"""So many polls that a rank never gives up."""


@dataclass(frozen=True)
class Setup:
    """An exchange, and how it is run: ``calls`` calls on each rank; ``gone`` is a rank that makes
    none; a program polls ``spins`` times. ``faults`` are parts of the kernel's text to replace.

    ``others`` are exchanges that follow in turn, in the same memory: their name, values and
    programs.

    ``counted`` calls have been made before, all of which used other slots.
    """

    name: str
    ranks: int
    calls: int = 3
    numel: int = 90
    programs: int = 1
    spec: str = "int8(block=32)"
    gone: int | None = None
    spins: int = LONG
    faults: tuple[tuple[str, str], ...] = ()
    others: tuple[tuple[str, int, int], ...] = ()
    counted: int = 0

    @property
    def turns(self) -> list[tuple[str, int, int]]:
        """Name, values and programs of each call."""
        every = [(self.name, self.numel, self.programs), *self.others]
        return [every[call % len(every)] for call in range(self.calls)]


@dataclass(frozen=True)
class Outcome:
    """What a schedule led to.

    ``races`` are reads that could have read other bytes. Results are ``wrong`` or ``right``; those
    with NaN in place of values are neither. ``missing`` has, for each rank, the bits of the ranks
    that it missed. ``lead`` is the most calls that a rank was ahead of another.
    """

    races: int
    wrong: int
    right: int
    nan: int
    missing: tuple[int, ...]
    lead: int
    stuck: bool = False

    @property
    def is_bad(self) -> bool:
        return bool(self.races or self.wrong or self.stuck)


@dataclass
class Program:
    """A program of a rank as a coroutine. ``polled`` is the number of signals at its last access,
    if that was a poll; ``waits`` says that the next one is a poll, too."""

    rank: int
    place: tuple[int, int, int]
    grid: tuple[int, int, int]
    agent: Agent
    run: Callable[[], None]
    go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    done: bool = False
    error: BaseException | None = None
    polled: int | None = None
    waits: bool = False


class Stuck(Exception):
    """All programs wait for signals that no one will send."""


class Stopped(BaseException):
    """Ends the threads of a schedule that is over."""


def outcomes(setup: Setup, seeds: range, until_bad: bool = False) -> list[Outcome]:
    """Return the outcome of each schedule, or those up to the first bad one."""
    found = []
    for seed in seeds:
        found.append(outcome(setup, seed))
        if until_bad and found[-1].is_bad:
            break
    return found


def outcome(setup: Setup, seed: int) -> Outcome:
    schedule = Schedule(setup, seed)
    stuck = False
    with patched(schedule):
        try:
            schedule.run()
        except Stuck:
            stuck = True
    wrong = right = nan = 0
    for call, (name, _, _) in enumerate(setup.turns):
        brought = [inputs[call] for inputs in schedule.inputs]
        want = plain(codec(setup.spec), name, brought, "sum")[2]
        for rank, outputs in enumerate(schedule.outputs):
            if rank == setup.gone or len(outputs) <= call or stuck:
                continue
            missed = outputs[call].isnan()
            same = (outputs[call] == part_of(name, want, rank, setup.ranks)) | missed
            wrong += int(not bool(same.all()))
            nan += int(bool(missed.any()))
            right += int(bool(same.all()) and not bool(missed.any()))
    races, missing = schedule.memory.races, schedule.missing()
    return Outcome(races, wrong, right, nan, missing, schedule.lead, stuck)


class Launch:
    """The kernel of a call, and its arguments."""

    def __init__(self, setup: Setup, exchange: Any, capacity: Any) -> None:
        from commpass.lowering.exchange import result_shape
        from commpass.lowering.gpu.exchange import numbers
        from commpass.lowering.gpu.exchange_kernel import kernel
        from commpass.lowering.gpu.source import load

        self.shape = result_shape(exchange.kind, (exchange.numel,), setup.ranks)
        made = kernel(exchange)
        text = made.source.text
        for old, new in setup.faults:
            assert old in text, old
            text = text.replace(old, new)
        self.function = load(replace(made.source, text=text)).rewrite()
        self.constants = {
            **made.constants,
            **{"CASTS": False, "FP8": False, "STORES": False, "SPINS": setup.spins},
        }
        self.numbers = [numbers(exchange, rank, capacity) for rank in range(setup.ranks)]
        self.names = list(made.signature)
        self.grid = (exchange.programs, exchange.rows, 1)


class Schedule:
    """All ranks of an exchange, and the random order of their accesses."""

    def __init__(self, setup: Setup, seed: int) -> None:
        from commpass.lowering.gpu.exchange import capacity_for, memory_of

        self.setup = setup
        self.random = np.random.default_rng(seed)
        exchanges = [
            exchange_of(
                name, codec(setup.spec), torch.float32, numel, setup.ranks, programs=programs
            )
            for name, numel, programs in setup.turns
        ]
        capacity = capacity_for(exchanges)
        made = {each: Launch(setup, each, capacity) for each in exchanges}
        self.launches = [made[each] for each in exchanges]
        self.lead = 0
        self.late, total = memory_of(capacity).late, memory_of(capacity).total
        # No bytes are there: all accesses of these addresses go to the memory of this schedule.
        self.base, self.end = 1 << 40, (1 << 40) + setup.ranks * total
        self.memory = Memory(setup.ranks * total, self.random)
        counters = memory_of(capacity).counters + total * np.arange(setup.ranks)
        places = counters[:, None] + np.arange(4 * capacity.programs)
        counted = np.full(capacity.programs, setup.counted, np.uint32)
        self.memory.values[0, places] = counted.view(np.uint8)
        self.peers = self.base + total * torch.arange(setup.ranks, dtype=torch.int64)
        draw = torch.Generator().manual_seed(seed)
        self.inputs = [
            [torch.randn(numel, generator=draw) for _, numel, _ in setup.turns]
            for _ in range(setup.ranks)
        ]
        self.outputs: list[list[Tensor]] = [[] for _ in range(setup.ranks)]
        self.programs: list[list[Program]] = [[] for _ in range(setup.ranks)]
        self.current: Program | None = None
        self.back = threading.Semaphore(0)
        self.stopped = False
        self.weights = np.ones(setup.ranks)

    def run(self) -> None:
        for rank in range(self.setup.ranks):
            if rank != self.setup.gone:
                self._start(rank, self.memory.agent())
        try:
            while (ready := self._ready()) is not None:
                self._step(ready)
        finally:
            self.stopped = True
            for each in self._alive():
                each.go.release()

    def missing(self) -> tuple[int, ...]:
        """Return the bits of the ranks that each rank has missed, at the end."""
        places = self.late + (self.end - self.base) // self.setup.ranks * np.arange(
            self.setup.ranks
        )
        at = places[:, None] + np.arange(4)
        found = self.memory.values[self.memory.newest[at], at].view(np.int32)[:, 0]
        return tuple(map(int, found))

    def _alive(self) -> list[Program]:
        return [each for several in self.programs for each in several if not each.done]

    def _ready(self) -> Program | None:
        """Return the program that runs next; None when all ranks have made all calls."""
        alive = self._alive()
        if not alive:
            return None
        signals = self.memory.signals
        able = alive
        if self.setup.spins == LONG:  # who polls again without a new signal learns nothing
            able = [each for each in alive if not each.waits or each.polled != signals]
            if not able:
                raise Stuck
        if self.random.random() < 0.01:  # now and then other ranks are slow
            self.weights = 4.0 ** self.random.integers(-3, 3, self.setup.ranks)
        weights = self.weights[[each.rank for each in able]]
        return able[self.random.choice(len(able), p=weights / weights.sum())]

    def _step(self, program: Program) -> None:
        from triton.runtime import interpreter

        interpreter.interpreter_builder.grid_idx = program.place
        interpreter.interpreter_builder.set_grid_dim(*program.grid)
        self.current = program
        program.go.release()
        self.back.acquire()
        if program.error is not None:
            raise program.error
        several = self.programs[program.rank]
        if all(each.done for each in several):
            if len(self.outputs[program.rank]) < self.setup.calls:
                self._start(program.rank, Agent.after(*(each.agent for each in several)))
            else:
                self.programs[program.rank] = []

    def _start(self, rank: int, before: Agent) -> None:
        """Start the next call of a rank: all its programs, which run at once."""
        from triton.runtime import interpreter

        call = len(self.outputs[rank])
        launch, x = self.launches[call], self.inputs[rank][call]
        y = x.new_zeros(launch.shape)
        self.outputs[rank].append(y)
        others = [len(each) for at, each in enumerate(self.outputs) if at != self.setup.gone]
        self.lead = max(self.lead, max(others) - min(others))
        given = {"peers": self.peers, "input": x, "output": y} | launch.numbers[rank]
        arguments = {name: interpreter._implicit_cvt(given[name]) for name in launch.names}
        self.programs[rank] = []
        for first in range(launch.grid[0]):
            for second in range(launch.grid[1]):
                program = Program(
                    rank,
                    (first, second, 0),
                    launch.grid,
                    Agent.after(before),
                    lambda: launch.function(**arguments, **launch.constants),
                )
                self.programs[rank].append(program)
                threading.Thread(target=self._body, args=(program,), daemon=True).start()

    def _body(self, program: Program) -> None:
        program.go.acquire()
        try:
            if not self.stopped:
                program.run()
        except Stopped:
            pass
        except BaseException as error:
            program.error = error
        program.done = True
        self.back.release()

    def pause(self, *, poll: bool = False) -> Agent:
        """Let others run before an access of this program; return what it has seen."""
        program = self.current
        assert program is not None
        program.waits = poll and program.polled is not None
        self.back.release()
        program.go.acquire()
        if self.stopped:
            raise Stopped
        program.polled = self.memory.signals if poll else None
        return program.agent


# --- the interpreter's accesses -------------------------------------------------------------------


@contextmanager
def patched(schedule: Schedule) -> Iterator[None]:
    """Direct the interpreter's accesses of the ranks' memory to a schedule."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    memory, own = schedule.memory, {}
    for name in ("create_masked_load", "create_masked_store", "create_atomic_rmw"):
        own[name] = getattr(builder, name)

    def places(pointers: Any, mask: Any, size: int) -> np.ndarray | None:
        """Return the bytes of the elements, or None if they are not in the ranks' memory."""
        kept = np.broadcast_to(mask.data, pointers.data.shape)
        at = pointers.data[kept].astype(np.int64)
        if not at.size or not ((at >= schedule.base) & (at < schedule.end)).all():
            return None
        return (at - schedule.base)[:, None] + np.arange(size)

    def load(pointers, mask, other, *more):
        dtype = interpreter._get_np_dtype(pointers.get_element_ty())
        at = places(pointers, mask, dtype.itemsize)
        if at is None:
            return own["create_masked_load"](pointers, mask, other, *more)
        agent = schedule.pause()
        kept = np.broadcast_to(mask.data, pointers.data.shape)
        filled = 0 if other is None else other.data
        found = np.broadcast_to(np.asarray(filled, dtype), pointers.data.shape).copy()
        found[kept] = memory.read(agent, at).view(dtype)[:, 0]
        return interpreter.TensorHandle(found, pointers.get_element_ty())

    def store(pointers, value, mask, *more):
        data = np.broadcast_to(value.data, pointers.data.shape)
        at = places(pointers, mask, data.itemsize)
        if at is None:
            return own["create_masked_store"](pointers, value, mask, *more)
        kept = np.broadcast_to(mask.data, pointers.data.shape)
        agent = schedule.pause()
        memory.write(agent, at, np.ascontiguousarray(data[kept])[:, None].view(np.uint8))
        return None

    def atomic(operation, pointers, value, mask, sem, scope):
        at = places(pointers, mask, 4)
        assert at is not None, "an atomic operation outside the ranks' memory"
        kept = np.broadcast_to(mask.data, pointers.data.shape)
        given = np.broadcast_to(value.data, pointers.data.shape)[kept]
        poll = operation == operation.ADD and not given.any()
        agent = schedule.pause(poll=poll)
        before = memory.fetch(agent, at, acquire=sem == sem.ACQUIRE).view(np.int32)[:, 0]
        kinds = {operation.ADD: before + given, operation.OR: before | given}
        after = np.ascontiguousarray(kinds.get(operation, given), dtype=np.int32)
        if not poll:
            release = sem == sem.RELEASE
            memory.exchange(agent, at, after[:, None].view(np.uint8), release=release)
        found = np.zeros(pointers.data.shape, dtype=np.int32)
        found[kept] = before
        return interpreter.TensorHandle(found, value.dtype.scalar)

    def barrier() -> None:
        assert schedule.current is not None
        schedule.current.agent.barrier()

    replaced = {
        "create_masked_load": load,
        "create_masked_store": store,
        "create_atomic_rmw": atomic,
        "create_barrier": barrier,
    }
    with patched_once({each.function for each in schedule.launches}):
        for name, function in replaced.items():
            setattr(builder, name, function)
        try:
            yield
        finally:
            for name in replaced:
                delattr(builder, name)


@contextmanager
def patched_once(functions: set[Any]) -> Iterator[None]:
    """Let Triton replace its language by the interpreter's once, and not at each call of a tile
    function; and let it not check each sum for overflow. Both take most of the time."""
    from triton.language import core, standard
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    scopes = [*map(patch, functions), patch(standard.cdiv.fn)]
    # Triton 3.6 has another, which NumPy 2.4 refuses.
    scopes[0].set_attr(core.tensor, "__index__", lambda self: int(self.handle.data.squeeze()))
    interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()
    builder = interpreter.interpreter_builder
    options, builder.options = builder.options, replace(builder.options, sanitize_overflow=False)
    try:
        yield
    finally:
        interpreter._patch_lang, builder.options = patch, options
        for scope in reversed(scopes):
            scope.restore()
