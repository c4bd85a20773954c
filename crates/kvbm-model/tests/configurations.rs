//! Public fields of real configurations, and what their models keep.
#![allow(clippy::unwrap_used)] // In a test a panic is the report.

use kvbm_layout::DType;
use kvbm_model::{CacheKind, LayerCache, ModelShape};
use serde_json::{Value, json};

fn text(name: &str) -> String {
    let path = format!("{}/tests/configs/{name}.json", env!("CARGO_MANIFEST_DIR"));
    std::fs::read_to_string(path).unwrap()
}

fn model(name: &str) -> ModelShape {
    ModelShape::from_hf(&text(name)).unwrap()
}

/// Kind, cache and layers of each group.
fn groups(model: &ModelShape) -> Vec<(CacheKind, LayerCache, u32)> {
    model.groups.iter().map(|group| (group.kind, group.cache, group.layers)).collect()
}

const fn heads(kv_heads: u32, head_dim: u32) -> LayerCache {
    LayerCache::Heads { kv_heads, head_dim }
}

const fn state(conv_elements: u64, recurrent_elements: u64) -> LayerCache {
    LayerCache::State { conv_elements, recurrent_elements, recurrent_dtype: DType::BF16 }
}

#[test]
fn models_with_full_attention_have_one_group() {
    let llama = model("llama-3-8b");
    assert_eq!((llama.architecture.as_str(), llama.dtype), ("llama", DType::BF16));
    assert_eq!(groups(&llama), [(CacheKind::Full, heads(8, 128), 32)]);
    // 128 KiB a token is the figure that the model's users know.
    assert_eq!(llama.bytes_per_token(1), 128 << 10);
    assert_eq!(llama.bytes_per_token(8), 16 << 10);
    assert_eq!(llama.bytes_per_token(16), 16 << 10, "more ranks than heads: each keeps one");
    // The window of these models is switched off.
    assert_eq!(groups(&model("qwen2.5-7b")), [(CacheKind::Full, heads(4, 128), 28)]);
    assert_eq!(groups(&model("qwen3-8b")), [(CacheKind::Full, heads(8, 128), 36)]);
}

#[test]
fn windows_are_groups_of_their_own() {
    let gemma = model("gemma-3-27b");
    let window = CacheKind::SlidingWindow { tokens: 1024 };
    assert_eq!(groups(&gemma), [(window, heads(16, 128), 52), (CacheKind::Full, heads(16, 128), 10)]);
    let gpt_oss = model("gpt-oss-20b");
    let window = CacheKind::SlidingWindow { tokens: 128 };
    assert_eq!(groups(&gpt_oss), [(window, heads(8, 64), 12), (CacheKind::Full, heads(8, 64), 12)]);

    let mut upper: Value = serde_json::from_str(&text("qwen2.5-7b")).unwrap();
    upper["use_sliding_window"] = true.into();
    upper["max_window_layers"] = 20.into();
    let upper = ModelShape::from_hf(&upper.to_string()).unwrap();
    let layers: Vec<_> = upper.groups.iter().map(|group| group.layers).collect();
    assert_eq!(layers, [20, 8]);
}

#[test]
fn a_latent_is_the_same_on_every_rank() {
    let deepseek = model("deepseek-v3");
    assert_eq!(groups(&deepseek), [(CacheKind::Full, LayerCache::Latent { width: 576 }, 61)]);
    // 70,272 bytes a token, the figure of the model's report.
    assert_eq!((deepseek.bytes_per_token(1), deepseek.bytes_per_token(8)), (70_272, 70_272));
}

#[test]
fn recurrent_layers_keep_a_state() {
    let mamba = model("mamba-codestral-7b");
    assert_eq!(groups(&mamba), [(CacheKind::State, state(3 * (8192 + 2048), 128 * 64 * 128), 64)]);
    assert_eq!(mamba.bytes_per_token(1), 0);
    assert_eq!(mamba.state_bytes(1), 64 * 2 * (30_720 + 1_048_576));
    assert_eq!(mamba.state_bytes(2), mamba.state_bytes(1) / 2);
    let jamba = model("jamba-v0.1");
    let expected = [(CacheKind::State, state(3 * 8192, 8192 * 16), 28), (CacheKind::Full, heads(8, 128), 4)];
    assert_eq!(groups(&jamba), expected);
    let next = model("qwen3-next-80b");
    let linear = state(3 * (2 * 16 * 128 + 32 * 128), 32 * 128 * 128);
    assert_eq!(groups(&next), [(CacheKind::State, linear, 36), (CacheKind::Full, heads(2, 256), 12)]);
}

#[test]
fn a_listed_type_that_is_not_known_is_named() {
    let mut config: Value = serde_json::from_str(&text("gpt-oss-20b")).unwrap();
    config["layer_types"][5] = "chunked_attention".into();
    let error = ModelShape::from_hf(&config.to_string()).unwrap_err().to_string();
    assert!(error.contains("layer 5") && error.contains("chunked_attention"), "{error}");
    config["layer_types"] = json!(["full_attention"]);
    let error = ModelShape::from_hf(&config.to_string()).unwrap_err().to_string();
    assert!(error.contains("layer_types") && error.contains("as many entries"), "{error}");
}

#[test]
fn what_is_missing_or_cannot_be_is_named() {
    for (text, part) in [
        ("", "no JSON object"),
        ("[1]", "no JSON object"),
        ("{}", "`num_hidden_layers`"),
        (r#"{"num_hidden_layers": 2}"#, "`n_head`"),
        (r#"{"num_hidden_layers": 0}"#, "1 to 4096"),
        (r#"{"num_hidden_layers": 2, "num_attention_heads": 4}"#, "`n_embd`"),
        (r#"{"num_hidden_layers": 2, "num_attention_heads": [4, 2]}"#, "[4,2]"),
        (r#"{"num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 0}"#, "`head_dim` = 0"),
        (r#"{"num_hidden_layers": 2, "torch_dtype": "int3"}"#, "int3"),
        (r#"{"num_hidden_layers": 2, "kv_lora_rank": 5}"#, "qk_rope_head_dim"),
        (r#"{"num_hidden_layers": 2, "model_type": "gemma2"}"#, "sliding_window"),
    ] {
        let error = ModelShape::from_hf(text).unwrap_err().to_string();
        assert!(error.contains(part), "{text}: {error}");
    }
}

/// Each field of each configuration in turn gets values that cannot be: an error or another model,
/// never a panic.
#[test]
fn odd_values_never_panic() {
    let odd = [
        json!(null),
        json!(0),
        json!(-1),
        json!(1 << 20),
        json!(u64::MAX),
        json!(1.5),
        json!("x"),
        json!([]),
    ];
    for entry in std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/configs")).unwrap() {
        let config: Value =
            serde_json::from_str(&std::fs::read_to_string(entry.unwrap().path()).unwrap()).unwrap();
        let fields: Vec<String> = config.as_object().unwrap().keys().cloned().collect();
        for field in &fields {
            for value in &odd {
                let mut changed = config.clone();
                changed[field] = value.clone();
                if let Ok(model) = ModelShape::from_hf(&changed.to_string()) {
                    assert!(model.bytes_per_token(1) > 0 || model.state_bytes(3) < u64::MAX, "{field}");
                }
            }
        }
    }
}
