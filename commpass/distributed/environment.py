"""Environment variables that an operator sets to change a job without changing the program.

``COMMPASS=off`` compiles as with policy ``off``, and integrations send uncompressed.
``COMMPASS_POLICY`` (a preset or a .toml file) replaces every policy that the program gives. The
other variables are defaults for what the program does not specify.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from commpass.distributed import step_times
from commpass.distributed.processors import CORES, SPEED, stated_cores, stated_speed
from commpass.errors import CommpassError, PolicyError, nearest
from commpass.groups import is_first_rank
from commpass.policy import PRESETS, Policy, policy_named

log = logging.getLogger("commpass")

SWITCH, POLICY, DUMP, PROFILE = "COMMPASS", "COMMPASS_POLICY", "COMMPASS_DUMP", "COMMPASS_PROFILE"
CHECK, STEPS = "COMMPASS_CHECK", step_times.FOLDER
SWITCH_VALUES = ("off", "on")


def is_off() -> bool:
    """Return whether commpass is switched off. Raise PolicyError for an unknown value."""
    given = os.environ.get(SWITCH) or "on"
    value = given.lower()
    if value not in SWITCH_VALUES:
        raise PolicyError(f"{SWITCH}={given}: must be off or on{nearest(value, SWITCH_VALUES)}")
    return value == "off"


def policy_of_environment() -> Policy | None:
    """Return the policy that COMMPASS_POLICY names; None if it is not set.

    Raise PolicyError for an unknown one.
    """
    named = os.environ.get(POLICY)
    if not named:
        return None
    try:
        return policy_named(named)
    except CommpassError as error:
        raise PolicyError(f"{POLICY}={named}: {error}") from error


def policy_here(argument: str | Path | Policy) -> Policy:
    """Return the policy to use if the program gives this one.

    Raise PolicyError for an unknown policy, also one that is replaced: so a mistake is found before
    the variables are removed. Raise it also for a wrong COMMPASS_CORES or COMMPASS_SPEED, before
    other ranks wait for what this one publishes.
    """
    step_times.open_recorder()
    stated_cores()
    stated_speed()
    chosen = policy_named(argument)
    requested = policy_of_environment()
    if is_off():
        _log(logging.INFO, f"{SWITCH}=off: nothing is compressed, also if the program has a policy")
        return PRESETS["off"]
    if requested is None or requested == chosen:
        return chosen
    named = os.environ[POLICY]
    _log(
        logging.WARNING,
        f"{POLICY}={named} takes the place of policy {chosen.name!r}, which the program gives",
    )
    return requested


def dump_here(argument: str | os.PathLike[str] | None) -> Path | None:
    """Return the folder for dumps: the program's, or else that of the environment.

    Under ``commpass compare`` it is that of the environment.
    """
    step_times.open_recorder()
    named = argument if not os.environ.get(STEPS) else None
    folder = named if named is not None else os.environ.get(DUMP)
    return Path(folder) if folder else None


@functools.cache
def _log(level: int, text: str) -> None:
    if is_first_rank():
        log.log(level, "%s", text)


# --- other ranks ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """What must be equal on all ranks: the variables as text, and a digest of their meaning."""

    text: str = ""
    digest: str = ""


def settings() -> Settings:
    """Return the settings of this process. A wrong value raises elsewhere."""
    text = " ".join(f"{name}={os.environ[name]}" for name in (SWITCH, POLICY) if _is_set(name))
    if not text:
        return Settings()
    try:
        meaning = "off" if is_off() else msgspec.to_builtins(policy_of_environment())
    except CommpassError as error:
        meaning = str(error)
    if isinstance(meaning, dict):
        meaning = {**meaning, "name": ""}
    return Settings(text, hashlib.sha256(msgspec.json.encode(meaning)).hexdigest()[:16])


def _is_set(name: str) -> bool:
    """Return whether a variable is set to something other than its default."""
    return os.environ.get(name) not in (None, "") and (name, os.environ[name]) != (SWITCH, "on")


def difference(settings: Mapping[int, Settings]) -> str:
    """Return the message for ranks whose settings differ; "" if they are equal."""
    sides: dict[str, list[int]] = {}
    for rank, one in sorted(settings.items()):
        sides.setdefault(one.digest, []).append(rank)
    if len(sides) < 2:
        return ""
    shown = "; ".join(
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}"
        f"{f' and {len(ranks) - 8} more' if len(ranks) > 8 else ''}:"
        f" {settings[ranks[0]].text or f'neither {SWITCH} nor {POLICY} is set'}"
        for ranks in sides.values()
    )
    return (
        f"the ranks were started with different environments. {shown}. Set both equally for all"
        " ranks, on every host"
    )


# --- what is set, for `commpass doctor` -----------------------------------------------------------


def problems() -> Iterator[tuple[str, str, str, str]]:
    """Yield (variable, its value or "not set", its meaning, the problem or "")."""
    for name, (meaning, check) in VARIABLES.items():
        value = os.environ.get(name, "")
        wrong = ""
        try:
            wrong = check(value) if value else ""
        except CommpassError as error:
            wrong = " ".join(str(error).split())
        yield name, value or "not set", meaning, wrong
    for name in sorted(os.environ):
        if name.startswith(f"{SWITCH}_") and name not in (*VARIABLES, PROFILE, *OTHERS):
            known = nearest(name, (*VARIABLES, PROFILE))
            yield name, os.environ[name], "", f"{name}: there is no such variable{known}"


def _checked(validate: Callable[[], object]) -> Callable[[str], str]:
    def check(value: str) -> str:
        validate()
        return ""

    return check


def _dump_problem(value: str) -> str:
    folder = Path(value)
    if folder.exists() and not folder.is_dir():
        return f"{DUMP}={value}: is a file, and must be a folder"
    existing = next(
        (each for each in (folder, *folder.absolute().parents) if each.exists()), folder
    )
    return (
        "" if os.access(existing, os.W_OK) else f"{DUMP}={value}: {existing} cannot be written to"
    )


def _steps_problem(value: str) -> str:
    return "" if os.access(value, os.W_OK) else f"{STEPS}={value}: must be a folder to write to"


def _check_problem(value: str) -> str:
    return "" if value in ("0", "1") else f"{CHECK}={value}: must be 0 or 1"


VARIABLES: dict[str, tuple[str, Callable[[str], str]]] = {
    SWITCH: ("off: nothing is compressed, also if the program has a policy", _checked(is_off)),
    POLICY: (
        "takes the place of the policy that the program gives",
        _checked(policy_of_environment),
    ),
    DUMP: ("where rank 0 writes plans and graphs, unless the program has dump=...", _dump_problem),
    STEPS: ("where each rank writes the times of its steps, for commpass compare", _steps_problem),
    CHECK: ("1: passes are checked on every graph, as with strict=True", _check_problem),
    CORES: ("how many processor cores this rank has", _checked(stated_cores)),
    SPEED: ("how fast its processor cores are; 1: as slow server cores", _checked(stated_speed)),
}
"""Maps a variable to its meaning and its check. COMMPASS_PROFILE is checked separately."""
OTHERS = ("COMMPASS_DEMO_HOSTS", "COMMPASS_NETLAB")
"""Variables of examples and tests."""
