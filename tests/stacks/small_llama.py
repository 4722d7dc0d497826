"""A small Llama, trained on the text of the documentation, in the form of Hugging Face.

Its tokens are bytes. The last bytes of the text are held out, and lie beside the model.
"""

from __future__ import annotations

from pathlib import Path

import torch

DOCS = Path(__file__).parents[2] / "docs"
UNSEEN = "held_out.bin"
HELD_OUT, CONTEXT, BATCH = 16384, 256, 8


def text() -> bytes:
    return b"".join(path.read_bytes() for path in sorted(DOCS.glob("*.md")))


def held_out(folder: Path, tokens: int, number: int = 0) -> list[int]:
    """Return the tokens of a prompt that the model was not trained on."""
    kept = (folder / UNSEEN).read_bytes()
    assert (number + 1) * tokens <= len(kept)
    return list(kept[number * tokens : (number + 1) * tokens])


def train(folder: Path, width: int = 512, layers: int = 4, steps: int = 40) -> Path:
    """Write a model to a folder, unless it is there, and return the folder."""
    if (folder / UNSEEN).exists():
        return folder
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = width // 64
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = LlamaForCausalLM(config)
    whole = text()
    tokens = torch.tensor(list(whole[:-HELD_OUT]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        starts = torch.randint(len(tokens) - CONTEXT, (BATCH,), generator=generator)
        batch = torch.stack([tokens[start : start + CONTEXT] for start in starts])
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step == steps - 1:
            print(f"small Llama: step {step}, loss {loss.item():.3f}", flush=True)
    model.save_pretrained(folder)
    (folder / UNSEEN).write_bytes(whole[-HELD_OUT:])
    return folder
