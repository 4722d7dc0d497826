"""The lines of a matmul that encodes a tile in parts, one in each step along k of the next tile.

Tensor cores multiply a step on their own, once it is started. Meanwhile the warps encode some rows
of the tile before. So the encode takes no time beside the products, as long as a part takes less
than a step. At its end a tile is only rounded, and stored in memory that is the program's own: two
tiles are small enough to stay in the second-level cache. The last tile of a program is encoded
behind the loop.

The steps of all tiles are one loop, as Triton would flatten two. Let tile t be stored in buffer
t % 2, at its last step. In step 1 of tile t + 1, beside the products of step 0, all threads wait
until all of tile t is stored (``turn``). From step 2 on they read it. The buffer is written again
at the end of tile t + 2, behind the wait in its step 1: all threads have then read tile t.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from commpass.lowering.gpu.source import indent
from commpass.lowering.gpu.supported import TYPES
from commpass.lowering.matmul import HELD

WAIT = 1
"""The step in which threads wait. The parts are encoded in the steps after it."""
PLACE = ("row", "above", "batch", "inner", "first", "line", "column")
"""What may locate a tile."""
WIDE = ("row", "first")
"""Those of 64 bits."""


def deferred_lines(
    dtype: torch.dtype,
    place: Sequence[str],
    parts: Sequence[str],
    result: Sequence[str],
    stores: Sequence[str],
) -> list[str]:
    """Return the loop of a kernel. Its memory HELD is ``[programs, 2, BLOCK_M, BLOCK_N]``.

    ``place`` finds a tile, ``parts`` load the operands of a step at ``deep``. ``result`` computes
    the result ``x [BLOCK_M, BLOCK_N]`` of the matmul from its product, and ``stores`` encode part
    ``cut`` of it, ``x [ROWS, BLOCK_N]``.
    """
    defined = [name for name in PLACE if _uses(place, name)]
    encoding = [name for name in defined if _uses(stores, name)]
    kept = [name for name in defined if _uses([*parts, *result], name) or name in encoding]
    encode = [
        *(f"{name} = old_{name}" for name in encoding),
        f"x = part_of_held({HELD}, read_at, turn, cut, ROWS, BLOCK_N, FP8)",
        *stores,
    ]
    store = f"store_values_{TYPES[dtype].removeprefix('*')}"
    whole = f"{HELD} + place_of_held(tiles_at + tile % 2 * SIZE_OF_TILE, BLOCK_M, BLOCK_N)"
    finish = [
        "x = total",
        *result,
        f"{store}({whole}, x, mask_after(turn, BLOCK_M, BLOCK_N), CASTS)",
        *(f"old_{name} = new_{name}" for name in encoding),
        "total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)",
    ]
    wait = f"turn = after_stores({HELD}, read_at)"
    return [
        "PARTS_OF_TILE: tl.constexpr = BLOCK_M // ROWS",
        "SIZE_OF_TILE: tl.constexpr = BLOCK_M * BLOCK_N",
        "steps = (depth + BLOCK_K - 1) // BLOCK_K",
        "count = tl.cdiv(tiles - tl.program_id(0), tl.num_programs(0))",
        "tiles_at = tl.program_id(0).to(tl.int64) * (2 * SIZE_OF_TILE)",
        "turn = count * 0",
        *(f"new_{name} = {_zero(name)}" for name in kept),
        *(f"old_{name} = {_zero(name)}" for name in encoding),
        "total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)",
        "for step_number in range(0, steps * count):",
        *indent(
            [
                "tile = step_number // steps",
                "step = step_number % steps",
                "if step == 0:",
                "    number = tl.program_id(0) + tile * tl.num_programs(0)",
                # This changes nothing. It lets tests prove that no address is too large.
                "    number = tl.minimum(number, tiles - 1)",
                *indent([*place, *(f"new_{name} = {name}" for name in kept)]),
                *(f"{name} = new_{name}" for name in kept if _uses([*parts, *result], name)),
                "deep = step * BLOCK_K",
                *parts,
                "total = multiply_add(left, right, total, CASTS)",
                "if tile > 0:",
                "    read_at = tiles_at + (tile + 1) % 2 * SIZE_OF_TILE",
                f"    if step == {WAIT}:",
                *indent(indent([wait])),
                f"    elif (step > {WAIT}) & (step <= {WAIT} + PARTS_OF_TILE):",
                *indent(indent([f"cut = step - {WAIT + 1}", *encode])),
                "if step == steps - 1:",
                *indent([*(f"{name} = new_{name}" for name in kept), *finish]),
            ]
        ),
        "read_at = tiles_at + (count + 1) % 2 * SIZE_OF_TILE",
        wait,
        "for cut in range(0, PARTS_OF_TILE):",
        *indent(encode),
    ]


def _zero(name: str) -> str:
    return "(count * 0).to(tl.int64)" if name in WIDE else "count * 0"


def _uses(lines: Sequence[str], name: str) -> bool:
    return any(re.search(rf"\b{name}\b", line) for line in lines)
