//! What a seed decides before the first step.

use crate::random::Random;
use crate::world::Faults;
use crate::world::store::Terms;
use kvbm_volume::VolumeCompression;
use std::time::Duration;

/// See the module.
#[derive(Clone, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each kind of accident is on or off")]
pub(crate) struct Setup {
    pub(crate) ranks: usize,
    /// Of G1, G2 and G3.
    pub(crate) blocks: [u32; 3],
    /// G1 is the engine's own memory.
    pub(crate) names_blocks: bool,
    /// Records that the journal of a disk may have beside one for each block.
    pub(crate) disk_slack: u64,
    pub(crate) has_volume: bool,
    pub(crate) volume: Terms,
    pub(crate) chains: usize,
    /// Requests come as in a trace of conversations.
    pub(crate) follows_trace: bool,
    pub(crate) queue_share: f64,
    pub(crate) watermark: f64,
    pub(crate) idle_iterations: u64,
    pub(crate) writes_through: bool,
    pub(crate) deadline: Duration,
    pub(crate) rank_lost_after: Duration,
    pub(crate) ring_capacity: u32,
    pub(crate) kills: bool,
    pub(crate) cuts: bool,
    pub(crate) restarts: bool,
    pub(crate) babbles: bool,
    pub(crate) lies: bool,
    pub(crate) faults: Faults,
}

impl Setup {
    pub(crate) fn of(seed: u64) -> Self {
        let mut random = Random::new(seed ^ 0x0073_6574);
        let mut rate = |rates: &[usize]| rates[random.below(rates.len())];
        let faults = Faults {
            read: rate(&[0, 25, 200]),
            write: rate(&[0, 25, 200]),
            flush: rate(&[0, 4]),
            land: rate(&[0, 3]),
            slow: rate(&[0, 10, 100]),
            refuse: rate(&[0, 40]),
            repeat: rate(&[0, 5]),
            full: rate(&[0, 50]),
        };
        let has_disk = !random.once_in(6);
        let seconds = Duration::from_secs(2);
        let mut setup = Self {
            ranks: 1 + random.below(3),
            blocks: [
                6 + random.below(10) as u32,
                4 + random.below(10) as u32,
                if has_disk { 4 + random.below(12) as u32 } else { 0 },
            ],
            disk_slack: 1 + random.below(40) as u64,
            names_blocks: random.once_in(3),
            has_volume: random.once_in(2),
            chains: 4 + random.below(8),
            follows_trace: random.once_in(3),
            queue_share: if random.once_in(3) { 0.3 } else { 1.0 },
            watermark: if random.once_in(3) { 0.7 } else { 1.0 },
            idle_iterations: if random.once_in(3) { 5 } else { 0 },
            writes_through: random.once_in(2),
            deadline: Duration::from_millis([20, 200, 2000][random.below(3)]),
            rank_lost_after: if random.once_in(2) { seconds } else { Duration::ZERO },
            ring_capacity: if random.once_in(3) { 16 } else { 4096 },
            kills: !random.once_in(3),
            cuts: random.once_in(2),
            restarts: random.once_in(2),
            babbles: random.once_in(2),
            lies: random.once_in(4),
            faults,
            volume: Terms {
                blocks: if random.once_in(2) { 2 + random.below(16) as u32 } else { 0 },
                encrypts: random.once_in(4),
                compression: match random.below(8) {
                    0 => VolumeCompression::Lz4,
                    1 => VolumeCompression::Zstd,
                    _ => VolumeCompression::Off,
                },
            },
        };
        // Without host memory, blocks of a G1 that is kvbm's go straight to the disk and to
        // volumes.
        let has_lower = setup.blocks[2] > 0 || setup.has_volume;
        if !setup.names_blocks && has_lower && random.once_in(5) {
            setup.blocks[1] = 0;
        }
        setup
    }
}
