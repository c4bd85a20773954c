//! A direction of travel: each has its own queue, executor and metrics.

use crate::Tier;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Source and destination tier of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Path {
    /// Where the bytes are read.
    pub src: Tier,
    /// Where the bytes are written.
    pub dst: Tier,
}

impl Path {
    /// Offload of a device block to host memory.
    pub const G1_G2: Self = Self::new(Tier::G1, Tier::G2);
    /// Onboard of a host block to the device.
    pub const G2_G1: Self = Self::new(Tier::G2, Tier::G1);
    /// Offload of a host block to disk.
    pub const G2_G3: Self = Self::new(Tier::G2, Tier::G3);
    /// Onboard of a disk block to host memory.
    pub const G3_G2: Self = Self::new(Tier::G3, Tier::G2);
    /// Onboard of a disk block directly to the device.
    pub const G3_G1: Self = Self::new(Tier::G3, Tier::G1);
    /// Offload of a device block directly to disk, through host memory that is no tier.
    pub const G1_G3: Self = Self::new(Tier::G1, Tier::G3);

    /// Offload of a host block to a volume.
    pub const G2_G4: Self = Self::new(Tier::G2, Tier::G4);
    /// Offload of a device block directly to a volume, through host memory that is no tier.
    pub const G1_G4: Self = Self::new(Tier::G1, Tier::G4);
    /// Onboard of a volume's block to the device, through host memory that is no tier.
    pub const G4_G1: Self = Self::new(Tier::G4, Tier::G1);

    /// The paths that a worker without peers and volumes executes.
    pub const LOCAL: [Self; 6] =
        [Self::G1_G2, Self::G2_G1, Self::G2_G3, Self::G3_G2, Self::G3_G1, Self::G1_G3];

    /// The paths that a worker without peers executes: [`LOCAL`](Self::LOCAL), then those of
    /// volumes.
    pub const ALL: [Self; 9] = [
        Self::G1_G2,
        Self::G2_G1,
        Self::G2_G3,
        Self::G3_G2,
        Self::G3_G1,
        Self::G1_G3,
        Self::G2_G4,
        Self::G4_G1,
        Self::G1_G4,
    ];

    /// A path from `src` to `dst`.
    pub const fn new(src: Tier, dst: Tier) -> Self {
        Self { src, dst }
    }
}

/// `g1_g2`: the name in metrics and JSON.
impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}_{}", self.src.as_str(), self.dst.as_str())
    }
}
