"""Whether anybody takes the gradients of parameters that a backward graph computes.

AOTAutograd's backward computes the gradients of all inputs in one call. ``torch.autograd.grad`` of
a model's inputs alone drops those of the parameters: adversarial examples, gradient penalties,
saliency, and the input half of backward in zero-bubble schedules. What such a call sends is
dropped as well, so it must leave residuals as they are.
"""

from __future__ import annotations

from typing import Any

import torch

from commpass.distributed.owners import Owner


def takes_gradients(owner: Owner) -> bool:
    """Return whether the backward that runs now passes on a gradient of an owner's parameters."""
    node: Any = torch._C._current_autograd_node()
    if node is None:
        return True
    parameters = {id(each()) for each in owner.parameters}
    receivers = [
        following
        for following, _ in node.next_functions
        if id(getattr(following, "variable", None)) in parameters
    ]
    return not receivers or any(map(_runs, receivers))


def _runs(node: Any) -> bool:
    """Return whether the current backward runs a node, or returns what it would receive."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch.autograd.grad of this parameter, which has no node to run
        return True
