//! The rights to read and to write a slot of G2.

use super::{Content, HostTier, each_fragment};
use crate::config::VerifyHost;
use kvbm_disk::IoFragments;
use kvbm_layout::FragmentList;
use kvbm_plan::{BlockIdentity, Failure, FailureKind};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The right to read (part of) a slot. Must outlive the copy.
#[derive(Debug)]
pub(crate) struct ReadClaim {
    pub(super) tier: Arc<HostTier>,
    pub(super) slot: u32,
    pub(super) identity: BlockIdentity,
    pub(super) checksum: Option<u64>,
}

impl ReadClaim {
    /// Checksum that the slot is known to have.
    pub(crate) fn checksum(&self) -> Option<u64> {
        self.checksum
    }

    /// Whether the policy wants the bytes compared with their checksum this time.
    pub(crate) fn is_due(&self) -> bool {
        match self.tier.verify {
            VerifyHost::Never => false,
            VerifyHost::Always => true,
            VerifyHost::Sampled(every) => {
                self.tier.reads.fetch_add(1, Ordering::Relaxed).is_multiple_of(u64::from(every))
            }
        }
    }

    /// Compares bytes and checksum if the policy asks for it. Returns whether it did.
    pub(crate) fn verify(&self) -> Result<bool, Failure> {
        let Some(expected) = self.checksum else { return Ok(false) };
        if self.is_due() { self.compare(expected).map(|()| true) } else { Ok(false) }
    }

    /// Whether another process knows what the slot should hold.
    pub(crate) fn is_elsewhere(&self) -> bool {
        self.tier.is_elsewhere(self.slot)
    }

    /// Computes the checksum of the whole block, for the process that knows what it should be.
    pub(crate) fn sum(&mut self) -> Result<(), Failure> {
        // SAFETY: this claim keeps writers away from the slot; where it is another process's, that
        // one does.
        self.checksum = Some(unsafe { self.tier.checksum(self.slot, &self.identity) }?);
        Ok(())
    }

    /// Compares the checksum that another process found as it copied the block. Returns whether the
    /// right one is known. A process that found another one may be wrong: so the bytes are looked
    /// at here too.
    pub(crate) fn check(&self, found: u64) -> Result<bool, Failure> {
        let Some(expected) = self.checksum else { return Ok(false) };
        if found != expected {
            self.compare(expected)?;
            let why = format!(
                "slot {} of {}: the engine's process read checksum {found:016x}, but {expected:016x} is there",
                self.slot, self.tier.place
            );
            return Err(Failure::new(FailureKind::Device, why));
        }
        Ok(true)
    }

    /// Always compares bytes and checksum: for blocks that leave this machine.
    pub(crate) fn verify_always(&self) -> Result<(), Failure> {
        self.checksum.map_or(Ok(()), |expected| self.compare(expected))
    }

    fn compare(&self, expected: u64) -> Result<(), Failure> {
        // SAFETY: this claim is on a filled slot (only those have a checksum), so nobody writes any
        // of it.
        let found = unsafe { self.tier.checksum(self.slot, &self.identity) }?;
        if found == expected {
            return Ok(());
        }
        self.tier.forget(self.slot);
        let bytes = self.tier.group(&self.identity).bound.bytes_per_block();
        let why = format!(
            "slot {} of {}, bytes 0..{bytes}: checksum {found:016x}, but {expected:016x} was written; it is not read again",
            self.slot, self.tier.place
        );
        Err(Failure::new(self.tier.damage, why))
    }

    /// Copies the block out, in the byte order of `order`.
    pub(crate) fn gather(&self, order: &FragmentList) -> Result<Vec<u8>, Failure> {
        let mut bytes = vec![0; order.slot_bytes() as usize];
        let copied = each_fragment(
            &self.tier.group(&self.identity).regions,
            order,
            self.slot,
            |region, offset, place| {
                // SAFETY: this claim keeps writers away from the slot.
                unsafe { region.read_at(offset, &mut bytes[place]) }
            },
        );
        let failed = |why| {
            let why = format!("slot {} of {}: {why}", self.slot, self.tier.place);
            Failure::new(FailureKind::Unsupported, why)
        };
        copied.map(|()| bytes).map_err(failed)
    }

    /// Marks the slot as damaged: it is never read again.
    pub(crate) fn condemn(&self) {
        self.tier.forget(self.slot);
    }

    pub(crate) fn io_memory(&self) -> Result<IoFragments, Failure> {
        self.tier.io_memory(self.slot, &self.identity)
    }
}

impl AsRef<Self> for ReadClaim {
    fn as_ref(&self) -> &Self {
        self
    }
}

impl Drop for ReadClaim {
    fn drop(&mut self) {
        // There is none where the claim is another process's.
        if let Some(slot) = self.tier.slots.lock().get_mut(self.slot as usize) {
            slot.readers -= 1;
        }
    }
}

/// The right to write (part of) a slot. Dropped unfinished, it leaves the slot without those
/// layers.
#[derive(Debug)]
pub(crate) struct WriteClaim {
    pub(super) tier: Arc<HostTier>,
    pub(super) slot: u32,
    pub(super) identity: BlockIdentity,
    pub(super) span: Range<u32>,
    pub(super) open: bool,
}

impl WriteClaim {
    pub(crate) fn io_memory(&self) -> Result<IoFragments, Failure> {
        self.tier.io_memory(self.slot, &self.identity)
    }

    /// The bytes arrived, with a checksum that was verified on the way.
    pub(crate) fn finish_verified(mut self, checksum: u64) {
        self.close(true, Some(checksum));
    }

    /// The bytes arrived. With `compute`, a whole block gets its checksum now, from that of its
    /// `content` if that was computed on the way; it is returned. A block that came in parts gets
    /// it with the last part.
    pub(crate) fn finish(mut self, compute: bool, content: Option<u64>) -> Result<Option<u64>, Failure> {
        if self.span == self.tier.group(&self.identity).all_layers() {
            let checksum = match content {
                _ if !compute => None,
                Some(content) => Some(self.tier.sums.bind(&self.identity, content)),
                // SAFETY: this claim is on all layers and its copy is complete, so nobody writes
                // the slot.
                None => Some(unsafe { self.tier.checksum(self.slot, &self.identity) }?),
            };
            self.close(true, checksum);
            return Ok(checksum);
        }
        let complete = self.close(true, None);
        if !(complete && compute) {
            return Ok(None);
        }
        let claim = self.tier.read(self.slot, &self.identity, None)?;
        // SAFETY: `complete` says that the slot is filled, and `claim` keeps writers away.
        let checksum = unsafe { self.tier.checksum(self.slot, &self.identity) }?;
        let mut slots = self.tier.slots.lock();
        if let Content::Filled { checksum: known, .. } = &mut slots[self.slot as usize].content {
            *known = Some(checksum);
        }
        drop(slots);
        drop(claim);
        Ok(Some(checksum))
    }

    /// Ends the claim. Whether the slot holds the whole block now.
    fn close(&mut self, arrived: bool, checksum: Option<u64>) -> bool {
        self.open = false;
        let whole = self.span == self.tier.group(&self.identity).all_layers();
        let mut slots = self.tier.slots.lock();
        let Some(slot) = slots.get_mut(self.slot as usize) else { return arrived && whole };
        if whole {
            let filled = Content::Filled { identity: self.identity, checksum };
            slot.content = if arrived { filled } else { Content::Empty };
            return arrived;
        }
        if let Some(index) = slot.writing.iter().position(|range| *range == self.span) {
            slot.writing.swap_remove(index);
        }
        if !arrived {
            return false;
        }
        let Content::Partial { identity, arrived } = &mut slot.content else { return false };
        if *identity != self.identity {
            return false;
        }
        for layer in self.span.clone() {
            arrived[layer as usize] = true;
        }
        let complete = slot.writing.is_empty() && arrived.iter().all(|layer| *layer);
        if complete {
            slot.content = Content::Filled { identity: self.identity, checksum: None };
        }
        complete
    }
}

impl Drop for WriteClaim {
    fn drop(&mut self) {
        if self.open {
            self.close(false, None);
        }
    }
}
