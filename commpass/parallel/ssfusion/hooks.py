"""Collect gradients by hooks on a module's parameters; helpers for DistributedDataParallel's
buckets."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable

from commpass.errors import CommpassError, PolicyError
from commpass.parallel.ssfusion.driver import Driver
from commpass.parallel.ssfusion.planner import Planner


class ModuleHooks:
    """Gradients of a plain module, each as soon as it is accumulated.

    Backward returns when all means have arrived. A parameter without a gradient at the end of
    backward is not used by this rank.
    """

    def __init__(self, module: nn.Module, planner: Planner):
        self.module, self.driver = module, Driver(planner)
        self.syncs = True
        self._task = -1
        self._handles: list[Any] = [
            each.parameter.register_post_accumulate_grad_hook(weak_hook(self._ready, each.name))
            for each in planner.weights
        ]
        self._handles.append(after_forward(module, self.driver, keep_alive=self))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients in this context without exchanging them."""
        before, self.syncs = self.syncs, False
        try:
            yield
        finally:
            self.syncs = before

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self.driver.close()

    def _ready(self, parameter: torch.Tensor) -> None:
        if not self.syncs:
            return
        task = torch._C._current_graph_task_id()
        if task != self._task:  # a checkpoint may run a backward within this one
            self._task = task
            engine: Any = Variable._execution_engine
            engine.queue_callback(self._finish)
        assert isinstance(parameter, nn.Parameter)
        self.driver.ready(parameter, parameter.grad)

    def _finish(self) -> None:
        """Finish the step at the end of a backward; of a nested one only if nothing is missing."""
        step = self.driver.step
        if step is None or (_in_backward() and any(step.missing)):
            return
        known = {id(each.parameter) for each in self.driver.planner.weights}
        for name, parameter in self.module.named_parameters():
            if (
                parameter.grad is not None
                and parameter.requires_grad
                and id(parameter) not in known
            ):
                raise PolicyError(
                    f"{name} has a gradient that is not exchanged: when ssfusion was called, the"
                    " parameter required no gradient or did not exist. Call remove(), then"
                    " ssfusion again"
                )
        for number, each in enumerate(self.driver.planner.weights):
            if number not in step.wires:
                self.driver.ready(each.parameter, each.parameter.grad)
        self.driver.wait(self.driver.end())


def _in_backward() -> bool:
    """Return whether autograd is in the middle of another backward."""
    return torch._C._current_autograd_node() is not None


def weak_hook(method: Callable[[torch.Tensor], None], name: str = "") -> Callable[[Any], None]:
    """Return a hook for the parameter ``name`` that does not keep the object of a method alive.

    Python's garbage collector cannot see these hooks, and would never free what refers to the
    parameter. If the object was freed, the hook raises CommpassError, or does nothing without a
    name.
    """
    reference = weakref.WeakMethod(method)

    def hook(parameter: torch.Tensor) -> None:
        alive = reference()
        if alive is not None:
            alive(parameter)
        elif name:
            raise CommpassError(
                f"{name}: the model that was given to ssfusion was freed, so its gradients are no"
                " longer exchanged: keep the model as long as its parameters are trained, or call"
                " remove() on what ssfusion returned"
            )

    return hook


def refuse_if_replaced(module: nn.Module, driver: Driver) -> None:
    """Raise PolicyError if a module has other parameters than those whose gradients are exchanged.

    The new ones would never get a mean, and the old ones would keep their gradients.
    """
    weights, present = driver.planner.weights, {id(each) for each in module.parameters()}
    if not torch.is_grad_enabled() or all(id(each.parameter) in present for each in weights):
        return
    known = {id(each.parameter) for each in weights}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and id(parameter) not in known:
            raise PolicyError(
                f"{name} is not the parameter that ssfusion was given"
                " (load_state_dict(assign=True) replaces parameters), so its gradient would not be"
                " exchanged. Call remove(), then ssfusion again"
            )


def after_forward(module: nn.Module, driver: Driver, keep_alive: object = None) -> Any:
    """Register a forward hook that starts the clock while times are measured.

    It also checks that the parameters are still the same. The hook keeps the object
    ``keep_alive`` as long as the module lives.
    """
    # references, so that the module can be copied
    driver_ref, module_ref = weakref.ref(driver), weakref.ref(module)

    def begin(module: nn.Module, inputs: Any, outputs: Any) -> None:
        if module is not module_ref():
            return  # a copy, whose gradients are not exchanged
        alive = driver_ref()
        if alive is not None and alive.planner.measures(alive.count):
            alive.planner.clock.begin()
        if alive is not None and not torch.compiler.is_compiling():
            refuse_if_replaced(module, alive)

    vars(begin)["keep_alive"] = keep_alive
    return module.register_forward_hook(begin)
