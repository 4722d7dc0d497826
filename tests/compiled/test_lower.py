"""Coded operators are lowered inline or to kernels, with the same bits."""

from __future__ import annotations

import pytest
import torch
from graphs import as_rank, ops, trace
from lockstep import run_in_lockstep
from tiers import VERSION, rarely, sampled
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import commpass
from commpass.codecs import NAMES, codec, operators
from commpass.codecs.block.transforms import Hadamard
from commpass.collectives import algorithms_of
from commpass.costmodel import default_profile
from commpass.lowering import cpu, kernel
from commpass.lowering.chain import Chain, Encode
from commpass.lowering.constants import without_tables
from commpass.passes import GraphInput, manager
from commpass.passes.choose import SHARE
from commpass.passes.fx.marks import MARK
from commpass.policy import Policy, PolicyError
from commpass.policy.rules import Rule

wait = ops.wait_tensor
RANKS = 4
CODECS = ["outlier(width=4)", *(n for n in NAMES if n not in ("difference", "outlier", "raw"))]
ROOTS = "taco"
"""Its scale is a root of a sum, which eager code, compiled code and C++ kernels add up and round
differently."""
CODED = set(operators.IMPLEMENTATIONS)
KERNEL = torch.ops.commpass.kernel_.default
EVERY = pytest.mark.every


def forced(codec: str, **more) -> Policy:
    return Policy(rules=[Rule(codec=codec, force=True, **more)])


def summed(x):
    return wait(ops.all_reduce(torch.relu(x), "sum", "0")) * 2


def rewritten(function, x, policy, passes=manager.PASSES):
    """Return the graph of one rank after some passes, and its plan."""
    gm = trace(function, x, dynamic="exponent" in str(policy))
    road = GraphInput(
        gm=gm,
        direction="forward",
        policy=policy,
        profile=default_profile("cpu"),
        stateless=None,
    )
    outcome = manager.run(road, "0", passes)
    if outcome.error is not None:
        raise outcome.error
    return gm, outcome


def coded(function, x, policy):
    """Return the graph with coded operators."""
    before_lower = [step.name for step in manager.PASSES].index("lower")
    return rewritten(function, x, policy, manager.PASSES[:before_lower])[0]


def roles(gm) -> list[str]:
    return [n.meta[MARK].role for n in gm.graph.nodes if MARK in n.meta]


# --- the middle level -----------------------------------------------------------------------------


def test_two_shot_is_a_dozen_nodes_that_say_what_they_are(fake_group):
    fake_group(8)
    gm = coded(summed, torch.randn(64, 64), forced("int8", algorithm="two_shot"))
    assert [role for role in roles(gm) if role != "layout"] == [
        *("encode", "exchange", "wait", "decode", "sum"),
        *("encode", "exchange", "wait", "decode"),
    ]
    assert len(roles(gm)) <= 14
    marks = [node.meta[MARK] for node in gm.graph.nodes if MARK in node.meta]
    assert {mark.site for mark in marks} == {"all_reduce"}
    assert [m.hop for m in marks if m.role != "layout"] == [0, 0, 0, 0, 0, 1, 1, 1, 1]
    assert max(m.hop for m in marks) == 1
    assert all("val" in node.meta for node in gm.graph.nodes if MARK in node.meta)


def test_values_that_are_summed_in_a_domain_enter_and_leave_it_once(fake_group):
    fake_group(8)
    gm = coded(summed, torch.randn(64, 64), forced("rotated", algorithm="two_shot"))
    assert [role for role in roles(gm) if role in ("enter", "leave")] == ["enter", "leave"]
    assert roles(gm)[-3:][0] == "leave" or "leave" in roles(gm)[-3:]


def test_domains_of_the_same_kind_are_distinguished():
    rows = torch.randn(2, 512, dtype=torch.float64)
    domains = [codec(name).domain for name in ("rotated(block=64)", "rotated", "sdp4bit")]
    with operators.as_operators():
        entered = [operators.to_domain(domain, rows) for domain in domains]
        traced = make_fx(lambda x: [operators.to_domain(domain, x) for domain in domains])(rows)
    assert len({node.args[1] for node in traced.graph.nodes if node.target in CODED}) == 3
    for domain, found in zip(domains, traced(rows), strict=True):
        assert torch.equal(found, domain.to_domain(rows))
    assert len({x.sum().item() for x in entered}) == 3


def test_micro_shards_are_chunks_of_a_hop(fake_group):
    fake_group(4)
    gm = coded(summed, torch.randn(64, 64), forced("int8", algorithm="two_shot(shards=2)"))
    marks = [node.meta[MARK] for node in gm.graph.nodes if MARK in node.meta]
    sent = [(m.hop, m.chunk) for m in marks if m.role == "exchange"]
    assert sent == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]


@pytest.mark.few(24)
@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_operators_have_the_shapes_of_what_they_stand_for(name, dtype):
    coder = codec(name)
    rows = torch.randn(3, coder.padded_numel(300), dtype=torch.float64).to(dtype)
    with operators.as_operators():
        wire = operators.encode(coder, rows, (1, 2))
        parts = operators.encode_parts(coder, rows, (1, 2))
        back = operators.decode(coder, wire, rows.shape[1], dtype)
        apart = operators.decode_parts(coder, parts, rows.shape[1], dtype)
        mode = FakeTensorMode(shape_env=ShapeEnv())
        with mode:
            fake = mode.from_tensor(rows)
            shapes = [
                operators.encode(coder, fake, (1, 2)),
                *operators.encode_parts(coder, fake, (1, 2)),
                operators.decode(coder, mode.from_tensor(wire), rows.shape[1], dtype),
            ]
    real = [wire, *parts, back]
    for fake, value in zip(shapes, real, strict=True):
        assert (fake.shape, fake.dtype) == (value.shape, value.dtype)
        assert fake.stride() == value.stride() or not value.numel()
    assert torch.equal(torch.cat(list(parts), dim=1), wire)
    same(back, apart)
    same(back, coder.decode_rows(coder.salted(1, 2).encode_rows(rows), rows.shape[1], dtype))


@pytest.mark.rest_slow(1)
@pytest.mark.parametrize("name", ["int8", "rotated", "fp8", "taco", "exponent"])
def test_operators_take_symbolic_sizes(name):
    coder = codec(name)

    def both(x):
        with operators.as_operators():
            wire = operators.encode(coder, x.reshape(2, -1), (0,))
            return operators.decode(coder, wire, x.numel() // 2, x.dtype)

    gm = make_fx(both, tracing_mode="symbolic")(torch.randn(8, 256))
    assert sum(node.target in CODED for node in gm.graph.nodes) == 2
    for rows in (8, 24):
        x = torch.randn(rows, 256)
        expected = coder.decode_rows(coder.encode_rows(x.reshape(2, -1)), rows * 128, x.dtype)
        same(gm(x), expected)


def same(one, other):
    assert one.dtype == other.dtype
    assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


# --- inline and kernel ----------------------------------------------------------------------------


def alike_of(name):
    """Return how the two forms of a codec are compared. A library's small matmul, which rotates,
    may add in another order for another number of blocks; processors differ in this."""
    transform = getattr(codec(name), "transform", None)
    return nearly_same if name == ROOTS or isinstance(transform, Hadamard) else same


def nearly_same(a, b):
    """Compare values whose scales are roots and whose rotations are summed in two orders.

    Each is within 4 roundings for each of the 256 values of its block. In at most one block of
    eight, a code may differ, which moves all its values by less than an eighth of the peak.
    """
    assert a.dtype == b.dtype
    one, other = a.double().flatten(), b.double().flatten()
    peak, eps = one.abs().amax(), max(4 * 256 * 2.0**-23, torch.finfo(a.dtype).eps)
    off = (one - other).abs()
    blocks = torch.nn.functional.pad(off > eps * peak, (0, -off.numel() % 256)).view(-1, 256)
    assert blocks.any(1).float().mean() <= 1 / 8
    assert (off <= peak / 8).all()


def results(policy, inputs, function=summed):
    graphs, states = [], []
    for rank, x in enumerate(inputs):
        with as_rank(rank, len(inputs)):
            gm, outcome = rewritten(function, x, policy)
            graphs.append(gm)
            states.append([torch.zeros(kept.shape, dtype=kept.dtype) for kept in outcome.state])
    given = [[x, *state] for x, state in zip(inputs, states, strict=True)]
    return graphs, run_in_lockstep(graphs, given, lambda group: range(len(inputs)))


def inputs_of(shape, dtype=torch.float32):
    made = [torch.randn(shape, generator=torch.Generator().manual_seed(r)) for r in range(RANKS)]
    return [x.to(dtype) for x in made]


def kernels(gm) -> int:
    return sum(node.target is KERNEL for node in gm.graph.nodes)


@pytest.mark.parametrize(("how", "outside"), [("ring", True), rarely("two_shot", False)])
def test_values_that_later_hops_take_are_filled_up_outside_of_kernels(how, outside, fake_group):
    """A ring adds a rank's own values at each hop: Inductor writes them once, followed by zeros.

    What is sent as a whole is padded in the kernel that encodes it.
    """
    fake_group(RANKS)
    gm, _ = rewritten(summed, torch.randn(5000), forced("int8", algorithm=how, lowering="kernel"))
    cats = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default)
    assert not gm.graph.find_nodes(
        op="call_function", target=torch.ops.aten.constant_pad_nd.default
    )
    assert len(cats) == outside
    calls = gm.graph.find_nodes(op="call_function", target=KERNEL)
    written = [made.meta["val"].dtype for call in calls for made in call.kwargs["outputs"]]
    # One kernel gives values: the last, which decodes.
    assert written.count(torch.float32) == 1
    if outside:
        assert [cats[0] in call.args[0] for call in calls] == [True] * RANKS + [False]


@pytest.mark.every
@pytest.mark.few(1)
@pytest.mark.parametrize("numel", [5000, 4096])
def test_ring_whose_values_are_filled_up_gives_the_bits_of_the_inline_form(numel):
    both = [
        results(forced("int8", algorithm="ring", lowering=form), inputs_of((numel,)))[1]
        for form in ("inline", "kernel")
    ]
    for one, other in zip(*both, strict=True):
        same(torch.cat([x.reshape(-1) for x in one]), torch.cat([x.reshape(-1) for x in other]))


SHAPES = [((64, 64), torch.float32), ((7, 33), torch.bfloat16), ((5,), torch.float32)]
ALGORITHMS = [each.spec for each in algorithms_of("all_reduce") if each.name != "native"]
FORMS = [
    pytest.param(
        name,
        how.replace("hierarchical", "hierarchical(node=2)"),
        *SHAPES[(first + second) % 3],
        marks=()
        if name == "int8"
        or (second == first % len(ALGORITHMS) and first % 3 == 0 and name != "exponent")
        else EVERY,
    )
    for first, name in enumerate(CODECS)
    for second, how in enumerate(["sparse"] if codec(name).state else ALGORITHMS)
    if (how == "sparse") == bool(codec(name).state)
    if name in ("int8", "exponent")
    or how == "sparse"
    or (second - first) % len(ALGORITHMS) in (0, 4)
]
"""All algorithms with one codec of a fixed size and one whose size depends on values, and two
algorithms with each other codec."""

FORMS += [("bf16", "native", *shape) for shape in SHAPES]
FORMS += [
    ("int4(rounding=stochastic, seed=7)", how, *SHAPES[0]) for how in ("ring", "two_shot(shards=3)")
]
"""Equal shapes that are encoded differently: each hop and each chunk has different noise."""


@pytest.mark.few(2)
@pytest.mark.parametrize(("name", "how", "shape", "dtype"), FORMS)
def test_both_forms_give_the_same_bits(name, how, shape, dtype, made):
    """Kernels run here as they are traced; other tests show for each codec that compiled and eager
    code give the same bits."""
    both = []
    for form in ("inline", "kernel"):
        policy = forced(name, algorithm=how, lowering=form)
        graphs, found = results(policy, inputs_of(shape, dtype))
        both.append(found)
        targets = {node.target for gm in graphs for node in gm.graph.nodes}
        assert not targets & CODED
        assert (KERNEL in targets) == (form == "kernel")
    for one, other in zip(*both, strict=True):
        whole = [torch.cat([x.reshape(-1) for x in each]) for each in (one, other)]
        alike_of(name)(*whole)


def test_view_that_only_an_earlier_region_uses_is_skipped():
    """In a semi-ring, some slices of the values are read only by the kernel of another hop. This
    kernel takes the whole tensor, and the slice is erased before its own region is visited."""
    policy = forced("int6", algorithm="semi_ring", lowering="kernel")
    graphs, _ = results(policy, inputs_of((5,)))
    assert all(kernels(gm) for gm in graphs)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("name", sampled(CODECS, ("int8", "rotated", ROOTS)))
def test_compiled_kernels_give_the_bits_of_the_inline_form(name):
    """A C++ kernel adds up a rotation in another order (``cpu.is_exact``): scales in bfloat16 hide
    this, and those in float32 do not."""
    how = "sparse" if codec(name).state else "two_shot"
    alike = same_but_for_order if name in ROTATED_IN_FLOAT32 else alike_of(name)
    both = [
        results(forced(name, algorithm=how, lowering=form), inputs_of((64, 64)))[1]
        for form in ("inline", "kernel")
    ]
    for one, other in zip(*both, strict=True):
        for a, b in zip(one, other, strict=True):
            alike(a, b)


ROTATED_IN_FLOAT32 = {"sdp4bit": 32}
"""Codecs whose C++ kernel does not have the bits of the inline form, and the width of the
rotation."""


def same_but_for_order(a: torch.Tensor, b: torch.Tensor) -> None:
    """Compare sums of ``width`` products, rotated back twice and summed over ranks once more, in
    two orders.

    Each is within ``width`` roundings of the largest value. In at most one block of a hundred, a
    value may lie so near the middle of two codes that the other one is chosen.
    """
    (width,) = set(ROTATED_IN_FLOAT32.values())
    rounding = 4 * width * torch.finfo(torch.float32).eps * a.abs().amax()
    assert ((a - b).abs() > rounding).float().mean() <= 0.01


@pytest.mark.parametrize("name", ROTATED_IN_FLOAT32)
def test_codecs_whose_kernels_sum_in_another_order_say_so(name):
    chain = Chain(torch.float32, (Encode(codec(name)),))
    assert not cpu.unsupported_reason(chain), "there is no kernel in C++ that could differ"
    assert not cpu.is_exact(chain)
    assert codec(name).scale.stored == "fp32"


@pytest.fixture
def made(monkeypatch):
    """Return the inputs of the kernels that were compiled; they run as they were traced."""
    found = []

    def compiled(body, inputs):
        found.append(inputs)
        return lambda given: body(*given)

    monkeypatch.setattr(kernel, "_compile", compiled)
    monkeypatch.setattr(kernel, "_kernels", {})
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize("form", ["inline", "kernel"])
def test_sites_that_differ_by_their_reduce_op_alone_are_apart(form, made):
    def function(x):
        total = wait(ops.all_reduce(torch.relu(x), "sum", "0"))
        return total, wait(ops.all_reduce(x * 3, "avg", "0"))

    inputs = inputs_of((64, 64))
    policy = forced("int8", algorithm="two_shot", lowering=form)
    for total, mean in results(policy, inputs, function)[1]:
        assert (total - sum(map(torch.relu, inputs))).norm() < 0.02 * total.norm()
        assert (mean - sum(inputs) * 3 / RANKS).norm() < 0.02 * mean.norm()


def test_sites_of_different_sizes_have_bodies_of_their_own(fake_group):
    """A block of equarx is a share of the row, so its length follows from the size."""
    fake_group(RANKS)

    def function(x):
        whole = wait(ops.all_reduce(torch.relu(x), "sum", "0"))
        return whole, wait(ops.all_reduce(x[:64] * 3, "sum", "0"))

    policy = forced("equarx", algorithm="two_shot", lowering="inline")
    gm, outcome = rewritten(function, torch.randn(256, 64), policy)
    assert len(outcome.plan.compressed) == 2
    sizes = {
        node.meta["val"].numel()
        for node in gm.graph.find_nodes(op="call_function", target=ops.all_to_all_single.default)
    }
    coder = codec("equarx")
    assert sizes == {RANKS * coder.wire_bytes(n * 64 // RANKS, torch.float32) for n in (64, 256)}


def test_kernel_writes_into_buffers_and_leaves_what_it_was_given(fake_group, made):
    """Codes of ``cast`` for bfloat16 are the values themselves."""
    fake_group(4)
    policy = forced("cast", algorithm="one_shot", lowering="kernel")
    gm, _ = rewritten(summed, torch.randn(64, 64, dtype=torch.bfloat16), policy)
    calls = [node for node in gm.graph.nodes if node.target is KERNEL]
    assert len(calls) == len(made) == 2
    for node in calls:
        (taken,) = node.args
        written, places, name = (node.kwargs[each] for each in ("outputs", "places", "name"))
        values = [torch.ones(n.meta["val"].shape, dtype=n.meta["val"].dtype) for n in taken]
        copies = [value.clone() for value in values]
        (buffer,) = [torch.empty(n.meta["val"].shape, dtype=n.meta["val"].dtype) for n in written]
        buffer.view(torch.uint8).fill_(77)
        KERNEL(values, [buffer], places, name)
        assert not (buffer.view(torch.uint8) == 77).any()
        assert all(map(torch.equal, values, copies))


def test_kernel_between_two_exchanges_is_one_and_shared_by_equal_sites(fake_group, made):
    fake_group(4)

    def function(x):
        for _ in range(3):
            x = wait(ops.all_reduce(x * 2, "sum", "0"))
        return x

    policy = forced("int8", algorithm="two_shot", lowering="kernel")
    gm, outcome = rewritten(function, torch.randn(64, 64), policy)
    called = [node for node in gm.graph.nodes if node.target is KERNEL]
    assert len(called) == 9
    assert len({node.kwargs["name"] for node in called}) == 3
    # Names are in the key of Inductor's cache: they are the same in each process.
    order = [f"kernel__default_{number}" if number else "kernel__default" for number in range(9)]
    assert [node.name for node in called] == order
    assert [node.meta[MARK].role for node in called[:3]] == [
        "encode",
        "decode+sum+encode",
        "decode",
    ]
    assert [site.lowering for site in outcome.plan] == ["kernel"] * 3


def chain(sites: int):
    def function(x):
        for _ in range(sites):
            x = wait(ops.all_reduce(torch.relu(x), "sum", "0"))
        return x

    return function


def lowerings(sites, compiled=True, **more):
    torch._dynamo.reset()
    x, policy = torch.randn(64, 64), forced("int8", algorithm="two_shot", **more)
    if not compiled:
        gm = trace(chain(sites), x)
        return {site.lowering for site in commpass.rewrite(gm, [], policy, strict=True)}
    seen = len(commpass.plans())
    with torch.no_grad():
        inner = "inductor" if compiled is True else compiled
        backend = commpass.backend(policy, strict=True, inner=inner)
        torch.compile(chain(sites), backend=backend)(x)
    return {site.lowering for plan in commpass.plans()[seen:] for site in plan}


@pytest.mark.slow
def test_sites_that_do_the_same_share_kernels(fake_group, without_code, made):
    fake_group(4)
    assert lowerings(3) == {"kernel"}
    assert lowerings(2) == {"inline"}
    assert lowerings(3, lowering="inline") == {"inline"}
    assert lowerings(1, lowering="kernel") == {"kernel"}


@pytest.fixture
def without_code(monkeypatch):
    """Let Inductor run graphs on fake values, as it does first, and generate no code.

    Code generation takes minutes if sizes depend on values.
    """
    from torch._inductor import compile_fx

    def compile_fx_inner(gm, example_inputs, **_):
        compile_fx.fake_tensor_prop(gm, example_inputs)
        return compile_fx.make_boxed_func(gm.forward)

    monkeypatch.setattr(compile_fx, "compile_fx_inner", compile_fx_inner)


def check_sizes_of_data(policy, sites=3, dynamic=False, training=False, lowering="kernel"):
    torch._dynamo.reset()
    seen = len(commpass.plans())
    backend = commpass.backend(policy, strict=True)
    compiled = torch.compile(chain(sites), backend=backend, dynamic=dynamic)
    result = compiled(torch.randn(16, 64, requires_grad=training))
    if training:
        result.sum().backward()
    plans = commpass.plans()[seen:]
    assert len(plans) == 1 + training
    for plan in plans:
        assert not plan.fallback
        assert {(site.codec, site.lowering) for site in plan} == {("exponent", lowering)}


@pytest.mark.every
@pytest.mark.parametrize("lowering", [pytest.param("inline", marks=EVERY), "kernel"])
def test_codes_whose_size_depends_on_values_have_both_forms(
    lowering, fake_group, without_code, made
):
    fake_group(4)
    policy = forced("exponent", algorithm="one_shot", lowering=lowering)
    check_sizes_of_data(policy, lowering=lowering)


@pytest.mark.slow
def test_kernels_encode_and_decode_codes_whose_size_depends_on_values(fake_group, made):
    fake_group(4)
    policy = forced("exponent", algorithm="one_shot", lowering="kernel")
    gm, _ = rewritten(summed, torch.randn(64, 64), policy)
    called = [node.meta[MARK].role for node in gm.graph.nodes if node.target is KERNEL]
    assert called == ["encode+used_bytes", "decode"]
    assert len(made) == 2
    assert not any(node.target in CODED for node in gm.graph.nodes)


@pytest.mark.every
@pytest.mark.timeout(2400)
def test_inductor_generates_code_for_codes_whose_size_depends_on_values(fake_group):
    fake_group(2)
    check_sizes_of_data(forced("exponent", algorithm="one_shot"))


@pytest.mark.every
@pytest.mark.parametrize(
    ("sites", "dynamic", "training"),
    [
        (3, False, False),
        rarely(1, False, True),
        rarely(3, False, True),
        rarely(3, True, False),
        rarely(3, True, True),
    ],
)
@pytest.mark.skipif(VERSION < (2, 12), reason="this fake group leaves what arrives unwritten")
def test_numbers_that_depend_on_values_may_be_asked_for_again(
    sites, dynamic, training, fake_group, without_code, made
):
    """Dynamo allows them only in graphs of whole functions."""
    fake_group(2)
    form = "kernel" if sites >= SHARE and not dynamic else "inline"
    check_sizes_of_data(
        forced("exponent", algorithm="two_shot"), sites, dynamic, training, lowering=form
    )


@EVERY
def test_collective_by_hand_stays_one_graph_without_being_a_whole_function(
    fake_group, without_code
):
    fake_group(2)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    x = torch.randn(600, requires_grad=True)

    def inductor(gm, example_inputs):  # its default is its inner compile
        compiler = torch._inductor.compile_fx
        with torch._functorch.config.patch(enable_autograd_cache=False):
            return compiler.compile_fx(gm, example_inputs, inner_compile=compiler.compile_fx_inner)

    function = torch.compile(
        lambda x: commpass.all_reduce(x * 2, codec="exponent"), backend=inductor
    )
    function(x).sum().backward()
    assert not torch._dynamo.utils.counters["graph_break"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def exact_sums() -> None:
    torch._dynamo.reset()
    x = torch.randn(600, generator=torch.Generator().manual_seed(torch.distributed.get_rank()))
    x[:4] = torch.tensor([-0.0, float("inf"), float("nan"), 1e-40])
    x[2:3].view(torch.int32).add_(5)  # a NaN with a payload
    policy = forced("exponent", algorithm="two_shot")
    with torch.no_grad():
        found = torch.compile(chain(3), backend=commpass.backend(policy, strict=True))(x)
    same(found, chain(3)(x))


@pytest.mark.every
@pytest.mark.timeout(2400)
def test_compiled_sums_by_a_lossless_codec_are_exact(ranks2):
    ranks2.run(exact_sums, timeout=2300)


@pytest.mark.slow
def test_other_compilers_get_plain_operators(fake_group):
    fake_group(4)
    assert lowerings(3, compiled=False) == {"inline"}
    assert lowerings(3, compiled="aot_eager") == {"inline"}
    assert lowerings(3, compiled=False, lowering="kernel") == {"kernel"}


# --- when kernels are compiled --------------------------------------------------------------------


@pytest.mark.slow
def test_kernels_are_compiled_once_by_the_pass_that_lowers(fake_group, made):
    fake_group(4)
    policy = forced("table", algorithm="two_shot", lowering="kernel")
    for _ in range(2):
        gm, _ = rewritten(chain(3), torch.randn(64, 64), policy)
        called = {node.kwargs["name"] for node in gm.graph.nodes if node.target is KERNEL}
        assert called == set(kernel._kernels)
        assert len(called) == len(made) == 3
    with torch._inductor.config.patch(emulate_precision_casts=True):  # this may change bits
        rewritten(chain(3), torch.randn(64, 64), policy)
    assert len(kernel._kernels) == len(made) == 6


def constants(graph) -> list:
    """Return what is computed without inputs."""
    known: set = set()
    for node in graph.nodes:
        if node.op == "call_function" and set(node.all_input_nodes) <= known:
            known.add(node)
    return [node for node in known if node.all_input_nodes]


def test_tables_are_computed_once_and_handed_to_the_kernel():
    coder, rows = codec("rotated"), torch.randn(3, 512)
    body = make_fx(lambda x: [coder.encode_rows(x)])(rows)
    assert constants(body.graph)
    with torch.no_grad():
        rest, tables = without_tables(body)
    assert [table.shape for table in tables] == [(16, 16), (16, 16)]
    assert not [node for node in constants(rest.graph) if "expand" not in node.name]
    same(rest(rows, *tables)[0], body(rows)[0])


def test_large_or_random_constants_are_no_tables():
    def function(x):
        return [x + torch.arange(40_000).view(5_000, 8) * 2 + torch.rand(8) * 3]

    body = make_fx(function)(torch.randn(5_000, 8))
    rest, tables = without_tables(body)
    assert tables == ()
    assert len(rest.graph.nodes) == len(body.graph.nodes)


@pytest.mark.parametrize(
    ("text", "of", "what"),
    [rarely("table", kernel, "_compile"), ("int8", kernel.cpu, "compile_chain")],
)
def test_sites_whose_kernel_cannot_be_compiled_are_left_alone(
    fake_group, monkeypatch, text, of, what
):
    fake_group(4)

    def fails(*given):
        raise RuntimeError("injected")

    compiled = getattr(of, what)
    monkeypatch.setattr(of, what, fails)
    monkeypatch.setattr(kernel, "_kernels", {})
    gm = trace(chain(3), torch.randn(64, 64))
    before = str(gm.graph)
    plan = commpass.rewrite(gm, [], forced(text, algorithm="two_shot", lowering="kernel"))
    why = "uncompressed: pass 'lower' failed: RuntimeError: injected"
    assert [(site.codec, site.reason) for site in plan.sites] == [("none", why)] * 3
    assert not plan.fallback
    assert str(gm.graph) == before
    assert of is not kernel or not kernel._kernels
    monkeypatch.setattr(of, what, compiled)
    again = trace(chain(3), torch.randn(64, 64))
    plan = commpass.rewrite(again, [], forced(text, algorithm="two_shot", lowering="kernel"))
    assert [site.codec for site in plan.sites] == [text] * 3


def test_kernels_of_other_dtypes_have_other_names():
    body = make_fx(lambda x: [x + 1])(torch.ones(4))
    forms = [kernel.form_of(torch.ones(4, dtype=d)) for d in (torch.float32, torch.float64)]
    assert len({kernel.Source(body, (form,), (form,)).name for form in forms}) == 2


def test_compiling_a_kernel_leaves_what_is_being_compiled_around_it_alone(monkeypatch):
    outer = FakeTensorMode(shape_env=ShapeEnv())
    with outer:
        given = torch.empty(40)
        body = make_fx(lambda x, y: (y.copy_(x * 2 + 1), ())[1])(given, torch.empty(40))
    cleaned, cleanup = [], ShapeEnv.cleanup
    monkeypatch.setattr(ShapeEnv, "cleanup", lambda env: (cleaned.append(env), cleanup(env)))
    monkeypatch.setattr(kernel, "_kernels", {})
    form = kernel.form_of(given)
    taken, piece = kernel.KernelInput(form, form), kernel.Piece(0, 0, form)
    source = kernel.Source(body, (taken,), (piece,))
    context = torch._guards.TracingContext(outer)
    context.output_strides = []
    with torch._guards.tracing(context), outer:
        kernel.make([source])
        assert torch._guards.TracingContext.get() is context
        assert torch._guards.detect_fake_mode() is outer
        assert outer.shape_env not in cleaned
        assert context.output_strides == []
    x = torch.randn(40)
    written = torch.empty(40)
    KERNEL([x], [written], [0, 0], source.name)
    same(written, x * 2 + 1)


@pytest.mark.slow
def test_sizes_that_are_not_fixed_stay_inline(fake_group, without_code):
    fake_group(4)
    torch._dynamo.reset()
    policy = forced("int8", algorithm="two_shot")
    compiled = torch.compile(chain(3), backend=commpass.backend(policy, strict=True), dynamic=True)
    seen = len(commpass.plans())
    with torch.no_grad():
        compiled(torch.randn(64, 64))
    (plan,) = commpass.plans()[seen:]
    assert {site.lowering for site in plan} == {"inline"}


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("form", [None, "inline", "kernel"])
def test_plan_names_the_form_that_is_carried_out(form, fake_group, made):
    fake_group(4)
    policy = forced("int8", algorithm="two_shot", lowering=form)
    gm = make_fx(summed, tracing_mode="symbolic")(torch.randn(64, 64))
    (site,) = commpass.rewrite(gm, [], policy, strict=True)
    assert site.lowering == "inline"
    assert not kernels(gm)
    assert ("its sizes are not fixed" in site.reason) == (form == "kernel")


@pytest.mark.few(1)
@pytest.mark.parametrize("form", ["inline", "kernel"])
@pytest.mark.parametrize("name", ["int8", "exponent"])
def test_graphs_traced_with_real_values_are_rewritten(name, form, fake_group, made):
    """``make_fx`` gives each of their nodes a separate fake mode."""
    fake_group(4)
    x = torch.randn(64, 24)
    gm = make_fx(chain(2))(x)
    plan = commpass.rewrite(gm, [x], forced(name, lowering=form), strict=True)
    assert [site.codec for site in plan] == [name] * 2
    assert gm(x).shape == x.shape


def test_unknown_lowering_is_refused():
    with pytest.raises(PolicyError, match="did you mean 'kernel'"):
        Rule(codec="int8", lowering="kernels")
    with pytest.raises(PolicyError, match="did you mean 'inline'"):
        Policy(lowering="inlined")


def reduced(steps, name):
    torch._dynamo.reset()
    x = torch.randn(96, 40, generator=torch.Generator().manual_seed(torch.distributed.get_rank()))
    found = []
    for how in ("inline", "kernel"):
        policy = forced(name, algorithm="two_shot", lowering=how)
        run = torch.compile(chain(steps), backend=commpass.backend(policy, strict=True))
        with torch.no_grad():
            found.append(run(x))
    alike_of(name)(*found)
    everywhere = [torch.empty_like(found[0]) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(everywhere, found[0])
    for other in everywhere:
        same(other, found[0])
    return True


@pytest.mark.every
@pytest.mark.parametrize("name", ["rotated", "fp8", ROOTS])
def test_real_ranks_get_the_same_bits_by_kernels(name, ranks2):
    assert ranks2.run(reduced, 3, name) == [True, True]
