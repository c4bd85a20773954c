//! Which directory of a disk tier a slot lies in.

use crate::BlockId;

/// Neighbouring slots of about so many bytes lie in one directory: large enough for a large
/// request.
const UNIT_BYTES: u64 = 1 << 20;

/// How slots are spread over the directories of a disk tier: units of neighbouring slots of about
/// 1 MiB lie in each directory in turn.
///
/// ```
/// use kvbm_plan::{BlockId, Striping};
///
/// let striping = Striping::new(2, 512 << 10);
/// let directories = [0, 1, 2, 3, 4].map(|slot| striping.directory(BlockId(slot)));
/// assert_eq!(directories, [0, 0, 1, 1, 0]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Striping {
    directories: u32,
    unit: u32,
}

impl Striping {
    /// Slots begin at multiples of this many bytes.
    pub const SLOT_ALIGNMENT: u64 = 4096;

    /// `slot_bytes`: a block's bytes, rounded up to [`SLOT_ALIGNMENT`](Self::SLOT_ALIGNMENT). There
    /// is at least one directory, and a unit has at least one slot.
    pub fn new(directories: usize, slot_bytes: u64) -> Self {
        let bytes = slot_bytes.checked_next_multiple_of(Self::SLOT_ALIGNMENT).unwrap_or(slot_bytes);
        let unit = (UNIT_BYTES / bytes.max(1)).max(1);
        Self { directories: u32::try_from(directories.max(1)).unwrap_or(u32::MAX), unit: unit as u32 }
    }

    /// Number of directories.
    pub fn directories(&self) -> usize {
        self.directories as usize
    }

    /// Neighbouring slots that lie in one directory.
    pub fn unit(&self) -> u32 {
        self.unit
    }

    /// The directory of a slot, from 0.
    pub fn directory(&self, slot: BlockId) -> usize {
        (slot.0 / self.unit % self.directories) as usize
    }
}
