"""The harness for PyTorch's own tests: outcomes, kinds of differences, and the wrapped call."""

from __future__ import annotations

import pytest
import torch
from peers import wrap
from peers.outcomes import CODE as GENERATED
from peers.outcomes import (
    COUNTERS,
    FAILED,
    HANG,
    NUMBERS,
    OTHER,
    PASSED,
    Outcome,
    differences,
    read,
)

JUNIT = """<testsuites><testsuite>
<testcase classname="t.A" name="test_one"/>
<testcase classname="t.A" name="test_two"><failure message="{message}">text</failure></testcase>
<testcase classname="t.A" name="test_gpu"><skipped message="Requires 2 GPUs"/></testcase>
<testcase classname="t.A" name="test_slow"><failure message="Timeout (&gt;20.0s)"/></testcase>
</testsuite></testsuites>"""


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("AssertionError: Tensor-likes are not close!\ncnt = CompileCounterWithBackend()", NUMBERS),
        ("AssertionError: Tensor-likes are not close!", NUMBERS),
        ("RuntimeError: Expected to find 'all_reduce' but did not", GENERATED),
        ("AssertionError: counters['inductor']['x'] is 3", COUNTERS),
        ("ValueError: not a group", OTHER),
    ],
)
def test_failure_under_a_policy_has_a_kind(tmp_path, message, kind):
    path = tmp_path / "result.xml"
    path.write_text(JUNIT.format(message=message))
    found = read(path)
    assert [each.state for each in found.values()] == [PASSED, FAILED, "skipped", HANG]
    plain = dict.fromkeys(found, Outcome(PASSED)) | {"t.A::test_gone": Outcome(PASSED)}
    differ = {each.test: each for each in differences(plain, found, "balanced")}
    assert differ.keys() == plain.keys() - {"t.A::test_one"}
    assert differ["t.A::test_two"].kind == kind
    assert differ["t.A::test_two"].is_by_design == (kind in (GENERATED, COUNTERS))
    assert differ["t.A::test_slow"].kind == differ["t.A::test_gone"].kind == HANG


def test_tests_that_fail_plain_do_not_count():
    assert differences({"a": Outcome(FAILED)}, {"a": Outcome(FAILED)}, "off") == []


@pytest.mark.parametrize(
    ("given", "backend"),
    [
        ({}, "commpass"),
        ({"backend": "inductor", "options": {"max_autotune": True}}, "commpass"),
        ({"backend": print}, print),
        ({"backend": "cudagraphs"}, "cudagraphs"),
    ],
)
def test_compile_is_wrapped_for_known_backends(given, backend):
    found = wrap.replaced(dict(given), "balanced")
    assert found["backend"] == backend
    if backend == "commpass":
        assert found["options"] == {"policy": "balanced"} | given.get("options", {})
    else:
        assert found == given


def test_eager_backend_runs_under_the_policy():
    found = wrap.replaced({"backend": "aot_eager"}, "balanced")["backend"]
    assert (found.policy.name, found.inner) == ("balanced", "aot_eager")


def test_torch_calls_the_wrapper_where_a_policy_is_set(tmp_path, monkeypatch):
    environment = wrap.activated(tmp_path, "balanced")
    assert "peers.wrap:install" in (tmp_path / wrap.PACKAGE / "entry_points.txt").read_text()
    monkeypatch.setattr(torch, "compile", plain := torch.compile)
    monkeypatch.delenv(wrap.POLICY, raising=False)
    wrap.install()
    assert torch.compile is plain
    monkeypatch.setenv(wrap.POLICY, environment[wrap.POLICY])
    wrap.install()
    assert torch.compile is not plain
    calls = []
    monkeypatch.setattr(torch, "compile", lambda *a, **k: calls.append(k))
    wrap.install()
    torch.compile(None)
    assert calls == [{"backend": "commpass", "options": {"policy": "balanced"}}]
