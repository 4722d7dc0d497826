"""Old public names work for one version, with a warning that names the new one."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
from torch import nn

import commpass


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


def test_old_module_of_vllm_is_the_new_one():
    code = (
        "import commpass.parallel.vllm as new\n"
        "from commpass.doors.vllm import SLOT\n"
        "assert SLOT is new.SLOT\n"
    )
    command = [sys.executable, "-W", "always", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "commpass.doors.vllm is deprecated" in done.stderr
