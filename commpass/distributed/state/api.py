"""The public functions of error feedback: save, load and drop residuals."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from commpass.distributed.owners import Owner, parameter_names, state_owners
from commpass.distributed.state.checkpoint import elsewhere_of, listed
from commpass.distributed.state.checks import (
    check_for_integrations,
    check_model,
    check_parameters,
    check_ranks,
    check_shapes,
    check_state,
)
from commpass.distributed.state.errors import ambiguous, other_model
from commpass.distributed.state.loaded import add, drop, loads
from commpass.distributed.state.names import Name, parse
from commpass.distributed.state.redistribute import is_new, is_same_state, redistributed
from commpass.distributed.state.residuals import live_of
from commpass.distributed.state.unused import warn_of_unused
from commpass.errors import PolicyError
from commpass.utils.ambient import making_lasting_tensors
from commpass.utils.keywords import named_arguments


@named_arguments
def state_dict(
    model: nn.Module | None = None,
    *,
    of: str | os.PathLike[str] | None = None,
    prefix: str = "commpass",
) -> dict[str, Tensor]:
    """Return this rank's residuals by name.

        dcp.save({"model": ..., "commpass": commpass.state_dict(model)}, checkpoint_id=path)

        state = commpass.state_dict(of=path)
        dcp.load({"commpass": state}, checkpoint_id=path)
        commpass.load_state_dict(state, model)

    The number of ranks may differ from that of the checkpoint: each rank gets the residuals that it
    continues with. State that was loaded and not yet used by a graph is included. If its parameters
    have been trained since, a warning says once that it is not sent.

    Args:
        model: the model whose residuals are returned, under its parameters' names. It is required
            if several instances share code: blocks that are compiled one by one, or two models of
            one class. Its wrappers (DDP, FSDP, ``torch.compile``) have the same residuals. None for
            all residuals.
        of: a folder that ``torch.distributed.checkpoint`` wrote. The result then has empty tensors,
            to load those of that checkpoint into.
        prefix: the prefix of the residuals in that checkpoint.

    Raise PolicyError for a model that is not a module, if the folder holds no checkpoint or a
    damaged one, or if the owner of a residual is ambiguous.
    """
    check_model("state_dict", model)
    if of is not None:
        return listed(of, prefix)
    found, unused = live_of(model), []
    for loaded in loads():
        for name, here in loaded.names_in(model).items():
            if loaded.tensors[name].is_meta:  # it is of another rank
                continue
            found.append((here, loaded.tensors[name]))
            if loaded.is_unused(name):
                unused.append(here.label)
    state: dict[str, Tensor] = {}
    for name, tensor in found:
        if str(name) in state:
            raise ambiguous(name, "kept for")
        state[str(name)] = tensor
    warn_of_unused(unused)
    return state


@named_arguments
def load_state_dict(state: Mapping[str, Tensor], model: nn.Module | None = None) -> None:
    """Continue with residuals that ``state_dict`` returned, on any number of ranks.

    References of differences are not saved. Existing ones are dropped, and the next step gathers
    the parameters anew, so every rank must call this function. Sites that have not run yet take
    their residuals when they do.

    Args:
        state: residuals by name, as ``state_dict`` returns them. An empty state starts again with
            zeros. Give what ``state_dict(of=...)`` returned as it is, also if it is empty: it knows
            what other ranks were given, so a state that is refused is refused on all ranks.
        model: the model to whose parameters residuals are assigned by name; other models keep
            theirs. If None, each site takes what was saved for it. If several instances ask for it,
            that is an error.

    Raise PolicyError for a state that is invalid, or of another model, shape or version, with what
    was expected. Then nothing is changed.
    """
    check_model("load_state_dict", model)
    check_state("commpass.load_state_dict", state)
    tensors: dict[Name, Tensor] = {}
    for key, tensor in state.items():
        if not isinstance(tensor, Tensor):
            raise PolicyError(
                f"{key!r} is {type(tensor).__name__}, but error feedback is kept in tensors"
            )
        tensors[parse(key)] = tensor.detach() if tensor.requires_grad else tensor
    everywhere = {**elsewhere_of(state), **tensors}
    live = live_of(model)
    names = parameter_names(model) if model is not None else None
    if everywhere and model is not None and names is not None:
        check_parameters(everywhere, set(names.values()))
        check_shapes(everywhere, model)
    check_for_integrations(everywhere, names)
    parameters = frozenset(saved.parameter for saved in everywhere)
    with making_lasting_tensors():
        loaded = [
            torch.zeros_like(tensor)
            if not everywhere or is_new(name, parameters)
            else redistributed(name, tensor, everywhere)
            for name, tensor in live
        ]
    if model is None and len({name for name, _ in live}) < len(live):
        twice = next(name for name, _ in live if sum(name == other for other, _ in live) > 1)
        if everywhere:
            raise ambiguous(twice, "kept for")
    left = {
        saved: tensor
        for saved, tensor in everywhere.items()
        if not any(is_same_state(name, saved) for name, _ in live)
    }
    if live and left and model is None:
        raise other_model(
            {n.label for n in left}, {n.label for n, _ in live}, "was loaded", "this model has"
        )
    check_ranks(everywhere)
    with making_lasting_tensors():
        for (_, tensor), value in zip(live, loaded, strict=True):
            tensor.copy_(value)
    for owner in _owners_of(model):
        owner.references.clear()
    drop(model)
    if everywhere:
        add(left, parameters, model)


@named_arguments
def reset_state(model: nn.Module | None = None) -> None:
    """Drop residuals, loaded state that is not used yet, and references of differences.

    The next step begins as in a new process: residuals are zero, and references are taken from the
    current parameters. Every rank must call it at the same step.

    Args:
        model: the model whose state is dropped; None for all models.
    """
    for owner in _owners_of(model):
        owner.state.clear()
        owner.references.clear()
    drop(model)


def _owners_of(model: nn.Module | None) -> list[Owner]:
    """Return all owners, or those of a model's parameters."""
    names = parameter_names(model) if model is not None else None
    return [each for each in state_owners() if names is None or each.name_in(names) is not None]
