"""Old public names work for one version, with a warning that names the new one."""

from __future__ import annotations

import copy
import dataclasses
import subprocess
import sys

import pytest
from torch import nn

import commpass
from commpass.costmodel import profile_from
from commpass.costmodel.files import Machine, Measured, ProfileFile, read, write
from commpass.errors import ProfileError


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [("ddp", "DDPDoor", "CompressedDDP"), ("fsdp", "FSDPDoor", "CompressedFSDP")],
)
def test_old_class_names_are_those_of_the_new_classes(module, old, new):
    found = getattr(commpass.parallel, module)
    with pytest.warns(DeprecationWarning, match=f"{old} is deprecated.*{new}"):
        assert getattr(found, old) is getattr(found, new)
    with pytest.raises(AttributeError, match="has no attribute 'Door'"):
        found.Door  # noqa: B018


def test_old_argument_of_apply_policy_is_taken_with_a_warning():
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.warns(DeprecationWarning, match=r"apply_policy\(annotations=...\)"):
        assert commpass.apply_policy(model, words={"0": "int8"}) is model


def test_both_names_of_an_argument_are_an_error():
    with pytest.raises(TypeError, match="both 'annotations' and its old name 'words'"):
        commpass.apply_policy(nn.Linear(2, 2), words={}, annotations={})


RENAMED = {"watch": ("error_sample_rate", 0.25), "leave_hidden": ("skip_overlapped", False)}


@pytest.mark.parametrize("old", RENAMED)
def test_old_fields_of_a_policy_work_with_a_warning(old, tmp_path):
    new, value = RENAMED[old]
    wanted = commpass.Policy(**{new: value})
    with pytest.warns(
        DeprecationWarning, match=rf"Policy\({old}=...\) is deprecated.*{new}"
    ) as found:
        assert commpass.Policy(**{old: value}) == wanted
    assert [each.filename for each in found] == [__file__]
    with pytest.warns(DeprecationWarning, match=f"{old} is deprecated.*{new}"):
        assert getattr(wanted, old) == value
    with pytest.warns(
        DeprecationWarning, match=rf"Policy\({old}=...\) is deprecated.*{new}"
    ) as found:
        changed = commpass.Policy.from_preset("balanced", **{old: value})
    assert [each.filename for each in found] == [__file__]
    assert changed == commpass.Policy.from_preset("balanced", **{new: value})
    with pytest.raises(TypeError, match=f"both '{new}' and its old name '{old}'"):
        commpass.Policy(**{old: value, new: value})
    file = tmp_path / "old.toml"
    file.write_text(f"name = 'old'\n{old} = {str(value).lower()}\n")
    with pytest.warns(DeprecationWarning, match=rf"old\.toml:2: {old} is deprecated.*{new}"):
        read = commpass.Policy.from_toml(file)
    assert read == dataclasses.replace(wanted, name="old")
    assert old not in read.to_toml()
    file.write_text(f"{old} = {str(value).lower()}\n{new} = {str(value).lower()}\n")
    with pytest.raises(commpass.PolicyError, match=rf"old\.toml:1: '{old}' is the old name"):
        commpass.Policy.from_toml(file)


OLD = commpass.Link(9.0, 2.0, overhead_us=3.0, contention_bytes=4.0)
PROFILE = commpass.Profile("p", OLD, {"tp": OLD}, ranks_per_host=2, intra_host_link=OLD)
OLD_TOML = """
node = 2

[link]
alpha_us = 9
gbytes_per_s = 2
busy_us = 3
crowd_bytes = 4

[inside]
alpha_us = 9
gbytes_per_s = 2
busy_us = 3
crowd_bytes = 4

[links.tp]
alpha_us = 9
gbytes_per_s = 2
busy_us = 3
crowd_bytes = 4
"""
PROFILE_FIELDS = {
    "ranks_per_host": "node",
    "intra_host_link": "inside",
    "overhead_us": "busy_us",
    "contention_bytes": "crowd_bytes",
}


def test_old_fields_of_profiles_and_links_work_with_a_warning():
    with pytest.warns(DeprecationWarning, match=r"Link\((busy_us|crowd_bytes)=...\)") as found:
        link = commpass.Link(9.0, 2.0, busy_us=3.0, crowd_bytes=4.0)
    assert [each.filename for each in found] == [__file__] * 2
    with pytest.warns(DeprecationWarning, match=r"Profile\((node|inside)=...\)") as found:
        made = commpass.Profile("p", link, {"tp": link}, node=2, inside=link)
    assert [each.filename for each in found] == [__file__] * 2
    assert made == PROFILE
    with pytest.warns(DeprecationWarning, match="is deprecated"):
        assert (made.node, made.inside, link.busy_us, link.crowd_bytes) == (2, link, 3.0, 4.0)


def test_profile_file_with_old_names_is_read_with_warnings_that_name_the_line(tmp_path):
    file = tmp_path / "p.toml"
    file.write_text(OLD_TOML)
    with pytest.warns(DeprecationWarning, match="is deprecated") as found:
        assert profile_from(file) == PROFILE
    said = "\n".join(str(each.message) for each in found)
    assert f"{file}:2: node is deprecated" in said
    assert "use ranks_per_host" in said
    assert "use overhead_us" in said
    file.write_text("node = 2\nranks_per_host = 2\n[link]\nalpha_us = 1\ngbytes_per_s = 2\n")
    with pytest.raises(ProfileError, match="'node' is the old name of 'ranks_per_host'"):
        profile_from(file)


def test_profile_of_format_version_1_is_read_with_a_warning(tmp_path):
    machine = Machine(
        device="cpu", processor="a", cores=2, hosts=2, world_size=4, backend="gloo", torch="2.13.0"
    )
    times = {"us": 300.0, "low_us": 290.0, "high_us": 310.0, "fit_us": 315.0}
    sizes = {"kind": "all_reduce", "ranks": 2, "nbytes": 1024, "sent": 1024}
    point = Measured(group="intra_host_link", **sizes, **times)
    written = ProfileFile(
        commpass="0.1.0",
        written="2026-01-02T03:04:05+00:00",
        machine=machine,
        profile=PROFILE,
        points=(point,),
    )
    path = tmp_path / "p.json"
    write(path, written)
    text = path.read_text().replace('"version": 2', '"version": 1')
    for new, old in PROFILE_FIELDS.items():
        text = text.replace(f'"{new}"', f'"{old}"')
    path.write_text(text)
    with pytest.warns(DeprecationWarning, match="profile version 1 is deprecated"):
        found = read(path)
    assert found == dataclasses.replace(written, version=1)


def test_old_field_of_kernels_works_with_a_warning(tmp_path):
    rate = commpass.KernelRate(1.0, 2.0)
    with pytest.warns(DeprecationWarning, match=r"Kernels\(matmul_encode=...\) is deprecated"):
        kernels = commpass.Kernels(3.0, rate, matmul_encode=1.5)
    assert kernels == commpass.Kernels(3.0, rate, decoding_matmul=1.5)
    machine = Machine(
        device="cpu", processor="a", cores=2, hosts=2, world_size=4, backend="gloo", torch="2.13.0"
    )
    profile = dataclasses.replace(PROFILE, kernels=kernels)
    written = ProfileFile(
        commpass="0.1.0",
        written="2026-01-02T03:04:05+00:00",
        machine=machine,
        profile=profile,
        points=(),
    )
    path = tmp_path / "p.json"
    write(path, written)
    path.write_text(path.read_text().replace('"decoding_matmul"', '"matmul_encode"'))
    with pytest.warns(DeprecationWarning, match="matmul_encode is deprecated"):
        assert read(path) == written


@pytest.mark.slow
def test_old_module_of_vllm_is_the_new_one():
    code = (
        "import commpass.parallel.vllm as new\n"
        "from commpass.doors.vllm import SLOT\n"
        "assert SLOT is new.SLOT\n"
    )
    command = [sys.executable, "-W", "always", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "commpass.doors.vllm is deprecated" in done.stderr


def test_state_of_an_older_policy_is_restored_under_the_new_names():
    written = commpass.Policy(error_sample_rate=0.25, skip_overlapped=False)
    old = {"error_sample_rate": "watch", "skip_overlapped": "leave_hidden"}
    state = {old.get(name, name): value for name, value in vars(written).items()}
    found = commpass.Policy.__new__(commpass.Policy)
    found.__setstate__(state)
    assert found == written
    assert copy.deepcopy(written) == written
