"""Make ``torch.compile`` use commpass in a process: torch calls ``install`` when it is imported.

``activated`` writes the metadata of a package with an entry point of the group ``torch.backends``,
and the environment that activates it. So processes that tests spawn are included.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

POLICY, PROFILE = "COMMPASS_PEERS_POLICY", "ethernet-0.1g"
"""The environment variable with the policy, and the link for which decisions are made: the slowest
one, so that as much as possible is compressed."""
INNER = ("eager", "aot_eager")
PACKAGE = "commpass_peers-0.dist-info"


def activated(folder: Path, policy: str) -> dict[str, str]:
    """Return the environment in which torch calls ``install``. ``folder`` is written to."""
    package = folder / PACKAGE
    package.mkdir(parents=True, exist_ok=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: commpass-peers\nVersion: 0\n")
    (package / "entry_points.txt").write_text(
        "[torch.backends]\ncommpass_peers = peers.wrap:install\n"
    )
    return {"PYTHONPATH": str(folder), POLICY: policy, "COMMPASS_PROFILE": PROFILE}


def install() -> None:
    """Wrap ``torch.compile``, if the environment names a policy."""
    policy = os.environ.get(POLICY)
    if not policy:
        return
    import torch

    plain = torch.compile

    @functools.wraps(plain)
    def compile_with_commpass(model: Any = None, **options: Any) -> Any:
        return plain(model, **replaced(options, policy))

    torch.compile = compile_with_commpass


def replaced(options: dict[str, Any], policy: str) -> dict[str, Any]:
    """Return the arguments of ``torch.compile`` with commpass before Inductor, or before ``eager``
    or ``aot_eager``. Other backends are left alone."""
    backend = options.get("backend", "inductor")
    if backend == "inductor":
        own = {"policy": policy}
        if options.get("mode") is not None:  # torch takes no options beside a mode
            os.environ["COMMPASS_POLICY"] = policy
            return options | {"backend": "commpass"}
        return options | {"backend": "commpass", "options": own | (options.get("options") or {})}
    if backend in INNER:
        import commpass

        return options | {"backend": commpass.backend(policy, inner=backend)}
    return options
