"""Environment variables: on, off, another policy, and invalid values."""

from __future__ import annotations

import json
import logging

import pytest
from typer.testing import CliRunner

import commpass
from commpass.cli import app
from commpass.distributed import environment
from commpass.distributed.environment import Settings, difference, settings
from commpass.errors import PolicyError
from commpass.policy import PRESETS, Policy

NAMES = (*environment.VARIABLES, environment.PROFILE)


@pytest.fixture(autouse=True)
def nothing_is_set(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    environment._log.cache_clear()
    yield
    environment._log.cache_clear()


def doctor() -> tuple[int, dict[str, dict], str]:
    result = CliRunner().invoke(app, ["doctor", "--json"])
    return result.exit_code, {row["what"]: row for row in json.loads(result.stdout)}, result.stderr


@pytest.mark.parametrize("word", ["off", "OFF"])
def test_off_takes_the_place_of_every_policy_and_is_said_once(word, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "commpass")
    monkeypatch.setenv("COMMPASS", word)
    monkeypatch.setenv("COMMPASS_POLICY", "balanced")
    for given in ("aggressive", PRESETS["taco"], Policy(codecs="int8")):
        assert commpass.backend(given).policy is PRESETS["off"]
    said = [each for each in caplog.records if "COMMPASS" in each.getMessage()]
    assert [(each.levelname, "COMMPASS=off" in each.getMessage()) for each in said] == [
        ("INFO", True)
    ]


@pytest.mark.parametrize("word", ["on", ""])
def test_value_on_is_as_if_nothing_was_set(monkeypatch, caplog, word):
    monkeypatch.setenv("COMMPASS", word)
    assert commpass.backend("balanced").policy is PRESETS["balanced"]
    assert settings() == Settings()
    assert not caplog.records


def test_file_takes_the_place_of_the_policy_with_both_names_in_a_warning(
    monkeypatch, caplog, tmp_path
):
    file = tmp_path / "ours.toml"
    file.write_text('preset = "balanced"\nwatch = 0.5\n')
    monkeypatch.setenv("COMMPASS_POLICY", str(file))
    for _ in range(2):
        assert commpass.backend("taco").policy == Policy.from_toml(file)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert f"COMMPASS_POLICY={file} takes the place of policy 'taco'" in record.getMessage()
    caplog.clear()
    assert commpass.backend(file).policy.error_sample_rate == 0.5  # the program sets the same
    assert not caplog.records


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("COMMPASS", "of", "COMMPASS=of: must be off or on; did you mean 'off'"),
        (
            "COMMPASS_POLICY",
            "balancd",
            "COMMPASS_POLICY=balancd: unknown policy 'balancd'; did you",
        ),
        ("COMMPASS_POLICY", "gone.toml", "COMMPASS_POLICY=gone.toml: gone.toml"),
    ],
)
def test_mistake_is_an_error_with_the_nearest_and_doctor_finds_it(monkeypatch, name, value, said):
    monkeypatch.setenv(name, value)
    with pytest.raises(PolicyError, match=said):
        commpass.backend("balanced")
    code, rows, stderr = doctor()
    assert code == 2
    assert said in stderr
    assert (rows[name]["state"], rows[name]["ok"]) == (value, False)
    assert said in rows[name]["wrong"]


def test_mistake_in_the_program_is_found_though_the_environment_says_otherwise(monkeypatch):
    monkeypatch.setenv("COMMPASS", "off")
    with pytest.raises(PolicyError, match="balanced"):
        commpass.backend("balancd")


def test_doctor_shows_all_variables_with_their_values(monkeypatch, tmp_path):
    code, rows, _ = doctor()
    assert code == 0
    assert {rows[name]["state"] for name in environment.VARIABLES} == {"not set"}
    given = {"COMMPASS": "off", "COMMPASS_POLICY": "taco", "COMMPASS_DUMP": str(tmp_path / "new")}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    code, rows, _ = doctor()
    assert code == 0
    assert {name: rows[name]["state"] for name in given} == given
    assert all(rows[name]["ok"] and rows[name]["meaning"] for name in given)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("COMMPASS_POLICI", "taco", "did you mean 'COMMPASS_POLICY'"),
        ("COMMPASS_DUMP", __file__, "is a file, and must be a folder"),
        ("COMMPASS_CHECK", "yes", "must be 0 or 1"),
    ],
)
def test_doctor_finds_what_has_no_effect(monkeypatch, name, value, said):
    monkeypatch.setenv(name, value)
    code, rows, stderr = doctor()
    assert code == 2
    assert said in stderr
    assert said in rows[name]["wrong"]


# --- on several ranks -----------------------------------------------------------------------------


def test_settings_differ_by_what_they_mean(monkeypatch, tmp_path):
    files = [tmp_path / name for name in ("a.toml", "b.toml", "c.toml")]
    for file, bits in zip(files, (8, 8, 4), strict=True):
        file.write_text(f'codecs = "int{bits}"\n')
    found = []
    for file in files:
        monkeypatch.setenv("COMMPASS_POLICY", str(file))
        found.append(settings())
    assert not difference(dict(enumerate(found[:2])))
    text = difference(dict(enumerate(found)))
    assert "ranks 0, 1: COMMPASS_POLICY=" in text
    assert f"rank 2: COMMPASS_POLICY={files[2]}" in text
    monkeypatch.setenv("COMMPASS", "off")  # then the policy has no effect
    assert settings().digest != found[0].digest
    text = difference({0: Settings(), 1: settings()})
    assert "rank 0: neither COMMPASS nor COMMPASS_POLICY is set" in text
    assert "rank 1: COMMPASS=off" in text


def test_difference_of_many_ranks_is_short():
    said = {rank: Settings("COMMPASS=off", "x") for rank in range(1, 1000)} | {0: Settings()}
    assert "and 991 more" in difference(said)
    assert len(difference(said)) < 400
