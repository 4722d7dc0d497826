"""Errors of a user's build function and of the model that it makes: what failed, and where."""

from __future__ import annotations

import inspect
import re
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from commpass.errors import CommpassError, nearest

OURS = Path(__file__).parent
NOT_THE_USERS = (OURS, Path(torch.__file__).parent, *map(Path, sysconfig.get_paths().values()))
"""Folders of commpass, torch, Python and installed packages."""
LINE_END = r"\n"
"""The end of a line in the text of an exception within another one."""


def check_call(
    build: Callable[..., Any], mesh: DeviceMesh, more: Mapping[str, Any], swept: Sequence[str]
) -> None:
    """Raise CommpassError unless a build function takes the mesh and the arguments ``more``.

    ``swept`` are the other names that a sweep may have.
    """
    try:
        signature = inspect.signature(build)
    except (TypeError, ValueError):  # some that are not written in Python have none
        return
    name = name_of(build)
    try:
        signature.bind(mesh, **more)
    except TypeError as error:
        given = list(signature.parameters)
        if unknown := [each for each in more if each not in given]:
            names = [*(mesh.mesh_dim_names or ()), *swept, *given[1:]]  # without the mesh
            raise CommpassError(
                f"{unknown[0]!r} cannot be swept: it is no argument of {name}"
                f"{nearest(unknown[0], names)}"
            ) from error
        call = ", ".join(["mesh", *(f"{key}={value!r}" for key, value in more.items())])
        raise CommpassError(
            f"{name}{signature} is called as {name}({call}): {error}. Its first argument must be"
            " the mesh, and the others need defaults"
        ) from error


def name_of(build: Callable[..., Any]) -> str:
    return getattr(build, "__name__", repr(build))


@contextmanager
def named_errors(
    failure: str, mesh: DeviceMesh | None = None, model: Sequence[Any] = ()
) -> Iterator[None]:
    """Turn errors of a user's code, or of torch called by it, into a CommpassError with its line.

    ``failure`` begins its message: what could not be done. A ``model`` whose parameters are divided
    unevenly is named too. Errors of commpass pass through, and those for a value that a fake tensor
    does not have.
    """
    try:
        yield
    except DataDependentOutputException:
        raise
    except Exception as error:
        inner = getattr(error, "inner_exception", error)  # of a backend
        if isinstance(inner, CommpassError) or _is_ours(inner):
            raise
        why = (no_dimension(error, mesh) if mesh is not None else "") or _reason(error)
        if uneven := next(_uneven(model), ""):
            why += f". {uneven}: choose a size that divides it"
        raise CommpassError(f"{failure}{place_of(error)}: {why}") from error


def no_dimension(error: Exception, mesh: DeviceMesh) -> str:
    """Name the dimension that the mesh lacks and the model asked for. Return "" for any other
    error."""
    text = " ".join(map(str, error.args))
    if not isinstance(error, KeyError) or "mesh_dim_names" not in text:
        return ""
    known = mesh.mesh_dim_names or ()
    asked = [name for name in re.findall(r"'(\w+)'", text) if name not in known]
    wants = f"a dimension {asked[0]!r}" if asked else "a dimension that it does not have"
    return f"the model asks the mesh for {wants}; there is {', '.join(map(repr, known))}"


def _is_ours(error: Exception) -> bool:
    """Whether code of commpass raised an error, which is a fault of commpass then."""
    frames = traceback.extract_tb(error.__traceback__)
    here = len(frames) == 1  # raised by Python, at the call of a user's function
    return not here and bool(frames) and Path(frames[-1].filename).is_relative_to(OURS)


def place_of(error: Exception) -> str:
    """Return the innermost line of the user's code, as `` at model.py:9 in forward``."""
    frames: Iterable[traceback.FrameSummary] = [
        *traceback.extract_tb(error.__traceback__),
        *(getattr(error, "real_stack", None) or ()),  # of what Dynamo traces
    ]
    users = [each for each in frames if _is_the_users(Path(each.filename))]
    if not users:
        return ""
    last = users[-1]
    return f" at {Path(last.filename).name}:{last.lineno} in {last.name}"


def _is_the_users(file: Path) -> bool:
    return file.is_absolute() and not any(map(file.is_relative_to, NOT_THE_USERS))


def _reason(error: Exception) -> str:
    """Return the kind of an error and what it says. Dynamo's begins with that of a fake call."""
    text = str(error).strip()
    if found := re.search(r"got (\w+)\((['\"])(.*?)\2\)", text, re.S):
        return f"{found[1]}: {found[3].partition(LINE_END)[0].rstrip('.')}"
    return f"{type(error).__name__}: {text.partition(chr(10))[0]}"


def _uneven(model: Sequence[Any]) -> Iterator[str]:
    """Yield which parameters have shards of different sizes."""
    for module in (each for each in model if isinstance(each, nn.Module)):
        for name, value in module.named_parameters():
            if not isinstance(value, DTensor):
                continue
            for dim, placement in enumerate(value.placements):
                ranks = value.device_mesh.size(dim)
                if isinstance(placement, Shard) and value.size(placement.dim) % ranks:
                    size = value.size(placement.dim)
                    yield f"{name} has {size} rows or columns, which {ranks} ranks divide unevenly"
