"""A small Llama with random weights: its output depends on every block of KV, as that of vLLM's
dummy weights does not.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

VOCABULARY = 1024

SHAPES = {
    # KV of a block of 32 tokens in float32: 128 KiB.
    "tiny": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    # Ranks have the same KV.
    "one-head": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
    },
    # 512 KiB, so that 2,048 tokens are 32 MiB.
    "small": {
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
}


def write(folder: Path, shape: str, seed: int = 1234) -> None:
    """Writes configuration, tokenizer and weights, unless they are there."""
    if (folder / "complete").is_file():
        return
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "head_dim": 64,
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": VOCABULARY,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        **SHAPES[shape],
    }
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    generator = torch.Generator().manual_seed(seed)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries, keys = config["num_attention_heads"] * 64, config["num_key_value_heads"] * 64

    def normal(rows: int, columns: int, deviation: float = 0.08) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * deviation

    weights = {
        "model.embed_tokens.weight": normal(VOCABULARY, hidden, 1.0),
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": normal(VOCABULARY, hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        weights[at + "self_attn.q_proj.weight"] = normal(queries, hidden)
        weights[at + "self_attn.k_proj.weight"] = normal(keys, hidden)
        weights[at + "self_attn.v_proj.weight"] = normal(keys, hidden)
        weights[at + "self_attn.o_proj.weight"] = normal(hidden, queries)
        weights[at + "mlp.gate_proj.weight"] = normal(inner, hidden)
        weights[at + "mlp.up_proj.weight"] = normal(inner, hidden)
        weights[at + "mlp.down_proj.weight"] = normal(hidden, inner)
        weights[at + "input_layernorm.weight"] = torch.ones(hidden)
        weights[at + "post_attention_layernorm.weight"] = torch.ones(hidden)
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "complete").touch()


def write_tokenizer(folder: Path) -> None:
    """Writes a tokenizer: a word for each token."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"t{word}": word for word in range(3, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<s>",
                "eos_token": "</s>",
                "unk_token": "<unk>",
            }
        )
    )


def write_adapter(folder: Path, shape: str, seed: int = 5) -> None:
    """Writes a LoRA adapter of the queries, unless it is there."""
    if (folder / "adapter_config.json").is_file():
        return
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    config, rank = SHAPES[shape], 8
    generator = torch.Generator().manual_seed(seed)
    hidden, weights = config["hidden_size"], {}
    for layer in range(config["num_hidden_layers"]):
        at = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        for name, size in (("lora_A", (rank, hidden)), ("lora_B", (hidden, rank))):
            weights[f"{at}.{name}.weight"] = torch.randn(size, generator=generator)
    save_file(weights, folder / "adapter_model.safetensors")
    about = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 16,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["q_proj"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(about))


if __name__ == "__main__":
    write(Path(sys.argv[1]), sys.argv[2])
