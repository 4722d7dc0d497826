"""Compilable kernels of a codec, and of a planned site."""

from __future__ import annotations

import torch

from commpass.codecs import Codec, SparseCodec
from commpass.codecs.entropy.codec import EntropyCodec
from commpass.codecs.exponent.codec import ExponentCodec
from commpass.errors import KernelError, nearest
from commpass.lowering.chain import Add, Chain, encoded_dtype, further_results, output_dtype
from commpass.lowering.fused import role_of
from commpass.lowering.gpu import generate, launch, supported, tile_sizes
from commpass.lowering.inspect.architectures import architecture
from commpass.lowering.inspect.chains import CHAINS, NUMEL, SiteChain
from commpass.lowering.inspect.isolated import of_entropy, of_exponent, of_sparse
from commpass.lowering.inspect.lowerable import Lowerable, casts
from commpass.lowering.inspect.matmuls import DECODES, FORMS, of_decode_matmul, of_matmul

# --- by name --------------------------------------------------------------------------------------


KERNELS = (*CHAINS, "matmul_encode")
"""The kernels that are shown if none is named."""
NAMES = (*CHAINS, *FORMS, DECODES)
"""The kernels that can be named."""


def kernels_named(
    name: str, codec: Codec, dtype: torch.dtype, ranks: int, arch: str
) -> tuple[Lowerable, ...]:
    """Return the kernels of a codec with this name: one, or several that run in order. Raises
    KernelError for an unknown name, or if the codec has no such kernel, with the reason."""
    if name not in NAMES:
        raise KernelError(f"no kernel {name!r}{nearest(name, NAMES)}")
    if name == DECODES:
        return (of_decode_matmul(codec, dtype, ranks, arch),)
    if name in FORMS:
        return (of_matmul(codec, dtype, ranks, arch, name),)
    if isinstance(codec, ExponentCodec):
        return of_exponent(name, codec, dtype, NUMEL)
    if isinstance(codec, EntropyCodec):
        return of_entropy(name, codec, dtype, NUMEL)
    if isinstance(codec, SparseCodec):
        return of_sparse(name, codec, dtype, ranks, arch, NUMEL)
    return (of_chain(CHAINS[name](codec, dtype, ranks), arch, name=name),)


def of_chain(
    chain: Chain,
    arch: str,
    numel: int = NUMEL,
    name: str = "",
    tile: tile_sizes.Tile | None = None,
) -> Lowerable:
    """Return the kernel of a chain for rows of ``numel`` values, with the static tile or another
    one."""
    if why := supported.unsupported_reason(chain, numel):
        raise KernelError(f"no kernel: {why}")
    generated = generate.kernel(chain, numel, architecture(arch).warp, tile)
    read, written = row_bytes(chain, numel)
    stride = read if chain.decodes else numel
    numbers = launch.scalars(generated, numel, 1, stride, written if chain.encodes else numel)
    added = sum(step.dtype.itemsize for step in chain.steps if isinstance(step, Add))
    added += sum(each.dtype.itemsize for each in further_results(chain) if each.per == 1)
    programs, *_ = launch.grid(generated, numel, 1)
    groups = chain.ranks // tile_sizes.ranks_of_group(chain, generated.constants["SIZE"])
    return Lowerable(
        name=name or generated.source.entry,
        source=generated.source,
        signature=generated.signature,
        constants=generated.constants | casts(arch),
        # Triton sees these divisors when it is called with these sizes.
        hints={key: 16 for key, number in numbers.items() if number % 16 == 0},
        num_warps=generated.num_warps,
        fuses=generated.fuses,
        moved=(chain.ranks * read + written + added * numel) / programs,
        trips=(groups - 1.0,) if groups > 1 else (),
    )


def row_bytes(chain: Chain, numel: int) -> tuple[int, int]:
    """Return the bytes of one row that a chain reads, and of one that it writes."""
    read = written = 0
    if chain.decodes is not None:
        read = chain.decodes.codec.wire_bytes(numel, chain.decodes.dtype)
    if chain.encodes is not None:
        written = chain.encodes.codec.wire_bytes(numel, encoded_dtype(chain))
    return (
        read or numel * chain.input_dtype.itemsize,
        written or numel * output_dtype(chain).itemsize,
    )


# --- kernels of a site ----------------------------------------------------------------------------


def of_site_chain(place: SiteChain, arch: str) -> tuple[Lowerable, ...]:
    """Return the kernels of a chain."""
    return (of_chain(place.chain, arch, place.numel, role_of(place.chain)),)
