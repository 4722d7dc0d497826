"""Process gradients in the order of backward: accumulate, select, exchange in fusion buffers.

Three threads are involved: backward's own, which accumulates and selects; one that selects in
parallel (offload); and one that exchanges, message by message in the order of the plan, which is
the same on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from commpass.codecs.codec import accumulation_dtype
from commpass.distributed.owners import owner_of
from commpass.distributed.state.checks import check_loads, end_checks
from commpass.distributed.state.residuals import residual
from commpass.errors import CommpassError, PolicyError
from commpass.parallel.ssfusion import messages
from commpass.parallel.ssfusion.memory import Memory
from commpass.parallel.ssfusion.messages import Part
from commpass.parallel.ssfusion.plan import FusionPlan, Message, Sent
from commpass.parallel.ssfusion.planner import Planner
from commpass.parallel.ssfusion.saved import CODE, VELOCITY, check_of, is_velocity
from commpass.passes.results import StateInput
from commpass.utils.ambient import without_ambient_state

CPU = torch.device("cpu")


@dataclass
class Step:
    """A step in progress.

    - ``missing``: the gradients that each message still waits for.
    - ``views``: where the mean of each gradient goes, by its number; None if its parameter had no
      gradient.
    - ``wires``: what is sent of each gradient.
    - ``sent``: the messages in flight.
    - ``late``: the means of parameters without a gradient.
    """

    missing: list[set[int]]
    views: dict[int, Tensor | None] = field(default_factory=dict)
    wires: dict[int, Tensor | Future[Tensor] | None] = field(default_factory=dict)
    sent: list[Future[None]] = field(default_factory=list)
    late: dict[int, Tensor] = field(default_factory=dict)


class Driver:
    """The exchange of gradients.

    The caller passes each gradient to ``ready``, once a step and in any order, then calls ``end``.
    The exchanging thread calls ``on_mean`` for each gradient whose mean has arrived, or
    ``on_failure`` with the error if none will.
    """

    def __init__(
        self,
        planner: Planner,
        on_mean: Callable[[nn.Parameter], None] = lambda parameter: None,
        on_failure: Callable[[BaseException], None] = lambda error: None,
    ):
        self.planner, self.options, self.channel = planner, planner.options, planner.channel
        self.on_mean, self.on_failure = on_mean, on_failure
        self.device = planner.device
        self.count = 0
        self.step: Step | None = None
        self.failure: BaseException | None = None
        self.plan: FusionPlan | None = None
        self._exchanger, self._selector = (
            ThreadPoolExecutor(1, f"commpass-{name}") for name in ("exchange", "select")
        )
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        if not self.options.momentum:
            self._drop_velocities()
        check_loads(self, check_of(planner.weights, self.options.momentum))

    def begin(self) -> Step:
        """Return the step in progress, or a new one."""
        if self.failure is not None:
            raise CommpassError(
                "an exchange of gradients failed, and ranks may have different ones: restart from a"
                " checkpoint"
            ) from self.failure
        if self.step is None:
            plan = self.planner.plan_at(self.count)
            if plan is not self.plan:
                self._adopt(plan)
            self.step = Step([{each.number for each in message.sent} for message in self.messages])
            if self.planner.measures(self.count):
                self.planner.clock.step()
        return self.step

    def _adopt(self, plan: FusionPlan) -> None:
        self.plan, self.messages = plan, plan.messages
        weights = self.planner.weights
        self.numbers = {id(each.parameter): number for number, each in enumerate(weights)}
        self.sent = {each.number: each for message in plan.messages for each in message.sent}
        self.parts = {number: self.planner.part(sent) for number, sent in self.sent.items()}

    def ready(self, parameter: nn.Parameter, gradient: Tensor | None, used: bool = True) -> None:
        """Take the gradient of a parameter; the mean is written into it later.

        None, or not ``used``: this rank had none in this step and sends nothing of it.
        """
        step = self.begin()
        number = self.numbers[id(parameter)]
        name = self.planner.weights[number].name
        if number in step.wires:
            raise CommpassError(
                f"{name} has a second gradient in one step: either the previous backward did not"
                " end, or it ran twice through one parameter (reentrant checkpoint)"
            )
        if gradient is not None and gradient.layout != torch.strided:
            raise PolicyError(
                f"{name} has a gradient of layout {gradient.layout}: use Embedding(sparse=False)"
            )
        if self.planner.measures(self.count) and used and gradient is not None:
            self.planner.clock.mark(number)
        step.views[number] = gradient
        with without_ambient_state():
            step.wires[number] = self._prepared(number, gradient if used else None)
        for missing in step.missing:
            missing.discard(number)
        self._send(step)

    def end(self) -> Step:
        """End the step: all gradients were given, and the next one begins a new step."""
        step, self.step = self.begin(), None
        self.count += 1
        return step

    def memory(self, number: int) -> Memory:
        """Return what this rank has not sent of a gradient."""
        velocity = self._state_tensor(number, VELOCITY) if self.options.momentum else None
        return Memory(self._state_tensor(number, "residual"), velocity, self.options.momentum)

    def _drop_velocities(self) -> None:
        """Drop the velocities that an earlier call for the same parameters has left."""
        for each in self.planner.weights:
            kept = owner_of([each.parameter]).state
            for key, (name, _) in list(kept.items()):
                if is_velocity(name):
                    del kept[key]

    def _state_tensor(self, number: int, name: str) -> Tensor:
        parameter = self.planner.weights[number].parameter
        state_input = StateInput(
            place=name,
            number=0,
            reaches=(),
            op="avg",
            group=self.planner.group.group_name,
            shape=tuple(parameter.shape),
            dtype=accumulation_dtype(parameter.dtype),
            device=parameter.device,
            fake=parameter,
        )
        return residual(state_input, 0, CODE, owner_of([parameter]))

    def _prepared(self, number: int, gradient: Tensor | None) -> Tensor | Future[Tensor] | None:
        if gradient is None:
            return None
        sent, part, memory = self.sent[number], self.parts[number], self.memory(number)
        if sent.offloaded:
            return self._selector.submit(self._offloaded, memory, gradient, part, self._event())
        return self._selected(memory, gradient, part, self.device)

    def _selected(self, memory: Memory, gradient: Tensor, part: Part, on: torch.device) -> Tensor:
        clip = self.options.clip
        memory.add(gradient, None if clip is None else clip / math.sqrt(self.channel.size()))
        if part.codec is None:
            return memory.take(part.dtype)
        return memory.select(part.codec, part.dtype, on)

    def _offloaded(self, memory: Memory, gradient: Tensor, part: Part, event: Any) -> Tensor:
        with without_ambient_state(), self._side_stream(event):
            return self._selected(memory, gradient, part, CPU)

    # --- messages ---------------------------------------------------------------------------------

    def _send(self, step: Step) -> None:
        """Submit all messages that are complete, in the order of the plan.

        In measured steps submit them only when all are complete, so that backward is measured
        alone.
        """
        if self.planner.measures(self.count) and any(step.missing):
            return
        while len(step.sent) < len(self.messages) and not step.missing[len(step.sent)]:
            message = self.messages[len(step.sent)]
            step.sent.append(self._exchanger.submit(self._run, message, step, self._event()))

    def _run(self, message: Message, step: Step, event: Any) -> None:
        """Exchange one message, in the exchanging thread."""
        if self.failure is not None:
            raise self.failure
        try:
            with without_ambient_state(), self._side_stream(event):
                means = self._exchanged(message.sent, message.kind, step)
                for sent, mean in zip(message.sent, means, strict=True):
                    self._put(sent.number, mean, step)
        except BaseException as error:
            self.failure = error
            self.on_failure(error)
            raise

    def _exchanged(self, sent: tuple[Sent, ...], kind: str, step: Step) -> list[Tensor | None]:
        parts = [self.parts[each.number] for each in sent]
        wires = []
        for each in sent:
            wire = step.wires[each.number]
            wire = wire.result() if isinstance(wire, Future) else wire
            if wire is not None and self._stream is not None:
                wire.record_stream(self._stream)
            wires.append(wire)
        if kind == "all_gather":
            return messages.gather(parts, wires, self.channel, self.device)
        return messages.sums(parts, wires, self.channel, self.device, self.options.dense)

    def _put(self, number: int, mean: Tensor | None, step: Step) -> None:
        parameter = self.planner.weights[number].parameter
        view = step.views[number]
        if mean is not None and view is not None:
            view.copy_(mean.view(view.shape))
        elif mean is not None:
            step.late[number] = mean.reshape(parameter.shape).clone()
        self.on_mean(parameter)

    def wait(self, step: Step) -> None:
        """Wait until all messages of a step have come back.

        Parameters that had no gradient here, but had one elsewhere, get theirs.
        """
        for future in step.sent:
            future.result()
        for number, mean in step.late.items():
            self.planner.weights[number].parameter.grad = mean
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def close(self) -> None:
        """End the threads, and accept any state."""
        end_checks(self)
        self._exchanger.shutdown(wait=False)
        self._selector.shutdown(wait=False)

    # --- the stream of the threads, on a GPU ------------------------------------------------------

    def _event(self) -> Any:
        """Record an event at the current position of backward's stream."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    @contextmanager
    def _side_stream(self, event: Any) -> Iterator[None]:
        """Run work after ``event``, in a separate stream."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(event)
            yield
