"""The residuals that a checkpoint of torch.distributed.checkpoint holds, without their values."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor

from commpass.distributed.state.names import parse
from commpass.errors import PolicyError
from commpass.groups import ready


def listed(folder: str | os.PathLike[str], prefix: str) -> dict[str, Tensor]:
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
    state = {}
    for key, entry in found.items():
        name = parse(key)
        # The members of a group that is not the world are unknown yet, so all of its residuals are
        # read.
        if isinstance(entry, TensorStorageMetadata) and (
            name.first != "world" or name.rank % world == rank
        ):
            state[key] = torch.zeros(entry.size, dtype=entry.properties.dtype, device="cpu")
    return state
