"""An entropy coder with a fixed number of bytes, which the step of its quantizer fills.

A row is cut into chunks of ``CHUNK`` values, and a chunk into blocks of ``BLOCK``. All blocks of a
chunk have the same step, the smallest one whose code fits into the bytes of the chunk. A table for
each block says how often its numbers occur; it follows from the root mean square of the block. So
blocks with larger values get more bits, which gives the least error for the chunk (*reverse water
filling*: Cover and Thomas, Elements of Information Theory, section 10.3.3).

The bytes of a chunk are, in order:

- int16: twice the step, in 64ths of an octave, plus 1 if small numbers are dithered too (see
  ``Table``);
- uint8 for each block: its root mean square, in eighths of an octave below 1, or ``ZERO``; a zero
  byte if their number is odd;
- the states, of 4 bytes: 16, or fewer if the chunk has fewer than 16 blocks (``lanes``);
- 16-bit words, and zeros.

The coder is rANS (Duda, 2013, arXiv:1311.2540) with interleaved states (Giesen, 2014,
arXiv:1402.3392). Of 16 states, number l has the values l, l + 16, l + 32 and so on. To decode, each
state in turn takes out a class, and if it falls below 2^16, it reads the next word. Then each takes
out the lowest bits, and reads likewise. The encoder does the same backwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from commpass.codecs.entropy.tables import (
    ALWAYS_DITHERED,
    COST_BITS,
    HALF,
    LARGEST_RATIO,
    LEAST_DITHERED,
    LEAST_RATIO,
    PER_OCTAVE,
    TOTAL,
    TOTAL_BITS,
    roots,
    tables,
)

BLOCK = 256
CHUNK = 64 * BLOCK
LANES = 16
"""The most states of a chunk."""
WORD_BITS = 16
LEAST = 1 << WORD_BITS
"""The smallest state between two words."""
FINE = 64
"""Steps for each doubling."""
PER_RMS = FINE // PER_OCTAVE
COARSEST = 2 * 256 * PER_RMS
"""A step that makes all numbers zero."""
ATTEMPTS = 5
"""How often a chunk is coded without dither before it is with it."""
ZERO = 255
"""The root mean square of a block whose numbers are all zero, for any ``even``: it is less than
2^-31.8. Its dither would otherwise be the value of exact zeros."""
PEAK = 5.5
"""A root mean square counts as at least the largest value over this, so that every number has a
class. Few Gaussian values in a hundred million are larger."""
DITHER = 159
"""The dither of position i of a block is ``(159 i mod 256 + 1/2) / 256 - 1/2``: each of 256 evenly
spaced numbers once, and neighbours far apart."""
OVERHEAD = 12
"""The bits of a state that a code wastes, on average: it begins at 2^16, and not at 1."""
SPARE = 16
"""Bits left free in a chunk, beside 3 for each state, when its step is chosen: its code then fits
at the first attempt, in most cases."""


@dataclass(frozen=True)
class Form:
    """How blocks are stored.

    Args:
        nbytes: bytes of a block, an even number.
        even: 0, 1 or 2. The step of a block is proportional to its root mean square to the power of
            ``even / 2``: 0 gives the least error of a chunk, 2 the same relative error in all
            blocks.
    """

    nbytes: int
    even: int

    def header(self, blocks: int) -> int:
        """Return the bytes of a chunk before its words."""
        return 2 + (blocks + 1) // 2 * 2 + 4 * lanes(blocks)


def lanes(blocks: int) -> int:
    """Return the number of states: the largest power of two up to the number of blocks, and 16."""
    return min(LANES, 1 << blocks.bit_length() - 1)


# --- encode ---------------------------------------------------------------------------------------


def encode(values: Tensor, form: Form) -> Tensor:
    """Encode float32 ``[n, size]``, of at most 1, to uint8 ``[n, size / BLOCK * nbytes]``."""
    return _by_chunk(values, CHUNK, form, _encode_chunks)


def _encode_chunks(values: Tensor, form: Form) -> Tensor:
    count, blocks = values.shape[0], values.shape[1] // BLOCK
    split = values.unflatten(1, (blocks, BLOCK))
    rms = rms_numbers(split)
    first = first_steps(rms, form, blocks)
    words = (blocks * form.nbytes - form.header(blocks)) // 2
    out = values.new_zeros((count, blocks * form.nbytes), dtype=torch.uint8)
    left, attempt = torch.arange(count, device=values.device), 0
    while len(left):
        dithered = attempt >= ATTEMPTS
        step = first[left] + (1 << attempt - ATTEMPTS * dithered) - 1
        which = numbers_of_tables(rms[left], step, dithered, form)
        scale = powers(-step_powers(rms[left], step, form)) * (rms[left] != ZERO)
        states, stream, length = _rans(split[left], which, scale, words)
        chunk = torch.cat(
            [
                (2 * step + dithered).to(torch.int16).unsqueeze(1).view(torch.uint8),
                torch.nn.functional.pad(rms[left], (0, blocks % 2)).to(torch.uint8),
                states.to(torch.int32).view(torch.uint8),
                stream.to(torch.int16).view(torch.uint8),
            ],
            dim=1,
        )
        fits = length <= words
        out[left[fits], : chunk.shape[1]] = chunk[fits]
        left, attempt = left[~fits], attempt + 1
    return out


def rms_numbers(split: Tensor) -> Tensor:
    """Return the root mean squares of blocks ``[n, blocks, BLOCK]`` as int64 ``[n, blocks]``, from
    0 (1) to ``ZERO``: eighths of an octave below 1."""
    mean = split.double().square().mean(-1)
    largest = torch.maximum(mean.sqrt(), split.abs().amax(-1).double() / PEAK)
    return (-PER_OCTAVE * largest.log2()).round().clamp(0, ZERO).to(torch.int64)


def first_steps(rms: Tensor, form: Form, blocks: int) -> Tensor:
    """Return the smallest steps whose estimated codes fit, int64 ``[n]``, by bisection."""
    free_bits = 32 - WORD_BITS - OVERHEAD  # of a state
    bits_left = 8 * (blocks * form.nbytes - form.header(blocks))
    budget = bits_left + lanes(blocks) * (free_bits - 3) - SPARE
    cost = torch.tensor([table.cost for table in tables()], device=rms.device)
    finest = _fine_ratio(rms, torch.zeros_like(rms[:, 0]), form).amax(1)
    finest = (finest - LARGEST_RATIO * PER_RMS).clamp_min(-COARSEST)
    coarsest = torch.full_like(finest, COARSEST)
    while bool((finest < coarsest).any()):
        middle = torch.div(finest + coarsest, 2, rounding_mode="floor")
        fine = _fine_ratio(rms, middle, form).clamp(
            LEAST_RATIO * PER_RMS, LARGEST_RATIO * PER_RMS - 1
        )
        place, part = (fine >> 3) - LEAST_RATIO, fine & 7
        bits = cost[place] * (PER_RMS - part) + cost[place + 1] * part
        fits = bits.sum(1) * BLOCK <= budget * (PER_RMS << COST_BITS)
        coarsest = torch.where(fits, middle, coarsest)
        finest = torch.where(fits, finest, middle + 1)
    return coarsest


def _fine_ratio(rms: Tensor, step: Tensor, form: Form) -> Tensor:
    """Return the ratios of the root mean squares of blocks to their steps, in 64ths of an
    octave. That of zeros is less than any."""
    ratio = -(2 - form.even) * (PER_RMS // 2) * rms - step.unsqueeze(1)
    return torch.where(rms == ZERO, -4 * COARSEST, ratio)


def numbers_of_tables(rms: Tensor, step: Tensor, dithered: Tensor | bool, form: Form) -> Tensor:
    """Return the number of the table of each block, int64 ``[n, blocks]``. ``dithered`` is that of
    the chunk."""
    ratio = ((_fine_ratio(rms, step, form) + PER_RMS // 2) >> 3).clamp(LEAST_RATIO, LARGEST_RATIO)
    other = (ratio >= LEAST_DITHERED) & (ratio < ALWAYS_DITHERED) & dithered
    return ratio - LEAST_RATIO + other * (LARGEST_RATIO + 1 - LEAST_DITHERED)


def step_powers(rms: Tensor, step: Tensor, form: Form) -> Tensor:
    """Return the steps of blocks in 64ths of an octave, int64 ``[n, blocks]``."""
    return step.unsqueeze(1) - form.even * (PER_RMS // 2) * rms


def powers(number: Tensor) -> Tensor:
    """Return ``2^(number / 64)`` as float32."""
    root = torch.tensor(roots(), dtype=torch.float32, device=number.device)
    return torch.ldexp(root[number & (FINE - 1)], (number >> 6).to(torch.float32))


def _rans(
    split: Tensor, which: Tensor, scale: Tensor, word_count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the last states ``[n, lanes]``, the stream ``[n, word_count]`` and the length that the
    stream would need ``[n]``, all int64."""
    count, blocks = which.shape
    width = lanes(blocks)
    steps = BLOCK // width
    numbers = (split * scale.unsqueeze(2) + _dither(which)).round().to(torch.int64)
    numbers = numbers.view(count, blocks * steps, width)
    low = _lows(split.device)[which]
    frequency, start = _frequencies(split.device)
    state = numbers.new_full((count, width), LEAST)
    written = numbers.new_zeros((blocks * steps, 2, count, width))
    is_written = torch.zeros_like(written, dtype=torch.bool)
    for place in reversed(range(blocks * steps)):
        block, number = place // steps, numbers[:, place]
        bits = low[:, block : block + 1]
        full = state >= 1 << (2 * WORD_BITS - bits)
        written[place, 1], is_written[place, 1] = state & (LEAST - 1), full
        state = torch.where(full, state >> WORD_BITS, state)
        state = (state << bits) | (number & ((1 << bits) - 1))
        entry = which[:, block : block + 1] * (2 * HALF) + (number >> bits) + HALF
        occurs = frequency[entry]
        full = state >= occurs << (2 * WORD_BITS - TOTAL_BITS)
        written[place, 0], is_written[place, 0] = state & (LEAST - 1), full
        state = torch.where(full, state >> WORD_BITS, state)
        state = ((state // occurs) << TOTAL_BITS) + state % occurs + start[entry]
    order = is_written.permute(2, 0, 1, 3).flatten(1)
    places = (order.cumsum(1) - 1).clamp_max(word_count)
    stream = numbers.new_zeros((count, word_count + 1))
    stream.scatter_(
        1, torch.where(order, places, word_count), written.permute(2, 0, 1, 3).flatten(1)
    )
    return state, stream[:, :word_count], order.sum(1)


# --- decode ---------------------------------------------------------------------------------------


def decode(wire: Tensor, form: Form) -> Tensor:
    """The inverse of ``encode``: float32 ``[n, size]``. Bytes that ``encode``
    did not make decode to finite numbers as well."""
    return _by_chunk(wire, CHUNK // BLOCK * form.nbytes, form, _decode_chunks)


def _decode_chunks(wire: Tensor, form: Form) -> Tensor:
    count, blocks = wire.shape[0], wire.shape[1] // form.nbytes
    width = lanes(blocks)
    steps, end = BLOCK // width, form.header(blocks)
    at = end - 4 * width
    first = _as(torch.int16, wire[:, :2])
    step, dithered = first[:, 0] >> 1, (first & 1).bool()
    rms = wire[:, 2 : 2 + blocks].to(torch.int64)
    state = _as(torch.int32, wire[:, at:end]) & 0xFFFFFFFF
    stream = _as(torch.int16, wire[:, end:]) & 0xFFFF
    stream = torch.nn.functional.pad(stream, (0, 1))
    which = numbers_of_tables(rms, step, dithered, form)
    low = _lows(wire.device)[which]
    frequency, start = _frequencies(wire.device)
    classes = _classes(wire.device)
    numbers = state.new_empty((count, blocks * steps, width))
    read = state.new_zeros((count, 1))
    for place in range(blocks * steps):
        block = place // steps
        bits, base = low[:, block : block + 1], which[:, block : block + 1]
        slot = state & (TOTAL - 1)
        found = classes[base, slot]
        entry = base * (2 * HALF) + found
        state = frequency[entry] * (state >> TOTAL_BITS) + slot - start[entry]
        state, read = _refill(state, stream, read)
        numbers[:, place] = ((found - HALF) << bits) | (state & ((1 << bits) - 1))
        state, read = _refill(state >> bits, stream, read)
    level = _levels(wire.device)[which] * powers(step_powers(rms, step, form))
    values = numbers.view(count, blocks, BLOCK).to(torch.float32) - _dither(which)
    return (values * level.unsqueeze(2)).flatten(1)


def _as(dtype: torch.dtype, raw: Tensor) -> Tensor:
    """Return bytes as numbers of a dtype, in int64. A copy is aligned, a slice may not be."""
    return raw.clone(memory_format=torch.contiguous_format).view(dtype).to(torch.int64)


def _refill(state: Tensor, stream: Tensor, read: Tensor) -> tuple[Tensor, Tensor]:
    empty = state < LEAST
    places = (read + empty.cumsum(1) - 1).clamp(0, stream.shape[1] - 1)
    word = stream.gather(1, places)
    return torch.where(empty, (state << WORD_BITS) | word, state), read + empty.sum(1, keepdim=True)


def _by_chunk(
    rows: Tensor, chunk: int, form: Form, function: Callable[[Tensor, Form], Tensor]
) -> Tensor:
    """Apply a function to the whole chunks of rows, and to the blocks after them."""
    count = rows.shape[0]
    whole = rows.shape[1] // chunk
    parts = []
    if whole:
        done = function(rows[:, : whole * chunk].reshape(count * whole, chunk), form)
        parts.append(done.view(count, -1))
    if rows.shape[1] > whole * chunk:
        parts.append(function(rows[:, whole * chunk :], form))
    return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]


def _dither(which: Tensor) -> Tensor:
    """Return the dither of blocks with these tables, float32 ``[n, blocks, BLOCK]``."""
    place = torch.arange(BLOCK, device=which.device)
    dither = ((DITHER * place & 255).to(torch.float32) + 0.5) / 256 - 0.5
    dithered = torch.tensor([table.dithered for table in tables()], device=which.device)
    return torch.where(dithered[which].unsqueeze(2), dither, 0.0)


@lru_cache(maxsize=8)
def _lows(device: torch.device) -> Tensor:
    return torch.tensor([table.low for table in tables()], device=device)


@lru_cache(maxsize=8)
def _levels(device: torch.device) -> Tensor:
    return torch.tensor([table.level for table in tables()], dtype=torch.float32, device=device)


@lru_cache(maxsize=8)
def _frequencies(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the frequencies of all classes of all tables, and the sums before them, flat."""
    frequency = torch.tensor([table.frequencies for table in tables()], device=device)
    return frequency.flatten(), (frequency.cumsum(1) - frequency).flatten()


@lru_cache(maxsize=8)
def _classes(device: torch.device) -> Tensor:
    """Return the class of each slot, ``[tables, TOTAL]``."""
    frequency = torch.tensor([table.frequencies for table in tables()], device=device)
    row = torch.arange(2 * HALF, device=device)
    return torch.stack([row.repeat_interleave(each) for each in frequency])
