//! A peer's memory.

use kvbm_layout::RegionMemory;

use crate::agent::{Descriptor, SegmentKind};

/// Memory of a peer that its agent has registered: reached by descriptors, never by pointers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NixlStorage {
    agent: String,
    memory: RegionMemory,
}

impl NixlStorage {
    /// The memory of one region of a block set of `agent`.
    pub fn of(agent: &str, memory: &RegionMemory) -> Self {
        Self { agent: agent.to_owned(), memory: *memory }
    }

    /// The agent that has registered it.
    pub fn agent(&self) -> &str {
        &self.agent
    }

    /// Kind of memory.
    pub fn kind(&self) -> SegmentKind {
        self.memory.kind.into()
    }

    /// Bytes from the region's first byte to the end of the memory.
    pub fn bytes(&self) -> u64 {
        self.memory.bytes.saturating_sub(self.memory.base_offset)
    }

    /// `bytes` bytes at `offset` of the region; `None` if they do not lie inside.
    pub fn descriptor(&self, offset: u64, bytes: u64) -> Option<Descriptor> {
        let end = offset.checked_add(bytes)?;
        let address = self.memory.address.checked_add(self.memory.base_offset)?.checked_add(offset)?;
        let device_id = u64::from(self.memory.device_id);
        (end <= self.bytes() && bytes > 0).then_some(Descriptor { address, bytes, device_id })
    }
}
