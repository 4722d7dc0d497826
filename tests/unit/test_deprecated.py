"""Old public names work for one version, with a warning that names the new one."""

from __future__ import annotations

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


def test_old_module_of_vllm_is_the_new_one():
    code = (
        "import commpass.parallel.vllm as new\n"
        "from commpass.doors.vllm import SLOT\n"
        "assert SLOT is new.SLOT\n"
    )
    command = [sys.executable, "-W", "always", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "commpass.doors.vllm is deprecated" in done.stderr
