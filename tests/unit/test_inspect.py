"""Inspect compiled kernels: small kernels compiled for processors that are not present, and
handwritten machine code."""

from __future__ import annotations

import re
import subprocess
from functools import lru_cache

import pytest
import triton.language as tl
from triton.backends.nvidia.compiler import get_ptxas

from commpass.errors import KernelError
from commpass.lowering.gpu.source import load, of_function, tile
from commpass.lowering.inspect import ARCHITECTURES, CARDS, Compiled, compile_kernel, predict
from commpass.lowering.inspect.architectures import architecture, cards_of, residence
from commpass.lowering.inspect.sass import Counts, Instruction, count_instructions, parse_sass

NVIDIA = ("sm_80", "sm_90", "sm_100")
H100 = next(card for card in CARDS if card.name == "H100 SXM")


@tile
def half(value):
    return value * 0.5


@tile
def middle(x, y, out, numel, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + at, mask=at < numel)
    b = tl.load(y + at, mask=at < numel)
    tl.store(out + at, half(a + b), mask=at < numel)


@tile
def centred(x, out, BLOCK: tl.constexpr):
    """Every value is needed twice, so that all of them must be held in between."""
    at = tl.arange(0, BLOCK)
    values = tl.load(x + at)
    tl.store(out + at, values - tl.max(values, 0))


@tile
def matmul(a, b, c, depth, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    rows, columns, inner = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    total = tl.zeros((M, N), tl.float32)
    for k in range(0, depth, K):
        left = tl.load(a + rows[:, None] * depth + k + inner[None, :])
        right = tl.load(b + columns[None, :] * depth + k + inner[:, None])
        total = tl.dot(left, right, total)
    tl.store(c + rows[:, None] * N + columns[None, :], total)


@tile
def divided(x, y, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.div_rn(tl.load(x + at), tl.load(y + at)))


@lru_cache
def of_middle(arch: str, hint: int = 16, dtype: str = "fp32") -> Compiled:
    types = {"x": f"*{dtype}", "y": f"*{dtype}", "out": f"*{dtype}", "numel": "i32"}
    kernel = load(of_function(middle))
    return compile_kernel(kernel, types, {"BLOCK": 2048}, arch, hints={"numel": hint})


@lru_cache
def of_matmul(arch: str, dtype: str) -> Compiled:
    types = {"a": f"*{dtype}", "b": f"*{dtype}", "c": "*fp32", "depth": "i32"}
    sizes = {"M": 64, "N": 64, "K": 64}
    return compile_kernel(load(of_function(matmul)), types, sizes, arch, hints={"depth": 16})


@lru_cache
def of_centred(arch: str, values: int) -> Compiled:
    types = {"x": "*fp32", "out": "*fp32"}
    return compile_kernel(load(of_function(centred)), types, {"BLOCK": values}, arch, num_warps=1)


@lru_cache
def of_divided() -> Compiled:
    types = {"x": "*fp32", "y": "*fp32", "out": "*fp32"}
    return compile_kernel(load(of_function(divided)), types, {"BLOCK": 128}, "sm_90", num_warps=4)


@pytest.mark.rest_slow(1)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_accesses_of_a_sum_are_as_wide_as_they_can_be(arch):
    found = of_middle(arch)
    threads = 4 * ARCHITECTURES[arch].warp
    each = 2048 // threads // 4
    assert found.loads == {16: 2 * each}
    assert found.stores == {16: each}
    assert found.spills == found.local == found.shared == 0
    assert found.matmuls == {}
    assert found.threads == threads
    assert 0 < found.registers < 64
    assert found.occupancy >= 0.75
    assert "def half" in found.source
    assert "def middle" in found.source
    assert (".target sm_" in found.assembly) == (arch in NVIDIA)


@pytest.mark.slow
def test_length_of_which_nothing_is_known_makes_narrow_accesses():
    """The mask may end anywhere: this is what hints are for."""
    found = of_middle("sm_90", hint=1)
    assert set(found.loads) == set(found.stores) == {4}
    assert found.loads[4] == 32


@pytest.mark.slow
def test_widths_are_those_of_the_dtype():
    found = of_middle("sm_90", hint=1, dtype="bf16")
    assert set(found.loads) == {2}
    assert set(of_middle("sm_90", hint=1, dtype="i8").loads) == {1}
    assert of_middle("sm_90", dtype="bf16").loads == {16: 4}


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "gfx942"])
def test_kernel_that_spills_is_seen(arch):
    few, many = of_centred(arch, 1024), of_centred(arch, 32768 if arch == "gfx942" else 8192)
    assert few.spills == few.local == 0
    assert many.spills > 0
    assert many.local > 0
    assert many.registers >= (512 if arch == "gfx942" else 255) - 1


@pytest.mark.slow
def test_spills_are_those_that_the_assembler_tells(tmp_path):
    found = of_centred("sm_90", 8192)
    text = tmp_path / "kernel.ptx"
    text.write_text(found.assembly)
    command = [get_ptxas(90).path, "-v", "--fmad=false", "--gpu-name=sm_90a"]
    command += ["--regAllocOptLevel=2", "-o", str(tmp_path / "kernel.cubin"), str(text)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    stores, loads = map(int, re.search(r"(\d+) bytes spill stores, (\d+)", done.stderr).groups())
    assert found.spills == stores + loads
    assert found.registers == int(re.search(r"Used (\d+) registers", done.stderr)[1])


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("arch", "dtype", "used"),
    [
        ("sm_80", "bf16", "HMMA"),
        ("sm_90", "bf16", "HGMMA"),
        ("sm_90", "fp8e4nv", "QGMMA"),
        ("sm_100", "bf16", "UTCHMMA"),
        ("sm_100", "fp8e4nv", "UTCQMMA"),
        ("gfx942", "bf16", "v_mfma_f32_"),
    ],
)
def test_matmuls_run_on_the_tensor_cores(arch, dtype, used):
    found = of_matmul(arch, dtype)
    assert found.matmuls
    assert all(name.startswith(used) for name in found.matmuls)
    assert found.spills == 0
    assert found.shared > 0
    if arch in NVIDIA:
        assert len(found.code.loops) == 1
        counts = count_instructions(found.code, [8])
        assert counts.loops == 0
        assert counts.unknown == ()
        assert count_instructions(found.code).loops == 1


@pytest.mark.slow
def test_slow_paths_of_a_division_are_not_counted():
    found = of_divided()
    assert "slowpath" in found.sass
    counts = count_instructions(found.code)
    # The usual form: one reciprocal, one check, five multiply-adds, and a branch around the call.
    assert counts.of("special") == 1
    assert counts.of("compare") == 1
    assert counts.of("fp32") == 5
    assert "CALL.REL.NOINC" not in counts.names
    assert found.code.loops == ()


@pytest.mark.slow
@pytest.mark.parametrize("arch", NVIDIA)
def test_every_instruction_is_of_a_known_kind(arch):
    for found in (of_middle(arch), of_matmul(arch, "bf16")):
        assert count_instructions(found.code).unknown == ()


@pytest.mark.slow
def test_sums_are_not_fused_into_products_unless_asked():
    kernel, types = load(of_function(fused)), {"x": "*fp32", "out": "*fp32"}
    plain = compile_kernel(kernel, types, {"BLOCK": 128}, "sm_90")
    other = compile_kernel(kernel, types, {"BLOCK": 128}, "sm_90", enable_fp_fusion=True)
    names = [count_instructions(one.code).names for one in (plain, other)]
    assert ("FFMA" in names[0], "FMUL" in names[0]) == (False, True)
    assert ("FFMA" in names[1], "FMUL" in names[1]) == (True, False)


@tile
def fused(x, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    value = tl.load(x + at)
    tl.store(out + at, value * value + value)


# Errors


def said(*args, **options) -> str:
    with pytest.raises(KernelError) as error:
        compile_kernel(*args, **options)
    return str(error.value)


def test_kernels_that_cannot_be_compiled_say_why():
    kernel = load(of_function(fused))
    types, sizes = {"x": "*fp32", "out": "*fp32"}, {"BLOCK": 128}
    assert "no architecture 'sm90'; did you mean 'sm_90'?" in said(kernel, types, sizes, "sm90")
    assert "no argument y" in said(kernel, types | {"y": "i32"}, sizes, "sm_90")
    assert "no argument n" in said(kernel, types, sizes, "sm_90", hints={"n": 16})
    assert "nothing given for out" in said(kernel, {"x": "*fp32"}, sizes, "sm_90")
    assert "is no kernel that can be compiled" in said(fused, types, sizes, "sm_90")
    with pytest.raises(KernelError, match=r"cannot be compiled for sm_80: .*fp8e4nv"):
        of_matmul("sm_80", "fp8e4nv")
    with pytest.raises(KernelError, match="gfx942: instructions are not counted"):
        _ = of_middle("gfx942").code


# Handwritten machine code


def listing(*lines: str) -> str:
    """Return lines as nvdisasm prints them: labels end in a colon, instructions get addresses."""
    shown, address = [".text.kernel:"], 0
    for line in lines:
        if line.endswith(":"):
            shown.append(line)
        else:
            shown.append(f"        /*{address:04x}*/              {line} ;")
            address += 16
    return "\n".join(shown)


NESTED = listing(
    "LDG.E.128 R4, desc[UR4][R2.64]",
    ".L_0:",
    "FADD R4, R4, R5",
    ".L_1:",
    "FMUL R4, R4, R5",
    "@P0 BRA `(.L_1)",
    "STS.64 [R2], R4",
    "BRA.U UP0, `(.L_0)",
    ".L_2:",
    "LDG.E.U8 R4, desc[UR4][R2.64]",
    "@!P1 BRA `(.L_2)",
    "STG.E.U16 desc[UR4][R2.64], R4",
    "EXIT",
    ".L_3:",
    "BRA `(.L_3)",
    "NOP",
)


def test_loops_are_found_in_their_order_and_depth():
    code = parse_sass(NESTED)
    assert [(loop.address, loop.depth) for loop in code.loops] == [(16, 1), (32, 2), (96, 1)]


def test_instructions_in_loops_count_as_often_as_they_run():
    names = count_instructions(parse_sass(NESTED), [3, 5, None]).names
    assert names == {
        "LDG.E.128": 1,
        "FADD": 3,
        "FMUL": 15,
        "BRA": 15 + 1,
        "STS.64": 3,
        "BRA.U": 3,
        "LDG.E.U8": 1,
        "STG.E.U16": 1,
        "EXIT": 1,
    }
    assert count_instructions(parse_sass(NESTED), [3, 5, None]).loops == 1
    assert count_instructions(parse_sass(NESTED)).loops == 3
    assert count_instructions(parse_sass(NESTED)).total == 10
    with pytest.raises(KernelError, match="4 trip counts for 3 loops"):
        count_instructions(parse_sass(NESTED), [1, 1, 1, 1])


def test_counts_by_kind_and_width():
    counts = count_instructions(parse_sass(NESTED), [1, 1, 7])
    assert counts.of("global load") == 8
    assert counts.widths("global load") == {16: 1, 1: 7}
    assert counts.bytes("global load", "global store") == 16 + 7 + 2
    assert counts.of("fp32") == 2
    assert counts.of("shared store") == 1
    assert counts.of("tensor") == 0


def test_subroutine_counts_where_it_is_called_and_a_rare_one_does_not():
    text = listing(
        "CALL.REL.NOINC `($div)",
        "CALL.REL.NOINC `($div)",
        "@!P0 BRA `(.L_0)",
        "MOV R1, R2",
        "CALL.REL.NOINC `($sqrt_slowpath)",
        "MOV R2, R1",
        ".L_0:",
        "BRA.DIV UR4, `(.L_1)",
        "EXIT",
        ".L_1:",
        "SHFL.IDX PT, R1, R2, R3, R4",
        "EXIT",
        "$div:",
        "IMAD R1, R2, R3, R4",
        "RET.REL.NODEC R2 `(kernel)",
        "$sqrt_slowpath:",
        "MUFU.RSQ R1, R2",
        "RET.REL.NODEC R2 `(kernel)",
    )
    names = count_instructions(parse_sass(text)).names
    assert names["IMAD"] == names["CALL.REL.NOINC"] == 2
    assert not {"MUFU.RSQ", "MOV", "SHFL.IDX"} & set(names)
    assert names["EXIT"] == 1


def test_loops_that_only_wait_have_no_trips():
    code = parse_sass(
        listing(
            ".L_0:",
            "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R5",
            "@!P0 BRA `(.L_0)",
            "EXIT",
        )
    )
    assert code.loops == ()
    assert len(code.kernel.loops) == 1
    counts = parse_sass(listing(".L_0:", "IADD3 R1, R1, 0x1, RZ", "@P0 BRA `(.L_0)", "EXIT"))
    assert len(counts.loops) == 1


def test_way_back_into_the_middle_of_a_loop_is_none_of_its_own():
    """As waits are laid out: after the end, with a jump back to where they failed."""
    code = parse_sass(
        listing(
            ".L_0:",
            "FADD R1, R1, R2",
            "@!P1 BRA `(.L_2)",
            ".L_1:",
            "FMUL R1, R1, R2",
            "@P0 BRA `(.L_0)",
            "EXIT",
            ".L_2:",
            "MUFU.EX2 R1, R1",
            "BRA `(.L_1)",
        )
    )
    assert [loop.address for loop in code.loops] == [0]
    assert count_instructions(code, [4]).names == {
        "FADD": 4,
        "BRA": 12,
        "FMUL": 4,
        "EXIT": 1,
        "MUFU.EX2": 4,
    }


def test_branches_of_a_loop_may_run_less_often_than_it_turns():
    """As for two loops in one: the end of a tile is a branch in the loop over its steps."""
    code = parse_sass(
        listing(
            ".L_0:",
            "HMMA.16816.F32.BF16 R4, R8, R12, R4",
            "@P1 BRA `(.L_1)",
            "STG.E.128 desc[UR4][R2.64], R4",
            ".L_1:",
            "FADD R1, R1, R2",
            "@P0 BRA `(.L_0)",
            "EXIT",
        )
    )
    names = count_instructions(code, [(64, 2)]).names
    assert (names["HMMA.16816.F32.BF16"], names["STG.E.128"], names["FADD"]) == (64, 2, 64)
    assert count_instructions(code, [64]).names["STG.E.128"] == 64


def test_names_of_no_known_kind_are_reported():
    counts = count_instructions(parse_sass(listing("WONDER.X R1", "EXIT")))
    assert counts.unknown == ("WONDER",)
    with pytest.raises(KernelError, match="no instructions"):
        parse_sass("nothing here")


@pytest.mark.parametrize(
    ("name", "kind", "width"),
    [
        ("LDG.E.EF.64", "global load", 8),
        ("LDGSTS.E.BYPASS.128", "async copy", 16),
        ("UTMALDG.2D", "bulk copy", 4),
        ("LDSM.16.M88.4", "shared load", 16),
        ("STL.128", "local store", 16),
        ("F2FP.BF16.F32.PACK_AB", "pack", 4),
        ("F2I.NTZ", "convert", 4),
        ("UIADD3", "uniform", 4),
        ("SHFL.BFLY", "shuffle", 4),
        ("BAR.SYNC.DEFER_BLOCKING", "barrier", 4),
    ],
)
def test_kinds_and_widths_of_instructions(name, kind, width):
    one = Instruction(0, name)
    assert one.kind == kind
    if "load" in kind or "store" in kind or "copy" in kind:
        assert one.width == width


# Occupancy, and what limits it


@pytest.mark.parametrize(
    ("arch", "registers", "shared", "warps", "programs", "limit"),
    [
        ("sm_90", 32, 0, 4, 16, "warps"),
        ("sm_90", 33, 0, 4, 12, "registers"),
        ("sm_90", 255, 0, 4, 2, "registers"),
        ("sm_80", 130, 0, 8, 1, "registers"),
        ("sm_90", 32, 0, 1, 32, "programs"),
        ("sm_90", 80, 0, 1, 24, "registers"),  # 25 if a warp could use two quarters
        ("sm_90", 32, 76 << 10, 4, 2, "shared"),  # 3 without the amount reserved for each
        ("sm_90", 32, 100 << 10, 4, 2, "shared"),
        ("sm_80", 32, 100 << 10, 4, 1, "shared"),
        ("sm_90", 32, 228 << 10, 4, 0, "shared"),
        ("gfx942", 64, 0, 4, 8, "warps"),
        ("gfx942", 100, 0, 4, 4, "registers"),
        ("gfx942", 64, 32 << 10, 4, 2, "shared"),
    ],
)
def test_how_many_programs_fit(arch, registers, shared, warps, programs, limit):
    found = residence(architecture(arch), registers, shared, warps)
    assert (found.programs, found.limit) == (programs, limit)
    assert found.occupancy == programs * warps / architecture(arch).warps


def test_limit_that_binds():
    """4 warps; on an H100 (132 multiprocessors, 1.83 GHz) 2415.6 clocks are 10 ns of a GPU."""
    card, clocks = H100, 132 * 1.83

    def of(names, moved=3350.0, programs=16):
        return predict(Counts(names), 4, programs, moved, card)

    copied = of({"LDG.E.128": 1, "STG.E.128": 1})
    assert (copied.limit, copied.share) == ("memory", 1.0)
    assert copied.ns["memory"] == pytest.approx(1.0)
    # A warp's 16 bytes per thread are 4 lines of 128 bytes, of which one passes per clock.
    assert copied.ns["load and store"] * clocks == pytest.approx(2 * 4 * 4)

    roots = of({"MUFU.RSQ": 100})
    assert roots.ns["special"] * clocks == pytest.approx(100 * 4 * 32 / 16)
    assert roots.limit == "special"
    assert roots.share == pytest.approx(clocks / 800)

    sums = of({"FADD": 1000, "IMAD": 200, "LOP3.LUT": 100, "BRA": 500})
    assert sums.ns["fma"] * clocks == pytest.approx(1200 * 4 * 32 / 128)
    assert sums.ns["multiply"] * clocks == pytest.approx(200 * 4 * 32 / 64)
    assert sums.ns["alu"] * clocks == pytest.approx(100 * 4 * 32 / 64)
    assert sums.ns["issue"] * clocks == pytest.approx(1800)
    assert sums.limit == "issue"

    pairs = of({"FFMA2": 100, "HFMA2.BF16_V2": 100, "POPC": 10})
    assert pairs.ns["fma"] * clocks == pytest.approx(2 * 100 * 4 * 32 / 128)
    assert pairs.ns["half"] * clocks == pytest.approx(100 * 4 * 32 / 128)
    assert pairs.ns["special"] * clocks == pytest.approx(10 * 4 * 32 / 16)

    alone = of({"LDG.E.128": 1, "STG.E.128": 1}, programs=1)
    assert alone.limit == "latency"
    assert alone.ns["latency"] * clocks == pytest.approx(479 + 32)
    busy = predict(Counts({"LDG.E.128": 1}), 4, 1, 3350.0, card, stays=True)
    assert busy.limit == "memory"
    wide = predict(Counts({"UTCHMMA": 1}), 4, 1, 0.0, card, 4096 * clocks, of="tensor")
    assert wide.ns["tensor"] == pytest.approx(1.0)
    assert (wide.limit, wide.share) == ("latency", pytest.approx(clocks / (clocks + 479)))
    nowhere = of({"LDG.E.128": 1}, programs=0)
    assert (nowhere.limit, nowhere.share) == ("latency", 0.0)


def test_sum_is_predicted_to_run_like_a_copy():
    found = of_middle("sm_90")
    moved = 3 * 2048 * 4
    for card in cards_of("sm_90"):
        one = predict(
            count_instructions(found.code), found.num_warps, found.residence.programs, moved, card
        )
        assert (one.limit, one.share) == ("memory", 1.0)
        assert one.ns["memory"] == pytest.approx(moved / card.gb_s)
