//! The manager that a replay runs on.

use anyhow::{Context, Result};
use kvbm::config::{
    Bytes, CacheGroup, Config, DeviceKind, LayerContent, LayoutKind, ModelConfig, Scales, VolumeConfig,
    WhenFull,
};
use kvbm::layout::DType;
use kvbm::{KvBlockManager, Owned};
use std::path::Path;

use super::models;
use crate::args::{DeviceChoice, OffloadMode, ReplayArgs, WrongUsage};
use crate::features::command_with;

/// With two tensors each, 16 fragments a block: the layer-separate G1 that engines have.
const LAYERS: u32 = 8;
const OUTER: u32 = 2;
const PAGE_SIZE: u32 = 16;
const DTYPE: DType = DType::BF16;
/// Elements of a head, where the block is large enough for whole heads.
const HEAD_DIM: u32 = 128;

/// Builds the manager that `args` ask for; `dir` is where G3 goes, if there is one.
pub(super) fn manager(args: &ReplayArgs, dir: Option<&Path>) -> Result<KvBlockManager<Owned>> {
    let config = config(args, dir)?;
    let builder = KvBlockManager::<Owned>::builder().config(config);
    let built = if args.metadata_only { builder.build_metadata_only() } else { builder.build() };
    built.with_context(|| {
        let s3 = args.volume.as_ref().is_some_and(|uri| uri.starts_with("s3:")) && !cfg!(feature = "s3");
        let hint = if s3 { format!("; this build lacks s3: {}", command_with("s3")) } else { String::new() };
        format!("cannot build the block manager{hint}")
    })
}

fn config(args: &ReplayArgs, dir: Option<&Path>) -> Result<Config> {
    let [g1, g2, g3, g4] = args.capacity.0;
    let mut config = Config { model: shape(args)?, ..Config::default() };
    config.parallelism.tensor_parallel = args.tensor_parallel;
    config.policy.checkpoint_every = args.checkpoint_every;
    if config.model.groups.as_slice().len() > 1 {
        config.device.layout = LayoutKind::FullyContiguous;
    }
    config.namespace.model.clone_from(&args.namespace);
    config.device.capacity = g1;
    if let DeviceChoice::Cuda(ordinal) = args.device {
        (config.device.kind, config.device.ordinal) = (DeviceKind::Cuda, ordinal);
    }
    config.host.capacity = g2;
    config.policy.eviction = args.policy;
    config.policy.seed = args.seed;
    config.tenants.shares.clone_from(&args.tenants);
    config.events.url.clone_from(&args.events);
    if args.events.is_some() {
        // A replay is as fast as the machine: rather wait for the transport than lose events.
        config.events.when_full = WhenFull::Block;
    }
    if !g3.is_none() {
        config.disk.capacity = g3;
        // Without bytes nothing is ever opened; the configuration still wants a name.
        config.disk.dir = Some(dir.unwrap_or(Path::new("metadata-only")).to_owned());
        config.disk.more_dirs = args.dir.iter().skip(1).collect();
        // A trace of hours is replayed in seconds: a budget by the clock would stop it at once.
        config.disk.drive_writes_per_day = 0.0;
    }
    config.volume = args
        .volume
        .iter()
        .map(|uri| VolumeConfig { uri: uri.clone(), capacity: g4, ..VolumeConfig::default() })
        .collect();
    if args.offload == OffloadMode::Wait {
        // Nothing new begins before a request's offloads are over, so they may take as much as they
        // need.
        config.offload.g1_g2.queue_share = 1.0;
        config.offload.g2_g3.queue_share = 0.5;
    }
    config.validate().map_err(|error| WrongUsage(format!("these options make no block manager: {error}")))?;
    Ok(config)
}

/// The model that `args` ask for.
fn shape(args: &ReplayArgs) -> Result<ModelConfig> {
    let model = match &args.model {
        Some(name) => models::model(name, PAGE_SIZE, args.dtype, args.block_bytes.get())?,
        None => model(args.block_bytes.get(), args.dtype.unwrap_or(DTYPE))?,
    };
    Ok(args.scales.map_or(model.clone(), |scales| scaled(&model, scales)))
}

/// The same model with scales beside its tokens.
fn scaled(model: &ModelConfig, scales: Scales) -> ModelConfig {
    let group = |group: CacheGroup| {
        let has_tokens = matches!(group.content, LayerContent::Kv { .. });
        CacheGroup { scales: has_tokens.then_some(scales), ..group }
    };
    let groups = model.cache_groups().into_iter().map(group).collect();
    ModelConfig { groups, page_size: model.page_size, dtype: model.dtype, ..ModelConfig::default() }
}

/// A model whose blocks have `block_bytes` bytes.
fn model(block_bytes: u64, dtype: DType) -> Result<ModelConfig, WrongUsage> {
    let per_element = u64::from(LAYERS * OUTER * PAGE_SIZE * dtype.width());
    if !block_bytes.is_multiple_of(per_element) {
        return Err(WrongUsage(format!(
            "--block-bytes {block_bytes} is not a multiple of {per_element}: {LAYERS} layers of keys and values, {PAGE_SIZE} tokens, {} bytes each",
            dtype.width()
        )));
    }
    let inner = u32::try_from(block_bytes / per_element).map_err(|_| {
        let most = Bytes(u64::from(u32::MAX) * per_element);
        WrongUsage(format!("--block-bytes {}: a block has at most {most}", Bytes(block_bytes)))
    })?;
    let head_dim = if inner.is_multiple_of(HEAD_DIM) { HEAD_DIM } else { inner };
    Ok(ModelConfig {
        num_layers: LAYERS,
        num_kv_heads: inner / head_dim,
        head_dim,
        page_size: PAGE_SIZE,
        dtype,
        outer_dim: OUTER,
        ..ModelConfig::default()
    })
}

/// Blocks that each tier of `manager` holds.
pub(super) fn capacity_blocks(manager: &KvBlockManager<Owned>) -> [u64; 3] {
    manager.config().capacity_blocks()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_has_the_bytes_that_were_asked_for() {
        for block_bytes in [512, 1536, 16 << 10, 64 << 10, 1 << 20, 4 << 20] {
            let config = Config { model: model(block_bytes, DTYPE).unwrap(), ..Config::default() };
            assert_eq!(config.rank_block_bytes(), block_bytes);
        }
        let error = model(1000, DTYPE).unwrap_err().to_string();
        assert!(error.contains("1000") && error.contains("multiple of 512"), "{error}");
        let error = model(u64::MAX / 512 * 512, DTYPE).unwrap_err().to_string();
        assert!(error.contains("a block has at most 2199023255040B"), "{error}");
    }
}
