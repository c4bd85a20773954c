//! A model's Hugging Face configuration to its cache groups.

use super::groups::{CacheGroup, CacheGroups, LayerContent};
use super::{ConfigError, ModelConfig};
use kvbm_layout::DType;
use kvbm_model::{CacheKind, LayerCache, ModelError, ModelShape, ShapeGroup};
use kvbm_plan::GroupKind;

impl ModelConfig {
    /// The KV cache of a model, from the text of its `config.json` of Hugging Face, in blocks of
    /// `page_size` tokens. Groups of layers are divided so that their blocks have about the same
    /// bytes: every slot of a tier is as long as the longest block.
    ///
    /// ```
    /// let config = r#"{"model_type": "gemma3_text", "num_hidden_layers": 12, "num_attention_heads": 8,
    ///     "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 1024, "sliding_window_pattern": 6}"#;
    /// let model = kvbm::config::ModelConfig::from_hf(config, 16)?;
    /// let layers: Vec<u32> = model.groups.as_slice().iter().map(|group| group.layers).collect();
    /// assert_eq!(layers, [2, 2, 2, 2, 2, 2]); // ten layers with a window, two with full attention
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`ModelError`] names the field. A state of 4 GiB or more is refused.
    pub fn from_hf(text: &str, page_size: u32) -> Result<Self, ModelError> {
        Self::of_shape(&ModelShape::from_hf(text)?, page_size)
    }

    /// The same from what was read already.
    ///
    /// # Errors
    /// As [`from_hf`](Self::from_hf).
    pub fn of_shape(shape: &ModelShape, page_size: u32) -> Result<Self, ModelError> {
        let groups = shape.groups.iter().map(|group| group_of(group, shape.dtype));
        let groups = groups.collect::<Result<Vec<_>, _>>()?;
        let base = Self { page_size, dtype: shape.dtype, ..Self::default() };
        if let [
            CacheGroup {
                kind: GroupKind::Full,
                layers,
                content: LayerContent::Kv { num_kv_heads, head_dim, outer_dim, .. },
                ..
            },
        ] = groups[..]
        {
            return Ok(Self { num_layers: layers, num_kv_heads, head_dim, outer_dim, ..base });
        }
        let groups = divided(&groups, page_size, shape.dtype).into_iter().collect();
        Ok(Self { groups, ..base })
    }
}

fn group_of(group: &ShapeGroup, dtype: DType) -> Result<CacheGroup, ModelError> {
    let kind = match group.kind {
        CacheKind::Full => GroupKind::Full,
        CacheKind::SlidingWindow { tokens } => GroupKind::SlidingWindow(tokens),
        CacheKind::State => GroupKind::State,
    };
    let content = match group.cache {
        LayerCache::Heads { kv_heads, head_dim } => {
            LayerContent::Kv { num_kv_heads: kv_heads, head_dim, outer_dim: 2, dtype: None }
        }
        LayerCache::Latent { width } => {
            LayerContent::Kv { num_kv_heads: 1, head_dim: width, outer_dim: 1, dtype: None }
        }
        LayerCache::State { .. } => {
            let bytes = group.state_bytes(dtype, 1) / u64::from(group.layers.max(1));
            let bytes = u32::try_from(bytes).map_err(|_| ModelError::Value {
                field: "the state of a layer",
                value: format!("{bytes} bytes"),
                wanted: "less than 4 GiB was expected",
            })?;
            LayerContent::State { bytes }
        }
    };
    Ok(CacheGroup::new(kind, group.layers, content))
}

/// Of slots as long as the longest block, what may be empty: one part of so many.
const EMPTY: u64 = 8;

/// Groups with the layers of `groups`, each divided into parts: as few as leave little of the slots
/// empty, where every slot is as long as the longest block.
fn divided(groups: &[CacheGroup], page_size: u32, dtype: DType) -> Vec<CacheGroup> {
    let bytes =
        |group: &CacheGroup, layers: u32| CacheGroup { layers, ..*group }.rank_bytes(page_size, dtype, 1);
    let parts_of = |group: &CacheGroup, slot: u64| {
        let most = (slot / bytes(group, 1).max(1)).max(1);
        u64::from(group.layers).div_ceil(most) as u32
    };
    let filled: u64 = groups.iter().map(|group| bytes(group, group.layers)).sum();
    // A slot is as long as some part of some group.
    let slots = groups.iter().flat_map(|group| {
        let parts = 1..=group.layers.min(CacheGroups::MAX as u32);
        parts.map(move |parts| bytes(group, group.layers.div_ceil(parts)))
    });
    let slots = slots.filter(|&slot| groups.iter().all(|group| slot >= bytes(group, 1)));
    let cost = |slot: u64| {
        let parts: u32 = groups.iter().map(|group| parts_of(group, slot)).sum();
        let empty = u64::from(parts).saturating_mul(slot).saturating_sub(filled);
        let is_much = empty > u64::from(parts).saturating_mul(slot) / EMPTY;
        (parts > CacheGroups::MAX as u32, if is_much { empty } else { 0 }, parts, empty)
    };
    let Some(slot) = slots.min_by_key(|&slot| cost(slot)) else { return groups.to_vec() };
    let mut all = Vec::new();
    for group in groups {
        let parts = parts_of(group, slot);
        for part in 0..parts {
            let layers = (group.layers * (part + 1)) / parts - (group.layers * part) / parts;
            all.push(CacheGroup { layers, ..*group });
        }
    }
    all
}

/// A configuration that cannot be read is one more that a setting can be.
impl From<ModelError> for ConfigError {
    fn from(error: ModelError) -> Self {
        Self::Rule { key: "model", value: "config.json".into(), rule: error.to_string() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONFIGS: &str = "../kvbm-model/tests/configs";

    fn read(name: &str) -> ModelConfig {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(CONFIGS).join(name);
        ModelConfig::from_hf(&std::fs::read_to_string(path).unwrap(), 16).unwrap()
    }

    /// Bytes of slots, and how much of them no block needs, in percent.
    fn slots(model: &ModelConfig) -> (usize, u64) {
        let groups = model.cache_groups();
        let bytes: Vec<u64> = groups.iter().map(|group| group.rank_bytes(16, model.dtype, 1)).collect();
        let slots = bytes.iter().max().unwrap() * bytes.len() as u64;
        (bytes.len(), 100 - 100 * bytes.iter().sum::<u64>() / slots)
    }

    #[test]
    fn models_of_today_have_their_groups() {
        for (file, groups, waste) in [
            ("llama-3-8b.json", 1, 0),
            ("qwen3-8b.json", 1, 0),
            ("deepseek-v3.json", 1, 0),
            ("gpt-oss-20b.json", 2, 0),
            ("gemma-3-27b.json", 5, 5),
            ("jamba-v0.1.json", 8, 10),
        ] {
            let model = read(file);
            let (found, wasted) = slots(&model);
            assert!(found == groups && wasted <= waste, "{file}: {found} groups, {wasted} % wasted");
            let config = super::super::Config {
                model,
                device: super::super::DeviceConfig {
                    layout: super::super::LayoutKind::FullyContiguous,
                    ..Default::default()
                },
                namespace: super::super::NamespaceConfig { model: file.into(), ..Default::default() },
                ..Default::default()
            };
            config.validate().unwrap();
        }
        let latent = read("deepseek-v3.json");
        assert_eq!((latent.num_kv_heads, latent.head_dim, latent.outer_dim), (1, 576, 1));
        assert!(!latent.has_groups());
    }

    #[test]
    fn no_layer_is_lost_when_groups_are_divided() {
        for file in ["gemma-3-27b.json", "jamba-v0.1.json", "qwen3-next-80b.json", "gpt-oss-20b.json"] {
            let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(CONFIGS).join(file);
            let shape = ModelShape::from_hf(&std::fs::read_to_string(path).unwrap()).unwrap();
            let model = ModelConfig::of_shape(&shape, 16).unwrap();
            let before: u32 = shape.groups.iter().map(|group| group.layers).sum();
            let after: u32 = model.groups.as_slice().iter().map(|group| group.layers).sum();
            assert_eq!(before, after, "{file}");
            assert!(model.groups.as_slice().len() <= CacheGroups::MAX, "{file}");
        }
    }
}
