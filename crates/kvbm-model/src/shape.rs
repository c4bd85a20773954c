//! Groups of layers and the bytes that they keep.

use kvbm_layout::DType;

/// What a model keeps in its KV cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelShape {
    /// `model_type` of the configuration.
    pub architecture: String,
    /// Element type of keys, values and latents.
    pub dtype: DType,
    /// Layers that cache alike, in the order of their first layer.
    pub groups: Vec<ShapeGroup>,
}

/// Layers that cache alike.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShapeGroup {
    /// Which tokens the layers keep.
    pub kind: CacheKind,
    /// What each layer keeps.
    pub cache: LayerCache,
    /// Number of layers.
    pub layers: u32,
}

/// Which tokens a layer keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheKind {
    /// All tokens.
    Full,
    /// The last tokens.
    SlidingWindow {
        /// How many.
        tokens: u32,
    },
    /// A state that covers all tokens before it, of a fixed size.
    State,
}

/// What one layer keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerCache {
    /// Keys and values of a token, for each head.
    Heads {
        /// KV heads over all ranks.
        kv_heads: u32,
        /// Elements of a head.
        head_dim: u32,
    },
    /// One latent vector of a token (MLA), the same on every rank.
    Latent {
        /// Elements of the vector.
        width: u32,
    },
    /// One state, whatever the number of tokens, over all ranks.
    State {
        /// Elements of the convolution's state.
        conv_elements: u64,
        /// Elements of the recurrent state.
        recurrent_elements: u64,
        /// Element type of the recurrent state.
        recurrent_dtype: DType,
    },
}

impl ShapeGroup {
    /// Bytes of a token on one of `ranks` tensor-parallel ranks, all layers of the group together;
    /// 0 for a state. Where there are more ranks than heads, each rank keeps one head. A latent is
    /// the same on every rank.
    pub fn bytes_per_token(&self, dtype: DType, ranks: u32) -> u64 {
        let elements = match self.cache {
            LayerCache::Heads { kv_heads, head_dim } => {
                2 * u64::from(kv_heads.div_ceil(ranks.max(1))) * u64::from(head_dim)
            }
            LayerCache::Latent { width } => u64::from(width),
            LayerCache::State { .. } => 0,
        };
        elements.saturating_mul(u64::from(self.layers) * u64::from(dtype.width()))
    }

    /// Bytes of one state on one of `ranks` tensor-parallel ranks, all layers of the group
    /// together; 0 where tokens are kept.
    pub fn state_bytes(&self, dtype: DType, ranks: u32) -> u64 {
        match self.cache {
            LayerCache::State { conv_elements, recurrent_elements, recurrent_dtype } => {
                let conv = conv_elements.saturating_mul(u64::from(dtype.width()));
                let recurrent = recurrent_elements.saturating_mul(u64::from(recurrent_dtype.width()));
                let rank = conv.saturating_add(recurrent).div_ceil(u64::from(ranks.max(1)));
                rank.saturating_mul(u64::from(self.layers))
            }
            LayerCache::Heads { .. } | LayerCache::Latent { .. } => 0,
        }
    }
}

impl ModelShape {
    /// Bytes of a token on one of `ranks` tensor-parallel ranks, all groups together, states aside.
    pub fn bytes_per_token(&self, ranks: u32) -> u64 {
        self.groups.iter().map(|group| group.bytes_per_token(self.dtype, ranks)).sum()
    }

    /// Bytes of one state of all layers that keep one, on one of `ranks` tensor-parallel ranks.
    pub fn state_bytes(&self, ranks: u32) -> u64 {
        self.groups.iter().map(|group| group.state_bytes(self.dtype, ranks)).sum()
    }
}
