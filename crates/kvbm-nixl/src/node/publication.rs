//! What a node offers: sets of blocks, and the blocks in them that peers find.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use kvbm_plan::SequenceHash;

use super::export::{Offered, PublishedBlock};
use super::grants::BlockSink;
use super::{RemoteError, RemoteNodeState};
use crate::ModelPart;

/// Blocks that a node offers while this lives. See the module's documentation for the order in
/// which they end.
#[must_use = "dropping it withdraws the blocks"]
pub struct Export {
    pub(super) shared: Arc<RemoteNodeState>,
    pub(super) offered: Arc<Offered>,
}

/// One or more published blocks: peers find them while this lives.
#[must_use = "dropping it unpublishes the blocks"]
pub struct Publication {
    offered: Arc<Offered>,
    blocks: Vec<(SequenceHash, Arc<PublishedBlock>)>,
}

impl Export {
    /// Publishes blocks: (sequence hash, slot, the same on every rank). `guard` keeps the bytes in
    /// place; it is dropped when the publication and all leases have ended. A hash that is
    /// published already is left as it is.
    ///
    /// # Errors
    /// [`RemoteError::Storage`] for a slot outside the layout, or memory that cannot be read.
    ///
    /// # Safety
    /// Until `guard` is dropped, nobody may write these slots on any rank.
    pub unsafe fn publish(
        &self,
        blocks: &[(SequenceHash, u32)],
        guard: &Arc<dyn Any + Send + Sync>,
    ) -> Result<Publication, RemoteError> {
        let mut publication = Publication { offered: Arc::clone(&self.offered), blocks: Vec::new() };
        for (hash, block) in blocks {
            let new = Arc::new(PublishedBlock::new(&self.offered, *hash, *block, Arc::clone(guard)));
            for rank in &self.offered.ranks {
                let part = ModelPart::of(&rank.slice);
                new.digest(&part).map_err(|error| RemoteError::Storage(error.to_string()))?;
            }
            let mut published = self.offered.published.lock();
            if !published.contains_key(hash) {
                published.insert(*hash, Arc::clone(&new));
                publication.blocks.push((*hash, new));
            }
        }
        Ok(publication)
    }

    /// Has peers write blocks into the slots that `sink` sets aside. Once; false if it is not the
    /// first one.
    ///
    /// # Safety
    /// From the time when the sink gives a [`Landing`](super::Landing) to its drop, nobody else may
    /// read or write its slots on any rank, but for those of blocks that have arrived: they are
    /// read alone.
    pub unsafe fn accept_writes(&self, sink: Arc<dyn BlockSink>) -> bool {
        self.offered.sink.set(sink).is_ok()
    }

    /// Blocks that are published now.
    pub fn len(&self) -> usize {
        self.offered.published.lock().len()
    }

    /// Whether nothing is published.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        let offered = self.shared.offered.write().remove(&self.offered.id);
        let blocks = std::mem::take(&mut *self.offered.published.lock());
        self.shared.sequence.fetch_add(1, Ordering::AcqRel);
        // Blocks are let go outside the locks.
        drop((offered, blocks));
    }
}

impl Drop for Publication {
    fn drop(&mut self) {
        let mut published = self.offered.published.lock();
        let mut gone = Vec::with_capacity(self.blocks.len());
        for (hash, block) in &self.blocks {
            if published.get(hash).is_some_and(|known| Arc::ptr_eq(known, block)) {
                gone.extend(published.remove(hash));
            }
        }
        // Blocks are let go outside the lock.
        drop(published);
        drop(gone);
    }
}

impl fmt::Debug for Export {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Export({}, {} blocks)", self.offered.id, self.len())
    }
}

impl fmt::Debug for Publication {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Publication({} blocks)", self.blocks.len())
    }
}
