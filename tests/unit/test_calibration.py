"""Calibrations as data, the mixes that they lead to, and the policies and files made from those."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure
from tiers import examples
from typer.testing import CliRunner

import commpass
from commpass.calibration import Address, Calibration, CountedSite, ErrorLevel, MeasuredSites
from commpass.cli import app
from commpass.codecs import codec
from commpass.collectives import algorithm, find_algorithm
from commpass.costmodel.budget import Option, cheapest
from commpass.distributed.budget import excess
from commpass.distributed.samples import Reading
from commpass.errors import CalibrationError, PolicyError
from commpass.passes.candidates import candidates
from commpass.passes.choose import choose
from commpass.plan import NONE, Site
from commpass.policy import PRESETS, Policy
from commpass.policy.rules import Rule
from commpass.report.calibrate import draw

tried = settings(max_examples=examples(50, 150), deadline=None)
option = st.builds(Option, cost=st.integers(0, 9), loss=st.sampled_from([0.0, 0.25, 0.5, 1.0, 3.0]))
problem = st.lists(st.lists(option, min_size=1, max_size=4), min_size=0, max_size=5)
SLOW = commpass.ethernet(0.1)
CODECS = ("rotated", "rotated(bits=6)", "rotated(bits=4)", "rotated(bits=2)")


# --- the solver ------------------------------------------------------------------------------


def best_by_trying_all(places: list[list[Option]], budget: float) -> float | None:
    sums = (
        sum(each.cost for each in mix)
        for mix in itertools.product(*places)
        if sum(each.loss for each in mix) <= budget
    )
    return min(sums, default=None)


@tried
@given(problem, st.sampled_from([0.0, 0.5, 1.0, 2.75, 6.0]))
def test_cheapest_mix_is_that_of_trying_all(places, budget):
    found, best = cheapest(places, budget), best_by_trying_all(places, budget)
    if best is None:
        assert found is None
        return
    chosen = [some[at] for some, at in zip(places, found.chosen, strict=True)]
    assert found.cost == best == sum(each.cost for each in chosen)
    assert found.loss == sum(each.loss for each in chosen) <= budget


@tried
@given(problem, st.integers(1, 4))
def test_larger_budget_never_costs_more_even_where_little_is_remembered(places, most):
    budgets = [0.0, 0.25, 0.5, 1.0, 1.5, 3.0, 6.0, 15.0]
    costs = [
        math.inf if found is None else found.cost
        for found in (cheapest(places, budget, most) for budget in budgets)
    ]
    assert costs == sorted(costs, reverse=True)


def test_choice_with_little_memory_is_no_worse_than_the_hull():
    drawn = random.Random(1)
    places = [
        [Option(999, 0.0), *(Option(drawn.randint(1, 998), drawn.random()) for _ in range(6))]
        for _ in range(40)
    ]
    for budget in (4.0, 8.0, 16.0):
        few, many = cheapest(places, budget, 8), cheapest(places, budget, 20_000)
        assert many.cost <= few.cost <= 1.05 * many.cost
        for price in (50, 200, 800, 3000):  # the best of a Lagrangian relaxation at each price
            picked = [min(some, key=lambda each: each.cost + price * each.loss) for some in places]
            if sum(each.loss for each in picked) <= budget:
                assert few.cost <= sum(each.cost for each in picked)


# --- policies --------------------------------------------------------------------------------


def site(module: str, direction: str = "forward", nbytes: int = 1 << 20, **more) -> Site:
    fields = {
        "name": "",
        "kind": "all_reduce",
        "reduce_op": "sum",
        "group": "0",
        "group_label": "tp",
        "group_labels": ("tp", "world"),
        "group_size": 4,
        "dtype": "float32",
        "shape": (nbytes // 1024, 256),
        "bytes": nbytes,
        "width": 256,
        "by_messages": True,
        "module": module,
        "direction": direction,
    }
    return Site(**fields | more)


def place(module: str, sensitivity: float, direction: str = "forward", **more) -> MeasuredSites:
    one = site(module, direction, **more)
    return MeasuredSites(
        where=(Address.of(one),),
        sites=(CountedSite(site=one, calls=1.0),),
        errors={codec(name).spec: codec(name).relative_error() for name in CODECS},
        levels=(ErrorLevel(codec="rotated(bits=6)", error=0.024, sensitivity=sensitivity),),
        loss=sensitivity / 10,
    )


def calibration(*places: MeasuredSites, **more) -> Calibration:
    fields = {
        "commpass": "0.1.0",
        "torch": "2.13.0",
        "written": "2026-01-01T00:00:00+00:00",
        "world_size": 4,
        "batches": 2,
        "of": "gradients",
        "probes": ("rotated(bits=6)",),
        "loss": 2.5,
        "places": places,
    }
    return Calibration(**fields | more)


SOME = (
    place("", 0.3),
    place("layers.0.mlp", 0.2),
    place("layers.0", 0.02, "backward"),
    place("layers.1.mlp", 0.01, nbytes=4 << 20),
)


def test_nothing_may_be_lost_without_a_budget():
    found = calibration(*SOME).solve(0.0)
    assert {each.codec for each in found.chosen} == {NONE}
    assert found.error == 0
    assert found.sent_bytes == found.plain_bytes == 1.5 * (7 << 20)  # 2 (P - 1) / P of them


def test_mix_keeps_the_budget_and_is_smaller_than_one_codec_everywhere():
    found = calibration(*SOME)
    alike = found.solve(0.0).uniform("rotated(bits=4)")
    mixed = found.solve(alike[1])
    assert mixed.error <= alike[1]
    assert mixed.sent_bytes < alike[0]
    assert math.isclose(mixed.error**2, sum(each.share for each in mixed.chosen))
    by_module = {p.where[0].module: c for p, c in zip(mixed.places, mixed.chosen, strict=True)}
    assert by_module[""].error < by_module["layers.1.mlp"].error


@pytest.mark.slow
@tried
@given(st.lists(st.floats(1e-4, 2), min_size=1, max_size=5), st.floats(0, 0.2), st.floats(1, 3))
def test_larger_budget_sends_no_more(sensitivities, budget, more):
    found = calibration(*(place(f"m{i}", s) for i, s in enumerate(sensitivities)))
    assert found.solve(budget * more).sent_bytes <= found.solve(budget).sent_bytes


def test_two_shot_is_taken_to_lose_more_than_one_encode():
    """Its values are encoded twice: once as a sum."""
    one = calibration(place("m", 0.1))
    shot = {
        name: one.solve(1.0, base=Policy(algorithms=(name,))).considered[0]
        for name in ("one_shot", "two_shot")
    }
    for once, twice in zip(shot["one_shot"][1:], shot["two_shot"][1:], strict=True):
        assert math.isclose(twice.error, once.error * math.sqrt(2), rel_tol=1e-3)
        assert math.isclose(once.error, one.places[0].errors[once.codec], rel_tol=1e-3)


def test_cost_model_takes_what_was_chosen_or_what_loses_no_more():
    found = calibration(*SOME)
    for budget in (0.005, 0.02, 0.1):
        mixed = found.solve(budget, profile=SLOW)
        for exactly in (False, True):
            policy = found.policy(budget, profile=SLOW, exactly=exactly)
            for each, chosen in zip(mixed.places, mixed.chosen, strict=True):
                one = dataclasses.replace(each.sites[0].site, name="s")
                allowed, number = policy.allowed(one)
                assert number is not None
                for spec, way in itertools.product(allowed.codecs, allowed.algorithms):
                    alone = codec(spec).relative_error()
                    error = algorithm("all_reduce", way).error(codec(spec), 4) / alone
                    assert each.errors[spec] * error <= chosen.error * (1 + 1e-4)
                options = candidates(one, allowed, SLOW, True)
                (planned,) = choose([one], [options], [allowed], SLOW)
                if exactly:
                    assert planned.codec == chosen.codec
                if planned.compressed:
                    alone = codec(planned.codec).relative_error()
                    error = each.errors[planned.codec] * planned.error / alone
                    assert error <= chosen.error * (1 + 1e-4)


def test_sensitivities_between_levels():
    levels = (
        ErrorLevel(codec="a", error=0.01, sensitivity=1.0),
        ErrorLevel(codec="b", error=0.16, sensitivity=3.0),
    )
    one = dataclasses.replace(SOME[0], levels=levels)
    for error, sensitivity in ((0.001, 1), (0.01, 1), (0.04, 2), (0.16, 3), (0.5, 3)):
        assert math.isclose(one.change(error), error * sensitivity)
    assert one.change(0.0) == 0
    assert one.sensitivity == 1


@pytest.mark.slow
def test_rules_of_deeper_modules_come_first():
    rules = calibration(*SOME).policy(0.05).rules
    assert [rule.module for rule in rules] == ["layers.0.mlp", "layers.1.mlp", "layers.0", ""]


def test_merged_sites_are_allowed_the_same():
    merged = dataclasses.replace(SOME[1], where=(Address.of(site("a")), Address.of(site("b"))))
    one, other = calibration(merged).policy(0.05).rules
    assert dataclasses.replace(one, module="b") == other


def test_sites_that_the_base_policy_keeps_stay_uncompressed():
    keep, more = Rule(module="layers.1", keep=True), Rule(module="head", codec="int8")
    base = Policy(rules=[keep, more], skip="group", codecs="bf16")
    policy = calibration(*SOME).policy(0.1, base=base)
    assert policy.allowed(dataclasses.replace(site("layers.1.mlp"), name="s"))[0].codecs == ()
    assert policy.rules[-2:] == (keep, more)
    assert (policy.skip, policy.codecs) == (("group",), ("bf16",))
    off = calibration(*SOME).solve(0.1, base="off")
    assert {each.codec for each in off.chosen} == {NONE}


def test_time_instead_of_bytes():
    found = calibration(*SOME)
    fast = found.solve(0.1, profile=SLOW, cheapest="time")
    assert fast.us <= found.solve(0.1, profile=SLOW).us


LIKE = tuple(place(f"like.{number}", 0.1 + number / 7) for number in range(8))
"""Their squares, added in another order, have other sums."""
SHUFFLED = """
import random, sys
sys.path[:0] = {path!r}
from test_calibration import LIKE, SOME, calibration
import dataclasses
mixed = lambda some: dict(random.sample(sorted(some.items()), len(some)))
some = [*SOME, *LIKE]
random.shuffle(some)
some = [dataclasses.replace(p, errors=mixed(p.errors)) for p in some]
found = calibration(*some).solve(0.03)
print(repr(found.chosen))
"""


@pytest.mark.every
def test_order_and_hash_seed_change_nothing():
    code = SHUFFLED.format(path=[str(Path(__file__).parent), str(Path(__file__).parents[1])])
    said = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[2])},
        ).stdout
        for seed in ("1", "2")
    }
    assert said == {repr(calibration(*SOME, *LIKE).solve(0.03).chosen) + "\n"}


# --- places without a measured effect --------------------------------------------------------


def no_effect(module: str, error: float = 0.024) -> MeasuredSites:
    """Values of this place reach no parameter; with ``error=0``, they are all 0."""
    one = place(module, 0.0)
    errors = {**one.errors, "exponent(bits=26.82)": 0.0}
    if not error:
        errors = dict.fromkeys(errors, 0.0)
    levels = (ErrorLevel(codec="rotated(bits=6)", error=error, sensitivity=0.0),)
    return dataclasses.replace(one, errors=errors, levels=levels)


@pytest.mark.parametrize("error", [0.024, 0.0])
@pytest.mark.parametrize("exactly", [False, True])
def test_place_without_effect_gets_lossless_codecs_only(error, exactly):
    found = calibration(place("a", 0.2), no_effect("b", error))
    solved = found.solve(0.02)
    assert [codec(each.codec).lossless for each in solved.chosen] == [False, True]
    rules = {rule.module: rule for rule in found.policy(0.02, exactly=exactly).rules}
    assert rules["b"].codec == ("exponent(bits=26.82)",)
    assert "rotated" in str(rules["a"].codec)


def test_place_without_effect_is_kept_if_no_lossless_codec_was_measured():
    one = dataclasses.replace(place("b", 0.0), errors=place("b", 0.1).errors)
    (rule,) = calibration(one).policy(0.5).rules
    assert rule.keep


def test_noise_of_kernels_is_no_effect_and_little_effect_is_one():
    assert place("a", 1e-6).without_effect  # 2.4e-8 of the gradients, at an error of 2.4 %
    assert not place("a", 1e-3).without_effect
    lossless = dataclasses.replace(place("a", 0.0), levels=())
    assert not lossless.without_effect


def test_places_without_effect_are_named(tmp_path):
    calibration(place("a", 0.2), no_effect("b"), no_effect("c", 0.0)).write(tmp_path / "c.json")
    done = run("--from", tmp_path / "c.json", "--max-error", "0.02", "-o", tmp_path / "p.toml")
    assert done.exit_code == 0, done.output
    assert done.stderr.splitlines()[:2] == [
        "only lossless codecs: all_reduce of b (forward, tp): no error there changes the gradients,"
        " so the budget does not limit it",
        "only lossless codecs: all_reduce of c (forward, tp): all values there are 0, so the budget"
        " does not limit it",
    ]


# --- the error check -------------------------------------------------------------------------


def with_peaks(one: MeasuredSites, factor: float = 1.0, **more) -> MeasuredSites:
    """A place where the errors of calls were up to ``factor`` times those of Gaussian data."""
    errors = {spec: codec(spec).relative_error() * factor for spec in one.errors}
    peaks = {
        spec: Reading(**{"error": error, "lost": 0.01, "worst": 2 * error, **more})
        for spec, error in errors.items()
        if not codec(spec).lossless
    }
    return dataclasses.replace(one, errors=errors, peaks=peaks)


@pytest.mark.parametrize("factor", [0.2, 1.0, 1.3, 4.0])
@pytest.mark.parametrize("budget", [0.005, 0.02, 0.1])
def test_rules_allow_the_errors_that_were_measured(factor, budget):
    """A rule with the error of Gaussian data would be over its limit on the calibrated values."""
    places = [with_peaks(each, factor) for each in SOME]
    found = calibration(*places)
    rules = {(rule.module, rule.direction): rule for rule in found.policy(budget).rules}
    compressed = 0
    for each in places:
        rule = rules[each.where[0].module, each.where[0].direction]
        for spec, way in itertools.product(rule.codec or (), rule.algorithm or ()):
            if (carried := find_algorithm("all_reduce", way)) is None or spec not in each.peaks:
                continue
            gaussian = carried.error(codec(spec), 4)
            alone = codec(spec).relative_error()
            real = dataclasses.replace(
                each.peaks[spec], error=each.peaks[spec].error * gaussian / alone
            )
            assert gaussian <= rule.max_error
            assert not excess(real, rule.max_error)
            assert real.error * 1.2 <= rule.max_error or rule.max_error == 1
            compressed += 1
    assert compressed


@pytest.mark.parametrize("over", [{"lost": 0.6}, {"worst": 1.1}, {"whole": True}])
def test_codecs_that_the_error_check_refuses_are_not_chosen(over):
    places = [with_peaks(place("a", 0.2), **over), with_peaks(place("b", 0.2))]
    solved = calibration(*places).solve(0.02)
    assert [codec(each.codec).lossless for each in solved.chosen if each.codec != NONE] == [False]
    assert solved.chosen[0].codec == NONE
    assert calibration(*places).policy(0.02).rules[0].keep


# --- files -----------------------------------------------------------------------------------


def test_json_out_and_in(tmp_path):
    found = calibration(*SOME, with_peaks(place("peaks", 0.1)), remarks=("one",))
    found.write(tmp_path / "c.json")
    again = Calibration.read(tmp_path / "c.json")
    assert again == found
    assert again.digest() == found.digest()
    assert (
        dataclasses.replace(found, written="2027-01-01T00:00:00+00:00").digest() == found.digest()
    )
    assert dataclasses.replace(found, batches=3).digest() != found.digest()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"format": "commpass-calibration", "version": 99, "commpass": "9.0"}', "version 99 was"),
        ('{"format": "commpass-profile", "version": 1}', "not a commpass calibration"),
        ('{"format": "commpass-cal', "cut short"),
        ('{"format": "commpass-calibration", "version": 1}', "damaged calibration"),
    ],
)
def test_files_that_are_none(tmp_path, text, said):
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(CalibrationError, match=said):
        Calibration.read(tmp_path / "c.json")


def test_folder_that_is_not_there(tmp_path):
    with pytest.raises(CalibrationError, match=r"there is no folder .*none; make it first"):
        calibration(*SOME).write(tmp_path / "none" / "c.json")


def reread(policy: Policy, path: Path) -> Policy:
    path.write_text(policy.to_toml(), encoding="utf-8")
    return Policy.from_toml(path)


@pytest.mark.parametrize("budget", [0.0, 0.01, 0.2])
def test_policy_out_and_in(tmp_path, budget):
    policy = calibration(*SOME).policy(budget)
    assert reread(policy, tmp_path / "p.toml") == policy


@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "off"])
def test_presets_out_and_in(tmp_path, preset):
    assert reread(PRESETS[preset], tmp_path / "p.toml") == PRESETS[preset]


def test_off_is_no_file():
    with pytest.raises(PolicyError, match="preset = 'off'"):
        PRESETS["off"].to_toml()


@tried
@given(st.text(max_size=8), st.floats(0, 1), st.booleans())
@example('a"b\\\n\x7f\x00', 1e-7, True)
def test_any_name_and_number_out_and_in(tmp_path_factory, name, number, force):
    rules = [Rule(module=name, codec="int8", max_error=number, force=force, kind=["all_reduce"])]
    policy = Policy(name=name, rules=rules, max_error=number, reassociate=force)
    again = reread(policy, tmp_path_factory.mktemp("toml") / "p.toml")
    assert again.to_toml() == policy.to_toml()
    assert (again.name, again.rules[0].module) == (name, name)
    assert again.rules[0].max_error == again.max_error == number


# --- errors and the command line -------------------------------------------------------------


@pytest.mark.parametrize("budget", [math.nan, -0.1, "2%", None, math.inf])
def test_budget_that_is_no_number(budget):
    with pytest.raises(CalibrationError, match=r"max_error=.*must be a number.*such as 0.02"):
        calibration(*SOME).policy(budget)


def test_cheapest_by_what():
    with pytest.raises(CalibrationError, match="did you mean 'time'"):
        calibration(*SOME).solve(0.1, cheapest="times")


def test_calibration_without_ranks_is_refused():
    with pytest.raises(CalibrationError, match="process group of several ranks"):
        commpass.calibrate(lambda x: x, [])


def run(*words):
    return CliRunner().invoke(app, ["calibrate", *map(str, words)])


@pytest.mark.slow
def test_another_budget_from_the_command_line(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("COMMPASS_PROFILE", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    calibration(*SOME, remarks=("not measured: x",)).write(tmp_path / "c.json")
    out, plot = tmp_path / "p.toml", tmp_path / "p.png"
    done = run("--from", tmp_path / "c.json", "--max-error", "0.02", "-o", out, "--plot", plot)
    assert done.exit_code == 0, done.output
    assert "layers.0.mlp" in done.stdout
    assert "rotated(bits=4) everywhere" in done.stdout
    assert "not measured: x" in done.stderr
    said = " ".join(done.stdout.split())
    assert "compresses a site only where it predicts a gain" in said
    assert "No --profile was given: ethernet-10g is assumed" in said
    more = run(
        "--from", tmp_path / "c.json", "--max-error", "0.02", "-o", tmp_path / "q.toml",
        "--profile", "nvlink-4",
    )  # fmt: skip
    assert "is assumed" not in more.stdout
    assert Policy.from_toml(out) == calibration(*SOME).policy(0.02, name="p")
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_picture_says_what_it_shows(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: drawn.append(self))
    draw(calibration(*SOME).solve(0.02), "a title", tmp_path / "p.png")
    (axes,) = drawn[0].axes
    assert "sensitivity" in axes.get_xlabel()
    (legend,) = drawn[0].legends
    told = {text.get_text() for text in legend.get_texts()}
    assert told <= {"forward", "backward"}
    assert "forward" in told
    drawn[0].draw_without_rendering()
    assert not legend.get_window_extent().overlaps(axes.get_window_extent())


@pytest.mark.parametrize("word", ["--train", "--inference"])
def test_command_measures_what_it_is_asked_for(word, fake_group, tmp_path, monkeypatch):
    fake_group(2)
    asked = {}

    def measured(model, batches, base, **options):
        asked.update(options)
        return calibration(*SOME)

    monkeypatch.setattr("commpass.report.calibrate.calibrate", measured)
    (tmp_path / "m.py").write_text("def build(mesh):\n    return None, []\n")
    words = (f"{tmp_path}/m.py:build", "--mesh", "tp=2", "--max-error", "0.1", word)
    done = run(*words, "--codec", "int8", "-o", str(tmp_path / "p.toml"))
    assert done.exit_code == 0, done.output
    assert asked["train"] is (word == "--train")
    assert asked["codecs"] == ["int8"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--max-error", "0.1"], "give FILE.py:FUNCTION and --mesh"),
        (
            ["x.py:f", "--mesh", "tp=2", "--max-error", "0.1"],
            "torchrun --nproc-per-node 2 -m commpass calibrate x.py:f --mesh tp=2",
        ),
        (["--from", "{c}", "--max-error", "nan", "-o", "{t}"], "--max-error nan: must be a share"),
        (["--from", "{c}", "--max-error", "-1", "-o", "{t}"], "--max-error -1.0: must be"),
        (["--from", "{c}", "--max-error", "5", "-o", "{t}"], "--max-error 5.0: must be"),
        (
            ["--from", "{c}", "--max-error", "0.1", "--codec", "int8"],
            "c.json has what was measured; measure again",
        ),
        (
            ["--from", "{c}", "--max-error", "0.1", "--inference"],
            "c.json is of gradients; measure again",
        ),
        (["--from", "{c}", "--max-error", "0.1", "-o", "p.json"], "a policy is a .toml file"),
        (["--from", "{c}", "--max-error", "0.1", "-o", "/none/p.toml"], "is no folder"),
        (["x.py:f", "--from", "{c}", "--max-error", "0.1", "-o", "{t}"], "not both"),
        (["--from", "{c}", "--max-error", "0.1", "--policy", "blanced"], "'balanced'"),
    ],
)
def test_errors_for_people(tmp_path, words, said, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    calibration(*SOME).write(tmp_path / "c.json")
    done = run(*(each.format(c=tmp_path / "c.json", t=tmp_path / "p.toml") for each in words))
    assert done.exit_code == 2, done.output
    assert said in done.stderr
