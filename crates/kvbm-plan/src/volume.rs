//! What an operator says about a blob store.

use crate::VolumeId;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// A volume of G4, made and mounted by whoever owns it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VolumeDescriptor {
    /// The volume's id in plans and locations.
    pub id: VolumeId,
    /// Where it is: `file:///mnt/kv`, `memory:`, or a scheme of a vendor.
    pub uri: String,
    /// Bytes that the objects of a deployment's namespace may take there, headers included; `None`: as many as the store takes. What
    /// others keep there is not counted.
    pub capacity_bytes: Option<u64>,
    /// Payloads begin at a multiple of this many bytes in their object; a power of two up to 1 MiB.
    pub alignment: u32,
    /// How long an operation may take when its caller has no better idea; more than zero, at most [`Self::MAX_DEADLINE`].
    pub deadline: Duration,
}

impl VolumeDescriptor {
    /// The longest deadline.
    pub const MAX_DEADLINE: Duration = Duration::from_secs(3600);

    /// A descriptor without a capacity limit, with alignment 1 and a deadline of 5 seconds.
    pub fn new(id: VolumeId, uri: impl Into<String>) -> Self {
        Self { id, uri: uri.into(), capacity_bytes: None, alignment: 1, deadline: Duration::from_secs(5) }
    }
}

/// What a [`VolumeDescriptor`] says beside the id: what a worker has to know to open a volume. Credentials are named in the URI by
/// reference, so each worker finds its own.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumePlace {
    /// As in the descriptor, at most [`VolumePlace::MAX_URI`] bytes.
    pub uri: String,
    /// As in the descriptor.
    pub capacity_bytes: Option<u64>,
    /// As in the descriptor.
    pub alignment: u32,
    /// As in the descriptor, in microseconds.
    pub deadline_us: u64,
}

impl VolumePlace {
    /// Most bytes of a URI.
    pub const MAX_URI: usize = 4096;

    /// The descriptor of volume `id` at this place.
    pub fn describe(self, id: VolumeId) -> VolumeDescriptor {
        let Self { uri, capacity_bytes, alignment, deadline_us } = self;
        VolumeDescriptor { id, uri, capacity_bytes, alignment, deadline: Duration::from_micros(deadline_us) }
    }
}

impl From<&VolumeDescriptor> for VolumePlace {
    fn from(descriptor: &VolumeDescriptor) -> Self {
        let VolumeDescriptor { ref uri, capacity_bytes, alignment, deadline, .. } = *descriptor;
        let deadline_us = u64::try_from(deadline.as_micros()).unwrap_or(u64::MAX);
        Self { uri: uri.clone(), capacity_bytes, alignment, deadline_us }
    }
}
