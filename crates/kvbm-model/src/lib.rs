//! What a model keeps in its KV cache: groups of layers, their kind and their bytes.
//!
//! **Knows:** the public fields of Hugging Face configurations and the size of a layer's cache.
//! **Must never know:** blocks, tiers, tokens, memory: it is pure arithmetic on a configuration.
//!
//! ```
//! let config = r#"{"model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32,
//!     "num_key_value_heads": 8, "hidden_size": 4096, "torch_dtype": "bfloat16"}"#;
//! let model = kvbm_model::ModelShape::from_hf(config)?;
//! assert_eq!(model.groups.len(), 1);
//! assert_eq!(model.bytes_per_token(1), 32 * 2 * 8 * 128 * 2);
//! # Ok::<(), kvbm_model::ModelError>(())
//! ```
#![forbid(unsafe_code)]

mod hugging_face;
mod known;
mod shape;

pub use hugging_face::ModelError;
pub use known::{KNOWN_MODELS, known_model};
pub use shape::{CacheKind, LayerCache, ModelShape, ShapeGroup};
