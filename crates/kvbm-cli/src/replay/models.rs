//! Models by name, or by their configuration, with blocks of a size that a replay can afford.

use anyhow::{Context, Result};
use kvbm::config::{CacheGroup, Config, LayerContent, ModelConfig};
use kvbm::layout::DType;
use kvbm_model::{KNOWN_MODELS, ModelShape, known_model};
use std::io::Read;

use crate::args::WrongUsage;

/// Most bytes of a configuration that are read.
const MAX_CONFIG_BYTES: u64 = 16 << 20;

/// The model `name`, a known one or a file, whose longest block has at most `block_bytes` bytes.
pub(super) fn model(
    name: &str,
    page_size: u32,
    dtype: Option<DType>,
    block_bytes: u64,
) -> Result<ModelConfig> {
    let text = match known_model(name) {
        Some(text) => text.to_owned(),
        None => read(name)?,
    };
    let mut shape = ModelShape::from_hf(&text).map_err(|error| wrong(name, &error))?;
    shape.dtype = dtype.unwrap_or(shape.dtype);
    let model = ModelConfig::of_shape(&shape, page_size).map_err(|error| wrong(name, &error))?;
    Ok(within(model, block_bytes))
}

fn wrong(name: &str, error: &dyn std::fmt::Display) -> WrongUsage {
    WrongUsage(format!("--model {name}: {error}"))
}

fn read(name: &str) -> Result<String> {
    let known: Vec<_> = KNOWN_MODELS.iter().map(|(known, _)| *known).collect();
    let file = std::fs::File::open(name).with_context(|| {
        format!("--model {name}: neither a file nor a known model ({})", known.join(", "))
    })?;
    let mut text = String::new();
    file.take(MAX_CONFIG_BYTES).read_to_string(&mut text).with_context(|| format!("--model {name}"))?;
    Ok(text)
}

fn longest(model: &ModelConfig) -> u64 {
    let config = Config { model: model.clone(), ..Config::default() };
    config.rank_block_bytes()
}

/// Makes heads and states smaller until no block is longer; layers, heads and windows stay.
fn within(model: ModelConfig, block_bytes: u64) -> ModelConfig {
    let factor = longest(&model).div_ceil(block_bytes.max(1)).max(1);
    let smaller = |value: u32| u32::try_from(u64::from(value) / factor).unwrap_or(value).max(1);
    let group = |group: &CacheGroup| {
        let content = match group.content {
            LayerContent::Kv { num_kv_heads, head_dim, outer_dim, dtype } => {
                LayerContent::Kv { num_kv_heads, head_dim: smaller(head_dim), outer_dim, dtype }
            }
            LayerContent::State { bytes } => LayerContent::State { bytes: smaller(bytes) },
            LayerContent::Opaque { rank_bytes } => LayerContent::Opaque { rank_bytes: smaller(rank_bytes) },
        };
        CacheGroup { content, ..*group }
    };
    let groups = model.groups.as_slice().iter().map(group).collect();
    let head_dim = if model.has_groups() { model.head_dim } else { smaller(model.head_dim) };
    ModelConfig { groups, head_dim, ..model }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_models_keep_their_groups_in_small_blocks() {
        for (name, groups) in [("gemma-3", 5), ("jamba", 8), ("deepseek-v3", 0), ("gpt-oss", 2)] {
            let small = model(name, 16, None, 64 << 10).unwrap();
            assert!(small.groups.as_slice().len() <= groups, "{name}: {}", small.groups);
            assert!(longest(&small) <= 64 << 10, "{name}: {}", longest(&small));
            assert!(longest(&small) > 8 << 10, "{name}: {}", longest(&small));
        }
        let error = model("no-such-model", 16, None, 1).unwrap_err().to_string();
        assert!(error.contains("no-such-model") && error.contains("gemma-3"), "{error}");
    }
}
