//! Lossy volumes: which models can have them, and what their blocks are called.

use super::groups::{CacheGroup, LayerContent};
use super::{Config, ConfigError, VolumeLossy};
use kvbm_layout::DType;
use kvbm_plan::GroupKind;

/// What `volumes.lossy` makes codes of.
const NUMBERS: [DType; 3] = [DType::BF16, DType::F16, DType::F32];
const WAY_OUT: &str = "use volumes.compress, which loses nothing";

impl Config {
    /// What a namespace says of the elements: what the model says, and what they lose on volumes.
    pub(crate) fn content(&self) -> String {
        let content = self.model.content();
        let of = self.volumes.lossy_dtype.map_or(String::new(), |dtype| format!(" of {}", dtype.name()));
        match self.volumes.lossy {
            VolumeLossy::Off => content,
            lossy => format!("{content}; lossy volumes {lossy}{of}"),
        }
    }

    pub(super) fn validate_lossy(&self) -> Result<(), ConfigError> {
        let broken = |key, value: String, rule| Err(ConfigError::Rule { key, value, rule });
        let (lossy, given) = (self.volumes.lossy, self.volumes.lossy_dtype);
        if let Some(dtype) = given {
            let rule = if lossy == VolumeLossy::Off {
                "has no meaning without volumes.lossy: leave it out"
            } else if !self.has_tensors_without_axes() {
                "has no meaning with a model whose elements have a type: leave it out"
            } else if !NUMBERS.contains(&dtype) {
                "must be bf16, f16 or f32: others have no lossy form"
            } else {
                ""
            };
            if !rule.is_empty() {
                return broken("volumes.lossy_dtype", dtype.to_string(), rule.to_owned());
            }
        }
        if lossy == VolumeLossy::Off {
            return Ok(());
        }
        // A leader alone writes nothing: its workers do.
        if cfg!(all(feature = "worker", not(feature = "compress"))) {
            let rule = "needs a build with the feature compress".to_owned();
            return broken("volumes.lossy", lossy.to_string(), rule);
        }
        let Err(rule) = self.lossy_types() else { return Ok(()) };
        broken("volumes.lossy", lossy.to_string(), rule)
    }

    fn has_tensors_without_axes(&self) -> bool {
        let groups = self.model.cache_groups();
        self.model.is_opaque()
            || groups.iter().any(|group| matches!(group.content, LayerContent::Opaque { .. }))
    }

    /// The element type of each cache group, where all of them may be lossy; else why they may not,
    /// with the way out.
    pub(crate) fn lossy_types(&self) -> Result<Vec<DType>, String> {
        const UNKNOWN: &str = "the type of whose elements is not known: set volumes.lossy_dtype, or";
        if self.model.is_opaque() {
            let why = || format!("must be off with model.opaque_tensors, {UNKNOWN} {WAY_OUT}");
            return Ok(vec![self.volumes.lossy_dtype.ok_or_else(why)?]);
        }
        let of_group = |group: &CacheGroup| {
            let why = match (group.content, self.volumes.lossy_dtype) {
                _ if group.scales.is_some() => "whose blocks have scales already:".to_owned(),
                _ if group.kind == GroupKind::State => "which keeps a state:".to_owned(),
                (LayerContent::Kv { dtype, .. }, _) => {
                    let dtype = dtype.unwrap_or(self.model.dtype);
                    if NUMBERS.contains(&dtype) {
                        return Ok(dtype);
                    }
                    format!("whose elements are {dtype}, and not bf16, f16 or f32:")
                }
                (_, Some(given)) => return Ok(given),
                (_, None) => UNKNOWN.to_owned(),
            };
            let what = if self.model.has_groups() { format!("group `{group}`") } else { "this model".into() };
            Err(format!("must be off with {what}, {why} {WAY_OUT}"))
        };
        self.model.cache_groups().iter().map(of_group).collect()
    }
}

#[cfg(all(test, feature = "compress"))]
mod tests {
    use super::super::ModelConfig;
    use super::*;
    use std::collections::HashSet;

    fn config(settings: &[(&str, &str)]) -> Config {
        let mut config = Config::default();
        let base =
            [("namespace.model", "m"), ("device.layout", "fully-contiguous"), ("volumes.lossy", "int8")];
        for (key, value) in base.iter().chain(settings) {
            config.set(key, value).expect("a setting");
        }
        config
    }

    fn axes() -> [(&'static str, &'static str); 3] {
        [("model.num_layers", "2"), ("model.num_kv_heads", "2"), ("model.head_dim", "64")]
    }

    #[test]
    fn blocks_without_numbers_that_are_known_must_be_exact() {
        for dtype in ["bf16", "f16", "f32"] {
            config(&[&axes()[..], &[("model.dtype", dtype)]].concat()).validate().unwrap();
        }
        let groups = "window=32 layers=2 heads=2 head_dim=8 dtype=f16, full layers=3 heads=2 head_dim=8";
        config(&[("model.groups", groups)]).validate().unwrap();
        // What the operator says of tensors without axes.
        for model in [("model.opaque_tensors", "2x4096"), ("model.groups", "full layers=2 rank_bytes=4096")] {
            for dtype in ["bf16", "f16", "f32"] {
                config(&[model, ("volumes.lossy_dtype", dtype)]).validate().unwrap();
            }
        }
        for (settings, says) in [
            (&[("model.opaque_tensors", "2x4096")][..], "off with model.opaque_tensors, the type of whose"),
            (
                &[&axes()[..], &[("model.dtype", "f8_e4m3")]].concat(),
                "this model, whose elements are f8_e4m3",
            ),
            (&[&axes()[..], &[("model.dtype", "u8")]].concat(), "whose elements are u8"),
            (
                &[("model.groups", "full layers=2 heads=2 head_dim=8, state layers=1 bytes=64")],
                "group `state layers=1 bytes=64`, which keeps a state",
            ),
            (
                &[("model.groups", "full layers=2 rank_bytes=4096")],
                "group `full layers=2 rank_bytes=4096`, the type of whose elements is not known: set volumes.lossy_dtype",
            ),
            (
                &[
                    ("model.groups", "full layers=2 rank_bytes=4096, state layers=1 rank_bytes=64"),
                    ("volumes.lossy_dtype", "bf16"),
                ],
                "group `state layers=1 rank_bytes=64`, which keeps a state",
            ),
            (
                &[("model.groups", "full layers=2 heads=2 head_dim=8 dtype=f8_e4m3")],
                "dtype=f8_e4m3`, whose elements",
            ),
            (
                &[("model.groups", "full layers=2 heads=2 head_dim=8 scales=head:f32")],
                "whose blocks have scales already",
            ),
        ] {
            let mut config = config(settings);
            let error = config.validate().unwrap_err().to_string();
            assert!(error.starts_with("volumes.lossy = int8: must be off with "), "{error}");
            assert!(error.contains(says) && error.ends_with(WAY_OUT), "{error}");
            (config.volumes.lossy, config.volumes.lossy_dtype) = (VolumeLossy::Off, None);
            config.validate().unwrap();
        }
        for (settings, says) in [
            (
                &[("model.opaque_tensors", "4096"), ("volumes.lossy_dtype", "u8")][..],
                "must be bf16, f16 or f32",
            ),
            (
                &[&axes()[..], &[("volumes.lossy_dtype", "bf16")]].concat(),
                "whose elements have a type: leave it out",
            ),
            (
                &[("model.opaque_tensors", "4096"), ("volumes.lossy_dtype", "f16"), ("volumes.lossy", "off")],
                "without volumes.lossy: leave it out",
            ),
        ] {
            let error = config(settings).validate().unwrap_err().to_string();
            assert!(error.starts_with("volumes.lossy_dtype = ") && error.contains(says), "{error}");
        }
    }

    /// Mutation that makes it fail: the setting does not enter the namespace.
    #[test]
    fn every_way_to_lose_is_a_namespace_of_its_own() {
        let mut config = config(&axes());
        let mut tags = HashSet::new();
        for (lossy, _) in VolumeLossy::ALL {
            config.volumes.lossy = *lossy;
            assert!(tags.insert(config.namespace().tag()), "{lossy}");
        }
        let mut opaque = self::config(&[("model.opaque_tensors", "4096")]);
        for dtype in NUMBERS {
            opaque.volumes.lossy_dtype = Some(dtype);
            assert!(tags.insert(opaque.namespace().tag()), "{dtype}");
        }
        config.volumes.lossy = VolumeLossy::Off;
        let exact = ModelConfig::namespace(&config.model, kvbm_tokens::Namespace::new("m"));
        assert_eq!(exact.tag(), config.namespace().tag(), "exact blocks are called as before");
    }
}
