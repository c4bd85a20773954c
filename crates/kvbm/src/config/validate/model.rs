//! The model: its heads, its cache groups, tensors without axes, and ranks with the same bytes.

use super::broken;
use crate::config::choices::{DeviceOrder, HostOrder, LayoutKind};
use crate::config::groups::{CacheGroup, CacheGroups, LayerContent};
use crate::config::sections::{MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, ModelConfig};
use crate::config::{Config, ConfigError};
use kvbm_layout::OpaqueLayout;
use kvbm_plan::GroupKind;

/// Checks every rule of the section `[model]`.
pub(super) fn check(config: &Config) -> Result<(), ConfigError> {
    let model = &config.model;
    check_replicas(config)?;
    if model.is_opaque() {
        return check_opaque(config);
    }
    if model.has_groups() {
        return check_groups(config);
    }
    check_ranks(config, "model.num_kv_heads", model.num_kv_heads)
}

/// Whether all ranks are in rows of `model.replicas`, of a model that does not say it by its
/// heads.
fn check_replicas(config: &Config) -> Result<(), ConfigError> {
    let (model, ranks) = (&config.model, config.parallelism.tensor_parallel);
    let has_axes = |group: &CacheGroup| !matches!(group.content, LayerContent::Opaque { .. });
    let says_heads = !model.is_opaque() && model.cache_groups().iter().any(has_axes);
    if model.replicas > 1 && says_heads {
        let rule = "must be 1 for a model whose heads or states are known";
        return broken("model.replicas", &model.replicas, rule);
    }
    if !ranks.is_multiple_of(model.replicas.max(1)) {
        let rule = format!("must divide parallelism.tensor_parallel ({ranks})");
        return broken("model.replicas", &model.replicas, &rule);
    }
    Ok(())
}

/// Whether the ranks can divide these KV heads.
fn check_ranks(config: &Config, key: &str, heads: u32) -> Result<(), ConfigError> {
    let ranks = config.parallelism.tensor_parallel;
    if !heads.is_multiple_of(ranks) && !ranks.is_multiple_of(heads) {
        let rule = format!("must divide {key} ({heads}) or be a multiple of it");
        return broken("parallelism.tensor_parallel", &ranks, &rule);
    }
    Ok(())
}

fn check_groups(config: &Config) -> Result<(), ConfigError> {
    const KEY: &str = "model.groups";
    let (model, one) = (&config.model, ModelConfig::default());
    let unused = [
        ("model.num_layers", model.num_layers, one.num_layers),
        ("model.num_kv_heads", model.num_kv_heads, one.num_kv_heads),
        ("model.head_dim", model.head_dim, one.head_dim),
        ("model.outer_dim", model.outer_dim, one.outer_dim),
    ];
    if let Some((key, value, _)) = unused.into_iter().find(|(_, value, default)| value != default) {
        return broken(
            key,
            &value,
            "has no meaning with model.groups, each of which has its own: leave it out",
        );
    }
    let groups = model.groups.as_slice();
    if groups.len() > CacheGroups::MAX {
        let rule = format!("must be at most {} groups", CacheGroups::MAX);
        return broken(KEY, &format!("{} groups", groups.len()), &rule);
    }
    groups.iter().try_for_each(|group| check_group(config, group))?;
    if groups.iter().all(|group| group.kind == GroupKind::State) {
        let rule = "must have a group that keeps tokens: a cache of states alone shares no prefix";
        return broken(KEY, &model.groups, rule);
    }
    if groups.len() == 1 {
        return Ok(());
    }
    // Slots of one size hold blocks of any group, which tensors of layers could not.
    if !config.device.capacity.is_none() && config.device.layout != LayoutKind::FullyContiguous {
        let rule = "must be fully-contiguous where model.groups has several groups and G1 is ours";
        return broken("device.layout", &config.device.layout, rule);
    }
    Ok(())
}

fn check_group(config: &Config, group: &CacheGroup) -> Result<(), ConfigError> {
    const KEY: &str = "model.groups";
    let limits = match group.content {
        LayerContent::Kv { num_kv_heads, head_dim, outer_dim, .. } => {
            check_ranks(config, &format!("the heads of group `{group}`"), num_kv_heads.max(1))?;
            [
                ("heads", u64::from(num_kv_heads), MAX_HEADS),
                ("head_dim", u64::from(head_dim), MAX_HEAD_DIM),
                ("outer", u64::from(outer_dim), 2),
            ]
        }
        LayerContent::State { bytes } => [("bytes", u64::from(bytes), u64::from(u32::MAX)); 3],
        LayerContent::Opaque { rank_bytes } => {
            [("rank_bytes", u64::from(rank_bytes), u64::from(u32::MAX)); 3]
        }
    };
    let most = match group.content {
        LayerContent::Opaque { .. } => OpaqueLayout::MAX_TENSORS as u64,
        LayerContent::Kv { .. } | LayerContent::State { .. } => MAX_LAYERS,
    };
    let layers = ("layers", u64::from(group.layers), most);
    let window = match group.kind {
        GroupKind::SlidingWindow(tokens) => ("window", u64::from(tokens), u64::from(u32::MAX)),
        GroupKind::Full | GroupKind::State => layers,
    };
    if group.scales.is_some() && !matches!(group.content, LayerContent::Kv { .. }) {
        return broken(KEY, &group.to_string(), "must keep tokens with heads, where it has scales");
    }
    let outside = |(_, value, most): &(&str, u64, u64)| !(1..=*most).contains(value);
    match limits.into_iter().chain([layers, window]).find(outside) {
        None => Ok(()),
        Some((name, _, most)) => {
            broken(KEY, &group.to_string(), &format!("must have {name} from 1 to {most}"))
        }
    }
}

fn check_opaque(config: &Config) -> Result<(), ConfigError> {
    let (model, axes) = (&config.model, ModelConfig::default());
    let unused = [
        ("model.num_layers", model.num_layers, axes.num_layers),
        ("model.num_kv_heads", model.num_kv_heads, axes.num_kv_heads),
        ("model.head_dim", model.head_dim, axes.head_dim),
        ("model.outer_dim", model.outer_dim, axes.outer_dim),
    ];
    let rule = "has no meaning with model.opaque_tensors, whose blocks have no axes: leave it out";
    if let Some((key, value, _)) = unused.into_iter().find(|(_, value, default)| value != default) {
        return broken(key, &value, rule);
    }
    if model.dtype != axes.dtype {
        return broken("model.dtype", &model.dtype, rule);
    }
    if config.host.order != HostOrder::Nhd {
        return broken("host.order", &config.host.order, rule);
    }
    if config.device.order != DeviceOrder::Nhd {
        return broken("device.order", &config.device.order, rule);
    }
    let shape = OpaqueLayout::config_of(1, model.opaque_tensors.as_slice(), 1);
    shape.map(drop).or_else(|error| broken("model.opaque_tensors", &model.opaque_tensors, &error.to_string()))
}
