"""Step times of ``commpass compare``: how they are recorded, read and compared."""

from __future__ import annotations

import gc
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from dumps import SITES, make
from torch import nn

import commpass
from commpass.distributed import step_times
from commpass.errors import CommpassError
from commpass.plan import dump
from commpass.report.compare import losses, page
from commpass.report.compare.jobs import Job, environment_of
from commpass.report.compare.steps import WARM_UP, Steps, read, steps_of
from commpass.report.compare.verdict import compare, middle_half
from commpass.utils import step_records
from commpass.utils.step_records import EXPLICIT, START, StepRecord

# recording


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for step times, as ``commpass compare`` sets it."""
    monkeypatch.setenv(step_times.FOLDER, str(tmp_path))
    return tmp_path


def records(folder: Path) -> list[StepRecord]:
    [file] = step_records.files(folder)
    return step_records.read(file)


def test_backend_records_that_commpass_is_in_use(folder: Path):
    commpass.backend("off")
    assert [each.clock for each in records(folder)] == [START]


def test_nothing_is_recorded_without_the_variable(monkeypatch, tmp_path):
    monkeypatch.delenv(step_times.FOLDER, raising=False)
    assert step_times.open_recorder() is None
    commpass.step()
    assert not list(tmp_path.iterdir())


def test_folder_that_another_host_does_not_have_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv(step_times.FOLDER, str(tmp_path / "gone"))
    with pytest.raises(CommpassError, match="a folder that all hosts share"):
        commpass.backend("off")


def test_each_step_of_an_optimizer_is_a_line_at_once(folder: Path):
    commpass.backend("off")
    model = nn.Linear(2, 2)
    first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    for optimizer in (first, first, second, first):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    found = records(folder)[1:]
    assert [each.clock for each in found] == [f"optimizer {n}" for n in (0, 0, 1, 0)]
    assert all(each.seconds > 0 for each in found)
    assert not found[1].compiled


def test_explicit_step_takes_the_place_of_optimizers(folder: Path):
    for _ in range(WARM_UP + 6):
        commpass.step()
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    for _ in range(50):
        optimizer.step()
    found = steps_of(read(folder))
    assert found.clock == EXPLICIT
    assert len(found.ms) + found.left_out == WARM_UP + 6


def test_step_that_compiles_is_marked(folder: Path):
    commpass.step()
    commpass.step()
    step_times.note_compile()
    commpass.step()
    commpass.step()
    assert [each.compiled for each in records(folder)[1:]] == [True, False, True, False]


class Event:
    """An event of a GPU that is reached when the test says so."""

    made: ClassVar[list] = []

    def __init__(self, enable_timing: bool):
        assert enable_timing
        self.reached, self.at_ms = False, 0.0
        Event.made.append(self)

    def record(self) -> None: ...

    def query(self) -> bool:
        return self.reached

    def elapsed_time(self, later: Event) -> float:
        return later.at_ms - self.at_ms


def test_on_a_gpu_steps_are_timed_by_events_without_waiting(folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    Event.made = []
    recorder = step_times.Recorder(folder)
    for _ in range(3):
        recorder.end_step(EXPLICIT)
    begin, first, second, third = Event.made
    assert len(records(folder)) == 1
    begin.reached = first.reached = second.reached = True
    first.at_ms, second.at_ms = 100.0, 125.0
    recorder.write_complete()
    assert [each.seconds for each in records(folder)[1:]] == [0.1, 0.025]
    third.reached, third.at_ms = True, 151.0
    recorder.write_complete()
    assert records(folder)[-1].seconds == pytest.approx(0.026)


def test_steps_that_are_written_after_the_end_of_the_process_group_have_its_rank(
    folder, monkeypatch
):
    """Without a launcher, no environment variable has the rank."""
    monkeypatch.delenv("RANK", raising=False)
    recorder = step_times.Recorder(folder)
    monkeypatch.setattr(step_times, "ready", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    recorder.end_step(EXPLICIT)
    monkeypatch.setattr(step_times, "ready", lambda: False)
    recorder.end_step(EXPLICIT)
    assert [each.rank for each in records(folder)] == [0, 3, 3]


def test_new_optimizer_does_not_share_the_clock_of_another(folder: Path):
    recorder = step_times.Recorder(folder)
    first, second, third = (torch.optim.SGD([nn.Parameter(torch.ones(1))]) for _ in range(3))
    assert [recorder.name_of(each) for each in (first, second)] == ["optimizer 0", "optimizer 1"]
    del first
    gc.collect()
    names = [recorder.name_of(each) for each in (second, third)]
    assert names == ["optimizer 1", "optimizer 0"]


def test_last_line_of_a_killed_process_is_left_out(tmp_path: Path):
    whole = step_records.encode(StepRecord(0, EXPLICIT, 0.5))
    (tmp_path / "a.jsonl").write_bytes(whole + whole[:-9])
    assert step_records.read(tmp_path / "a.jsonl") == [StepRecord(0, EXPLICIT, 0.5)]


# reading


def rank(number: int, *seconds: float, clock: str = "optimizer 0", compiled=(0,)):
    return [StepRecord(number, clock, each, at in compiled) for at, each in enumerate(seconds)]


def test_warm_up_and_steps_after_a_compile_do_not_count():
    seconds = [9.0, 1.0, 1.0, 1.0, 0.1, 0.2, 5.0, 2.0, 2.0, 2.0, 0.3]
    found = steps_of([rank(0, *seconds, compiled=(0, 6))])
    assert found.ms == pytest.approx((100, 200, 300))
    assert found.left_out == 8
    none = steps_of([rank(0, *[1.0] * (WARM_UP + 1), compiled=())])
    assert (len(none.ms), none.left_out) == (1, WARM_UP)


def test_time_of_a_step_is_the_median_of_ranks():
    ranks = [rank(n, *[1.0] * 4, 0.1 * (n + 1)) for n in range(3)]
    assert steps_of(ranks).ms == pytest.approx((200,))
    assert steps_of([rank(0, *[1.0] * 4, 0.5), rank(1, *[1.0] * 4)]).ms == pytest.approx((500,))


def test_clock_is_the_optimizer_that_steps_most():
    both = [*rank(0, *[1.0] * 3), *rank(0, *[0.5] * 9, clock="optimizer 1")]
    assert steps_of([both]).clock == "optimizer 1"
    assert steps_of([[StepRecord(0, START)]]) == Steps(ranks=1)


def test_rank_that_was_started_again_counts_once(tmp_path: Path):
    for start, seconds in ((1, 0.5), (2, 0.25)):
        name = step_records.file_name(start, "host", 10 + start)
        (tmp_path / name).write_bytes(step_records.encode(StepRecord(1, EXPLICIT, seconds)))
    assert read(tmp_path) == [[StepRecord(1, EXPLICIT, 0.25)]]


def test_processes_of_a_rank_without_steps_do_not_count(tmp_path: Path):
    """Such as those of a data loader, which begin later and have the rank of their parent."""
    step = StepRecord(0, EXPLICIT, 0.5)
    for start, found in ((1, [StepRecord(0, START), step]), (2, [StepRecord(0, START)])):
        name = step_records.file_name(start, "host", 10 + start)
        (tmp_path / name).write_bytes(b"".join(map(step_records.encode, found)))
    assert read(tmp_path) == [[StepRecord(0, START), step]]


# losses


STEPS_3_AND_4 = {"step 3": 0.5, "step 4": 2.0}


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (["step 1 loss 2.5", "step 2 loss 2.25e0"], {"step 1": 2.5, "step 2": 2.25}),
        (["{'loss': 2.5, 'grad_norm': 1.0, 'epoch': 1}"], {"epoch 1": 2.5}),
        (["epoch 1, step 3: train loss = nan"], {"epoch 1 step 3": float("nan")}),
        (["step 4 | Loss: 1.5", "step 4 | Loss: 1.5"], {"step 4": 1.5}),
        (["loss=3", "loss=2"], {"line 1": 3.0, "line 2": 2.0}),
        (["lossless", "no loss here", "glossy 3", "loss of 3 ranks at 5"], {"line 1": 3.0}),
        (["step 3 loss: \x1b[1;32m0.5\x1b[0m", "\x1b[1mstep 4\x1b[0m loss 2"], STEPS_3_AND_4),
        (["step 3 train_loss=0.5", "step 4 loss: tensor(2., grad_fn=<X>)"], STEPS_3_AND_4),
        (["step 3 loss -> 0.5/9", "step 4: loss - 2"], STEPS_3_AND_4),
        (["step 3 loss -0.5", "loss:    -.5e-3, step:   4"], {"step 3": -0.5, "step 4": -0.0005}),
        (["{'loss': '0.5', 'epoch': '0.08'}"], {"epoch 0.08": 0.5}),
        (["step 1 loss 1,234.5", "step 2 loss -inf"], {"step 1": 1234.5, "step 2": -math.inf}),
        (["loss scale 3", "loss_scale=65536", "loss 0.5m", "loss 0x10"], {}),
        (["loss 3 " + "x" * 9_999_999 + " step 7"], {"line 1": 3.0}),
        ([], {}),
    ],
)
def test_losses_are_found_in_the_output(lines, found):
    assert str(losses.find(lines)) == str(found)


@pytest.mark.parametrize(
    ("expression", "lines", "found"),
    [
        (r"ppl=([0-9.]+)?", ["step 1 ppl=", "step 2 ppl=2"], {"step 2": 2.0}),
        (r"ppl=([0-9.]+)|nll=([0-9.]+)", ["step 1 nll=3"], {"step 1": 3.0}),
        (r"ppl=(\S+)", ["ppl=n/a", "ppl=3.5."], {"line 1": 3.5}),
        (r"(\d+)", ["no number"], {}),
    ],
)
def test_lines_without_a_number_are_no_losses(expression, lines, found):
    assert losses.find(lines, losses.loss_pattern(expression)) == found


def test_expression_that_would_take_years_is_an_error(monkeypatch):
    monkeypatch.setattr(losses, "LINE_SECONDS", 0.05)
    pattern = losses.loss_pattern("(a+)+b([0-9])")
    with pytest.raises(CommpassError, match=r"\(a\+\)\+b.* takes more than 0.05 s for the line"):
        losses.find(["a" * 60], pattern)


@pytest.mark.parametrize("expression", ["(a{99999999999})", "(" * 9999 + ")" * 9999])
def test_expression_that_cannot_be_compiled_is_an_error(expression):
    with pytest.raises(CommpassError, match="is no regular expression"):
        losses.loss_pattern(expression)


def test_difference_of_losses():
    assert losses.difference({"step 1": 2.0, "step 2": 1.0}, {"step 1": 2.0, "step 2": 0.9}) == (
        pytest.approx(0.1)
    )
    nan, inf = float("nan"), float("inf")
    assert losses.difference({"a": nan, "b": inf}, {"a": nan, "b": inf}) == 0
    for ill in (nan, inf, -inf):
        assert losses.difference({"a": ill}, {"a": 1.0}) == inf
        assert losses.difference({"a": 1.0}, {"a": ill}) == inf
    assert losses.difference({"a": 1.0}, {"b": 1.0}) is None


def test_rows_of_losses_keep_the_first_and_the_last():
    columns = [{f"step {n}": float(n) for n in range(100)}, {"step 0": 1.0}]
    rows = losses.side_by_side(columns, 5)
    assert [name for name, _ in rows] == ["step 0", "step 25", "step 50", "step 74", "step 99"]
    assert rows[0][1] == [0.0, 1.0]
    assert rows[-1][1] == [99.0, None]


# verdict


def job(folder: Path, policy: str, ms, round_: int = 1, losses=None) -> Job:
    """A run with the plan of one compressed and one plain site; one of policy off compresses
    nothing."""
    where = folder / policy
    if not where.exists():
        dump.write(where / "dump", make(sites=(SITES[0],) * 2 if policy == "off" else SITES))
    return Job(
        policy=policy,
        round=round_,
        folder=where,
        status=0,
        seconds=1.0,
        used=True,
        steps=Steps(ms=tuple(ms), left_out=4, ranks=2, clock="optimizer 0"),
        losses=losses or {},
    )


FAST, SLOW = (10.0, 10.5, 11.0, 11.5, 12.0), (20.0, 21.0, 22.0, 23.0, 24.0)


def test_verdict_of_a_clear_result(tmp_path: Path):
    loss = {"step 1": 2.0}
    jobs = [
        job(tmp_path, policy, ms, round_, losses=loss)
        for round_ in (1, 2)
        for policy, ms in (("off", SLOW), ("taco", FAST))
    ]
    found = compare(["python", "x.py"], ["off", "taco"], jobs, [])
    assert found.verdict == (
        "taco is 2.00 times as fast as off: 11 ms a step instead of 22 ms. Its printed losses"
        " are those of off"
    )
    assert found.policies[1].faster == 2.0
    assert (found.policies[0].low_ms, found.policies[0].high_ms) == (21.0, 23.0)
    back = compare(["x"], ["taco", "off"], jobs, [])
    assert back.verdict == (
        "off is 2.00 times as slow as taco: 22 ms a step instead of 11 ms (off compresses no"
        " collective of this program). Its printed losses are those of taco"
    )


def test_verdict_says_if_none_of_several_policies_is_faster(tmp_path: Path):
    loss = {"step 1": 2.0}
    jobs = [
        job(tmp_path, policy, ms, round_, losses=loss)
        for round_ in (1, 2)
        for policy, ms in (("off", FAST), ("taco", SLOW), ("int8", [30.0] * 5))
    ]
    assert compare(["x"], ["off", "taco", "int8"], jobs, []).verdict == (
        "taco is 2.00 times as slow as off: 22 ms a step instead of 11 ms. Its printed losses are"
        " those of off. No policy is clearly faster than off"
    )


@pytest.mark.parametrize(
    ("ms", "marked"), [(FAST, ' class="verdict"'), (SLOW, "slow"), ([21.5] * 5, "unclear")]
)
def test_page_marks_a_verdict_that_is_slower_or_unclear(ms, marked, tmp_path: Path):
    off = (21.0, 21.5, 22.0, 22.5, 23.0) if marked != "slow" else FAST
    jobs = [
        job(tmp_path, policy, times, round_)
        for round_ in (1, 2)
        for policy, times in (("off", off), ("taco", ms))
    ]
    made = page.page(compare(["x"], ["off", "taco"], jobs, []))
    assert (marked if "=" in marked else f' class="verdict {marked}"') in made


def test_verdict_is_inconclusive_if_middle_halves_overlap(tmp_path: Path):
    near = [each + 0.9 for each in FAST]
    jobs = [job(tmp_path, "off", FAST), job(tmp_path, "taco", near)]
    found = compare(["x"], ["off", "taco"], jobs, []).verdict
    assert found.startswith(
        "inconclusive: the middle halves of taco (11.4 to 12.4 ms) and off (10.5"
    )


def test_verdict_is_inconclusive_if_rounds_differ(tmp_path: Path):
    jobs = [
        *(job(tmp_path, "off", SLOW * 3, 1), job(tmp_path, "taco", FAST * 3, 1)),
        *(job(tmp_path, "off", FAST[:1], 2), job(tmp_path, "taco", SLOW[:1], 2)),
    ]
    found = compare(["x"], ["off", "taco"], jobs, []).verdict
    opposite = "inconclusive: 1 round of 2 gave the opposite order of taco and off"
    assert found == f"{opposite}. Run more --rounds or more steps, or use an idle machine"


def test_verdict_is_inconclusive_if_nothing_was_compiled(tmp_path: Path):
    (tmp_path / "taco").mkdir()
    jobs = [job(tmp_path, "off", SLOW), job(tmp_path, "taco", FAST)]
    found = compare(["x"], ["off", "taco"], jobs, []).verdict
    assert found.startswith("inconclusive: commpass has compiled no graph under taco")


def test_traffic_is_that_of_the_plans(tmp_path: Path):
    jobs = [job(tmp_path, "off", SLOW), job(tmp_path, "taco", FAST)]
    off, taco = (each.traffic for each in compare(["x"], ["off", "taco"], jobs, []).policies)
    assert (off.sites, off.compressed, off.bytes, off.wire_bytes) == (2, 0, 16 << 20, 16 << 20)
    assert (taco.sites, taco.compressed, taco.bytes, taco.wire_bytes) == (2, 1, 16 << 20, 10 << 20)


def test_verdict_needs_some_steps(tmp_path: Path):
    jobs = [job(tmp_path, "off", FAST), job(tmp_path, "taco", [1.0])]
    found = compare(["x"], ["off", "taco"], jobs, []).verdict
    assert found.startswith("inconclusive: taco has 1 counted steps")


def test_verdict_names_the_fastest_of_several(tmp_path: Path):
    jobs = [
        job(tmp_path, name, ms) for name, ms in (("off", SLOW), ("a", FAST), ("b.toml", [1.0] * 9))
    ]
    found = compare(["x"], ["off", "a", "b.toml"], jobs, [])
    assert found.verdict.startswith("b.toml is 22.00 times as fast as off")
    assert found.verdict.endswith("It is the fastest of 3 policies")


def test_losses_that_differ_are_reported(tmp_path: Path):
    one, two = {"step 1": 2.0}, {"step 1": 1.9}
    jobs = [
        job(tmp_path, "off", SLOW, losses=one),
        job(tmp_path, "off", SLOW, 2, losses=two),
        job(tmp_path, "taco", FAST, losses=two),
    ]
    found = compare(["x"], ["off", "taco"], jobs, [])
    assert found.verdict.endswith("Its printed losses differ by at most 5.00%")
    assert any("not deterministic" in remark for remark in found.remarks)


def test_loss_that_is_nan_under_one_policy_is_in_the_verdict(tmp_path: Path):
    """Also if the first round is like that of the base."""
    good, bad = {"step 1": 2.0, "step 2": 1.5}, {"step 1": 2.0, "step 2": math.nan}
    jobs = [
        *(job(tmp_path, "off", SLOW, losses=good), job(tmp_path, "taco", FAST, losses=good)),
        *(job(tmp_path, "off", SLOW, 2, losses=good), job(tmp_path, "taco", FAST, 2, losses=bad)),
    ]
    found = compare(["x"], ["off", "taco"], jobs, [])
    assert found.verdict.endswith("The loss of taco at step 2 is nan, that of off is 1.5")
    assert "not finite" in page.page(found)
    back = compare(["x"], ["taco", "off"], jobs, []).verdict
    assert back.endswith("The loss of taco at step 2 is nan, that of off is 1.5")


def test_verdict_of_one_round_has_a_condition(tmp_path: Path):
    once = [job(tmp_path, "off", SLOW), job(tmp_path, "taco", FAST)]
    condition = "if the machine was equally fast in both runs"
    assert condition in compare(["x"], ["off", "taco"], once, []).verdict
    twice = [*once, job(tmp_path, "off", SLOW, 2), job(tmp_path, "taco", FAST, 2)]
    assert condition not in compare(["x"], ["off", "taco"], twice, []).verdict


def test_verdict_is_inconclusive_if_rounds_of_one_policy_differ_as_much(tmp_path: Path):
    """The machine became slower in the third round."""
    speeds = [(10.4, 10.0), (10.5, 10.1), (11.1, 10.8)]
    jobs = [
        job(tmp_path, policy, [ms + 0.01 * step for step in range(9)], round_)
        for round_, pair in enumerate(speeds, 1)
        for policy, ms in zip(("off", "taco"), pair, strict=True)
    ]
    found = compare(["x"], ["off", "taco"], jobs[:4], []).verdict
    assert found.startswith("taco is 1.040 times as fast as off")
    jobs[4:] = [replace(each, steps=Steps(ms=each.steps.ms[:2])) for each in jobs[4:]]
    found = compare(["x"], ["off", "taco"], jobs, []).verdict
    assert found.startswith("inconclusive: taco (10.1 ms) and off (10.5 ms) differ by no more than")


def test_program_that_sets_the_policy_itself_is_noted(tmp_path: Path):
    """The plans have the policy 'balanced', whatever the environment says."""
    plan = replace(make().plan, policy="balanced")
    for policy in ("off", "taco", "on", "balanced"):
        dump.write(tmp_path / policy / "dump", replace(make(), plan=plan))
    jobs = [job(tmp_path, "off", SLOW), job(tmp_path, "taco", FAST)]
    notes = [each for each in compare(["x"], ["off", "taco"], jobs, []).remarks if "itself" in each]
    assert [note.partition(":")[0] for note in notes] == [
        f"The program compiled under the policy 'balanced' instead of {policy!r}"
        for policy in ("off", "taco")
    ]
    jobs = [job(tmp_path, "on", SLOW), job(tmp_path, "balanced", FAST)]
    found = compare(["x"], ["on", "balanced"], jobs, []).remarks
    assert not any("itself" in each for each in found)


def test_verdict_is_inconclusive_if_nothing_differs(tmp_path: Path):
    """However much faster one of them was."""
    dump.write(tmp_path / "lossless" / "dump", make(sites=(SITES[0],) * 2))
    jobs = [job(tmp_path, "off", SLOW), job(tmp_path, "lossless", FAST)]
    found = compare(["x"], ["off", "lossless"], jobs, []).verdict
    assert found.startswith("inconclusive: the collectives are the same under lossless and off")


def test_middle_half():
    assert middle_half([5.0]) == (5.0, 5.0, 5.0)
    assert middle_half([1.0, 2.0, 3.0, 4.0, 5.0]) == (3.0, 2.0, 4.0)


# environment


def test_environment_of_each_policy(tmp_path: Path):
    given = {"COMMPASS": "on", "COMMPASS_POLICY": "taco", "PATH": "/bin"}
    off, on, other = (environment_of(name, tmp_path, given) for name in ("off", "on", "x.toml"))
    assert (off["COMMPASS"], off.get("COMMPASS_POLICY")) == ("off", None)
    assert (on.get("COMMPASS"), on.get("COMMPASS_POLICY")) == (None, None)
    assert (other.get("COMMPASS"), other["COMMPASS_POLICY"]) == (None, "x.toml")
    for each in (off, on, other):
        assert each["PATH"] == "/bin"
        assert each["COMMPASS_STEPS"] == str(tmp_path / "steps")


# page


def test_page_is_one_file_and_escapes_all_text(tmp_path: Path):
    jobs = [
        job(tmp_path, "off", [*SLOW, 900.0], losses={"step <1>": 2.0}),
        job(tmp_path, "taco", FAST, losses={"step <1>": 1.9}),
    ]
    found = compare(["python", "<script>.py"], ["off", "taco"], jobs, ["a & b"])
    text = page.page(found)
    assert "<script" not in text
    assert "&lt;script&gt;.py" in text
    assert "step &lt;1&gt;" in text
    assert "a &amp; b" in text
    assert found.verdict in text
    assert text.count("<polyline") == 2
    assert "1 slower step is drawn at the upper edge" in text
    assert "prefers-color-scheme: dark" in text
    assert not [line for line in text.splitlines() if "http" in line and "http-equiv" not in line]


def test_ticks_are_round():
    assert page.round_values(23.0) == [0, 5, 10, 15, 20]
    assert page.round_values(0.7) == [0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    assert page.spread(3) == [0, 1, 2]
    assert page.spread(101) == [0, 20, 40, 60, 80, 100]


def test_json_has_no_nan(tmp_path: Path, capsys):
    from commpass.report.tables import print_json

    found = compare(["x"], ["off", "taco"], [job(tmp_path, "off", FAST)], [])
    print_json(found)
    assert json.loads(capsys.readouterr().out)["policies"][1]["median_ms"] is None
