"""What every integration has: plans, bytes, state, an end and a summary.

An integration applies a policy to exchanges that the graphs of ``commpass.backend`` do not hold, or
brings the passes to another stack. The defaults here are those of one that sends nothing itself: no
plans, no bytes, no state, and nothing to stop. A new one subclasses ``Integration`` in one file.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from commpass.distributed import state
from commpass.distributed.state.checkpoint import elsewhere_of
from commpass.distributed.state.checks import check_state
from commpass.errors import PolicyError
from commpass.plan import Plan
from commpass.policy import Policy


@dataclass(frozen=True)
class Sent:
    """What one rank handed to the collectives of a kind.

    ``calls`` is the number of exchanges; ``plain`` and ``sent`` are the bytes without and with the
    policy.
    """

    calls: int = 0
    plain: int = 0
    sent: int = 0


class Bytes(dict[str, Sent]):
    """What one rank handed to collectives, by their kind. ``plain`` and ``sent`` are the sums."""

    @property
    def plain(self) -> int:
        """Bytes without the policy."""
        return sum(each.plain for each in self.values())

    @property
    def sent(self) -> int:
        """Bytes with the policy."""
        return sum(each.sent for each in self.values())

    def add(self, kind: str, plain: int, sent: int, calls: int = 1) -> None:
        """Count exchanges of a kind."""
        so_far = self.get(kind, Sent())
        self[kind] = Sent(so_far.calls + calls, so_far.plain + plain, so_far.sent + sent)


class Integration:
    """The handle of an integration, and a context manager that closes it.

    ``call`` is the name of the function that makes it. ``per`` says of what time ``bytes`` are:
    " a step" if of the last one, else "" for all since the call or ``clear``. ``policy`` is None if
    it has other options instead.
    """

    call: ClassVar[str] = ""
    per: ClassVar[str] = ""
    policy: Policy | None = None

    def __init__(self, model: nn.Module | None = None, policy: Policy | None = None):
        self.policy, self.closed = policy, False
        self._model = weakref.ref(model) if model is not None else None
        self._acquired: list[weakref.ref[Any]] = []
        self._sent = Bytes()

    @property
    def model(self) -> nn.Module | None:
        """The model whose error feedback is kept; None if none is, or once the model is freed."""
        return self._model() if self._model is not None else None

    @property
    def plans(self) -> list[Plan]:
        """The current plans of its exchanges."""
        return []

    @property
    def bytes(self) -> Bytes:
        """What this rank has sent, by kind."""
        return Bytes(self._sent)

    def clear(self) -> None:
        """Reset the byte counts."""
        self._sent.clear()

    def state_dict(self) -> dict[str, Tensor]:
        """Return this rank's error feedback: ``commpass.state_dict(model)``, or nothing."""
        return {} if self.model is None else state.state_dict(self.model)

    def load_state_dict(self, saved: Mapping[str, Tensor]) -> None:
        """Load a state as ``commpass.load_state_dict(saved, model)`` does, from any number of
        ranks.

        Raise PolicyError for a state that is not of this model, or for any if none is kept.
        """
        check_state(f"{self.call or 'integration'}.load_state_dict", saved)
        if self.model is not None:
            state.load_state_dict(saved, self.model)
        elif given := len(saved) or len(elsewhere_of(saved)):
            raise PolicyError(f"{self.call} keeps no state, but was given {given} tensors")

    def close(self) -> None:
        """Stop: from now on all is sent as without this integration. Error feedback stays.

        Call it between steps, on all ranks. A second call does nothing.
        """
        if not self.closed:
            self.closed = True
            self._stop()
            for each in self._acquired:
                if (sender := each()) is not None:
                    integration_of.pop(sender, None)

    def _stop(self) -> None:
        """Give exchanges back to their sender, and free groups and threads."""

    def acquire(self, sender: object, owner: object) -> None:
        """Record, until it is closed, that it exchanges the data of ``sender``, a part of the
        user's object ``owner``."""
        under = f", under policy {self.policy.name!r}," if self.policy is not None else ""
        text = f"commpass.parallel.{self.call} of a {type(owner).__name__} already{under}"
        integration_of[sender] = self.call, text
        self._acquired.append(weakref.ref(sender))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def summary(self) -> str:
        """How many exchanges are compressed, and the bytes."""
        sites = [site for plan in self.plans for site in plan.sites]
        parts = []
        if self.plans:
            coded = sum(site.compressed for site in sites)
            parts.append(f"{coded} of {len(sites)} exchanges compressed")
        if sent := self.bytes:
            parts.append(f"{sent.sent:,} instead of {sent.plain:,} bytes{self.per}")
        return ", ".join(parts) or ("no step yet" if self.per else "nothing sent yet")

    def __repr__(self) -> str:
        policy = f", policy {self.policy.name!r}" if self.policy is not None else ""
        return f"<{self.call}{policy}: {self.summary}>"


# --- one integration for each parameter, unit or stage --------------------------------------------


integration_of: WeakKeyDictionary[object, tuple[str, str]] = WeakKeyDictionary()
"""The call of an integration, and a text about it, by the model or object whose data it sends."""
TWICE = (
    "{}: {} is exchanged by {} and would be exchanged twice. Leave one of the two out, give one"
    " policy with rules for both, or call close() on the first"
)


def refuse_if_exchanged(sender: object, name: str, call: str, by: Collection[str]) -> None:
    """Raise PolicyError in the name of ``call`` if an integration of ``by`` already has ``sender``.

    A module counts as exchanged if one of its parameters is. ``name`` is that of anything else.
    """
    names = _parts(sender, name)

    def found() -> str:
        return next(
            (
                TWICE.format(call, names[part], text)
                for owner, (other, text) in list(integration_of.items())
                if other in by
                for part in _parts(owner)
                if part in names
            ),
            "",
        )

    if found():
        gc.collect()  # a model that is no longer referenced does not count
        if why := found():
            raise PolicyError(why)


def _parts(sender: object, name: str = "") -> dict[int, str]:
    """Return the names of an object's parts by their ids: a module's parameters, or itself."""
    if not isinstance(sender, nn.Module):
        return {id(sender): name}
    return {id(parameter): f"{path} of this model" for path, parameter in sender.named_parameters()}
