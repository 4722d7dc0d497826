"""The outcomes of tests from JUnit's files, and the kinds of differences with commpass."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PASSED, FAILED, SKIPPED, HANG = "passed", "failed", "skipped", "no end"
NUMBERS, CODE, COUNTERS, SHAPE, OTHER = (
    "numbers",
    "generated code",
    "cache counters",
    "graph shape",
    "error",
)
KINDS = {
    CODE: r"FileCheck|Expected to find|run_and_get_triton_code|assertExpectedInline|not found in",
    COUNTERS: r"counters\[|cache_hit|cache_miss|fxgraph_cache|frame_count|op_count|CompileCounter",
    SHAPE: r"find_nodes|\.graph\.nodes|num_nodes|len\(.*graph|print_readable",
    NUMBERS: r"Tensor-likes are not|assertEqual|assert_close|allclose|Scalars are not|not close",
}
"""What tells the kind of a failure, in the order in which they are tried. Generated code, counters
and shapes differ by design: the backend has another name, and graphs have other operators."""
BY_DESIGN = (CODE, COUNTERS, SHAPE)


@dataclass(frozen=True)
class Outcome:
    """What a test gave, and the message of its failure."""

    state: str
    message: str = ""

    @property
    def kind(self) -> str:
        """The kind of failure."""
        if self.state == HANG:
            return HANG
        if "Tensor-likes are not" in self.message:  # whatever else the test looks at
            return NUMBERS
        found = (kind for kind, pattern in KINDS.items() if re.search(pattern, self.message))
        return next(found, OTHER)


def read(path: Path) -> dict[str, Outcome]:
    """Return the outcomes by the name of the test."""
    found = {}
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        name = f"{case.get('classname', '')}::{case.get('name', '')}"
        found[name] = _outcome_of(case)
    return found


def _outcome_of(case: ElementTree.Element) -> Outcome:
    for tag in ("failure", "error"):
        if (failure := case.find(tag)) is not None:
            text = f"{failure.get('message', '')}\n{failure.text or ''}"
            # Of pytest-timeout.
            return Outcome(HANG if "Timeout (>" in text or "Timeout >" in text else FAILED, text)
    return Outcome(SKIPPED if case.find("skipped") is not None else PASSED)


@dataclass(frozen=True)
class Difference:
    """A test that passes plain, and not under a policy."""

    test: str
    policy: str
    kind: str
    message: str

    @property
    def is_by_design(self) -> bool:
        return self.kind in BY_DESIGN


def differences(
    plain: Mapping[str, Outcome], other: Mapping[str, Outcome], policy: str
) -> list[Difference]:
    """Return the tests that pass plain and not with a policy; one without an outcome did not
    end."""
    missing = Outcome(HANG, "its process ended, or was stopped, before the test had a result")
    found = []
    for test, outcome in plain.items():
        with_policy = other.get(test, missing)
        if outcome.state == PASSED and with_policy.state != PASSED:
            message = next(iter(with_policy.message.strip().splitlines()), "")
            kind = "skipped" if with_policy.state == SKIPPED else with_policy.kind
            found.append(Difference(test, policy, kind, message))
    return found
