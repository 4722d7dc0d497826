"""A collective in one kernel: the instructions for a GPU, what is unsupported, and why the number
of buffers suffices."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from exchanging import ALL, FORMS
from memory_order import accesses_of, loads_in_flight, out_of_order
from tiers import rarely

from commpass.codecs import codec
from commpass.errors import CommpassError

triton = pytest.importorskip("triton", reason="kernels are written in Triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from commpass.lowering.gpu.exchange import Workspace, numbers, run  # noqa: E402
from commpass.lowering.gpu.exchange_kernel import kernel  # noqa: E402
from commpass.lowering.gpu.exchange_sizes import (  # noqa: E402
    BUFFERS,
    PHASES,
    RESIDENT,
    Capacity,
    Exchange,
    capacity_for,
    memory_of,
    rounded_up,
    unsupported_reason,
)
from commpass.lowering.gpu.generate import KNOWN  # noqa: E402
from commpass.lowering.gpu.source import load, of_text  # noqa: E402
from commpass.lowering.inspect.lowerable import casts  # noqa: E402

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
INT8 = Exchange("one_shot", codec("int8"), torch.bfloat16, 1 << 17, 8, programs=64)


def of(name: str, **changed: Any) -> Exchange:
    """Return the exchange whose kernel has a name."""
    kind, algorithm = FORMS[name]
    return replace(INT8, kind=kind, algorithm=algorithm, **changed)


# --- instructions for a GPU -----------------------------------------------------------------------


def compiled(arch: str, exchange: Exchange) -> Any:
    exchange = replace(exchange, lanes=TARGETS[arch].warp_size)
    made = kernel(exchange)
    given = numbers(exchange, 2, capacity_for([exchange]))
    constants = made.constants | casts(arch)
    whole = [
        place
        for place, (name, kind) in enumerate(made.signature.items())
        if kind.startswith("*") or given[name] % 16 == 0
    ]
    source = ASTSource(
        load(made.source),
        {**made.signature, **dict.fromkeys(constants, "constexpr")},
        constants,
        {(place,): [["tt.divisibility", 16]] for place in whole},
    )
    options = {"num_warps": made.num_warps, "enable_fp_fusion": made.fuses, **exchange.options}
    return triton.compile(source, target=TARGETS[arch], options=options)


def usage(cubin: bytes) -> tuple[int, int]:
    """Return registers and bytes of local memory."""
    said = said_of(cubin, triton.knobs.nvidia.cuobjdump.path, "-res-usage")
    registers, stack = (int(re.findall(rf"{name}:(\d+)", said)[-1]) for name in ("REG", "STACK"))
    return registers, stack


def said_of(cubin: bytes, *command: str) -> str:
    """Return what a tool of NVIDIA says of a kernel."""
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "kernel.cubin"
        file.write_bytes(cubin)
        ran = subprocess.run([*command, str(file)], check=True, capture_output=True, text=True)
    return ran.stdout


def arguments(exchange: Exchange) -> list[str]:
    return list(kernel(exchange).signature)


def wires(exchange: Exchange) -> list[str]:
    """Return the arguments that locate what each phase signals."""
    return ["wires_at", "sums_at"][: exchange.phases]


SPECS = ["int8", "rotated", "fp8"]
NVIDIA = [(arch, spec) for arch in ("sm_80", "sm_90", "sm_100") for spec in SPECS]
NVIDIA += [("sm_90", "rotated(bits=4)"), ("sm_100", "rotated(bits=4)")]


@pytest.mark.rest_slow(1)
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("arch", "spec"), NVIDIA)
def test_nvidia_releases_and_acquires_for_the_system(arch, name, spec):
    exchange = of(name, codec=codec(spec))
    made = compiled(arch, exchange)
    registers, stack = usage(made.asm["cubin"])
    assert stack == 0, "spills"
    # `unsupported_reason` guarantees that so many programs of one processor run at once.
    assert registers * made.metadata.num_warps * 32 * RESIDENT <= 65536
    lines = made.asm["ptx"].splitlines()
    order = [each for each in lines if re.search(r"bar\.sync|atom\.global\.sys|st\.release", each)]
    released = [place for place, line in enumerate(order) if "@mine st.release.sys.global" in line]
    acquired = [place for place, line in enumerate(order) if "sys.acquire.add" in line]
    assert len(released) == len(acquired) == exchange.phases
    for place in released:
        assert "bar.sync" in order[place - 1]  # all threads have written
    for place in acquired:
        assert "bar.sync" in order[place + 1]  # no thread reads before one has seen the signals
    assert out_of_order(accesses_of(made.asm["ptx"], arguments(exchange)), wires(exchange)) == []
    assert "ld.global.nc" not in made.asm["ptx"]  # memory that others write
    assert re.search(r"ld\.global\S*\.v4\.b32", made.asm["ptx"])


def moved(text: str, words: str, before: str) -> str:
    """Return a kernel's text with a line moved to before a line with other words: the last one
    above it, or else the last of all."""
    lines = text.splitlines()
    (place,) = (n for n, each in enumerate(lines) if each.strip().startswith(words))
    line, lines[place] = lines[place].strip(), lines[place].replace(lines[place].strip(), "pass")
    others = [n for n, each in enumerate(lines) if each.strip().startswith(before)]
    to = max((n for n in others if n < place), default=others[-1])
    indent = len(lines[to]) - len(lines[to].lstrip())
    return "\n".join([*lines[:to], " " * indent + line, *lines[to:]]) + "\n"


@pytest.mark.rest_slow(2)
@pytest.mark.parametrize("name", ["one_shot", "all_gather", "reduce_scatter"])
@pytest.mark.parametrize(
    ("words", "before", "said"),
    [
        ("signal(", "for tile in", "a store behind the signal"),
        ("late = wait(", "count_call(", "a load before the signal is seen"),
    ],
)
def test_access_on_the_other_side_of_a_signal_is_found(words, before, said, name):
    exchange = of(name)
    made = kernel(exchange)
    text = moved(made.source.text, words, before)
    changed = replace(made, source=replace(made.source, text=text))
    with patch(f"{__name__}.kernel", lambda exchange: changed):
        ptx = compiled("sm_90", exchange).asm["ptx"]
    found = out_of_order(accesses_of(ptx, arguments(exchange)), wires(exchange))
    assert found == [f"wires_at: {said}"]


SIGNALS = {
    "atomic": (
        "atom.global.sys.release.exch.b32 %r9, [ %rd4 + 0 ], %r8;",
        "atom.acquire.sys.add.u32",
    ),
    "store": ("st.global.release.sys.b32 [ %rd4 + 0 ], %r8;", "ld.acquire.sys.global.b32"),
}
PTX = """
ld.param.b64 %rd1, [one_shot_param_0];
ld.param.b32 %r1, [one_shot_param_1];
ld.global.b64 { %rd2 }, [ %rd1 + 0 ];
cvt.u64.u32 %rd3, %r1;
add.s64 %rd4, %rd2, %rd3;
@%p1 st.global.b32 [ %rd4 + 0 ], { %r2 };
bar.sync 0;
SIGNAL
LOOK %r4, [ %rd2 + 0 ], %r5;
bar.sync 0;
@%p1 ld.global.b32 { %r3 }, [ %rd4 + 8 ];
"""


@pytest.mark.parametrize("form", SIGNALS)
def test_signals_are_understood_as_stores_and_as_atomic_operations(form):
    signal, look = SIGNALS[form]
    lines = PTX.replace("SIGNAL", f"@%p2 {signal}").replace("LOOK", look).strip().splitlines()
    assert lines[5].startswith("@%p1 st.global")

    def found(some: list[str]) -> list[str]:
        return out_of_order(accesses_of("\n".join(some), ["peers", "wires_at"]), ["wires_at"])

    assert found(lines) == []
    late = [*lines[:5], *lines[6:9], lines[5], *lines[9:]]
    assert found(late) == ["wires_at: a store behind the signal"]
    early = [*lines[:8], lines[-1], *lines[8:-1]]
    assert found(early) == ["wires_at: a load before the signal is seen"]
    assert found([*lines[:6], *lines[7:]]) == ["wires_at: a store behind the signal"]


@pytest.mark.rest_slow(1)
@pytest.mark.parametrize(
    ("arch", "ranks", "spec"),
    [
        *(("sm_90", 8, "int8"), ("sm_90", 4, "int8"), ("sm_100", 8, "int8"), ("sm_80", 8, "int8")),
        *(("sm_90", 8, "rotated"), ("sm_100", 4, "rotated"), ("sm_80", 8, "rotated")),
    ],
)
@pytest.mark.parametrize("name", ALL)
def test_loads_of_all_ranks_are_issued_before_the_first_is_used(name, arch, ranks, spec):
    made = compiled(arch, of(name, ranks=ranks, codec=codec(spec)))
    disassembler = triton.knobs.nvidia.nvdisasm.path
    assert loads_in_flight(said_of(made.asm["cubin"], disassembler, "-c")) >= ranks


@pytest.mark.parametrize("spec", [*SPECS, "rotated(bits=4)"])
@pytest.mark.parametrize("name", ALL)
def test_amd_releases_and_acquires_for_the_system(name, spec):
    exchange = of(name, codec=codec(spec))
    made = compiled("gfx942", exchange)
    text = made.asm["amdgcn"]
    assert re.findall(r"\.[sv]gpr_spill_count:\s*(\d+)", text) == ["0", "0"]
    # The write-back comes before the exchange, the invalidation after the poll: an exchange that
    # adds nothing, which has become a load before Triton 3.9. `sc0 sc1` is the whole system.
    poll = r"global_(?:load_dword|atomic_add) .* sc0 sc1"
    order = re.findall(rf"buffer_wbl2 sc0 sc1|global_atomic_swap .* sc1|{poll}|buffer_inv.*", text)
    said = " ".join("poll" if re.match(poll, each) else each.split()[0] for each in order)
    once = "buffer_wbl2 global_atomic_swap poll buffer_inv"
    assert said == " ".join([once] * exchange.phases)


# --- unsupported exchanges ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"algorithm": "ring"}, "ring: kernels exchange by one_shot or two_shot"),
        ({"kind": "all_gather"}, "one_shot: kernels exchange by direct"),
        ({"kind": "broadcast"}, "broadcast: there are kernels for all_reduce, all_gather"),
        ({"codec": codec("nvfp4")}, "no program has the largest value of a whole row"),
        (
            {"kind": "all_gather", "algorithm": "direct", "numel": 2**28},
            "2,147,483,648 values: kernels count to 2^31",
        ),
        ({"op": "max"}, "max of values"),
        ({"ranks": 33}, "33 ranks: a line of signals holds 32"),
        ({"codec": codec("exponent")}, "exponent: no block codec"),
        ({"codec": codec("int8", block=24)}, "blocks of 24 values"),
        ({"dtype": torch.float64}, "float64 values"),
        ({"numel": 2**31}, "kernels count to 2^31"),
        ({"numel": 2**30, "programs": 1}, "bytes of memory: kernels count to 2^31"),
        ({"programs": 100 * RESIDENT + 1}, "all programs must run at once"),
        (
            {"algorithm": "two_shot", "programs": 100 * RESIDENT // 8 + 1},
            "408 programs on 100 processors",
        ),
    ],
)
def test_exchanges_without_a_kernel_say_why(changed, said):
    assert unsupported_reason(INT8, processors=100, card=(9, 0)) == ""
    assert said in unsupported_reason(replace(INT8, **changed), processors=100, card=(9, 0))


def test_card_that_is_too_old_is_named():
    assert "sm_61: it does not release and acquire" in unsupported_reason(INT8, card=(6, 1))


@pytest.mark.parametrize("lack", [Capacity(63, 1 << 30), Capacity(64, 1 << 10)])
def test_exchange_of_other_values_or_in_small_memory_is_refused(lack):
    exchange = replace(INT8, ranks=1)
    peers, memory = torch.zeros(1, dtype=torch.int64), torch.zeros(1)
    space = Workspace(lack, 1, 0, peers, memory)
    with pytest.raises(CommpassError, match=r"of 131072 values .* was called with 131073"):
        run(space, exchange, torch.zeros(131073, dtype=torch.bfloat16))
    with pytest.raises(CommpassError, match=r"was called with 131072 of torch\.float32"):
        run(space, exchange, torch.zeros(131072))
    with pytest.raises(CommpassError, match=r"is too small for Capacity\(programs=64"):
        run(space, exchange, torch.zeros(131072, dtype=torch.bfloat16))


def test_generated_text_may_not_hide_a_tile_function():
    text = "def entry(x, flat):\n    flat(x, x, 8)\n"
    with pytest.raises(ValueError, match="entry: flat: names of variables"):
        of_text("entry", text, KNOWN)
    assert "def flat(" in of_text("entry", text.replace(", flat", ""), KNOWN).text


@pytest.mark.parametrize(
    "size", [Capacity(1, 1152), Capacity(77, 77 * 128), Capacity(528, 1 << 20)]
)
def test_nothing_in_memory_overlaps(size):
    at = memory_of(size)
    begins = [at.signals, at.counters, at.late, at.wires, at.total]
    sizes = [PHASES * size.programs * 32 * 4, size.programs * 4, 4, BUFFERS * size.buffer_bytes]
    for place, length, following in zip(begins[:-1], sizes, begins[1:], strict=True):
        assert place % 128 == 0
        assert place + length <= following


@pytest.mark.parametrize("ranks", [1, 3, 32])
@pytest.mark.parametrize("name", ALL)
def test_wires_of_a_call_fill_a_buffer(name, ranks):
    """Each is as long as its values need, and begins at a multiple of 128 bytes."""
    exchange = of(name, ranks=ranks, numel=100_003 * ranks, programs=77)
    wire, capacity = exchange.wire_bytes, capacity_for([exchange])
    assert wire % 128 == 0
    assert wire >= exchange.length * (1 + 4 / 256)
    rows, sums = {
        "one_shot": (1, 0),
        "all_gather": (1, 0),
        "two_shot": (ranks, 1),
        "reduce_scatter": (ranks, 0),
    }[name]
    assert capacity == Capacity(77 * rows, (rows + sums) * wire)
    given, at = numbers(exchange, 2, capacity), memory_of(capacity)
    assert (given["wires_at"], given["buffer_bytes"]) == (at.wires, capacity.buffer_bytes)
    assert given["sums_at"] == at.wires + rows * wire


def test_memory_is_that_of_the_largest_exchange():
    """Most bytes and most programs may be those of different exchanges."""
    small = of("reduce_scatter", numel=4096, programs=9)
    large = of("one_shot", codec=codec("fp8"), numel=1 << 20, programs=64)
    capacity = capacity_for([small, large])
    assert capacity == Capacity(72, large.buffer_bytes)
    assert all(capacity.holds(capacity_for([each])) for each in (small, large))
    assert not capacity_for([small]).holds(capacity_for([large]))
    assert not capacity_for([large]).holds(capacity_for([small]))
    assert capacity_for([small], programs=132).programs == 132
    for each in (small, large):
        given, at = numbers(each, 2, capacity), memory_of(capacity)
        assert (given["counters_at"], given["late_at"]) == (at.counters, at.late)
        assert (given["slots"], given["buffer_bytes"]) == (72, large.buffer_bytes)
        assert at.wires + 2 * capacity.buffer_bytes == at.total


def test_memory_grows_by_powers_of_two_up_to_the_largest():
    assert rounded_up(Capacity(5, 100_000)) == Capacity(5, 1 << 17)
    assert rounded_up(Capacity(5, 1 << 17)) == Capacity(5, 1 << 17)
    assert rounded_up(Capacity(5, 128)) == Capacity(5, 1 << 16)
    large = replace(INT8, numel=2**30 - 2**28, programs=1)
    assert unsupported_reason(large) == ""
    assert "2^31" in unsupported_reason(replace(large, numel=2**30))
    assert rounded_up(capacity_for([large])) == capacity_for([large])


def test_memory_that_exchanges_share_can_be_addressed():
    """One of them may have the wires, and another the programs, of which each has signals."""
    many = replace(INT8, numel=2**20, programs=304 * RESIDENT)
    lengths = range(2**30 - 2**26, 2**30, 2**14)
    allowed = [at for at in lengths if not unsupported_reason(replace(INT8, numel=at, programs=1))]
    assert len(allowed) not in (0, len(lengths))
    most = replace(INT8, numel=allowed[-1], programs=1)
    assert memory_of(rounded_up(capacity_for([most, many]))).total < 2**31


# --- why the number of buffers suffices -----------------------------------------------------------

WRITE, SIGNAL, WAIT, READ = "write", "signal", "wait", "read"


ALL_RANKS, OWNER = "all ranks", "rank 0"


def steps_of(name: str, rank: int, ranks: int) -> list[tuple[str, str, str]]:
    """Return what one program of a rank does in a call, in order, with what, and with whose.

    The wires of a rank are ``w``, and the wire of its sum ``s``. Signals have the number of their
    program, or ``sum`` for the second one of a two-shot. There the program is one of those for the
    shard of rank 0. In a reduce_scatter a rank has a program for each shard, whose number is also
    the name of the wire; that of its own shard ends last here.
    """
    if name == "reduce_scatter":
        shards = [str(shard) for shard in range(ranks)]
        first = [(kind, shard, "") for shard in shards for kind in (WRITE, SIGNAL)]
        return [*first, (WAIT, str(rank), ALL_RANKS), (READ, str(rank), ALL_RANKS)]
    first = [(WRITE, "w", ""), (SIGNAL, "0", "")]
    sums = [(WAIT, "0", ALL_RANKS), (READ, "w", ALL_RANKS)]
    if name in ("one_shot", "all_gather"):
        return [*first, *sums]
    own = [*sums, (WRITE, "s", ""), (SIGNAL, "sum", "")] if rank == 0 else []
    return [*first, *own, (WAIT, "sum", OWNER), (READ, "s", OWNER)]


def overwritten(names: Sequence[str], buffers: int, ranks: int) -> bool:
    """Return whether in any execution order of calls of these kinds, one after the other, some rank
    reads data of another call than its own.

    A state is the position of each rank. The contents of memory follow from it: all wires of a call
    are in one buffer, which the first write of a later call spoils. A read from all peers takes
    several steps, one per peer.
    """
    programs = [
        [
            (call, kind, what, peer)
            for call, name in enumerate(names, 1)
            for kind, what, whose in steps_of(name, rank, ranks)
            for peer in (range(ranks) if whose == ALL_RANKS else [0])
        ]
        for rank in range(ranks)
    ]
    done = [[_latest(program[:at]) for at in range(len(program) + 1)] for program in programs]
    seen, todo = set(), [(0,) * ranks]
    while todo:
        state = todo.pop()
        for rank, at in enumerate(state):
            if at == len(programs[rank]):
                continue
            call, kind, what, peer = programs[rank][at]
            calls = done[peer][state[peer]]
            if kind == WAIT and calls.get((SIGNAL, what), 0) < call:
                continue
            if kind == READ:
                later = max(latest for (of, _), latest in calls.items() if of == WRITE)
                if calls.get((WRITE, what)) != call and later <= call:
                    return True
                if any((call - each) % buffers == 0 for each in range(call + 1, later + 1)):
                    return True
            following = (*state[:rank], at + 1, *state[rank + 1 :])
            if following not in seen:
                seen.add(following)
                todo.append(following)
    assert tuple(map(len, programs)) in seen, "nobody may wait for ever"
    return False


def _latest(done: list) -> dict[tuple[str, str], int]:
    """Return the latest call of each kind of step, by what it was done with."""
    return {(kind, what): call for call, kind, what, _ in done}


KINDS = ("one_shot", "two_shot", "reduce_scatter")
"""An all_gather has the steps of a one_shot."""


@pytest.mark.parametrize(("ranks", "calls"), [(2, 4), (3, 3), rarely(3, 4), rarely(4, 3)])
def test_no_rank_overwrites_what_another_still_reads(ranks, calls):
    """Calls of all kinds follow each other in one memory."""
    assert steps_of("all_gather", 1, ranks) == steps_of("one_shot", 1, ranks)
    for names in product(KINDS, repeat=calls):
        assert not overwritten(names, BUFFERS, ranks), names


@pytest.mark.parametrize("names", product(KINDS, repeat=2))
def test_one_buffer_is_too_few(names):
    """Calls may have other sizes, and so wires in other places of the buffer."""
    assert overwritten(names, 1, 2)


@pytest.mark.parametrize(
    ("name", "programs"),
    [("one_shot", 256), ("two_shot", 32), ("reduce_scatter", 32), ("all_gather", 256)],
)
def test_programs_share_tiles_and_shards(name, programs):
    """131,072 values in tiles of 512: each program of a rank has a tile of one wire."""
    exchange = of(name, programs=programs)
    assert exchange.tiles == programs
    assert exchange.all_programs == 256
    assert unsupported_reason(exchange, processors=64) == ""
    assert "256 programs on 63 processors" in unsupported_reason(exchange, processors=63)
