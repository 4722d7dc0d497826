"""What a calibration found, as data: JSON out, JSON in, with a digest that all ranks share."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from commpass.calibration.mix import Solution, rules_of, solve
from commpass.calibration.places import Address, Carried, Level, Place
from commpass.costmodel import Profile
from commpass.distributed.machine import profile_here
from commpass.errors import CalibrationError
from commpass.policy import Policy, policy_named
from commpass.utils.tables import Format, read_json, write_whole

FORMAT = Format("calibration", 1, "measure again with `commpass calibrate`", CalibrationError)

__all__ = ["Address", "Calibration", "Carried", "Level", "Place"]


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """How much a model minds errors of its collectives, as measured on ``batches`` batches.

    ``of`` says what sensitivities are of: the ``gradients`` of all parameters, or the ``outputs``
    of inference. ``loss`` is the mean loss of the untouched model (None for inference), ``probes``
    the codecs whose errors stood for all others', and ``remarks`` say which collectives were not
    measured, and why. ``written`` is a time as ISO 8601.
    """

    format: str = FORMAT.name
    version: int = FORMAT.version
    commpass: str
    torch: str
    written: str
    world_size: int
    batches: int
    of: str
    probes: tuple[str, ...]
    loss: float | None = None
    places: tuple[Place, ...] = ()
    remarks: tuple[str, ...] = field(default=())

    def solve(
        self,
        max_error: float,
        *,
        base: str | Path | Policy = "lossless",
        profile: str | Path | Profile | None = None,
        cheapest: str = "bytes",
    ) -> Solution:
        """The codec of each place that sends least (``cheapest="bytes"``) or is predicted to take
        least (``"time"``), with a predicted error of gradients or outputs of at most ``max_error``:
        a share such as 0.02. Places that ``base`` keeps are left alone. Raises CalibrationError for
        a budget that is no number, PolicyError for a policy or profile that is none.
        """
        return solve(self.places, max_error, policy_named(base), profile_here(profile), cheapest)

    def policy(
        self,
        max_error: float,
        *,
        base: str | Path | Policy = "lossless",
        profile: str | Path | Profile | None = None,
        cheapest: str = "bytes",
        exactly: bool = False,
        name: str = "calibrated",
    ) -> Policy:
        """A policy with a rule for each place: the chosen codec, and every other one whose measured
        error there is no larger, of which the cost model takes the fastest, or none. With
        ``exactly`` the rule has the chosen codec alone, and forces it.

        What no rule covers is the policy ``base``'s, by its own rules: nothing was measured there.
        """
        base = policy_named(base)
        found = self.solve(max_error, base=base, profile=profile, cheapest=cheapest)
        return rules_of(found, base, name, exactly=exactly)

    def digest(self) -> str:
        """A digest of all that was measured; equal on all ranks."""
        said = {**msgspec.to_builtins(self), "written": ""}
        return hashlib.sha256(msgspec.json.encode(said, order="deterministic")).hexdigest()[:16]

    def to_json(self) -> str:
        return msgspec.json.format(msgspec.json.encode(self), indent=1).decode()

    def write(self, path: str | Path) -> None:
        """Writes it, whole or not at all. Raises CalibrationError where that cannot be."""
        write_whole(Path(path), self.to_json().encode() + b"\n", CalibrationError)

    @staticmethod
    def read(path: str | Path) -> Calibration:
        """What ``write`` wrote. Raises CalibrationError that says what is wrong with it and
        where."""
        found: Any = read_json(Path(path), FORMAT, Calibration)
        return found
