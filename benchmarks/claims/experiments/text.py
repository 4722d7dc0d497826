"""The small model and the text of the experiments.

The model is the demo's transformer over bytes (examples/common.py); the text is the English of
``pydoc_data.topics``, of which a part is held out.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))

import common

HELD_OUT = 10
"""One in this many bytes is held out, at the end."""


def texts() -> tuple[Tensor, Tensor]:
    """Return bytes to train on, and held-out bytes. They differ a little between versions of
    Python."""
    whole = bytearray("\n".join(topics[name] for name in sorted(topics)).encode())
    bytes_ = torch.frombuffer(whole, dtype=torch.uint8)
    cut = len(bytes_) // HELD_OUT * (HELD_OUT - 1)
    return bytes_[:cut], bytes_[cut:]


def digest() -> str:
    """Return a digest of the text, for the results."""
    return hashlib.sha256(b"".join(each.numpy().tobytes() for each in texts())).hexdigest()[:12]


def batches(text: Tensor, count: int, seed: int, size: int = common.BATCH) -> Iterator[Tensor]:
    """Yield random windows of a text, int64 ``[size, CONTEXT + 1]``."""
    generator = torch.Generator().manual_seed(seed)
    windows = text.unfold(0, common.CONTEXT + 1, 1)
    for _ in range(count):
        yield windows[torch.randint(len(windows), (size,), generator=generator)].long()


def transformer(layers: int, width: int, seed: int = 0) -> common.Transformer:
    torch.manual_seed(seed)
    return common.Transformer(layers, width)


def trained(layers: int, width: int, steps: int) -> common.Transformer:
    """Return a model after some steps of AdamW in one process; the learning rate falls to a
    tenth."""
    model = transformer(layers, width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, 1e-4)
    for batch in batches(texts()[0], steps, 0):
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model


def perplexity(model: Any, count: int) -> float:
    """Return the perplexity per byte on some batches of the held-out text."""
    with torch.no_grad():
        losses = [float(model(batch)) for batch in batches(texts()[1], count, 1)]
    return math.exp(math.fsum(losses) / count)
