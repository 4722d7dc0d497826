"""What the scripts of the four trainers share: a small model of bytes, its text, and their results.

A script runs one training as its options say (JSON in its last argument), and writes what each
rank found to the folder ``out``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

CONTEXT = 16


def rows(count: int, start: int = 0) -> Tensor:
    """Return windows of the sources of Python's standard library: ``CONTEXT`` bytes and one."""
    sources = sorted(Path(os.__file__).parent.glob("*.py"))
    text = b"".join(path.read_bytes() for path in sources)
    width = CONTEXT + 1
    return torch.tensor(list(text[start * width : (start + count) * width])).view(-1, width)


class NextByte(nn.Module):
    """Predicts a byte from those before it. The same random weights on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(256, 64)
        self.hidden = nn.Linear(64 * CONTEXT, 512)
        self.output = nn.Linear(512, 256)

    def forward(self, batch: Tensor) -> Tensor:
        """Return the loss of rows of bytes."""
        found = self.embedding(batch[:, :CONTEXT]).flatten(1)
        logits = self.output(nn.functional.gelu(self.hidden(found)))
        return nn.functional.cross_entropy(logits.float(), batch[:, CONTEXT])


def options() -> dict[str, Any]:
    """Return the options of this script."""
    return json.loads(sys.argv[-1])


def write(given: dict[str, Any], rank: int, losses: list[float], model: Any, **more: Any) -> None:
    """Write the losses, a digest of the weights, and more."""
    digest = sum(_local(each).double().abs().sum().item() for each in model.parameters())
    found = {"losses": losses, "digest": digest, **more}
    (Path(given["out"]) / f"{rank}.json").write_text(json.dumps(found))


def sent(integration: Any) -> dict[str, Any]:
    """Return what an integration reports."""
    if integration is None:
        return {}
    sites = [site for plan in integration.plans for site in plan]
    return {
        "plain": integration.bytes.plain,
        "sent": integration.bytes.sent,
        "codecs": sorted({site.codec for site in sites}),
        "state": len(integration.state_dict()),
        "summary": str(integration),
    }


def _local(parameter: Any) -> Tensor:
    return (parameter.to_local() if hasattr(parameter, "to_local") else parameter).detach()
