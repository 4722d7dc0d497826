"""The chains of a codec by the names of their kernels, and those of a planned site."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from commpass.codecs import VALUES, Codec, accumulation_dtype
from commpass.codecs import codec as codec_of
from commpass.lowering.chain import Add, Cast, Chain, Decode, Encode, Enter, Leave, Step, Sum
from commpass.plan.stage import Stage

NUMEL = 1 << 20
"""The default number of values of a row: enough for whole tiles."""

# --- by name --------------------------------------------------------------------------------------


def _encode(codec: Codec, dtype: torch.dtype, ranks: int) -> Chain:
    return Chain(dtype, (Encode(codec),))


def _decode(codec: Codec, dtype: torch.dtype, ranks: int) -> Chain:
    return Chain(torch.uint8, (Decode(codec, dtype), Cast(dtype)))


def _decode_sum(codec: Codec, dtype: torch.dtype, ranks: int) -> Chain:
    """The end of a reduction. Values are summed in the codec's domain and leave it once."""
    leave = () if codec.domain == VALUES else (Leave(codec.domain),)
    return Chain(torch.uint8, (Decode(codec.domain_codec, dtype), Sum(ranks), *leave, Cast(dtype)))


def _decode_sum_encode(codec: Codec, dtype: torch.dtype, ranks: int) -> Chain:
    """The middle of a two-shot; values stay in the codec's domain."""
    return Chain(
        torch.uint8, (Decode(codec.domain_codec, dtype), Sum(ranks), Encode(codec.domain_codec))
    )


CHAINS: Mapping[str, Callable[[Codec, torch.dtype, int], Chain]] = {
    "encode": _encode,
    "decode": _decode,
    "decode_sum": _decode_sum,
    "decode_sum_encode": _decode_sum_encode,
}
"""The chain of each kernel name, for the rows of ``ranks`` ranks."""

# --- of a site ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SiteChain:
    """A chain of a site, for rows of ``numel`` values, and the number of its occurrences."""

    chain: Chain
    numel: int
    times: int


def of_stages(stages: Sequence[Stage], dtype: torch.dtype, ranks: int) -> list[SiteChain]:
    """Return the chains of a site's algorithm: what a rank computes between two exchanges, in
    order.

    A codec applies its transform itself unless values enter and leave its domain in separate
    stages. If values are encoded again without a sum, the rank's own values are added to them (a
    ring). A sum of values that were not encoded needs no kernel.
    """
    entered = any(stage.role == "enter" for stage in stages)
    found: list[SiteChain] = []
    for run in _runs(stages):
        place = _place(run, stages, dtype, ranks, entered)
        same = [n for n, one in enumerate(found) if replace(one, times=1) == place]
        if same:
            found[same[0]] = replace(place, times=found[same[0]].times + 1)
        else:
            found.append(place)
    return found


def _runs(stages: Sequence[Stage]) -> list[list[Stage]]:
    """Return runs of stages in which each uses the result of the one before it, without an exchange
    between them."""
    runs: list[list[Stage]] = []
    for number, stage in enumerate(stages):
        if stage.role == "exchange":
            continue
        before = number - 1
        if runs and runs[-1] and before in stage.after and stages[before] is runs[-1][-1]:
            runs[-1].append(stage)
        elif stage.role != "sum":
            runs.append([stage])
        else:
            runs.append([])
    return [run for run in runs if any(stage.codec for stage in run)]


def _place(
    run: Sequence[Stage], stages: Sequence[Stage], dtype: torch.dtype, ranks: int, entered: bool
) -> SiteChain:
    roles = [stage.role for stage in run]
    codecs = [codec_of(stage.codec) if stage.codec else None for stage in run]
    steps: list[Step] = []
    rows = 1
    for number, (stage, codec) in enumerate(zip(run, codecs, strict=True)):
        if codec is not None:
            inner = codec.domain_codec if entered else codec
            if stage.role == "encode" and number and roles[number - 1] == "decode":
                steps.append(Add(accumulation_dtype(dtype)))
            steps.append(Decode(inner, dtype) if stage.role == "decode" else Encode(inner))
        elif stage.role == "sum":
            after = [stage.values for stage in run[number + 1 :]]
            rows = stage.values // after[0] if after else ranks
            steps.append(Sum(rows))
        else:  # the domain is that of the adjacent codec
            near = [each for each in (*codecs[number:], *codecs[::-1]) if each is not None]
            steps.append((Enter if stage.role == "enter" else Leave)(near[0].domain))
    if roles[-1] != "encode":
        steps.append(Cast(dtype))
    if roles[0] == "decode":
        # Gathered data has one row from each rank.
        several = rows if "sum" in roles else 1 if roles[-1] == "encode" else ranks
        return SiteChain(Chain(torch.uint8, tuple(steps)), run[0].values // several, 1)
    summed = any(stage.role == "sum" for stage in stages[: stages.index(run[0])])
    input_dtype = accumulation_dtype(dtype) if summed else dtype
    return SiteChain(Chain(input_dtype, tuple(steps)), _row(run[-1], stages), 1)


def _row(stage: Stage, stages: Sequence[Stage]) -> int:
    """Return the values of one encoded row: for an all-to-all, the values sent to one rank."""
    sent = next(each for each in stages[stages.index(stage) :] if each.role == "exchange")
    apart = sent.kind == "all_to_all" and sent.peers is not None and sent.peers > 1
    return stage.values // (sent.peers + 1 if apart and sent.peers else 1)
