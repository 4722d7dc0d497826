"""Call generated kernels on tensors: on a GPU, or on a CPU if Triton interprets."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.library import wrap_triton

from commpass.codecs.block.codec import BlockCodec
from commpass.codecs.block.noise import Stochastic, key_of
from commpass.codecs.block.scales import row_numbers, row_peak
from commpass.codecs.rows import aligned
from commpass.errors import CommpassError
from commpass.lowering.chain import Chain, encoded_dtype, further_results, output_dtype
from commpass.lowering.gpu.current import on_device
from commpass.lowering.gpu.generate import (
    LARGEST_GRID,
    Generated,
    kernel,
)
from commpass.lowering.gpu.row_peaks import row_peaks
from commpass.lowering.gpu.source import load
from commpass.lowering.gpu.supported import needs_row_peaks, unsupported_reason


def interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def run(chain: Chain, inputs: Tensor, numel: int, *constants: Tensor) -> Tensor:
    """Run a chain on rows of values or wires ``[rows, n]``, and return rows of values ``[rows',
    numel]`` or wires.

    ``numel`` is the number of values of a row. ``constants`` are the inputs of later steps
    (residuals, weights).
    """
    return run_all(chain, inputs, numel, *constants)[0]


def run_all(chain: Chain, inputs: Tensor, numel: int, *constants: Tensor) -> list[Tensor]:
    """As ``run``; the further results of the chain follow its result."""
    if why := unsupported_reason(chain, numel):
        raise CommpassError(f"no kernel: {why}")
    generated = kernel(chain, numel, lanes(inputs.device))
    rows = inputs.shape[0] // chain.ranks
    output = empty(generated, rows, numel, inputs.device)
    further = empty_further(generated, rows, numel, inputs.device)
    launch(generated, [inputs, *constants], output, numel, further)
    return [output, *further]


def empty(generated: Generated, rows: int, numel: int, device: torch.device) -> Tensor:
    """Return an output buffer of a kernel for ``rows`` rows."""
    chain = generated.chain
    width, dtype = numel, output_dtype(chain)
    if chain.encodes is not None:
        width = chain.encodes.codec.wire_bytes(numel, encoded_dtype(chain))
    return torch.empty((rows, width), dtype=dtype, device=device)


def empty_further(
    generated: Generated, rows: int, numel: int, device: torch.device
) -> list[Tensor]:
    """Return buffers for the further results of a kernel."""
    return [
        torch.empty((rows, numel // each.per), dtype=each.dtype, device=device)
        for each in further_results(generated.chain)
    ]


def launch(
    generated: Generated,
    inputs: Sequence[Tensor],
    outputs: Tensor,
    numel: int,
    further: Sequence[Tensor] = (),
    *,
    graph: bool = False,
    as_in_graph: bool = False,
) -> None:
    """Call a kernel; ``inputs`` are the rows, then the inputs of later steps.

    ``further`` are contiguous buffers for its further results (``empty_further``). With ``graph``,
    the call is traced for Inductor, which launches the kernel itself. With ``as_in_graph`` it is
    compiled with Triton's default options, as Inductor compiles it.
    """
    rows = outputs.shape[0]
    if not rows or not numel:
        return
    if needs_row_peaks(generated.chain):
        # Inductor fuses the form of torch's operators; called, it would be a kernel for each.
        peaks = row_peak(inputs[0]).flatten().float() if graph else row_peaks(inputs[0])
        inputs = [*inputs, peaks]
    function = load(generated.source)
    values = scalars(generated, numel, rows, inputs[0].stride(0), outputs.stride(0))
    plain = graph or as_in_graph or interpreting()
    with nullcontext() if graph else on_device(inputs[0].device):
        (wrap_triton(function) if graph else function)[grid(generated, numel, rows)](
            *order_arguments(generated, [*inputs, outputs, *further], values),
            **(generated.constants | casts(inputs[0].device)),
            **({} if plain else {"enable_fp_fusion": generated.fuses}),
            num_warps=generated.num_warps,
        )


def grid(generated: Generated, numel: int, rows: int) -> tuple[int, int, int]:
    """Return the grid of a kernel for at least one row: rows are on two axes, since each of these
    has at most 65,535 programs."""
    blocks = _codec(generated).layout.blocks(numel)
    planes = -(-rows // LARGEST_GRID)
    return -(-blocks // generated.blocks), -(-rows // planes), planes


def scalars(
    generated: Generated, numel: int, rows: int, input_stride: int, output_stride: int
) -> dict[str, int]:
    """Return the integer arguments of a kernel by name."""
    chain = generated.chain
    found = {
        "input_stride": input_stride,
        "output_stride": output_stride,
        "numel": numel,
        "rows": rows,
        "blocks": _codec(generated).layout.blocks(numel),
    }
    if chain.decodes is not None:
        found |= offsets("input", chain.decodes.codec, numel, chain.decodes.dtype)
    if chain.encodes is not None:
        codec = chain.encodes.codec
        found |= offsets("output", codec, numel, encoded_dtype(chain))
        if isinstance(codec, BlockCodec) and isinstance(codec.rounding, Stochastic):
            found["key"] = key_argument(codec.rounding, codec.salt)
    return {name: found[name] for name in generated.signature if name in found}


def casts(device: torch.device) -> dict[str, int]:
    """Return the compile-time arguments for a device: whether its casts round as required. ``FP8``
    is 2 if it also computes on pairs of float32 (``generate.CONSTANTS``)."""
    card = not interpreting()
    return {"CASTS": card, "FP8": (has_fp8(device) + has_pairs(device)) if card else 0}


def lanes(device: torch.device) -> int:
    """Return the threads of a warp."""
    if torch.version.hip is None or device.type != "cuda":
        return 32
    return torch.cuda.get_device_properties(device).warp_size


def has_fp8(device: torch.device) -> bool:
    """Whether a GPU has casts to the 8-bit floats of the grids. AMD GPUs before gfx950 have other
    formats of the same name."""
    if torch.version.hip is not None or device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


def has_pairs(device: torch.device) -> bool:
    """Whether a GPU has instructions that compute on two float32 at once."""
    if torch.version.hip is not None or device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device) >= (10, 0)


def _codec(generated: Generated) -> BlockCodec:
    ends = generated.chain.decodes or generated.chain.encodes
    assert ends is not None
    assert isinstance(ends.codec, BlockCodec)
    return ends.codec


def key_argument(rounding: Stochastic, salt: tuple[int, ...]) -> int:
    """Return the key of the noise as an int32."""
    return (key_of(rounding.seed, salt) + 2**31) % 2**32 - 2**31


def offsets(of: str, codec: Any, numel: int, dtype: torch.dtype) -> dict[str, int]:
    """Return the offsets of the regions of a wire, in bytes of a row."""
    codes, *lengths = (aligned(length) for length in codec.regions(numel, dtype))
    names = [f"{of}_middle_at"] if codec.offset else []
    names += [f"{of}_number_{i}_at" for i in range(codec.scale.numbers)]
    names += [f"{of}_row_{i}_at" for i in range(row_numbers(codec.scale))]
    names += [f"{of}_side_at"] if codec.transform.side else []
    places, at = {}, codes
    for name, length in zip(names, lengths, strict=True):
        places[name] = at
        at += length
    return places


def order_arguments(
    generated: Generated, tensors: Sequence[Tensor], values: dict[str, int]
) -> list[Any]:
    """Order arguments by the signature: tensors in the given order, numbers by name."""
    left = iter(tensors)
    names = [name for name, what in generated.signature.items() if what.startswith("*")]
    held = dict(zip(names, left, strict=True))
    return [held[name] if name in held else values[name] for name in generated.signature]
