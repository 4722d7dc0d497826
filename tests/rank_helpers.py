"""Helpers for functions that tests run on every rank."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

import commpass
from commpass.distributed import owners


def gather_objects(x: Any) -> list[Any]:
    """Return the objects of all ranks, in rank order."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, x)
    return found


def is_same_on_all_ranks(x: Any) -> bool:
    """Return whether all ranks pass equal, hashable objects."""
    return len(set(gather_objects(x))) == 1


def forget_process() -> None:
    """Reset the state to that of a new process."""
    commpass.reset_state()
    owners._owners.clear()
    torch._dynamo.reset()


@contextmanager
def commpass_messages(level: int = logging.NOTSET) -> Iterator[list[str]]:
    """Collect the messages that commpass logs on this rank in this context."""
    messages: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("commpass").addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger("commpass").removeHandler(handler)
