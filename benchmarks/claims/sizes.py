"""Count a model's small tensors, and their share of all entries (SSFusion, table II)."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

SMALL = 102_400
"""A tensor with fewer entries is small."""


@lru_cache
def tensor_sizes(model: str) -> tuple[int, ...]:
    """Return the number of entries of each parameter of a model, by the paper's name; no weight is
    created."""
    import transformers as library

    large = {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
    }
    made: dict[str, tuple[Any, Any]] = {
        "ResNet-152": (
            library.ResNetForImageClassification,
            library.ResNetConfig(depths=[3, 8, 36, 3], num_labels=1000),
        ),
        "ViT-large": (
            library.ViTForImageClassification,
            library.ViTConfig(**large, num_labels=1000),
        ),
        "BERT-large": (library.BertForQuestionAnswering, library.BertConfig(**large)),
        "GPT2-large": (
            library.GPT2LMHeadModel,
            library.GPT2Config(n_embd=1280, n_layer=36, n_head=20),
        ),
    }
    kind, config = made[model]
    with torch.device("meta"):
        return tuple(each.numel() for each in kind(config).parameters())


def small_percents(model: str) -> tuple[float, float]:
    """Return the percentage of tensors that are small, and the percentage of all entries that these
    hold."""
    sizes = tensor_sizes(model)
    small = [size for size in sizes if size < SMALL]
    return 100 * len(small) / len(sizes), 100 * sum(small) / sum(sizes)
