"""Check the kernels that are not chains: the lossless codec, the sparse ones, and the matmul that
encodes its result."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import checks, exact
from benchmarks.gpu.bench import POISON, Bench, poisoned
from commpass.codecs import codec
from commpass.codecs.block.codec import BlockCodec
from commpass.lowering import matmul as matmul_of
from commpass.lowering.matmul import BATCHED, GROUPED, SINGLE
from commpass.lowering.pointwise import VALUE, Epilogue, Operand, Operation

GPU = "commpass.lowering.gpu"
SPARSE = ("gaussiank", "topk", "dgc", "redsync", "sidco", "randomk", "topk(values=bf16)")
TIES = 0.01
"""The largest share of sent entries that may differ from the plain form's: a threshold is computed
with roots and logarithms, which a GPU rounds differently."""


def module(bench: Bench, name: str) -> Any:
    """Return a module of kernels; if it does not exist, report it and return None."""
    try:
        return importlib.import_module(f"{GPU}.{name}")
    except ModuleNotFoundError as missing:
        bench.say("left out", name=str(missing))
        return None


def words(x: Tensor) -> Tensor:
    """Return bytes on the CPU, so that NaNs compare as bits."""
    return x.contiguous().reshape(-1).view(torch.uint8).cpu()


# --- exponent -------------------------------------------------------------------------------------


def exponent(bench: Bench, spec: str, dtype_name: str) -> None:
    """Check the lossless codec: the used bytes equal those of the plain form, and every bit is
    restored."""
    kernels = module(bench, "exponent")
    if kernels is None:
        return
    coder: Any = codec(spec)
    for content, x in _contents(bench, getattr(torch, dtype_name)):
        name = f"{coder.spec} {dtype_name} {content} {[*x.shape]}"
        if not bench.late(name):
            with bench.part(name):
                _lossless(bench, kernels, coder, x, name)


def _contents(bench: Bench, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    counts = [(2, 1100)] if bench.small else [(1, 1 << 20), (2, 300_007), (3, 1023)]
    for count, numel in counts:
        normal = bench.normal(count, numel, dtype=dtype)
        raw = torch.randint(
            *(0, 256, (count, numel * dtype.itemsize)),
            generator=bench.random,
            device=bench.device,
        )
        noise = raw.to(torch.uint8).view(dtype)
        chunk = torch.arange(numel, device=bench.device) // 1024
        yield "gaussian", normal
        yield "any bits", noise
        yield "mixed", torch.where(chunk % 3 == 1, noise, torch.where(chunk % 4 == 0, 0, normal))
    yield "zeros", torch.zeros(1, 2049, dtype=dtype, device=bench.device)
    yield "one value", bench.normal(1, 1, dtype=dtype)


def _lossless(bench: Bench, kernels: Any, coder: Any, x: Tensor, name: str) -> None:
    numel = x.shape[1]
    plain = coder.encode_rows(x.cpu())
    used = coder.used_bytes(plain, numel, x.dtype).tolist()
    with poisoned():
        wire = kernels.encode_rows(coder, x)
    rows = zip(wire.cpu(), plain, used, strict=True)
    apart = [int((mine[:end] != its[:end]).sum()) for mine, its, end in rows]
    bench.check(f"{name} encode: bytes", not any(apart), f"{apart} of {used} bytes differ")
    torn = plain.clone()
    for row, end in zip(torn, used, strict=True):
        row[end:] = POISON
    for what, given in (("its own wire", wire), ("a wire with a spoiled rest", torn.to(x.device))):
        with poisoned():
            back = kernels.decode_rows(coder, given, numel, x.dtype)
        good = torch.equal(words(back), words(x))
        bench.check(f"{name} decode: bits, of {what}", good)


# --- sparse ---------------------------------------------------------------------------------------


def sparse(bench: Bench, spec: str) -> None:
    kernels = module(bench, "sparse")
    if kernels is None:
        return
    cases = [(torch.bfloat16, (1, 1 << 20)), (torch.float32, (2, 100_003))]
    cases += [(torch.float16, (1, 65_537))] if spec == SPARSE[0] else []
    for dtype, shape in [(torch.bfloat16, (1, 700))] if bench.small else cases:
        name = f"{spec} {str(dtype).removeprefix('torch.')} {shape[0]} x {shape[1]:,}"
        if not bench.late(name):
            with bench.part(name):
                _chosen(bench, kernels, spec, dtype, shape, name)


def _chosen(
    bench: Bench, kernels: Any, spec: str, dtype: torch.dtype, shape: tuple[int, int], name: str
) -> None:
    coder: Any = codec(spec)
    numel = shape[1]
    if why := kernels.unsupported_reason(coder, numel, dtype):
        bench.check(f"{name}: a kernel", False, why)
        return
    x, residual = bench.normal(*shape, dtype=dtype), bench.normal(*shape) / 4
    sizes = (kernels.Sizes(block=256, tile=128, step=32, warps=1),) if bench.dry else ()
    with poisoned():
        wire, left = kernels.encode(coder, x, residual, *sizes)
        made = kernels.decode(coder, wire, numel, dtype, *sizes)
    exactly = coder.decode_rows(wire.cpu(), numel, dtype).float()
    apart = checks.share(made, exactly)
    bench.check(f"{name} decode: the plain form's of the same wire", apart == 0, f"{apart:.2%}")
    wanted = x.float() + residual
    sent = made != 0
    slots = coder.slots(numel)
    most = int(sent.sum(dim=1).max())
    bench.check(f"{name} encode: no more than {slots:,}", most <= slots, f"{most:,} sent")
    coarse = wanted.to(dtype).double()
    allowed = coarse.abs() * (coder.inner.bound or 0.0) + coder.inner.floor(dtype)
    off = float((made.double() - coarse)[sent].abs().sub(allowed[sent]).max()) if most else 0.0
    bench.check(f"{name} encode: values are those of their places", off <= 0, f"off by {off:.1e}")
    rest = checks.share(left, torch.where(made.isfinite(), wanted - made, 0))
    bench.check(f"{name} encode: what is left is the rest", rest == 0, f"{rest:.2%} differ")
    if spec.startswith("topk"):
        sizes_of = coarse.abs()
        least = sizes_of.masked_fill(~sent, math.inf).amin(dim=1)
        above = sizes_of.masked_fill(sent, 0).amax(dim=1)
        bench.check(f"{name} encode: the largest", bool((above <= least).all()))
    plain = coder.decode_rows(coder.encode_rows(wanted.to(dtype).cpu()), numel, dtype).float()
    other = plain != made.cpu()
    if spec.startswith("topk"):  # which of equal values are sent is free
        other &= (sizes_of != least.unsqueeze(1)).cpu()
    others = float((other.sum(dim=1) / slots).max())
    differ = f"{others:.2%} of the entries are others"
    bench.check(f"{name} encode: the plain form's choice", others <= TIES, differ)
    _summed_by_index(bench, kernels, coder, (dtype, numel), sizes, name)
    x[0, numel // 2] = math.nan
    with poisoned():
        wire, _ = kernels.encode(coder, x, residual, *sizes)
        made = kernels.decode(coder, wire, numel, dtype, *sizes)
    if not spec.startswith("randomk"):
        bench.check(f"{name}: a NaN stays one", not bool(made[0, numel // 2].isfinite()))


def _summed_by_index(
    bench: Bench,
    kernels: Any,
    coder: Any,
    of: tuple[torch.dtype, int],
    sizes: tuple[Any, ...],
    name: str,
) -> None:
    dtype, numel = of
    wires = coder.encode_rows(bench.normal(4, numel, dtype=dtype).cpu()).to(bench.device)
    with poisoned():
        total = kernels.sum_rows(coder, wires, numel, dtype, *sizes)
    each = coder.decode_rows(wires.cpu(), numel, dtype).double()
    near = each.abs().sum(dim=0) * 1e-6
    worst = float(((total.cpu().double() - each.sum(dim=0)).abs() - near).max())
    bench.check(f"{name} sum of 4 ranks: float64", worst <= 0, f"{worst:.1e} above")


# --- matmul ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Product:
    """``m x k @ k x n`` for a number of ranks.

    ``b`` is the weight of a linear layer, whose columns are contiguous, unless ``by_rows``. If
    batched or grouped (``form``), there are ``batches`` of them. ``then`` names an epilogue.
    """

    spec: str
    m: int
    n: int
    k: int
    ranks: int = 4
    dtype: torch.dtype = torch.bfloat16
    by_rows: bool = False
    bias: bool = False
    then: str = ""
    form: str = SINGLE
    batches: int = 1

    @property
    def name(self) -> str:
        words = [f"matmul_encode {self.spec} {self.m} x {self.n} x {self.k}"]
        words += [f"{self.form}, {self.batches}"] if self.form else []
        words += ["fp16"] if self.dtype == torch.float16 else []
        words += ["b by rows"] if self.by_rows else []
        words += ["bias"] if self.bias else []
        return " ".join([*words, self.then]).strip()


PRODUCTS = (
    Product("int8", 512, 1024, 512),
    Product("rotated", 512, 1024, 512),
    Product("int4", 512, 512, 264, by_rows=True),
    Product("fp8", 384, 768, 512, ranks=3, bias=True),
    Product("rotated(bits=4)", 512, 1024, 512, dtype=torch.float16),
    Product("int8", 512, 1024, 512, bias=True, then="relu"),
    Product("taco", 512, 1024, 512),
    Product("int8", 200, 512, 520, ranks=2, then="relu"),
    Product("int8", 2048, 1024, 512, form=BATCHED, batches=8),
    Product("rotated", 1536, 512, 512, form=BATCHED, batches=3, bias=True),
    Product("int8", 2048, 1024, 512, form=GROUPED, batches=7),
    Product("int4", 2048, 512, 264, form=GROUPED, batches=30, by_rows=True),
    Product("int8", 512, 1024, 512, then="silu"),
    Product("fp8", 512, 1024, 512, then="residual"),
)
SMALL = (
    Product("int8", 32, 256, 48, ranks=2),
    Product("rotated", 32, 256, 48, ranks=2, by_rows=True),
    Product("int8", 128, 256, 48, ranks=2, form=BATCHED, batches=2),
    Product("int8", 64, 256, 48, ranks=2, form=GROUPED, batches=3, then="residual"),
)
EPILOGUES = {
    "": Epilogue(),
    "relu": Epilogue((), (Operation("relu", ("v0",), torch.bfloat16),)),
    "silu": Epilogue(
        (),
        (
            Operation("sigmoid", ("v0",), torch.float32),
            Operation("mul", ("v0", "v1"), torch.bfloat16),
        ),
    ),
    "residual": Epilogue(
        (Operand(torch.bfloat16, VALUE),), (Operation("add", ("v0", "v1"), torch.bfloat16),)
    ),
}
EXACT: dict[str, Callable[..., Tensor]] = {
    "": lambda y: y,
    "relu": torch.relu,
    "silu": torch.nn.functional.silu,
    "residual": torch.add,
}
"""The epilogues, and the same in float64."""


def matmul(bench: Bench) -> None:
    kernels = module(bench, "matmul_launch")
    if kernels is None:
        return
    for product in SMALL if bench.dry else PRODUCTS:
        if not bench.late(product.name):
            with bench.part(product.name):
                _product(bench, kernels, product, product.name, small(bench))


def configurations(bench: Bench, spec: str) -> None:
    """Check every listed configuration; these include the timed ones."""
    kernels, sizes = module(bench, "matmul_launch"), module(bench, "matmul_sizes")
    if kernels is None or sizes is None or bench.dry:
        return
    product = Product(spec, 1024, 1024, 1024, ranks=8)
    problem = sizes.Problem(2048, 4096, 4096, 8)
    for by in sizes.configurations(codec(spec), problem, kernels.arch_of(bench.device)):
        name = f"{product.name} {said(by)}"
        if not bench.late(name):
            with bench.part(name):
                _product(bench, kernels, product, name, {"by": by})


def said(by: Any) -> str:
    """Describe a configuration in a few words."""
    told = f"{by.block_m}x{by.block_n}x{by.block_k} warps {by.num_warps} stages {by.num_stages}"
    return f"{told} cuts {by.cuts} {'tma' if by.descriptors else 'pointers'}"


def small(bench: Bench) -> dict[str, Any]:
    """Return a configuration with small tiles for the interpreter."""
    if not bench.dry:
        return {}
    from commpass.lowering.gpu.matmul_sizes import Configuration

    return {"by": Configuration(16, 256, 32, num_warps=4, num_stages=2)}


def _product(bench: Bench, kernels: Any, product: Product, name: str, more: dict[str, Any]) -> None:
    coder = codec(product.spec)
    assert isinstance(coder, BlockCodec)
    epilogue = EPILOGUES[product.then]
    encoded = matmul_of.Product(coder, product.ranks, product.form, product.bias, epilogue)
    # The last bits of an exponential depend on the GPU.
    for whole in (False,) if product.then == "silu" else (True, False):
        tensors = _operands(bench, product, whole)
        with poisoned():
            wires = kernels.run(tensors, encoded, **more)
        result, *others = _exact(encoded, tensors)
        want = EXACT[product.then](result.to(product.dtype).double(), *others)
        numel = product.m * product.n // product.ranks
        rows = want.reshape(product.ranks, numel)
        if whole:
            made = torch.float16 if product.dtype == torch.float16 else torch.bfloat16
            plain = coder.encode_rows(rows.to(made).cpu())
            checks.same_bits(bench, f"{name}, whole numbers", coder, wires, plain)
            continue
        error = exact.blocks_of(coder, exact.decode(coder, wires, numel, torch.bfloat16) - rows)
        norms = exact.blocks_of(coder, rows).norm(dim=-1)
        rounded = 2**-8 * (1 if not product.then else 4)
        allowed = (coder.bound + rounded) * norms + coder.floor(torch.float32) + 1e-6
        worst = float((error.norm(dim=-1) / allowed).nan_to_num(math.inf).max())
        relative = float(error.norm() / norms.norm())
        bench.check(
            f"{name}: float64",
            worst <= 1 and relative <= 1.05 * coder.relative_error() + rounded,
            f"{worst:.2g} of the bound, relative error {relative:.2e}",
            relative_error=relative,
        )


def _operands(bench: Bench, product: Product, whole: bool) -> list[Tensor]:
    """Return the operands of a product in order.

    The values are small whole numbers, whose products and sums are exact in any order, or else
    random.
    """

    def made(*shape: int) -> Tensor:
        if not whole:
            return bench.normal(*shape)
        return torch.randint(-4, 5, shape, generator=bench.random, device=bench.device).float()

    m, n, k, batches = product.m, product.n, product.k, product.batches
    several = (batches,) if product.form else ()
    a = made(*several, m // batches, k) if product.form == BATCHED else made(m, k)
    b = made(*several, k, n) if product.by_rows else made(*several, n, k).transpose(-2, -1)
    tensors = [a.to(product.dtype), b.to(product.dtype)]
    if product.bias:
        tensors.append(made(*several, n).to(torch.bfloat16))
    if product.form == GROUPED:  # one group is empty, and some rows belong to none
        ends = [m * (i + 1) // (batches + 1) for i in range(batches)]
        ends[1] = ends[0]
        tensors.append(torch.tensor(ends, dtype=torch.int32, device=bench.device))
    if product.then == "residual":
        tensors.append(made(m, n).to(torch.bfloat16))
    return tensors


def _exact(product: matmul_of.Product, tensors: list[Tensor]) -> list[Tensor]:
    """Return a product in float64 ``[m, n]``, and the further operands of its epilogue."""
    given = matmul_of.operands_of(product, tensors)
    others = [each.double() for each in given.others]
    if given.offsets is None:
        found = given.a.double() @ given.b.double()
        if given.bias is not None:
            found = found + given.bias.double().unsqueeze(-2)
        return [found.reshape(-1, found.shape[-1]), *others]
    found = given.a.new_zeros(given.a.shape[0], given.b.shape[-1], dtype=torch.float64)
    begin = 0
    for matrix, end in zip(given.b, given.offsets.tolist(), strict=True):
        found[begin:end] = given.a[begin:end].double() @ matrix.double()
        begin = end
    return [found, *others]
