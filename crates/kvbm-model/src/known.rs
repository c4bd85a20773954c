//! Configurations of known models: the fields that say what is cached.

/// Models by name, each with the text of its configuration.
pub const KNOWN_MODELS: [(&str, &str); 9] = [
    ("deepseek-v3", include_str!("../tests/configs/deepseek-v3.json")),
    ("gemma-3", include_str!("../tests/configs/gemma-3-27b.json")),
    ("gpt-oss", include_str!("../tests/configs/gpt-oss-20b.json")),
    ("jamba", include_str!("../tests/configs/jamba-v0.1.json")),
    ("llama-3", include_str!("../tests/configs/llama-3-8b.json")),
    ("mamba-codestral", include_str!("../tests/configs/mamba-codestral-7b.json")),
    ("qwen2.5", include_str!("../tests/configs/qwen2.5-7b.json")),
    ("qwen3", include_str!("../tests/configs/qwen3-8b.json")),
    ("qwen3-next", include_str!("../tests/configs/qwen3-next-80b.json")),
];

/// The configuration of a known model.
pub fn known_model(name: &str) -> Option<&'static str> {
    KNOWN_MODELS.iter().find(|(known, _)| *known == name).map(|(_, text)| *text)
}
