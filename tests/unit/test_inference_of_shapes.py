"""Calls with which a pipeline stage learns its shapes are recognised, in any thread."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed.pipelining import stage

from commpass.distributed import calls
from commpass.distributed.inference_of_shapes import FUNCTIONS, infers_shapes


def within(name, function):
    """Call a function from one of that name in torch's module of stages."""
    scope = {"__name__": stage.__name__, "function": function}
    exec(f"def {name}(): return function()", scope)
    return scope[name]()


@pytest.mark.parametrize("name", [*FUNCTIONS, "forward_one_chunk"])
def test_inference_is_recognised_from_other_threads_too(name):
    with ThreadPoolExecutor(1) as pool:
        found = within(name, lambda: (infers_shapes(), pool.submit(infers_shapes).result()))
    assert found == (name in FUNCTIONS,) * 2
    assert not infers_shapes()


def test_state_that_inference_changes_is_a_copy():
    """Also that of hooks and of compiled autograd, whose gradients count as taken."""
    kept = [torch.ones(3)]
    (given,) = within(FUNCTIONS[0], lambda: calls._of_call(kept))
    assert torch.equal(given, kept[0])
    given.zero_()
    assert kept[0].sum() == 3
    assert calls._of_call(kept)[0] is kept[0]
