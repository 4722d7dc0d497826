"""Small models for torchtitan: ``--module titan_small --config llama``.

Their text is the documentation, their tokens are bytes.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from small_llama import DOCS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.functional import scaled_dot_product_attention
from torchtitan.components.checkpointer import BaseCheckpointManager
from torchtitan.config.override import OverrideConfig, apply_overrides, derive, override
from torchtitan.experiments.graph_trainer.llama3.config_registry import (
    graph_trainer_llama3_debugmodel,
)
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

BUILD = Path(__file__).parents[2] / "build" / "stacks" / "titan"
LAYERS = 2
TEXTS, TOKENIZER = BUILD / "texts", BUILD / "tokenizer"


class MaskedAttention(FlexAttention):
    """FlexAttention, which has no backward on CPUs, with a mask of all pairs of tokens."""

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        pass

    def forward(
        self, q_BLNH: Any, k_BLNH: Any, v_BLNH: Any, *, attention_masks: Any, **how: Any
    ) -> torch.Tensor:
        batch, length = torch.arange(q_BLNH.shape[0]), torch.arange(q_BLNH.shape[1])
        visible = attention_masks.mask_mod(
            batch[:, None, None, None], 0, length[:, None], length[None, :]
        )
        q, k, v = (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
        given = {name: how[name] for name in ("scale", "enable_gqa") if name in how}
        return scaled_dot_product_attention(q, k, v, visible, **given).transpose(1, 2)


@override(target=FlexAttention.Config, description="attention with a backward on CPUs")
def masked_attention(config: FlexAttention.Config) -> MaskedAttention.Config:
    return derive(config, MaskedAttention.Config)


class NoCheckpoints(BaseCheckpointManager):
    """A checkpoint manager of another kind than torchtitan's default, always disabled."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        pass

    def __init__(self, config: Config, *, states: dict[str, Any], **more: Any):
        self.enable = False

    def _unused(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError

    _load = _save = _close = _wait_for_saving = _maybe_wait_for_staging = _unused


def llama() -> Trainer.Config:
    return _small(llama3_debugmodel())


def llama_other_checkpoints() -> Trainer.Config:
    config = llama()
    config.checkpoint = NoCheckpoints.Config(enable=False)
    return config


def mixture() -> Trainer.Config:
    return _small(deepseek_v3_debugmodel())


def graph_llama() -> Trainer.Config:
    config = _small(graph_trainer_llama3_debugmodel())
    config.compile.disable_passes = ["cudagraph_pass"]
    return config


def _small(config: Trainer.Config) -> Trainer.Config:
    del config.model_spec.model.layers[LAYERS:]
    config.model_spec.parallelize_fn = _on_gloo(config.model_spec.parallelize_fn)
    apply_overrides(OverrideConfig(imports=["titan_small.masked_attention"]), config)
    config.parallelism.spmd_backend = "partial_dtensor"
    config.hf_assets_path = str(TOKENIZER)
    config.dataloader.dataset_path = str(TEXTS)
    config.training.local_batch_size = 4
    config.training.seq_len = 256
    config.training.mixed_precision_param = "float32"  # bfloat16 takes 30 s a step
    config.checkpoint.enable = False
    config.validator.enable = False
    config.debug.seed = 0
    return config


def _on_gloo(parallelize: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Return a function that also lets FSDP2 multiply gradients itself: gloo has no PREMUL_SUM."""

    @functools.wraps(parallelize)
    def parallelized(*args: Any, **kwargs: Any) -> nn.Module:
        model = parallelize(*args, **kwargs)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
        return model

    return parallelized


def write_data() -> None:
    """Write the texts and a tokenizer whose tokens are bytes."""
    TEXTS.mkdir(parents=True, exist_ok=True)
    TOKENIZER.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"text": path.read_text()}) for path in sorted(DOCS.glob("*.md"))]
    (TEXTS / "docs.jsonl").write_text("\n".join(lines))
    letters = pre_tokenizers.ByteLevel.alphabet()
    vocabulary = {letter: number for number, letter in enumerate(sorted(letters))}
    vocabulary |= {"<bos>": 256, "<eos>": 257}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    tokenizer.save(str(TOKENIZER / "tokenizer.json"))
    names = {"bos_token": "<bos>", "eos_token": "<eos>"}
    (TOKENIZER / "tokenizer_config.json").write_text(json.dumps(names))


if __name__ == "__main__":
    write_data()
