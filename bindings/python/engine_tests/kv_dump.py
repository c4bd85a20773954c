"""Writes the keys and values of a model as kvbm stores them, for `kvbm bench compression --kv`.

Without `--model` a small Llama is trained first, on text of this repository and of Python's
library: its KV is that of learned weights, if of few. `--seconds 0` leaves its weights random.
"""

from __future__ import annotations

import argparse
import sysconfig
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

PAGE = 16
"""Tokens of a block."""
LENGTH = 512
"""Tokens of a sequence."""
HELD_OUT = 200_000
"""Bytes at the end of the text that nothing is trained on."""


def text() -> bytes:
    """Markdown of the repository, then modules of Python's library, in an order that is always the
    same.
    """
    root = Path(__file__).parents[3]
    files = sorted(root.glob("docs/*.md")) + sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return b"".join(file.read_bytes() for file in files)


def small() -> LlamaForCausalLM:
    """Four layers of four heads, a token for each byte."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
    )
    return LlamaForCausalLM(config)


def train(model: LlamaForCausalLM, data: torch.Tensor, seconds: float) -> None:
    """Trains until the time is over, and says what the loss is."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    end, step, shown = time.monotonic() + seconds, 0, 0.0
    while time.monotonic() < end:
        starts = torch.randint(len(data) - HELD_OUT - LENGTH, (4,))
        batch = torch.stack([data[start : start + LENGTH] for start in starts])
        loss = model(batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step, shown = step + 1, 0.98 * shown + 0.02 * loss.item()
    if step:
        print(f"{step} steps, loss {shown / (1 - 0.98**step):.2f} a token")


def blocks(cache: object, dtype: torch.dtype) -> bytes:
    """Blocks of one sequence in universal order: head, layer, outer, token, element."""
    layers = [torch.stack([layer.keys[0], layer.values[0]], 1) for layer in cache.layers]  # type: ignore[attr-defined]
    heads, _, tokens, size = layers[0].shape
    whole = torch.stack(layers, 1)[:, :, :, : tokens // PAGE * PAGE].to(dtype)
    parts = (
        whole.reshape(heads, len(layers), 2, -1, PAGE, size).permute(3, 0, 1, 2, 4, 5).contiguous()
    )
    return parts.view(torch.uint8).numpy().tobytes()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="folder for FILE.DTYPE")
    parser.add_argument("--model", help="a checkpoint of transformers, with its tokenizer")
    parser.add_argument(
        "--seconds", type=float, default=600, help="time to train where there is no model"
    )
    parser.add_argument("--sequences", type=int, default=16)
    options = parser.parse_args()
    torch.manual_seed(1)
    if options.model:
        model = AutoModelForCausalLM.from_pretrained(options.model)
        ids = AutoTokenizer.from_pretrained(options.model)(
            text()[-HELD_OUT:].decode(errors="replace")
        ).input_ids
        data = torch.tensor(ids)
    else:
        model, data = small(), torch.frombuffer(bytearray(text()), dtype=torch.uint8).long()
        train(model, data, options.seconds)
        data = data[-HELD_OUT:]
    model.eval()
    dtypes = {
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "fp32": torch.float32,
        "fp8_e4m3": torch.float8_e4m3fn,
    }
    files = {name: (options.out / f"kv.{name}").open("wb") for name in dtypes}
    shape = ""
    for at in range(options.sequences):
        with torch.no_grad():
            cache = model(
                data[None, at * LENGTH : (at + 1) * LENGTH], use_cache=True
            ).past_key_values
        keys = cache.layers[0].keys
        shape = f"{len(cache.layers)} layers, {keys.shape[1]} heads of {keys.shape[3]}"
        for name, dtype in dtypes.items():
            files[name].write(blocks(cache, dtype))
    for file in files.values():
        file.close()
    print(f"{options.sequences} sequences of {LENGTH} tokens, {shape}, blocks of {PAGE} tokens")


if __name__ == "__main__":
    main()
