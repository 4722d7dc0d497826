"""Profiles as JSON and TOML: round trips, and errors that name file, line and remedy."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

import commpass
from commpass.cli import app
from commpass.costmodel import Link, Profile, Region, default_profile, profile_from
from commpass.costmodel.cards import CARDS
from commpass.costmodel.files import (
    POLICY_KEYS,
    Machine,
    Measured,
    ProfileFile,
    digest,
    profile_of,
    read,
    write,
)
from commpass.costmodel.fit import FASTEST
from commpass.costmodel.interconnects import INTERCONNECTS
from commpass.costmodel.profile import NAMES, link_named, profile_named
from commpass.distributed.machine import differences_from, processor, this_machine
from commpass.errors import CommpassError, PolicyError, ProfileError
from commpass.policy import PROFILE_KEYS
from commpass.report import probe as report_probe
from commpass.report.probe import group, noisy, parts, without_rate

MACHINE = Machine(
    device="cpu", processor="a", cores=2, hosts=2, world_size=4, backend="gloo", torch="2.13.0"
)
LINK = Link(60, 0.125, measured={"all_reduce": (Region(0, 50, 0.1), Region(1e6, 80, 0.12))})


def file(**fields) -> ProfileFile:
    profile = dataclasses.replace(default_profile("cpu"), name="here", link=LINK)
    point = Measured(
        group="link",
        kind="all_reduce",
        ranks=4,
        nbytes=1024,
        sent=1536,
        us=300.0,
        low_us=290.0,
        high_us=310.0,
        fit_us=315.0,
    )
    said = {"commpass": "0.1.0", "written": "2026-01-02T03:04:05+00:00", "machine": MACHINE}
    return ProfileFile(**said | {"profile": profile, "points": (point,)} | fields)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write(tmp_path / "cluster.json", file())
    return tmp_path / "cluster.json"


def test_profile_written_comes_back(path):
    assert read(path) == file()
    assert profile_from(str(path)) == profile_from(path) == file().profile
    assert read(path).points[0].off == pytest.approx(0.05)
    assert [each.name for each in path.parent.iterdir()] == ["cluster.json"]


def test_digest_is_that_of_the_numbers_and_not_of_the_name(path):
    profile = file().profile
    assert digest(profile) == digest(dataclasses.replace(profile, name="other"))
    assert digest(profile) == digest(read(path).profile)
    assert digest(profile) != digest(dataclasses.replace(profile, margin=0.2))
    other = dataclasses.replace(LINK, measured={"all_reduce": (Region(0, 50, 0.1),)})
    assert digest(profile) != digest(dataclasses.replace(profile, link=other))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda x: "", "cut short; measure again with `commpass probe`"),
        (lambda x: x[:200], "cut short"),
        (lambda x: "alpha", "not JSON"),
        (lambda x: x.replace("gloo", "gl\xf6\xf6").encode("latin-1"), "not JSON"),
        (lambda x: "{}", "not a commpass profile"),
        (lambda x: "[1]", "not a commpass profile"),
        (lambda x: x.replace('"version": 2', '"version": 9'), "version 9.*up to version 2"),
        (lambda x: x.replace('"version": 2', '"version": 0'), "version 0: versions are 1 to 2"),
        (lambda x: x.replace('"version": 2', '"version": true'), "version True: versions are"),
        (lambda x: x.replace('"alpha_us": 60', '"alpha_us": -1'), "alpha_us"),
        (lambda x: x.replace('"alpha_us": 60', '"alpha_us": "x"'), r"\$\.profile\.link"),
        (lambda x: x.replace('"all_reduce": [', '"all_reduced": ['), "did you mean 'all_reduce'"),
        (lambda x: x.replace("2026-01-02T03", "yesterday"), "damaged"),
        (lambda x: x.replace("+00:00", ""), "no time zone"),
    ],
)
def test_damaged_files_say_what_is_wrong(path, change, said):
    changed = change(path.read_text())
    path.write_bytes(changed if isinstance(changed, bytes) else changed.encode())
    with pytest.raises(ProfileError, match=said) as error:
        commpass.backend("balanced", profile=str(path))
    assert str(path) in str(error.value)


def test_file_that_is_not_there(tmp_path):
    with pytest.raises(ProfileError, match=r"none\.json: cannot be read: No such file"):
        profile_from(tmp_path / "none.json")
    with pytest.raises(ProfileError, match=r"\.json or a \.toml"):
        profile_from(tmp_path / "none.txt")
    with pytest.raises(ProfileError, match="cannot be written"):
        write(tmp_path / "none" / "x.json", file())


def test_measurement_that_cannot_be_written_at_the_end_is_kept(tmp_path):
    with pytest.raises(ProfileError, match="cannot be written") as error:
        report_probe._write(tmp_path / "gone" / "cluster.json", file())
    kept = Path(str(error.value).rpartition("The measurement is in ")[2])
    assert kept.name == "cluster.json"
    assert read(kept) == file()


# --- TOML -----------------------------------------------------------------------------------------

TOML = """
base = "ethernet-10g"
margin = 0.05
ranks_per_host = 8
intra_host_link = "nvlink-4"

[link]
alpha_us = 20

[links.dp]
base = "ethernet-25g"
alpha_us = 30

[kernels]
gflops = 100

[kernels.rates.int8]
encode_ns = 0.5
decode_ns = 0.5
"""


def toml(tmp_path: Path, text: str) -> Path:
    (tmp_path / "cluster.toml").write_text(text)
    return tmp_path / "cluster.toml"


def test_numbers_of_ones_own(tmp_path):
    found = profile_from(toml(tmp_path, TOML))
    base = commpass.ethernet(10)
    assert (found.name, found.margin, found.ranks_per_host) == ("cluster", 0.05, 8)
    assert found.link == dataclasses.replace(base.link, alpha_us=20)
    assert found.links == {"dp": commpass.ethernet(25, alpha_us=30).link}
    assert found.intra_host_link == link_named("nvlink-4")
    assert found.kernels.gflops == 100
    assert found.kernels.rates["int8"] == commpass.KernelRate(0.5, 0.5)
    assert found.kernels.rates["rotated"] == base.kernels.rates["rotated"]


def test_least_that_a_file_can_say(tmp_path):
    found = profile_from(toml(tmp_path, "[link]\nalpha_us = 5\ngbytes_per_s = 12.5\n"))
    assert found == Profile("cluster", Link(5, 12.5))


def test_rates_of_a_card(tmp_path):
    link = 'base = "infiniband-ndr"\n'
    found = profile_from(toml(tmp_path, f'{link}kernels = "h100"\n'))
    assert found.kernels == CARDS["h100"].kernels
    found = profile_from(toml(tmp_path, f'{link}[kernels]\nbase = "h100"\nlaunch_us = 3\n'))
    assert found.kernels == dataclasses.replace(CARDS["h100"].kernels, launch_us=3.0)


TWO_LINKS = """base = "ethernet-10g"
[links.tp]
alpha_us = 1
gbytes_per_s = 1
[links.dp]
alpha_us = 2
"""


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ('base = "nvlink-4"\nkernels = "h10"\n', 2, "unknown card 'h10'; did you mean 'h100'"),
        ("margin = 0.1\n", 1, "needs a .link."),
        ("\nmargn = 0.1\n", 2, "no field 'margn'; did you mean 'margin'"),
        ('base = "ethernet-10"\n', 1, "unknown profile 'ethernet-10'; did you mean 'ethernet-10g'"),
        ('base = "ethernet-10g"\n\nintra_host_link = "nvlnk-4"\n', 3, "did you mean 'nvlink-4'"),
        ("[link]\nalpha_us = 5\n", 1, "gbytes_per_s"),
        ('base = "ethernet-10g"\n\n[links]\ndp = 3\n', 4, "links"),
        (
            TWO_LINKS + 'gbytes_per_s = "x"\n',
            7,
            r"\[links.dp\]: gbytes_per_s must be a number, but is a string$",
        ),
        (TWO_LINKS + "gbytes_per_s = -1\n", 7, r"\[links.dp\]: Link\(gbytes_per_s=-1.0\)"),
        (TWO_LINKS + "alpha = 1\n", 7, "no field 'alpha'"),
        (TWO_LINKS, 5, r"\[links.dp\]: gbytes_per_s is missing$"),
        (TWO_LINKS.replace("links.dp", 'links . "dp"') + "gbytes_per_s = 0\n", 7, "above 0"),
        (
            TWO_LINKS + "gbytes_per_s = 1\n[[links.dp.protocols]]\nshare = 2\n",
            8,
            r"\[links.dp.protocols.0\]: name is missing$",
        ),
        ('base = "nvlink-4"\nlinks = { tp = { alpha_us = 1, gbytes_per_s = 0 } }\n', 2, "above 0"),
        ('base = "nvlink-4"\n[links]\ndp.alpha_us = 1\ndp.gbytes_per_s = 0\n', 4, "above 0"),
        ('base = "nvlink-4"\n[links]\ntp = "nvlink"\ndp = "nvlnk"\n', 4, "unknown link 'nvlnk'"),
        ('base = "nvlink-4"\n[kernels.rates.int8]\ndecode_ns = -1\n', 2, r"encode_ns is missing$"),
        (
            'base = "nvlink-4"\n[links]\ndp = 3\n',
            3,
            r"\[links.dp\]: must be a table, but is an integer$",
        ),
        (
            'base = "nvlink-4"\n[link]\nalpha_us = "2"\n',
            3,
            ": link.alpha_us must be a number, but is a string$",
        ),
        ('base = "nvlink-4"\nports = 2.5\n', 2, ": ports must be a whole number, but is a float$"),
        ('base = "nvlink-4"\n\nmargin = -1\n', 3, "Profile.margin"),
        ("x = \n", 1, "not TOML"),
        ("base = nvlink-4\n", 1, 'not TOML.*write it in quotes, "nvlink-4"'),
        (
            'name = "x"\npreset = "balanced"\n',
            2,
            r"this is a policy, since it has 'preset', .*commpass\.backend\('.*cluster.toml'\)",
        ),
        ('[[rule]]\nmodule = "a"\n', 1, "this is a policy, since it has 'rule'"),
        (TWO_LINKS + 'gbytes_per_s = 1\nbase = "nvlnk-4"\n', 8, "did you mean 'nvlink-4'"),
        ('base = "nvlink-4"\n[kernels]\nlaunch_us = 3\nbase = "h10"\n', 4, "unknown card 'h10'"),
    ],
)
def test_errors_name_file_and_line(tmp_path, text, line, said):
    with pytest.raises(ProfileError, match=said) as error:
        profile_from(toml(tmp_path, text))
    assert f"cluster.toml:{line}: " in str(error.value)


RATES = ("[link]\ngbytes_per_s", "[link]\npeer_gbytes_per_s", "[kernels]\ngflops")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("[link]\nalpha_us", "1e308"),
        *((rate, number) for rate in RATES for number in ("1e-308", "1e308", "5e-324")),
    ],
)
def test_number_that_makes_times_infinite_is_refused(tmp_path, text, number):
    with pytest.raises(PolicyError, match=r"must be from (0|1e-30) to 1e\+30") as error:
        profile_from(toml(tmp_path, f'base = "ethernet-10g"\n{text} = {number}\n'))
    assert "cluster.toml:3: " in str(error.value)


@pytest.mark.parametrize("number", ["1e-308", "5e-324", "0"])
def test_latency_may_be_small(tmp_path, number):
    found = profile_from(toml(tmp_path, f'base = "ethernet-10g"\n[link]\nalpha_us = {number}\n'))
    assert found.link.alpha_us == float(number)


PROTOCOL = '[[link.protocols]]\nname = "LL"\nstart_us = 1\nstep_us = 2\nshare = 0.5\n'


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("start_us = 3\n", 4, "no field 'start_us'; give protocols, each with name, start_us"),
        ("trees = true\n", 4, "no field 'trees'; give protocols"),
        (f"{PROTOCOL}near_step = 1\n", 9, "no field 'near_step'; did you mean 'near_step_us'"),
        (
            "[[link.measured.all_reduce]]\nfrom_bytes = 0\nalpha_us = 1\ngbytes_per_s = 1\nn = 1\n",
            8,
            "a region has no field 'n'",
        ),
    ],
)
def test_unknown_fields_of_a_link_are_refused(tmp_path, text, line, said):
    start = "[link]\nalpha_us = 5\ngbytes_per_s = 1\n"
    with pytest.raises(ProfileError, match=said) as error:
        profile_from(toml(tmp_path, start + text))
    assert f"cluster.toml:{line}: " in str(error.value)


@pytest.mark.parametrize(
    ("where", "said"),
    [
        (["link"], "a link has no field 'start_us'; give protocols"),
        (["intra_host_link"], "a link has no field 'start_us'; give protocols"),
        (["links", "dp"], "a link has no field 'start_us'; give protocols"),
        (["link", "protocols", 0], "a protocol has no field 'trees'. Known: "),
        (["link", "measured", "all_reduce", 1], "a region has no field"),
        (["kernels"], r"\[kernels\] has no field"),
        (["kernels", "rates", "int8"], "the rate of int8 has no field"),
        ([], "a profile has no field"),
    ],
)
def test_measured_profile_of_other_fields_is_refused(tmp_path, where, said):
    """They would change nothing, unnoticed."""
    link = dataclasses.replace(LINK, protocols=link_named("nvlink-4").protocols)
    profile = dataclasses.replace(
        file().profile, link=link, intra_host_link=link, links={"dp": link}
    )
    write(tmp_path / "a.json", file(profile=profile))
    assert read(tmp_path / "a.json").profile == profile
    fields = json.loads((tmp_path / "a.json").read_text())
    table = fields["profile"]
    for key in where:
        table = table[key]
    table.update({"trees": True} if "protocols" in where else {"start_us": 3.0})
    (tmp_path / "a.json").write_text(json.dumps(fields))
    with pytest.raises(ProfileError, match=said) as error:
        read(tmp_path / "a.json")
    assert "a.json: " in str(error.value)
    assert "measure again with `commpass probe`" in str(error.value)


@pytest.mark.parametrize("name", NAMES)
def test_every_field_of_a_named_profile_comes_back(name):
    made = profile_named(name)
    assert profile_of(json.loads(msgspec.json.encode(made))) == made


# --- names ----------------------------------------------------------------------------------------


REACHED = {"nvlink": 0.82, "xgmi": 0.70, "pcie": 0.82}
NETWORKS = {"infiniband", "roce", "efa", "tcpxo", "slingshot"}


@pytest.mark.parametrize("name", INTERCONNECTS)
def test_link_by_name_is_what_its_maker_states_less_a_share(name):
    found = profile_from(name)
    family = name.partition("-")[0]
    share = 0.8 if family in NETWORKS else REACHED[family]
    assert found.link.gbytes_per_s == pytest.approx(INTERCONNECTS[name].gbytes_per_s * share)
    assert INTERCONNECTS[name].source


@pytest.mark.parametrize("name", CARDS)
def test_card_copies_no_faster_than_its_maker_states(name):
    assert CARDS[name].kernels.gbytes_per_s < CARDS[name].gbytes_per_s
    assert CARDS[name].kernels.gflops < 1000 * CARDS[name].tflops


# --- uses -----------------------------------------------------------------------------------------


def test_environment_names_a_profile(path, monkeypatch):
    monkeypatch.setenv("COMMPASS_PROFILE", str(path))
    assert commpass.backend("balanced").profile == file().profile
    assert commpass.backend("balanced", profile="nvlink").profile.name == "nvlink"
    monkeypatch.setenv("COMMPASS_PROFILE", "")
    assert commpass.backend("balanced").profile is None


def test_profile_of_another_machine_is_reported_once(path, caplog):
    for _ in range(2):
        commpass.backend("balanced", profile=path)
    (said,) = [each.message for each in caplog.records if str(path) in each.message]
    assert f"processor a there, {processor()} here" in said
    assert "Probe again" in said


def test_unknown_facts_are_no_difference():
    assert not list(differences_from(this_machine(), this_machine()))
    started = dataclasses.replace(this_machine(), world_size=4, hosts=2, backend="gloo")
    assert not list(differences_from(started, this_machine()))
    assert not list(differences_from(dataclasses.replace(started, backend="undefined"), started))
    (other,) = differences_from(dataclasses.replace(started, backend="nccl"), started)
    assert other == "backend nccl there, gloo here"
    (other,) = differences_from(started, dataclasses.replace(started, world_size=8))
    assert other == "number of ranks 4 there, 8 here"
    (other,) = differences_from(dataclasses.replace(started, torch="2.1.0"), started)
    assert other.startswith("torch 2.1.0 there")
    assert not list(
        differences_from(dataclasses.replace(started, torch=f"{started.torch}+x"), started)
    )


@pytest.mark.parametrize("make", [profile_named, link_named])
def test_any_rate_of_ethernet_is_offered(make):
    with pytest.raises(PolicyError, match=r"any rate: 'ethernet-2\.5g' has 2\.5 Gbit/s"):
        make("ethernet-1")
    assert make("ethernet-2.5g") is not None
    with pytest.raises(PolicyError) as error:
        make("nvlink-9")
    assert "any rate" not in str(error.value)


def test_doctor_says_which_profile_would_be_used(path, monkeypatch):
    def row() -> dict:
        rows = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)
        return next(row for row in rows if row["what"] == "profile")

    assert not row()["ok"]
    assert "COMMPASS_PROFILE is not set" in row()["meaning"]
    assert "commpass probe" in row()["meaning"]
    monkeypatch.setenv("COMMPASS_PROFILE", str(path))
    assert "days old; processor a there" in row()["state"]
    assert "COMMPASS_PROFILE is from another machine" in row()["meaning"]
    write(path, file(machine=this_machine()))
    assert row()["ok"]
    monkeypatch.setenv("COMMPASS_PROFILE", "ethernet-10")
    assert "did you mean 'ethernet-10g'" in row()["meaning"]
    monkeypatch.setenv("COMMPASS_PROFILE", "nvlink-4")
    nominal = "nvlink-4 (nominal rate, not measured)"
    assert (row()["state"], row()["ok"]) == (nominal, True)


def test_kind_whose_sends_were_too_small_for_a_rate_is_reported():
    given = file()
    assert without_rate(given) == ""
    link = dataclasses.replace(
        given.profile.link,
        measured={"all_reduce": (Region(0.0, 200.0, 2.0), Region(1024.0, 300.0, FASTEST))},
    )
    found = without_rate(file(profile=dataclasses.replace(given.profile, link=link)))
    assert found.startswith("the time of all_reduce up to 1.5 KiB does not grow")


def test_times_of_a_busy_machine_are_reported():
    calm = file().points[0]
    wild = dataclasses.replace(calm, low_us=100.0, high_us=400.0)
    assert noisy(file(points=(calm, calm, calm, wild))) == ""
    assert "2 of 4 times varied" in noisy(file(points=(calm, calm, wild, wild)))


def test_fits_of_two_regions_are_not_joined():
    one = file().points[0]
    points = [dataclasses.replace(one, kind="all_reduce", sent=n) for n in (1, 10, 100, 1000)]
    measured = {"all_reduce": (Region(0, 10.0, 1.0), Region(100, 50.0, 1.0))}
    shown = parts(points, Link(10.0, 1.0, measured=measured))
    assert [[each.sent for each in part] for part in shown] == [[1, 10], [100, 1000]]
    assert parts(points, None) == [points]


def test_probe_says_how_it_is_started(tmp_path, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    result = CliRunner().invoke(app, ["probe", "-o", str(tmp_path / "x.json")])
    assert result.exit_code == 2
    assert "torchrun --nproc-per-node 2 -m commpass probe" in result.stderr
    result = CliRunner().invoke(app, ["probe", "-o", str(tmp_path / "x.txt")])
    assert result.exit_code == 2
    assert ".json file" in result.stderr


def test_probe_names_the_variables_that_are_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    result = CliRunner().invoke(app, ["probe", "-o", str(tmp_path / "x.json")])
    assert result.exit_code == 2
    assert "RANK is set, but not MASTER_ADDR, MASTER_PORT" in result.stderr


def test_rank_that_ends_while_a_probe_runs_is_one_line(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "init_process_group", lambda: None)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    with pytest.raises(CommpassError, match=r"^another rank ended"), group("probe"):
        raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:1")
    with pytest.raises(RuntimeError, match=r"^another fault$"), group("probe"):
        raise RuntimeError("another fault")


TORCHRUN = ("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "WORLD_SIZE", "GROUP_RANK", "RANK")


@pytest.mark.parametrize(
    ("started", "ranks_per_host"),
    [
        ((8, 2, 16, 1, 9), 8),
        ((8, 1, 8, 0, 3), 0),  # one host
        ((4, 3, 12, 1, 3), 0),  # hosts of 3, 4 and 5 ranks
        ((3, 3, 12, 0, 2), 0),
        ((0, 2, 0, 0, 0), 0),
        ((), 0),  # another launcher
    ],
)
def test_default_of_a_gpu_is_by_its_name_and_the_hosts_of_torchrun(
    started, ranks_per_host, monkeypatch
):
    from commpass.distributed import machine

    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    for name, value in zip(TORCHRUN, started, strict=False):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    machine.default_here.cache_clear()
    try:
        found = machine.default_here("cuda")
        assert machine.default_here("cpu") == default_profile("cpu")
    finally:
        machine.default_here.cache_clear()
    assert found == default_profile("cuda", "NVIDIA H100 80GB HBM3", ranks_per_host)
    assert found.ranks_per_host == ranks_per_host


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[link]\nalpah_us = 20\n", ":3: a link has no field 'alpah_us'; did you mean 'alpha_us'?"),
        (
            "[intra_host_link]\nalpha_us = 2\ngbyte_per_s = 3\n",
            ":4: a link has no field 'gbyte_per_s'",
        ),
        ('[links.dp]\nbase = "ethernet-25g"\nalpha = 30\n', ":4: a link has no field 'alpha'"),
        ("[kernels]\nlaunch = 20\n", ":3: [kernels] has no field 'launch'; did you mean"),
        ("[kernels.rates.int8]\nencode = 1\n", ":3: the rate of int8 has no field 'encode'"),
        ('[kernels]\nbase = ["h100"]\n', "unknown card ['h100']"),
        ("[kernels]\nrates = 3\n", "rates=3: must map names of codecs"),
        (
            "[kernels.rates.int9]\nencode_ns = 0.5\ndecode_ns = 0.5\n",
            "[kernels.rates.int9]: no codec; did you mean 'int8'?",
        ),
    ],
)
def test_misspelt_word_anywhere_is_an_error(text, said, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('base = "ethernet-10g"\n' + text)
    with pytest.raises(ProfileError) as error:
        commpass.backend("balanced", profile=path)
    assert said in str(error.value)


def test_files_are_told_apart_by_keys_that_only_one_of_them_has():
    of_policy = {each.name for each in dataclasses.fields(commpass.Policy)} | {"preset", "rule"}
    of_profile = {each.name for each in dataclasses.fields(commpass.Profile)} | {"base", "link"}
    assert of_policy - of_profile >= POLICY_KEYS
    assert of_profile - of_policy >= PROFILE_KEYS
