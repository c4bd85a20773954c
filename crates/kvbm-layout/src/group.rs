//! Groups of layers with the same kind of cache: a hybrid model has several, each with layouts of
//! its own.

use crate::config::{ConfigError, LayoutConfig, OpaquePlane};
use crate::dtype::DType;

/// What one layer of a group keeps for each block.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Plane {
    /// Keys and values with known axes; at most one in a group.
    Kv {
        /// 2 for keys and values, 1 for MLA.
        outer_dim: u32,
        /// KV heads on this rank.
        num_heads: u32,
        /// Elements of a head.
        head_dim: u32,
        /// Elements of a head of the values, where they differ.
        value_head_dim: Option<u32>,
        /// Element type.
        dtype: DType,
    },
    /// Bytes without known axes: scales, sub-byte formats, recurrent state.
    Opaque(OpaquePlane),
}

/// Layers that share one block table: full attention, a sliding window, or recurrent state.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct LayerGroup {
    /// Layers of the model in this group, in growing order.
    pub layers: Vec<u32>,
    /// Tokens per block of this group.
    pub tokens_per_block: u32,
    /// What each layer keeps.
    pub planes: Vec<Plane>,
}

impl LayerGroup {
    /// The shape of this group's blocks.
    ///
    /// # Errors
    /// No layers or too many, more than one KV plane, or a broken rule of
    /// [`LayoutConfig::validate`].
    pub fn config(&self, num_blocks: u32, alignment: u64) -> Result<LayoutConfig, ConfigError> {
        let mut config = LayoutConfig {
            num_blocks,
            num_layers: u32::try_from(self.layers.len())
                .map_err(|_| ConfigError::new("layers", self.layers.len(), "too many layers in a group"))?,
            outer_dim: 0,
            page_size: self.tokens_per_block,
            inner_dim: 1,
            value_inner_dim: None,
            dtype: DType::U8,
            alignment,
            num_heads: 1,
            planes: Vec::new(),
        };
        let mut has_kv = false;
        for plane in &self.planes {
            match plane {
                Plane::Opaque(opaque) => config.planes.push(opaque.clone()),
                Plane::Kv { .. } if has_kv => {
                    let rule = "a group has at most one KV plane; put other layers into another group";
                    return Err(ConfigError::new("planes", "a second KV plane", rule));
                }
                &Plane::Kv { outer_dim, num_heads, head_dim, value_head_dim, dtype } => {
                    has_kv = true;
                    (config.outer_dim, config.num_heads, config.dtype) = (outer_dim, num_heads, dtype);
                    config.inner_dim = heads_times("head_dim", num_heads, head_dim)?;
                    config.value_inner_dim = value_head_dim
                        .map(|dim| heads_times("value_head_dim", num_heads, dim))
                        .transpose()?;
                }
            }
        }
        config.validate()?;
        Ok(config)
    }
}

fn heads_times(field: &'static str, num_heads: u32, head_dim: u32) -> Result<u32, ConfigError> {
    let rule = || format!("num_heads ({num_heads}) * {field} must fit into 32 bits");
    num_heads.checked_mul(head_dim).ok_or_else(|| ConfigError::new(field, head_dim, rule()))
}

/// Checks that the groups of a model hold every layer of `0..num_layers` exactly once, in growing
/// order in each group.
///
/// # Errors
/// The first layer that is missing, doubled, beyond the model, or out of order.
pub fn validate_groups(num_layers: u32, groups: &[LayerGroup]) -> Result<(), ConfigError> {
    let mut all: Vec<u32> = Vec::new();
    for group in groups {
        if group.layers.is_empty() {
            return Err(ConfigError::new("layers", "[]", "a group has at least one layer"));
        }
        if let Some(pair) = group.layers.windows(2).find(|pair| pair[0] >= pair[1]) {
            let rule = format!("must stand before layer {} in its group", pair[0]);
            return Err(ConfigError::new("layers", pair[1], rule));
        }
        all.extend(&group.layers);
    }
    all.sort_unstable();
    for (expected, &layer) in (0..num_layers).zip(&all) {
        if layer != expected {
            let rule = if layer < expected {
                "is in two groups"
            } else {
                "is the next one; a layer before it is in no group"
            };
            return Err(ConfigError::new("layers", layer, rule));
        }
    }
    match u32::try_from(all.len()) {
        Ok(count) if count == num_layers => Ok(()),
        Ok(count) if count < num_layers => Err(ConfigError::new("layers", count, "is in no group")),
        _ => {
            let rule = format!("the model has {num_layers} layers, and each is in one group");
            Err(ConfigError::new("layers", all[num_layers as usize], rule))
        }
    }
}
