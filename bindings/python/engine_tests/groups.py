"""The part `groups`: models of several cache groups, with random weights made from their
configurations.

python groups.py FOLDER KIND
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import daemon
from model import VOCABULARY, write_tokenizer

__all__ = ["CONFIGS", "judge", "write"]

_COMMON = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 16384,
    "vocab_size": VOCABULARY,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "torch_dtype": "float32",
}

#: Kinds of models: the fields of a `config.json`. vLLM 0.32 runs no Jamba on a CPU ("'_C' object
#: has no attribute 'selective_scan_fwd'"), and Qwen3-Next in bfloat16 alone ("CPU GDN attention
#: requires BF16"), whose sums differ with the sizes of chunks.
#:
#: What its short convolution computes on a CPU depends on the other requests of a batch and on
#: where a prompt begins to be computed. So `state` runs one request at a time, and what is right is
#: what vLLM computes with prefixes of its own.
CONFIGS: dict[str, dict[str, Any]] = {
    # Four layers with a window of 96 tokens, two with full attention: three groups of two layers.
    "window": _COMMON
    | {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "sliding_window": 96,
        "query_pre_attn_scalar": 64,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    },
    # Two layers with a state (a short convolution), two with full attention.
    "state": _COMMON
    | {
        "model_type": "lfm2",
        "architectures": ["Lfm2ForCausalLM"],
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention"] * 2,
        "conv_L_cache": 3,
        "conv_dim": 256,
        "block_dim": 256,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
        "conv_bias": False,
        "block_auto_adjust_ff_dim": False,
        "norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    },
}


#: How large embeddings are: small beside what layers add, or a model repeats its last token.
#: Gemma multiplies them by the root of the hidden size.
_EMBEDDINGS = {"window": 0.05, "state": 0.3}


def write(folder: Path, kind: str, seed: int = 1234) -> None:
    """Writes configuration, tokenizer and weights, unless they are there. Weights as large as those
    of the other tests: a wrong block changes tokens.
    """
    if (folder / "complete").is_file():
        return
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS[kind]))
    write_tokenizer(folder)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.dim() < 2:
                # Of a norm; Gemma's norms add 1 to their weights.
                weights.fill_(0.0 if kind == "window" else 1.0)
                continue
            deviation = _EMBEDDINGS[kind] if "embed" in name else 0.3 if weights.dim() > 2 else 0.08
            weights.copy_(torch.randn(weights.shape, generator=generator) * deviation)
    model.save_pretrained(folder)
    # As it was given: what was saved may have been completed.
    (folder / "config.json").write_text(json.dumps(CONFIGS[kind]))
    (folder / "complete").touch()


def judge(suite: Any) -> None:
    """Runs the scenarios with each kind of model and says what must hold of them."""
    count, longest, length = (40, 1200, 2048) if suite.quick else (200, 4000, 4608)
    for kind in CONFIGS:
        folder = suite.work / f"groups-{kind}"
        write(folder, kind)
        size = {"count": count, "longest": longest, "max_model_len": length}
        _equality(suite, kind, str(folder), size)
        _restart(suite, kind, str(folder))


def _equality(suite: Any, kind: str, model: str, size: dict[str, Any]) -> None:
    """The same tokens as without a connector; and not so where a loaded block is wrong."""
    right = str(suite.work / f"groups-{kind}.json")
    again = str(suite.work / f"groups-{kind}-restart.json")
    size |= {"count": size["count"] // 2, "batch": 1} if kind == "state" else {}
    wanted = {right: {"twice": True, **size}}
    if kind == "window":
        wanted[again] = {"twice": False, **_restart_size(suite)}
    suite.run(
        f"groups {kind} references",
        "references",
        program="equality.py",
        model=model,
        wanted=wanted,
        own_prefixes=kind == "state",
        max_model_len=4608,
    )
    size |= {"forget": True}
    tight = {"num_gpu_blocks_override": 4 * size["max_model_len"] // 32}
    chunked = ({"hashes": "own"}, {"max_num_batched_tokens": 256})
    kinds: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {"async": ({}, {})}
    if kind == "window":
        # The quick form has one engine less.
        kinds = {"chunked": chunked} if suite.quick else kinds | {"chunked": chunked}
    control: dict[str, Any] = {}
    for label, (options, changes) in kinds.items():
        found = suite.run(
            f"groups {kind} {label}",
            "equality",
            program="equality.py",
            model=model,
            reference=right,
            options={"host": "1GiB", **options},
            control=not control,
            **size,
            **tight,
            **changes,
        )
        control = found.get("control", control)
        _check_loads(suite, f"groups, {kind}, {label}", found)
    suite.check(
        f"groups, {kind}: a flipped bit changes tokens", control.get("unequal", 0) > 0, control
    )
    suite.row(f"groups_control_differs {kind}", control.get("unequal", 0))
    _through_daemon(suite, kind, model, right, size | tight)


def _check_loads(suite: Any, label: str, found: dict[str, Any]) -> None:
    """What must hold of a run whose blocks were loaded."""
    for what, holds in {
        "tokens are those without a connector": found.get("unequal") == 0,
        "blocks were loaded": found.get("loaded_blocks", 0) > 0,
        "no load failed": found.get("failed_blocks") == 0,
        "vLLM's external hits are ours": bool(found) and found["vllm_hits"] == found["kvbm_hits"],
        "no error inside the connector": found.get("errors") == 0,
        "nothing is left behind": not any(found.get("left", {"": 1}).values()),
    }.items():
        suite.check(f"{label}: {what}", holds, found)


def _through_daemon(
    suite: Any, kind: str, model: str, right: str, settings: dict[str, Any]
) -> None:
    """The same where a node daemon keeps the blocks; then the engine is killed."""
    label = f"groups {kind} daemon"
    found = suite.run(
        label,
        "daemon_starts_later",
        program="daemon.py",
        model=model,
        folder=suite.fresh(f"daemon-groups-{kind}"),
        reference=right,
        host="1GiB",
        **settings,
    )
    _check_loads(suite, f"groups, {kind}, daemon", found)
    suite.row(f"groups_daemon_unequal {kind}", found.get("unequal", -1))
    if not found or kind != "window" or suite.quick:
        return
    # Reference tokens of these prompts are those of `_restart`.
    with daemon.Daemon(suite.fresh(f"daemon-{kind}"), found["daemon_model"], "512MiB") as keeper:
        where = {
            "program": "daemon.py",
            "model": model,
            "socket": keeper.socket,
            **_restart_size(suite),
        }
        with suite.running(f"{label}, fill", "fill_through_daemon", **where):
            pass
        again = str(suite.work / f"groups-{kind}-restart.json")
        found = suite.run(f"{label}, engine killed", "next_life", reference=again, **where)
    share = found.get("found", 0) / max(1, found.get("wanted", 1))
    suite.row(f"groups_daemon_restart_hits {kind}", share)
    for what, holds in {
        "99 % is found in G2": share >= 0.99,
        "tokens are right": found.get("unequal") == 0,
    }.items():
        suite.check(f"groups, {kind}, daemon, engine killed: {what}", holds, found)


def _restart_size(suite: Any) -> dict[str, Any]:
    count, longest = (12, 800) if suite.quick else (40, 3000)
    return {"count": count, "longest": longest, "max_model_len": 4608}


def _restart(suite: Any, kind: str, model: str) -> None:
    """What was flushed is found after a kill, and right."""
    right = str(suite.work / f"groups-{kind}-restart.json") if kind == "window" else None
    where = {
        "program": "restarts.py",
        "model": model,
        "disk": suite.fresh(f"disk-groups-{kind}"),
        "options": {
            "host": "512MiB",
            "disk_capacity": "2GiB",
            "offload.g2_g3.write_through": True,
            "disk.drive_writes_per_day": 0,
        },
        **_restart_size(suite),
    }
    with suite.running(f"groups {kind} fill", "fill_and_wait", **where):
        pass
    found = suite.run(f"groups {kind} restart", "after_restart", reference=right, **where)
    share = found.get("found", 0) / max(1, found.get("wanted", 1))
    suite.row(f"groups_restart_hits {kind}", share)
    for what, holds in {
        "95 % of what was flushed is found": share >= 0.95,
        "tokens are right": found.get("unequal") == (0 if right else -1),
        "no hit with another salt": found.get("found_with_salt") == 0,
    }.items():
        suite.check(f"groups, {kind}, restart: {what}", holds, found)


if __name__ == "__main__":
    write(Path(sys.argv[1]), sys.argv[2])
