//! Reading `config.json` of a Hugging Face model.
//!
//! The meaning of each field is that of the model classes in `transformers`. Fields of the text
//! model may stand in a part `text_config`.

use crate::shape::{CacheKind, LayerCache, ModelShape, ShapeGroup};
use kvbm_layout::DType;
use serde_json::{Map, Value};

/// Largest number that a field of a configuration may have: far above every model, and the product
/// of three fits.
const MAX: u64 = 1 << 20;
/// Most layers of a model.
const MAX_LAYERS: u64 = 4096;

/// A configuration that does not say what the model keeps.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// The text is no JSON object.
    #[error("the model's configuration is no JSON object: {0}")]
    NotJson(String),
    /// A field is needed and absent.
    #[error("the model's configuration has no `{field}`: it is needed to know {purpose}")]
    Missing {
        /// The field.
        field: &'static str,
        /// What it is needed for.
        purpose: &'static str,
    },
    /// A field has a value that cannot be.
    #[error("`{field}` = {value} in the model's configuration: {wanted}")]
    Value {
        /// The field.
        field: &'static str,
        /// What stands there.
        value: String,
        /// What can stand there.
        wanted: &'static str,
    },
    /// Layers of a kind that is not known here.
    #[error(
        "layer {layer} of the model is of type `{kind}`, whose cache is not known to kvbm: report the model"
    )]
    LayerType {
        /// The layer.
        layer: usize,
        /// Its type, as the configuration calls it.
        kind: String,
    },
}

impl ModelShape {
    /// Reads the text of a `config.json`.
    ///
    /// # Errors
    /// [`ModelError`] names the field.
    pub fn from_hf(text: &str) -> Result<Self, ModelError> {
        let whole: Map<String, Value> =
            serde_json::from_str(text).map_err(|error| ModelError::NotJson(error.to_string()))?;
        let config = Fields { text: whole.get("text_config").and_then(Value::as_object), whole: &whole };
        let dtype = config.dtype("dtype")?.or(config.dtype("torch_dtype")?).unwrap_or(DType::BF16);
        let architecture = config.text("model_type").unwrap_or("unknown").to_owned();
        let layers = config.layers()?;
        let mut groups: Vec<ShapeGroup> = Vec::new();
        for layer in layer_kinds(&config, layers)?.into_iter().flatten() {
            let cache = match layer {
                LayerKind::Attention(_) => attention(&config)?,
                LayerKind::Mamba1 => mamba1(&config, dtype)?,
                LayerKind::Mamba2 => mamba2(&config, dtype)?,
                LayerKind::DeltaNet => delta_net(&config, dtype)?,
            };
            let kind = match layer {
                LayerKind::Attention(kind) => kind,
                _ => CacheKind::State,
            };
            match groups.iter_mut().find(|group| group.kind == kind && group.cache == cache) {
                Some(group) => group.layers += 1,
                None => groups.push(ShapeGroup { kind, cache, layers: 1 }),
            }
        }
        Ok(Self { architecture, dtype, groups })
    }
}

/// The fields of a configuration: those of the text model first.
struct Fields<'a> {
    text: Option<&'a Map<String, Value>>,
    whole: &'a Map<String, Value>,
}

impl Fields<'_> {
    fn get(&self, field: &str) -> Option<&Value> {
        let present = |map: &Map<String, Value>| map.get(field).is_some_and(|value| !value.is_null());
        match self.text {
            Some(text) if present(text) => text.get(field),
            _ => self.whole.get(field).filter(|value| !value.is_null()),
        }
    }

    fn text(&self, field: &str) -> Option<&str> {
        self.get(field)?.as_str()
    }

    fn flag(&self, field: &str) -> Option<bool> {
        self.get(field)?.as_bool()
    }

    fn number(&self, field: &'static str) -> Result<Option<u64>, ModelError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        match value.as_u64().filter(|number| *number <= MAX) {
            Some(number) => Ok(Some(number)),
            None => Err(ModelError::Value {
                field,
                value: shortened(value),
                wanted: "a whole number from 0 to 1048576 was expected",
            }),
        }
    }

    fn needed(&self, field: &'static str, purpose: &'static str) -> Result<u64, ModelError> {
        self.number(field)?.ok_or(ModelError::Missing { field, purpose })
    }

    fn dtype(&self, field: &'static str) -> Result<Option<DType>, ModelError> {
        let Some(name) = self.text(field) else { return Ok(None) };
        let wanted = "give an element type such as bfloat16";
        let unknown = |_| ModelError::Value { field, value: name.chars().take(64).collect(), wanted };
        name.parse().map(Some).map_err(unknown)
    }

    fn layers(&self) -> Result<usize, ModelError> {
        let layers = match self.number("num_hidden_layers")? {
            Some(layers) => layers,
            None => self.number("n_layer")?.ok_or(ModelError::Missing {
                field: "num_hidden_layers",
                purpose: "how many layers have a cache",
            })?,
        };
        if layers == 0 || layers > MAX_LAYERS {
            return Err(ModelError::Value {
                field: "num_hidden_layers",
                value: layers.to_string(),
                wanted: "give 1 to 4096 layers",
            });
        }
        Ok(layers as usize)
    }
}

/// A value as an error shows it.
fn shortened(value: &Value) -> String {
    value.to_string().chars().take(64).collect()
}

/// What a layer does with the tokens before it.
#[derive(Clone, Copy)]
enum LayerKind {
    Attention(CacheKind),
    Mamba1,
    Mamba2,
    /// Gated `DeltaNet`, the linear attention of Qwen3-Next.
    DeltaNet,
}

const FULL: LayerKind = LayerKind::Attention(CacheKind::Full);

/// The kind of each layer; none for a layer without a cache.
fn layer_kinds(config: &Fields<'_>, layers: usize) -> Result<Vec<Option<LayerKind>>, ModelError> {
    if let Some(types) = config.get("layer_types").or_else(|| config.get("layers_block_type")) {
        return listed_kinds(config, types, layers);
    }
    let every = |kind: LayerKind| Ok(vec![Some(kind); layers]);
    let window = window(config)?;
    match config.text("model_type").unwrap_or_default() {
        "mamba" | "falcon_mamba" => every(LayerKind::Mamba1),
        "mamba2" => every(LayerKind::Mamba2),
        "jamba" => {
            let period = config.number("attn_layer_period")?.unwrap_or(8).max(1) as usize;
            let offset = config.number("attn_layer_offset")?.unwrap_or(4) as usize;
            Ok(by_layer(layers, |layer| if layer % period == offset { FULL } else { LayerKind::Mamba1 }))
        }
        "qwen3_next" => {
            let interval = config.number("full_attention_interval")?.unwrap_or(4).max(1) as usize;
            Ok(by_layer(layers, |layer| if (layer + 1) % interval == 0 { FULL } else { LayerKind::DeltaNet }))
        }
        "gemma2" | "gpt_oss" => {
            let window = needed_window(window)?;
            Ok(by_layer(layers, |layer| if layer % 2 == 0 { window } else { FULL }))
        }
        "gemma3" | "gemma3_text" => {
            let window = needed_window(window)?;
            let pattern = config.number("sliding_window_pattern")?.unwrap_or(6).max(1) as usize;
            Ok(by_layer(layers, |layer| if (layer + 1) % pattern == 0 { FULL } else { window }))
        }
        // A model that has the switch uses the window only where it is on, and only in the upper
        // layers.
        _ => match (window, config.flag("use_sliding_window")) {
            (None, _) | (_, Some(false)) => every(FULL),
            (Some(window), Some(true)) => {
                let full = config.number("max_window_layers")?.unwrap_or(0) as usize;
                Ok(by_layer(layers, |layer| if layer < full { FULL } else { window }))
            }
            (Some(window), None) => every(window),
        },
    }
}

fn by_layer(layers: usize, kind: impl Fn(usize) -> LayerKind) -> Vec<Option<LayerKind>> {
    (0..layers).map(|layer| Some(kind(layer))).collect()
}

/// The kinds that the configuration lists layer by layer.
fn listed_kinds(
    config: &Fields<'_>,
    types: &Value,
    layers: usize,
) -> Result<Vec<Option<LayerKind>>, ModelError> {
    let wrong = |wanted| ModelError::Value { field: "layer_types", value: shortened(types), wanted };
    let list = types.as_array().ok_or_else(|| wrong("a list with a name for each layer was expected"))?;
    if list.len() != layers {
        return Err(wrong("it must have as many entries as num_hidden_layers says"));
    }
    let window = window(config)?;
    let kind = |(layer, name): (usize, &Value)| match name.as_str().unwrap_or_default() {
        "full_attention" | "attention" => Ok(Some(FULL)),
        "sliding_attention" => needed_window(window).map(Some),
        "linear_attention" => Ok(Some(LayerKind::DeltaNet)),
        "mamba" if config.get("mamba_n_heads").is_none() => Ok(Some(LayerKind::Mamba1)),
        "mamba" | "mamba2" => Ok(Some(LayerKind::Mamba2)),
        "mlp" => Ok(None),
        _ => Err(ModelError::LayerType { layer, kind: shortened(name) }),
    };
    list.iter().enumerate().map(kind).collect()
}

fn window(config: &Fields<'_>) -> Result<Option<LayerKind>, ModelError> {
    let tokens = config.number("sliding_window")?.filter(|tokens| *tokens > 0);
    Ok(tokens.map(|tokens| LayerKind::Attention(CacheKind::SlidingWindow { tokens: tokens as u32 })))
}

fn needed_window(window: Option<LayerKind>) -> Result<LayerKind, ModelError> {
    window.ok_or(ModelError::Missing {
        field: "sliding_window",
        purpose: "how many tokens the layers with a window keep",
    })
}

fn attention(config: &Fields<'_>) -> Result<LayerCache, ModelError> {
    if let Some(rank) = config.number("kv_lora_rank")? {
        let rope = config.needed("qk_rope_head_dim", "the width of the latent of MLA")?;
        return Ok(LayerCache::Latent { width: (rank + rope) as u32 });
    }
    let heads = match config.number("num_attention_heads")? {
        Some(heads) => heads,
        None => config.needed("n_head", "the number of heads (or `num_attention_heads`)")?,
    };
    let kv_heads = match (config.number("num_key_value_heads")?, config.number("num_kv_heads")?) {
        (Some(kv_heads), _) | (None, Some(kv_heads)) => kv_heads,
        (None, None) if config.flag("multi_query") == Some(true) => 1,
        (None, None) => heads,
    };
    let head_dim = if let Some(head_dim) = config.number("head_dim")? {
        head_dim
    } else {
        let hidden = match config.number("hidden_size")? {
            Some(hidden) => hidden,
            None => config.needed("n_embd", "the elements of a head (or `head_dim`, `hidden_size`)")?,
        };
        hidden / heads.max(1)
    };
    for (field, value) in [("num_key_value_heads", kv_heads), ("head_dim", head_dim)] {
        if value == 0 {
            return Err(ModelError::Value { field, value: "0".into(), wanted: "at least 1 was expected" });
        }
    }
    Ok(LayerCache::Heads { kv_heads: kv_heads as u32, head_dim: head_dim as u32 })
}

/// The type of recurrent states, where the configuration names one of their own.
fn recurrent_dtype(config: &Fields<'_>, dtype: DType) -> Result<DType, ModelError> {
    Ok(config.dtype("mamba_ssm_dtype")?.unwrap_or(dtype))
}

/// Convolution: (kernel - 1) x inner elements. State: inner x state size.
fn mamba1(config: &Fields<'_>, dtype: DType) -> Result<LayerCache, ModelError> {
    const PURPOSE: &str = "the state of a Mamba layer";
    let inner = match (config.number("intermediate_size")?, config.number("mamba_expand")?) {
        // Jamba's `intermediate_size` is that of its feed-forward layers.
        (_, Some(expand)) => expand * config.needed("hidden_size", PURPOSE)?,
        (Some(inner), None) => inner,
        (None, None) => config.number("expand")?.unwrap_or(2) * config.needed("hidden_size", PURPOSE)?,
    };
    let state = either(config, "mamba_d_state", "state_size", PURPOSE)?;
    let kernel = either(config, "mamba_d_conv", "conv_kernel", PURPOSE)?;
    Ok(LayerCache::State {
        conv_elements: kernel.saturating_sub(1) * inner,
        recurrent_elements: inner * state,
        recurrent_dtype: recurrent_dtype(config, dtype)?,
    })
}

/// Convolution: (kernel - 1) x (inner + 2 x groups x state size). State: heads x head size x state
/// size.
fn mamba2(config: &Fields<'_>, dtype: DType) -> Result<LayerCache, ModelError> {
    const PURPOSE: &str = "the state of a Mamba-2 layer";
    let heads = either(config, "mamba_n_heads", "num_heads", PURPOSE)?;
    let head_dim = match config.number("mamba_d_head")? {
        Some(head_dim) => head_dim,
        None => config.needed("head_dim", PURPOSE)?,
    };
    let state = either(config, "mamba_d_state", "state_size", PURPOSE)?;
    let groups = either(config, "mamba_n_groups", "n_groups", PURPOSE)?;
    let kernel = either(config, "mamba_d_conv", "conv_kernel", PURPOSE)?;
    let inner = heads * head_dim;
    Ok(LayerCache::State {
        conv_elements: kernel.saturating_sub(1) * (inner + 2 * groups * state),
        recurrent_elements: inner * state,
        recurrent_dtype: recurrent_dtype(config, dtype)?,
    })
}

/// Convolution: (kernel - 1) x (2 x keys + values). State: value heads x key size x value size.
fn delta_net(config: &Fields<'_>, dtype: DType) -> Result<LayerCache, ModelError> {
    const PURPOSE: &str = "the state of a linear attention layer";
    let key_heads = config.needed("linear_num_key_heads", PURPOSE)?;
    let value_heads = config.needed("linear_num_value_heads", PURPOSE)?;
    let key_dim = config.needed("linear_key_head_dim", PURPOSE)?;
    let value_dim = config.needed("linear_value_head_dim", PURPOSE)?;
    let kernel = config.needed("linear_conv_kernel_dim", PURPOSE)?;
    Ok(LayerCache::State {
        conv_elements: kernel.saturating_sub(1) * (2 * key_heads * key_dim + value_heads * value_dim),
        recurrent_elements: value_heads * key_dim * value_dim,
        recurrent_dtype: recurrent_dtype(config, dtype)?,
    })
}

fn either(
    config: &Fields<'_>,
    field: &'static str,
    other: &'static str,
    purpose: &'static str,
) -> Result<u64, ModelError> {
    match config.number(field)? {
        Some(number) => Ok(number),
        None => config.needed(other, purpose),
    }
}
