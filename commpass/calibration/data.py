"""The results of a calibration as data: written to and read from JSON, with a common digest."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from commpass.calibration.measured_sites import Address, CountedSite, ErrorLevel, MeasuredSites
from commpass.calibration.mix import Solution, rules_of, solve
from commpass.costmodel import Profile
from commpass.distributed.machine import profile_here
from commpass.errors import CalibrationError
from commpass.policy import Policy, policy_named
from commpass.utils.keywords import named_arguments, named_fields
from commpass.utils.tables import Format, read_json, write_whole

FORMAT = Format("calibration", 1, "measure again with `commpass calibrate`", CalibrationError)

__all__ = ["Address", "Calibration", "CountedSite", "ErrorLevel", "MeasuredSites"]


@named_fields()
@dataclass(frozen=True, kw_only=True)
class Calibration:
    """How sensitive a model is to errors of its collectives, as measured on ``batches`` batches.

    ``of`` is the subject of sensitivities: the ``gradients`` of all parameters, or the ``outputs``
    of inference. ``loss`` is the mean loss of the untouched model (None for inference). ``probes``
    are the codecs whose errors represented all others'. ``remarks`` report which collectives were
    not measured, and why. ``written`` is a time as ISO 8601.
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
    places: tuple[MeasuredSites, ...] = ()
    remarks: tuple[str, ...] = field(default=())

    @named_arguments
    def solve(
        self,
        max_error: float,
        *,
        base: str | Path | Policy = "lossless",
        profile: str | Path | Profile | None = None,
        cheapest: str = "bytes",
    ) -> Solution:
        """Return the cheapest codec of each place, with a predicted error of at most ``max_error``.

        The cheapest one sends least (``cheapest="bytes"``) or is predicted to take least
        (``"time"``). The error is that of gradients or outputs, a share such as 0.02. Places that
        ``base`` keeps stay uncompressed. Raise CalibrationError for an invalid budget, and
        PolicyError for an invalid policy or profile.
        """
        return solve(self.places, max_error, policy_named(base), profile_here(profile), cheapest)

    @named_arguments
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
        """Return a policy with a rule for each place.

        A rule allows the chosen codec, and every other one whose measured error there is no larger.
        The cost model then selects the fastest of them, or none. With ``exactly`` a rule has only
        the chosen codec, and forces it. Sites without such a rule follow the rules of the policy
        ``base``, since nothing was measured there.
        """
        base = policy_named(base)
        found = self.solve(max_error, base=base, profile=profile, cheapest=cheapest)
        return rules_of(found, base, name, exactly=exactly)

    def digest(self) -> str:
        """Return a digest of all that was measured; equal on all ranks."""
        fields = {**msgspec.to_builtins(self), "written": ""}
        return hashlib.sha256(msgspec.json.encode(fields, order="deterministic")).hexdigest()[:16]

    def to_json(self) -> str:
        return msgspec.json.format(msgspec.json.encode(self), indent=1).decode()

    def write(self, path: str | Path) -> None:
        """Write it completely or not at all. Raise CalibrationError if that fails."""
        write_whole(Path(path), self.to_json().encode() + b"\n", CalibrationError)

    @staticmethod
    def read(path: str | Path) -> Calibration:
        """Read what ``write`` wrote. Raise CalibrationError with the error and its place."""
        found: Any = read_json(Path(path), FORMAT, Calibration)
        return found
