"""The residuals that a checkpoint of torch.distributed.checkpoint holds, without their values."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from commpass.distributed.state.names import Name, parse
from commpass.errors import PolicyError
from commpass.groups import ready


class Listed(dict[str, Tensor]):
    """The residuals of a checkpoint that this rank continues with.

    ``elsewhere`` are those with which other ranks of the world continue, on the meta device. With
    them all ranks check the same state, also one that continues with nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.elsewhere: dict[Name, Tensor] = {}


def elsewhere_of(state: Mapping[str, Tensor]) -> Mapping[Name, Tensor]:
    """Return what other ranks continue with of a state, as far as it is known."""
    return state.elsewhere if isinstance(state, Listed) else {}


def listed(folder: str | os.PathLike[str], prefix: str) -> Listed:
    """Return a tensor of zeros for each residual of a checkpoint that this rank continues with.

    Raise PolicyError if the folder holds no checkpoint or a damaged one.
    """
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    if not isinstance(folder, (str, os.PathLike)):
        raise PolicyError(f"commpass.state_dict(of={folder!r}): must be the path of a folder")
    try:
        stored = FileSystemReader(folder).read_metadata().state_dict_metadata
    except OSError as error:
        raise PolicyError(
            f"{os.fspath(folder)}: no checkpoint of torch.distributed.checkpoint: {error.strerror}"
        ) from error
    except Exception as error:  # of whatever reads the file
        raise PolicyError(
            f"{os.path.join(folder, '.metadata')}: damaged, or not written by"
            f" torch.distributed.checkpoint ({type(error).__name__}: {error}). Copy the checkpoint"
            " again, or read an earlier one"
        ) from error
    found = {
        key.removeprefix(prefix + "."): entry
        for key, entry in stored.items()
        if key.startswith(f"{prefix}.commpass.v")
    }
    rank, world = (dist.get_rank(), dist.get_world_size()) if ready() else (0, 1)
    state = Listed()
    for key, entry in found.items():
        name = parse(key)
        if not isinstance(entry, TensorStorageMetadata):
            continue
        # The members of a group that is not the world are unknown yet, so all of its residuals are
        # read.
        own = name.first != "world" or name.rank % world == rank
        device = "cpu" if own else "meta"
        tensor = torch.zeros(entry.size, dtype=entry.properties.dtype, device=device)
        if own:
            state[key] = tensor
        else:
            state.elsewhere[name] = tensor
    return state
