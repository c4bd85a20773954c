//! When blocks are copied to the next tier down: the settings of both edges.

use super::schema::{Section, section_keys};

/// When blocks are copied from a tier to the next one down.
#[derive(Clone, Debug, PartialEq)]
pub struct EdgeConfig {
    /// Copy each block as soon as it is registered.
    pub write_through: bool,
    /// Above this occupancy, counting only blocks that are neither free nor copied lower, copy in
    /// the background; 1 for never.
    pub watermark: f64,
    /// Copy blocks that nobody used for so many engine iterations; 0 for never.
    pub idle_iterations: u64,
    /// Share of the upper tier that waiting and running copies may hold; beyond it those that wait
    /// and are least likely to be used again are dropped.
    pub queue_share: f64,
    /// Share of the upper tier, from the next victims of eviction on, whose blocks are copied
    /// before they go; 0 for none.
    pub ahead_share: f64,
}

/// The triggers of both edges.
#[derive(Clone, Debug, PartialEq)]
pub struct OffloadConfig {
    /// Device to host memory; to disk where there is none.
    pub g1_g2: EdgeConfig,
    /// Host memory to disk.
    pub g2_g3: EdgeConfig,
}

impl Default for OffloadConfig {
    fn default() -> Self {
        Self {
            g1_g2: EdgeConfig {
                write_through: true,
                watermark: 0.90,
                idle_iterations: 100,
                queue_share: 0.25,
                ahead_share: 0.0,
            },
            g2_g3: EdgeConfig {
                write_through: false,
                watermark: 0.90,
                idle_iterations: 1000,
                queue_share: 0.25,
                ahead_share: 0.2,
            },
        }
    }
}

macro_rules! edge {
    ($name:ident, $path:literal, $doc:literal, |$config:ident| $place:expr) => {
        pub(super) const $name: Section = section_keys!($path, $doc, |$config| $place, {
            /// Copy each block as soon as it is registered in the upper tier.
            write_through: bool, [""];
            /// Above this occupancy of the upper tier, counting only blocks that are neither free
            /// nor copied lower, blocks are copied in the background; 1 for never.
            watermark: f64, ["share of the tier"];
            /// Copy blocks that nobody used for so long; 0 for never.
            idle_iterations: u64, ["engine iterations"];
            /// Share of the upper tier that waiting and running copies may hold; beyond it those
            /// that wait and are least likely to be used again are dropped and counted.
            queue_share: f64, ["share of the tier"];
            /// Blocks that are this close to eviction from the upper tier are copied before they
            /// are evicted; 0 for none. The policy `hazard` (the default) may evict any block next:
            /// with it, every value above 0 copies all blocks.
            ahead_share: f64, ["share of the tier"];
        });
    };
}
edge! {
    OFFLOAD_G1_G2, "offload.g1_g2", "When blocks are copied from the device to host memory, or to disk where there is no host memory.", |config| config.offload.g1_g2
}
edge! {
    OFFLOAD_G2_G3, "offload.g2_g3", "When blocks are copied from host memory to disk.", |config| config.offload.g2_g3
}
