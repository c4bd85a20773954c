//! Queues and threads of a worker's paths.

use crate::config::Config;
use crate::transfers::plans::{MAX_PLAN_BLOCKS, max_read_blocks};
use kvbm_transfer::{PathConfig, PathConfigs};

/// Bytes that one call of a volume moves, roughly.
const CALL_BYTES: u64 = 8 << 20;

pub(super) fn paths(config: &Config) -> PathConfigs {
    let Config { transfer, disk, volumes, .. } = config;
    let memory = PathConfig {
        queue_plans: transfer.queue_depth as usize,
        threads: transfer.threads as usize,
        ..PathConfig::MEMORY
    };
    // The engine has threads of its own: one executor keeps them busy, with as much waiting as is
    // at the device.
    let depth_blocks = (2 * disk.depth.max(disk.threads) as usize).max(PathConfig::DISK.depth_blocks);
    let disk = PathConfig { queue_plans: memory.queue_plans, depth_blocks, ..PathConfig::DISK };
    // As many calls as there are threads, each of so many blocks that they fit into a few
    // megabytes.
    let batch_blocks = (CALL_BYTES / config.rank_block_bytes().max(1)).clamp(1, 16) as usize;
    let depth_blocks = 2 * batch_blocks * volumes.threads as usize;
    let volume = PathConfig { threads: 1, depth_blocks, batch_blocks, ..memory };
    // Plans of reads are small where blocks are large: as many blocks wait as of others.
    let smaller = MAX_PLAN_BLOCKS / max_read_blocks(config.rank_block_bytes());
    let read = |path: PathConfig| PathConfig { queue_plans: path.queue_plans * smaller, ..path };
    PathConfigs {
        g1_g2: memory,
        g2_g1: memory,
        g2_g3: disk,
        g3_g2: read(disk),
        g3_g1: read(disk),
        g1_g3: disk,
        g2_g4: volume,
        g4_g1: read(volume),
        g1_g4: volume,
    }
}
