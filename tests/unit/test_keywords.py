"""Unknown keyword arguments of public functions and classes: the error names the nearest one."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
import re

import pytest
import torch

import commpass
from commpass.errors import PolicyError
from commpass.plan import PlannedSite

MADE_BY_COMMPASS = {"Report", "Handle", "InGraph", "Integration", "SSFusion"}
"""Public classes that users do not make themselves."""
NAMED = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY


def public() -> list[tuple[str, object]]:
    """Return what users call with arguments by name, none of which is ``**kwargs``."""
    found = [("PlannedSite", PlannedSite)]
    for module in (commpass, commpass.parallel):
        for name in module.__all__:
            one = getattr(module, name)
            if not (inspect.isfunction(one) or isinstance(one, type)):
                continue
            if name in MADE_BY_COMMPASS or (
                isinstance(one, type) and issubclass(one, BaseException)
            ):
                continue
            kinds = [each.kind for each in inspect.signature(one).parameters.values()]
            if inspect.Parameter.VAR_KEYWORD not in kinds and any(k in NAMED for k in kinds):
                found.append((name, one))
    return found


@pytest.mark.parametrize(("name", "one"), public(), ids=[name for name, _ in public()])
def test_unknown_keyword_is_named_with_the_known_ones(name, one):
    known = [each.name for each in inspect.signature(one).parameters.values() if each.kind in NAMED]
    known = [each for each in known if len(each) > 3]
    with pytest.raises((TypeError, PolicyError)) as error:
        one(**{known[-1][:-1]: 1})
    assert f"'{known[-1][:-1]}'; did you mean " in str(error.value)
    assert "Known: " in str(error.value)
    assert name in str(error.value)


def test_all_kinds_of_callables_are_public():
    names = {name for name, _ in public()}
    some = {"backend", "Link", "Policy", "Plan", "compress", "keep", "all_reduce", "shard"}
    assert some <= names


def test_compiled_call_names_the_unknown_keyword(fake_group):
    fake_group(2)

    def call(x):
        return commpass.all_reduce(x, codecs="int8")

    with pytest.raises(Exception, match="codecs"):
        torch.compile(call, backend="eager", fullgraph=True)(torch.ones(4))


def test_error_of_python_keeps_its_type():
    with pytest.raises(TypeError, match=r"^backend\(\) got an unexpected keyword .*'profil'"):
        commpass.backend("balanced", profil="ethernet-1g")
    with pytest.raises(TypeError, match="'max_eror'; did you mean 'max_error'"):
        commpass.Calibration.policy(None, max_eror=0.1)
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        commpass.Link(20)
    with pytest.raises(TypeError, match="multiple values for argument 'alpha_us'"):
        commpass.Link(20, 1, alpha_us=3)


def test_rate_in_another_unit_is_converted_and_not_renamed():
    """A nearest name alone would give a link eight times the rate."""
    with pytest.raises(TypeError) as error:
        commpass.Link(20, gbit_per_s=10)
    assert "10 Gbit/s are 1.25" in str(error.value)
    assert "did you mean" not in str(error.value)


@dataclasses.dataclass(frozen=True)
class Shared(commpass.Link):
    """A link with a field of its own: its ``__init__`` does not call that of Link."""

    users: int = 1


class Slow(commpass.Link):
    def __init__(self, alpha_us: float, **fields):
        super().__init__(alpha_us, 0.1, **fields)


class Fast(commpass.Link):
    """A link with the fields of Link."""


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: Shared(20, 1.25, user=2), "Shared() got .*'user'; did you mean 'users'"),
        (lambda: Shared(20, gbit_per_s=10), "Shared() got .*10 Gbit/s are 1.25"),
        (lambda: dataclasses.replace(Shared(20, 1), user=2), "'user'; did you mean 'users'"),
        (lambda: Slow(20, overhed_us=1), "'overhed_us'; did you mean 'overhead_us'"),
        (lambda: Fast(20, 1.25, overhed_us=1), "'overhed_us'; did you mean 'overhead_us'"),
    ],
)
def test_subclass_names_the_nearest_of_its_own_fields(made, message):
    with pytest.raises(TypeError, match=message.replace("()", r"\(\)")):
        made()


def test_subclasses_are_made_as_before():
    shared = Shared(20, 1.25, users=2)
    assert pickle.loads(pickle.dumps(shared)) == shared == dataclasses.replace(shared)
    assert list(inspect.signature(Shared).parameters)[-1] == "users"
    assert list(inspect.signature(Slow).parameters) == ["alpha_us", "fields"]
    assert Slow(alpha_us=20, overhead_us=1).overhead_us == 1
    with pytest.warns(DeprecationWarning, match="overhead_us"):
        assert Fast(20, 1.25, busy_us=3).overhead_us == 3


def test_classes_are_the_same_otherwise():
    link = commpass.Link(20, 1.25, overhead_us=3)
    assert pickle.loads(pickle.dumps(link)) == link
    assert dataclasses.replace(link, alpha_us=1) == commpass.Link(1, 1.25, overhead_us=3)
    assert list(inspect.signature(commpass.Link).parameters)[:2] == ["alpha_us", "gbytes_per_s"]
    with pytest.warns(DeprecationWarning, match="overhead_us"):
        assert commpass.Link(20, 1.25, busy_us=3) == link


def test_wrong_keyword_in_compiled_code_is_named_too():
    def step(x: torch.Tensor) -> torch.Tensor:
        return commpass.all_reduce(x, codek="int8")

    with pytest.raises(Exception, match=re.escape("codek")):
        torch.compile(step, backend="eager", fullgraph=True)(torch.ones(4))
