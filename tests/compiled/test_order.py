"""The order of exchanges, waits and matmuls in the code that Inductor generates."""

from __future__ import annotations

import re

import pytest
import torch
from graphs import Columns, ops, trace
from tiers import rarely
from torch._inductor.utils import run_and_get_code

import commpass
from commpass.passes.post.order import order
from commpass.policy import Policy
from commpass.policy.rules import Rule

wait = ops.wait_tensor
CALL = re.compile(
    r"(buf\d+) = torch\.ops\._c10d_functional\.(all_\w+)\.default"
    r"|(wait_tensor)\.default\((buf\d+)\)"
    r"|extern_kernels\.(mm)\("
)


def policy(chunks: int, lowering: str = "kernel") -> Policy:
    rule = Rule(codec="int8", algorithm="two_shot", force=True, chunks=chunks, lowering=lowering)
    return Policy(rules=[rule])


def function(x, w):
    return torch.relu(wait(ops.all_reduce(torch.mm(x, w), "sum", "0")))


def exchanges(source: str, *, matmuls: bool = False) -> list[str]:
    """Return starts and waits in order.

    ``a0`` starts the first all-to-all, ``A0`` waits for it; ``g`` and ``G`` are all-gathers, and
    ``m`` is a matmul.
    """
    names: dict[str, str] = {}
    counts = {"a": 0, "g": 0}
    found = []
    for started, kind, _, waited, mm in CALL.findall(source[source.index("def call(") :]):
        if mm:
            found += ["m"] if matmuls else []
        elif started:
            letter = "a" if kind == "all_to_all_single" else "g"
            names[started] = f"{letter}{counts[letter]}"
            counts[letter] += 1
            found.append(names[started])
        else:
            found.append(names[waited].upper())
    return found


EXPECTED = {
    1: "a0 A0 g0 G0",
    2: "a0 a1 A0 g0 A1 g1 G0 G1",
    4: "a0 a1 a2 a3 A0 g0 A1 g1 A2 g2 A3 g3 G0 G1 G2 G3",
    8: (
        "a0 a1 a2 a3 A0 g0 A1 g1 A2 g2 A3 g3 G0 a4 G1 a5 G2 a6 G3 a7"
        " A4 g4 A5 g5 A6 g6 A7 g7 G4 G5 G6 G7"
    ),
}
"""Chunks to the order of a two-shot: four are in flight at once."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chunks", "lowering"),
    [
        (8, "kernel"),
        *(rarely(chunks, "kernel") for chunks in (1, 2, 4)),
        *(rarely(chunks, "inline") for chunks in (2, 4)),
    ],
)
def test_generated_code_has_the_order_of_the_algorithm(chunks, lowering, fake_group):
    fake_group(4)
    torch._dynamo.reset()
    backend = commpass.backend(policy(chunks, lowering), strict=True)
    x, w = torch.randn(256, 256), torch.randn(256, 256)
    with torch.no_grad(), torch._inductor.config.patch(force_disable_caches=True):
        _, sources = run_and_get_code(torch.compile(function, backend=backend), x, w)
    assert " ".join(exchanges(sources[-1])) == EXPECTED[chunks]
    (site,) = commpass.plans()[-1]
    assert (site.algorithm, site.chunks, site.lowering) == ("two_shot", chunks, lowering)


@pytest.mark.slow
def test_kernels_of_chunks_write_into_one_buffer(fake_group):
    """Nothing is joined, no wire is assembled from parts, and the result replaces the input."""
    fake_group(4)
    torch._dynamo.reset()
    backend = commpass.backend(policy(4), strict=True)
    x, w = torch.randn(256, 256), torch.randn(256, 256)
    with torch.no_grad(), torch._inductor.config.patch(force_disable_caches=True):
        _, sources = run_and_get_code(torch.compile(function, backend=backend), x, w)
    body = sources[-1][sources[-1].index("def call(") :]
    assert "cat" not in body
    whole = re.findall(r"empty_strided_cpu\(\(256, 256\)", body)
    assert len(whole) == 2  # the product, to which the sum is written, and the relu's result
    kernels = re.findall(
        r"kernel_\.default\(\[(\w+)\], outputs=\[(\w+)\], places=\[(\d+), (\d+)\]", body
    )
    assert len(kernels) == 12
    assert [int(first) for _, _, first, _ in kernels[:4]] == [0, 4096, 8192, 12288]
    assert [int(first) for _, _, _, first in kernels[-4:]] == [0, 4096, 8192, 12288]
    assert len({written for _, written, _, _ in kernels[-4:]}) == 1


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "chunks", "expected"),
    [
        ("one_shot", 4, "ks ks ks ks wk wk wk wk"),
        ("two_shot", 2, "ks ks wks wks wk wk"),
        ("two_shot", 4, "ks ks ks ks wks wks wks wks wk wk wk wk"),
    ],
)
def test_kernels_stay_between_what_they_stand_between(name, chunks, expected, fake_group):
    """A chunk is encoded once the one before is sent, and decoded before the next is waited for.

    Inductor would run all encodes first, since that frees the values soonest.
    """
    fake_group(2)
    torch._dynamo.reset()
    rule = Rule(codec="int8", algorithm=name, force=True, chunks=chunks, lowering="kernel")
    backend = commpass.backend(Policy(rules=[rule]), strict=True)

    def function(x):
        return wait(ops.all_reduce(x * 2, "sum", "0"))

    with torch.no_grad(), torch._inductor.config.patch(force_disable_caches=True):
        _, sources = run_and_get_code(torch.compile(function, backend=backend), torch.randn(65536))
    body = sources[-1][sources[-1].index("def call(") :]
    found = re.findall(r"ops\.\w+\.(kernel_|wait_tensor|all_\w+)\.default\(", body)
    letters = {"kernel_": "k", "wait_tensor": "w"}
    assert "".join(letters.get(each, "s") for each in found) == expected.replace(" ", "")


def layer(x, w, v):
    return (Columns.apply(x) @ w).relu() @ v


HIDDEN = {
    1: "m m a0 m A0 g0 m G0",
    2: "m m a0 a1 m A0 g0 A1 g1 m G0 G1",
    4: "m m a0 a1 a2 a3 m A0 g0 A1 g1 A2 g2 A3 g3 m G0 G1 G2 G3",
}
"""Chunks to the order of a backward graph: the gradients of both weights while that of the input is
sent."""


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [1, rarely(2), rarely(4)])
def test_generated_code_computes_weight_gradients_while_the_input_gradient_travels(
    chunks, fake_group
):
    fake_group(4)
    torch._dynamo.reset()
    backend = commpass.backend(
        Policy(rules=policy(chunks).rules, more_memory=1.0), profile="ethernet-1g", strict=True
    )
    x, w, v = (torch.randn(512, 512, requires_grad=True) for _ in range(3))
    with torch._inductor.config.patch(force_disable_caches=True):
        compiled = torch.compile(layer, backend=backend)
        _, sources = run_and_get_code(lambda: compiled(x, w, v).sum().backward())
    assert " ".join(exchanges(sources[-1], matmuls=True)) == HIDDEN[chunks]


@pytest.mark.slow
def test_generated_code_of_inference_keeps_what_is_computed_meanwhile(fake_group):
    """Inductor would move a matmul next to its user, after the wait."""
    fake_group(4)
    torch._dynamo.reset()

    def function(x, w):
        shared = x @ w
        return wait(ops.all_reduce(x + 1, "sum", "0")).relu() + shared

    backend = commpass.backend(Policy(rules=policy(1).rules, more_memory=1.0), strict=True)
    x, w = torch.randn(256, 256), torch.randn(256, 256)
    with torch.no_grad(), torch._inductor.config.patch(force_disable_caches=True):
        _, sources = run_and_get_code(torch.compile(function, backend=backend), x, w)
    assert " ".join(exchanges(sources[-1], matmuls=True)) == "a0 m A0 g0 G0"


@pytest.mark.slow
def test_generated_code_sends_a_chunk_while_the_next_is_computed(fake_group):
    """Chunks are written to where they are joined: this needs no copies."""
    fake_group(2)
    torch._dynamo.reset()

    def half(x, w, residual, v):
        h = residual + wait(ops.all_reduce(x @ w, "sum", "0"))
        return h, (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1)) @ v

    backend = commpass.backend(Policy(rows=2, more_memory=1.0), strict=True)
    given = [torch.randn(512, 256), torch.randn(256, 256)] * 2
    with torch.no_grad(), torch._inductor.config.patch(force_disable_caches=True):
        _, sources = run_and_get_code(torch.compile(half, backend=backend), *given)
    body = sources[-1][sources[-1].index("def call(") :]
    found = re.findall(r"(all_reduce_|wait_tensor)\.default\(|extern_kernels\.(mm)\(", body)
    letters = {"all_reduce_": "s", "wait_tensor": "w", "": "m"}
    assert "".join(letters[name] for name, _ in found) == "msmswmwm"
    assert "cat" not in body
    assert len(re.findall(r"empty_strided_cpu\(\(512, 256\)", body)) == 2


@pytest.mark.slow
def test_sum_that_is_pinned_is_made_in_place(fake_group):
    """Inductor does not look behind pins: it would copy each gradient before it is summed.

    A gradient with other, later users is copied.
    """
    fake_group(4)
    torch._dynamo.reset()

    def function(x, w, v):
        a, b, c = x @ w, w @ v, v @ x
        sums = [wait(ops.all_reduce(each, "sum", "0")) for each in (a, b, c)]
        return *(each * 2 for each in sums), c + 1

    backend = commpass.backend(
        Policy(codecs=["raw"], skip=("group", "simplify"), more_memory=1.0),
        profile="ethernet-1g",
        strict=True,
    )
    x, w, v = (torch.randn(512, 512) for _ in range(3))
    with torch.no_grad(), torch._inductor.config.patch(force_disable_caches=True):
        _, sources = run_and_get_code(torch.compile(function, backend=backend), x, w, v)
    body = sources[-1][sources[-1].index("def call(") :]
    summed = re.findall(r"all_reduce_\.default\((buf\d+)", body)
    made = re.findall(r"extern_kernels\.mm\(.*out=(?:reinterpret_tensor\()?(buf\d+)", body)
    assert len(summed) == len(made) == 3
    assert [each in made for each in summed].count(True) == 2


def test_sum_of_an_input_is_pinned_and_leaves_the_input_alone(fake_group):
    fake_group(4)

    def function(x, w):
        sums = [wait(ops.all_reduce(each, "sum", "0")) for each in (x @ w, w @ x, x)]
        return [each * 2 for each in sums]

    gm = trace(function, torch.ones(8, 8), torch.ones(8, 8))
    order(gm.graph)
    bodies = [module for module in gm.modules() if isinstance(module, torch.fx.GraphModule)]
    targets = [node.target for body in bodies for node in body.graph.nodes]
    assert targets.count(ops.all_reduce_.default) == 2
    assert targets.count(ops.all_reduce.default) == 1


@pytest.mark.slow
def test_cache_is_written_into_once_it_has_been_sent(fake_group):
    """The new rows are written to the graph's input, in place."""
    fake_group(4)
    torch._dynamo.reset()

    def function(x, w, cache, rows):
        sent = wait(ops.all_gather_into_tensor(cache, 4, "0")) * 2
        y = x @ w
        cache[rows] = y
        return sent, y

    backend = commpass.backend("lossless", profile="ethernet-1g", strict=True)
    inputs = torch.randn(256, 256), torch.randn(256, 256), torch.randn(1024, 256)
    with torch.no_grad(), torch._inductor.config.patch(force_disable_caches=True):
        compiled = torch.compile(function, backend=backend)
        _, sources = run_and_get_code(compiled, *inputs, torch.arange(256))
    body = sources[-1][sources[-1].index("def call(") :]
    places = [body.index(name) for name in ("extern_kernels.mm", "wait_tensor", "index_put")]
    assert places == sorted(places)
