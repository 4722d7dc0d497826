"""Tile sizes are chosen by times, within a bound of time, and stored on disk.

Times and the clock are given by the tests. Kernel calls are stand-ins, or run in Triton's
interpreter.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field
from types import SimpleNamespace

import fake_cuda
import pytest
import torch
from interpreter import interpreted
from test_tile_choices import call_of, chain_of

from commpass.backend.options import AUTOTUNE_S, autotune_seconds
from commpass.errors import PolicyError
from commpass.lowering.timed import Timed

pytest.importorskip("triton", reason="kernels are written in Triton: pip install commpass[kernels]")

import commpass
from commpass.lowering.gpu import autotune, tile_cache, timing
from commpass.lowering.gpu.tile_sizes import Tile

CPU = torch.device("cpu")
TILES = (Tile(4), Tile(2), Tile(8), Tile(8, 2))


@dataclass(eq=False)
class Call:
    """A stand-in for a kernel call. ``results`` are those of a choice, or the error that it
    raises."""

    identity: str = "call"
    cost: float = 1.0
    choices: tuple[Tile, ...] = TILES
    device: torch.device = CPU
    results: dict[Tile, object] = field(default_factory=dict)
    ran: list[Tile] = field(default_factory=list)

    def examples(self) -> list[torch.Tensor]:
        return []

    def run(self, choice: Tile, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        self.ran.append(choice)
        result = self.results.get(choice, 1.0)
        if isinstance(result, Exception):
            raise result
        return [torch.tensor([result])]


def timer(us: dict[Tile, float], clock: list[float] | None = None, seconds: float = 1.0):
    """Return a timer that gives these times; each call takes seconds of the clock."""

    def time(call, device: torch.device) -> float:
        if clock is not None:
            clock[0] += seconds
        call()
        return us[call.args[0]]

    return time


US = {TILES[0]: 100.0, TILES[1]: 120.0, TILES[2]: 80.0, TILES[3]: 90.0}


def tuned(call: Call, us: dict[Tile, float] = US, **more) -> Timed:
    return autotune.tune({call: 1}, 10.0, timer(us), **more).found[call]


def test_fastest_choice_is_used():
    assert tuned(Call()) == Timed({"blocks": 8, "num_warps": 1}, 100.0, 80.0)


def test_static_choice_is_kept_unless_another_is_clearly_faster():
    near = {**US, TILES[2]: 98.0, TILES[3]: 97.1}
    assert tuned(Call(), near) == Timed(None, 100.0, 100.0)
    assert tuned(Call(), {**near, TILES[3]: 97.0}).choice == {"blocks": 8, "num_warps": 2}


def test_choice_that_fails_is_skipped_and_named(caplog):
    call = Call(results={TILES[2]: RuntimeError("out of resource: shared memory\nmore")})
    with caplog.at_level(logging.INFO, logger="commpass"):
        found = tuned(call)
    assert found.choice == {"blocks": 8, "num_warps": 2}
    assert found.skipped == ("8 blocks in 1 warps: RuntimeError: out of resource: shared memory",)
    assert "8 blocks in 1 warps" in caplog.text


def test_choice_that_gives_other_bytes_is_skipped():
    found = tuned(Call(results={TILES[2]: -1.0}))
    assert found.choice == {"blocks": 8, "num_warps": 2}
    assert "other bytes" in found.skipped[0]


def test_zeros_of_different_signs_are_other_bytes():
    call = Call(results=dict.fromkeys(TILES, 0.0) | {TILES[2]: -0.0})
    assert tuned(call).choice == {"blocks": 8, "num_warps": 2}


@pytest.mark.parametrize("place", [0, 2])
def test_kernel_without_memory_for_its_values_keeps_the_static_choice(place, tmp_path):
    call = Call(results={TILES[place]: torch.OutOfMemoryError("CUDA out of memory. Tried")})
    found = autotune.tune({call: 1}, 10.0, timer(US)).found[call]
    assert found == Timed(note="not timed: OutOfMemoryError: CUDA out of memory. Tried")


def test_gpu_that_can_run_nothing_any_more_is_an_error(monkeypatch):
    call = Call(device=torch.device("cuda", 0), results={TILES[1]: RuntimeError("illegal address")})

    def synchronize(device) -> None:
        raise RuntimeError("the GPU is lost")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    with pytest.raises(RuntimeError, match="the GPU is lost"):
        tuned(call)


# --- the bound of time ----------------------------------------------------------------------------


def test_longest_kernels_are_timed_first_and_the_rest_keeps_static_choices():
    small, large, often = Call("small", 1.0), Call("large", 9.0), Call("often", 4.0)
    now = [0.0]
    made = autotune.tune({small: 1, large: 1, often: 3}, 7.5, timer(US, now), clock=lambda: now[0])
    assert list(made.found) == [often, large, small]
    assert made.found[often] == Timed({"blocks": 8, "num_warps": 1}, 100.0, 80.0)
    assert made.found[large].note == ""
    assert made.found[small] == Timed(note="not all choices were timed within 7.5 s")
    assert small.ran == []
    assert made.timed == 2
    assert made.seconds == 8.0


def test_fastest_so_far_is_used_if_the_time_is_over():
    now, call = [0.0], Call()
    found = autotune.tune({call: 1}, 3.0, timer(US, now), clock=lambda: now[0]).found[call]
    assert found.choice == {"blocks": 8, "num_warps": 1}
    assert found.note == "not all choices were timed within 3 s"
    assert TILES[3] not in call.ran


# --- results on disk ------------------------------------------------------------------------------


def never(call, device: torch.device) -> float:
    raise AssertionError("a stored result is not timed again")


def test_stored_result_is_read_without_a_time(tmp_path):
    folder = tmp_path / "new"
    first = tuned(Call(), folder=folder)
    made = autotune.tune({Call(): 1}, 0.0, never, folder=folder)
    assert list(made.found.values()) == [first]
    assert (made.timed, made.stored) == (0, 1)
    (file,) = folder.iterdir()
    assert json.loads(file.read_text())["choice"] == {"blocks": 8, "num_warps": 1}


@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"{", b"\xff", b"[1]", b"{}", b"[" * 100_000),
        b'{"us": 3, "static_us": 3, "choice": {"blocks": 3}}',
        *(b'{"us": -3, "static_us": 3}', b'{"us": 3}', b'{"us": 1e300, "static_us": 1e300}'),
    ],
    ids=lambda text: text[:40].decode(errors="replace"),
)
def test_damaged_file_is_reported_and_written_again(text, tmp_path, caplog):
    first = tuned(Call(), folder=tmp_path)
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    file.write_bytes(text)
    assert tuned(Call(), folder=tmp_path) == first
    assert "is damaged, and its kernel is timed again" in caplog.text
    assert file.read_bytes() == whole


def test_file_that_cannot_be_replaced_leaves_no_other_files(tmp_path, caplog):
    tuned(Call(), folder=tmp_path)
    (file,) = tmp_path.iterdir()
    file.unlink()
    file.mkdir()
    assert tuned(Call(), folder=tmp_path).us == US[TILES[2]]
    assert "tile sizes are not stored" in caplog.text
    assert list(tmp_path.iterdir()) == [file]


def test_results_that_are_not_complete_are_not_stored(tmp_path):
    now = [0.0]
    autotune.tune({Call(): 1}, 3.0, timer(US, now), clock=lambda: now[0], folder=tmp_path)
    tuned(Call(results={TILES[0]: RuntimeError("failed")}), folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_folder_that_cannot_be_written_is_reported(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    assert tuned(Call(), folder=tmp_path / "file").choice
    assert "tile sizes are not stored" in caplog.text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("card", lambda device: "B200"),
        ("own_version", lambda: "2"),
        ("_triton_version", lambda: "9"),
    ],
)
def test_other_gpu_or_version_has_other_files(name, value, monkeypatch):
    before = tile_cache.key_of(Call())
    monkeypatch.setattr(tile_cache, name, value)
    assert tile_cache.key_of(Call()) != before


def test_other_choices_or_kernels_have_other_files():
    keys = {tile_cache.key_of(Call(n, choices=c)) for n in "ab" for c in (TILES, TILES[:2])}
    assert len(keys) == 4


def test_files_are_in_the_folder_of_inductor_unless_it_is_disabled(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert tile_cache.folder() == tmp_path / "commpass_tile_sizes"
    with torch._inductor.config.patch(force_disable_caches=True):
        assert tile_cache.folder() is None


def test_file_is_named_by_its_gpu():
    with fake_cuda.a_card():
        assert tile_cache.card(torch.device("cuda", 0)) == "NVIDIA H100 80GB HBM3, 132"


# --- real kernels, interpreted --------------------------------------------------------------------


def real() -> tuple[list[int], Timed]:
    """Time a chain with given times. Called in the interpreter."""
    call, state = call_of(chain_of("int8", "decode"), 2048), torch.random.get_rng_state()
    counts: list[int] = []

    def time(run, device: torch.device) -> float:
        counts.append(len(run()))
        return 10.0 - len(counts)

    found = autotune.tune({call: 1}, 1e9, time).found[call]
    assert torch.equal(torch.random.get_rng_state(), state)
    return counts, found


@pytest.mark.slow
def test_real_kernels_run_on_random_values_of_their_own():
    counts, found = interpreted(real)
    assert counts == [1] * 4
    assert found == Timed({"blocks": 8, "num_warps": 2}, 9.0, 6.0)


# --- times on a GPU -------------------------------------------------------------------------------


class Events:
    """Stand-ins for events of a GPU, with a log of what was recorded and called."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.count = 0

    def __call__(self, enable_timing: bool):
        assert enable_timing
        self.count += 1
        number = self.count
        return SimpleNamespace(
            record=lambda: self.log.append(f"event {number % 2}"),
            elapsed_time=lambda end: float(number),
        )


def test_time_of_a_call_is_between_two_events_after_other_writes(monkeypatch):
    events, memory = Events(), SimpleNamespace(zero_=lambda: events.log.append("write"))
    monkeypatch.setattr(torch.cuda, "Event", events)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: events.log.append("wait"))
    monkeypatch.setattr(torch, "empty", lambda *size, **how: memory)
    us = timing.time_us(lambda: events.log.append("call"), torch.device("cpu"))
    each = ["write"] * timing.FLUSHES + ["event 1", "call", "event 0"]
    assert events.log == each * timing.SAMPLES + ["wait"]
    assert us == 1e4  # the median of 1, 3, ..., 19 ms


# --- the option -----------------------------------------------------------------------------------


def test_option_follows_inductors_unless_it_is_given():
    assert autotune_seconds(None, "inductor") == 0.0
    with torch._inductor.config.patch(max_autotune=True):
        assert autotune_seconds(None, "inductor") == AUTOTUNE_S
        assert autotune_seconds(False, "inductor") == 0.0
        assert autotune_seconds(None, "aot_eager") == 0.0
    assert autotune_seconds(True, "inductor") == AUTOTUNE_S
    assert autotune_seconds(2.5, "inductor") == 2.5


@pytest.mark.parametrize("wrong", [-1, "yes", float("nan"), float("inf"), 1e9])
def test_wrong_option_is_refused(wrong):
    said = rf"^autotune={wrong!r}: must be True, False, or seconds for each graph from 0 to 86400"
    with pytest.raises(PolicyError, match=said.replace("+", r"\+")):
        commpass.backend("off", autotune=wrong)


@pytest.mark.parametrize("right", [None, True, False, 0, 30, 86400.0])
def test_option_is_a_switch_or_seconds(right):
    assert commpass.backend("off", autotune=right).autotune is right


@pytest.mark.parametrize("autotune", [True, None, False])
def test_log_says_once_that_a_cpu_times_nothing(autotune, caplog):
    made = commpass.backend("off", autotune=autotune)
    with (
        torch._inductor.config.patch(max_autotune=True),
        caplog.at_level(logging.INFO, "commpass"),
    ):
        for size in (3, 4):
            torch.compile(torch.nn.ReLU(), backend=made, dynamic=False)(torch.ones(size))
    lines = [line for line in caplog.messages if line.startswith("autotune=True: no kernel is")]
    assert len(lines) == (autotune is True)


def test_option_needs_inductor():
    with pytest.raises(PolicyError, match='kernels are only used with inner="inductor"'):
        commpass.backend("off", autotune=True, inner="aot_eager")
