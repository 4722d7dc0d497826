"""Report what this installation can do."""

from __future__ import annotations

import os
import platform
import shutil
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from textwrap import shorten

from rich.table import Table
from rich.text import Text

from commpass.errors import CommpassError
from commpass.report.tables import plain_table


@dataclass(frozen=True)
class Check:
    """One feature that an installation has or lacks.

    Without a ``needed`` one commpass cannot work at all. ``wrong`` describes an invalid setting.
    """

    what: str
    state: str
    ok: bool
    meaning: str
    needed: bool
    wrong: str = ""


def checks() -> list[Check]:
    """Return what this installation can do. A probe that fails is a finding, never a traceback."""
    found = []
    for what, probe, have, lack in PROBES:
        needed = what in NEEDED
        try:
            state, ok = probe()
            meaning = have if ok else _lack(what, lack)
            found.append(Check(what, str(state), ok, meaning, needed))
        except CommpassError as error:
            why = " ".join(str(error).split())
            found.append(Check(what, "wrong", False, why, needed, why))
        except Exception as error:
            why = " ".join(str(error).split()) or type(error).__name__
            found.append(Check(what, "no", False, f"{lack} ({why})", needed))
    return found + variables()


def _lack(subject: str, lack: str) -> str:
    """Return the meaning of what is missing."""
    return UNSET if subject == "profile" and not os.environ.get("COMMPASS_PROFILE") else lack


def variables() -> list[Check]:
    """Return commpass's environment variables, and unknown ones with its prefix."""
    try:
        from commpass.distributed.environment import problems
    except Exception as error:  # without torch, which is reported above
        return [Check("environment", "unknown", False, str(error), False)]
    return [
        Check(name, value, not wrong, wrong or meaning, False, wrong)
        for name, value, meaning, wrong in problems()
    ]


def torch_version() -> tuple[str, bool]:
    import torch

    major, minor = map(int, torch.__version__.split(".")[:2])
    return torch.__version__, (2, 11) <= (major, minor) < (2, 16)


def distributed(part: str = "") -> tuple[str, bool]:
    """Return whether torch.distributed, or one backend of it, was built in."""
    import torch.distributed

    has = torch.distributed.is_available() and (
        not part or getattr(torch.distributed, f"is_{part}_available")()
    )
    return "yes" if has else "no", has


def gpus() -> tuple[str, bool]:
    import torch

    kinds: dict[str, int] = {}
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        capability = torch.cuda.get_device_capability(index)
        fp8 = "" if torch.version.hip else ", fp8" if capability >= (8, 9) else ", no fp8"
        kind = (
            f"{torch.cuda.get_device_name(index)} (capability"
            f" {'.'.join(map(str, capability))}{fp8})"
        )
        kinds[kind] = kinds.get(kind, 0) + 1
    return ", ".join(f"{count} x {kind}" for kind, count in kinds.items()) or "none", bool(kinds)


def no_gpu_reason() -> str:
    """Return why nothing can be tested on GPUs here, or "" if there is a GPU and Triton."""
    _, has = gpus()
    missing = "" if has else "torch finds no GPU"
    try:
        triton()
    except ImportError:
        missing = "no triton"
    said = (
        f"not tested ({missing}): kernels, links, symmetric memory, multicast, codecs, exchanges"
        " and times of NCCL. --gpu needs a GPU, its driver, and a torch and triton for it"
    )
    return said if missing else ""


def triton() -> tuple[str, bool]:
    import triton

    return triton.__version__, True


def compiler() -> tuple[str, bool]:
    from torch._inductor.cpp_builder import get_cpp_compiler

    found = get_cpp_compiler()
    headers = Path(sysconfig.get_path("include"), "Python.h").exists()
    return (found, True) if headers else (f"{found}, but no Python.h", False)


def graph_cache() -> tuple[str, bool]:
    from torch._inductor import config

    on = bool(config.fx_graph_cache and not config.force_disable_caches)
    return "on" if on else "off", on


def drawing() -> tuple[str, bool]:
    found = [f"{name} {metadata.version(name)}" for name in ("graphviz", "matplotlib")]
    program = shutil.which("dot")
    return ", ".join([*found, "dot" if program else "no program dot"]), program is not None


def profile() -> tuple[str, bool]:
    """Return the default profile of a program, its age, and how its machine differs from this
    one."""
    import torch

    from commpass.costmodel.files import age, read
    from commpass.costmodel.networks import on_processors
    from commpass.distributed.agreed_network import default_between_hosts
    from commpass.distributed.machine import (
        default_here,
        differences_from,
        profile_here,
        requested_profile,
        this_machine,
    )
    from commpass.distributed.processors import speed_here, stated_cores

    path = requested_profile(None)
    if path is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        alone, several = default_here(device), default_between_hosts(device)
        if device == "cpu":  # the number of ranks here is unknown, and so is what they share
            alone = on_processors(alone, stated_cores() or 1.0, speed_here())
        return f"on one host {alone.description}, on several {several.description}", False
    found = profile_here(None)
    assert found is not None
    if not str(path).endswith(".json"):
        return found.description, True
    file = read(Path(str(path)))
    others = list(differences_from(file.machine, this_machine()))
    said = f"{path}, {age(file)} old" + (f"; {'; '.join(others)}" if others else "")
    return said, not others


def needed_torch() -> str:
    """Return the versions of torch that this package supports, from its metadata, or "torch" if
    sources run that nobody installed."""
    try:
        lines = metadata.requires("commpass") or ()
    except metadata.PackageNotFoundError:
        lines = ()
    return next((line for line in lines if line.startswith(("torch<", "torch>"))), "torch")


NEEDED = ("python", "torch", "distributed")
HEADERS = "needed on the CPU: g++ and Python headers"
COLD = "every process compiles anew"
BUILT = "needed: install a torch that was built with it"
UNSET = "COMMPASS_PROFILE is not set: measure a profile of this machine with `commpass probe`"
MEASURE = "COMMPASS_PROFILE is from another machine: measure one of this with `commpass probe`"
INSTALL = "pip install 'commpass[graph]', and Graphviz (apt-get install graphviz)"
NO_GPU = "only the CPU can be used; a GPU needs its driver and a torch for it"
PROBES: tuple[tuple[str, Callable[[], tuple[str, bool]], str, str], ...] = (
    ("python", lambda: (platform.python_version(), True), "", ""),
    (
        "commpass",
        lambda: (metadata.version("commpass"), True),
        "",
        "not installed: pip install commpass",
    ),
    ("torch", torch_version, "supported", f"needed: pip install '{needed_torch()}'"),
    ("distributed", distributed, "torch has collectives", BUILT),
    ("gloo", partial(distributed, "gloo"), "collectives on the CPU", "no collectives on the CPU"),
    (
        "NCCL",
        partial(distributed, "nccl"),
        "collectives on the GPU",
        "needed on a GPU: a torch for CUDA or ROCm",
    ),
    ("GPU", gpus, "", NO_GPU),
    ("triton", triton, "Inductor compiles for the GPU", "needed on a GPU: pip install triton"),
    ("C++ compiler", compiler, "Inductor compiles for the CPU", HEADERS),
    ("Inductor FX-graph cache", graph_cache, "a warm start compiles nothing", COLD),
    ("profile", profile, "COMMPASS_PROFILE names it", MEASURE),
    ("graph --svg", drawing, "", INSTALL),
)
"""What is checked, the probe, and its meaning if present and if missing."""


def table_of(found: Sequence[Check]) -> Table:
    """Return a row for each feature; what is wrong is shortened, since the command ends with it."""
    table = plain_table("what", "state", "meaning", folded=("state", "meaning"))
    for check in found:
        style = "green" if check.ok else "bold red" if check.needed or check.wrong else "yellow"
        meaning = shorten(check.wrong, LONGEST, placeholder=" ...") or check.meaning
        table.add_row(Text(check.what), Text(check.state, style=style), Text(meaning))
    return table


LONGEST = 100
"""The columns that a sentence on what is wrong may take in the table."""
