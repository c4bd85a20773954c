//! A free list of vectors: batches that end leave theirs to the next ones, so steady state needs no
//! heap.

use crate::sync::Mutex;
use kvbm_plan::{BlockId, BlockIdentity};

/// Vectors kept of each kind, and the largest that is kept, in elements.
const KEPT: usize = 16;
const LARGEST: usize = 16_384;

/// Two leaf locks: no other lock is taken under them, and a thread that finds one taken does
/// without.
pub(crate) struct VectorPool {
    ids: Mutex<Vec<Vec<BlockId>>>,
    identities: Mutex<Vec<Vec<BlockIdentity>>>,
}

fn take<T>(kept: &Mutex<Vec<Vec<T>>>, room: usize) -> Vec<T> {
    let free = kept.try_lock().and_then(|mut kept| kept.pop());
    let mut taken = free.unwrap_or_default();
    taken.reserve(room);
    taken
}

fn keep<T>(kept: &Mutex<Vec<Vec<T>>>, mut used: Vec<T>) {
    if used.capacity() == 0 || used.capacity() > LARGEST {
        return;
    }
    used.clear();
    if let Some(mut kept) = kept.try_lock()
        && kept.len() < KEPT
    {
        kept.push(used);
    }
}

impl VectorPool {
    pub(crate) fn new() -> Self {
        Self { ids: Mutex::new(Vec::new()), identities: Mutex::new(Vec::new()) }
    }

    /// An empty vector with room for that many ids.
    pub(crate) fn take_ids(&self, room: usize) -> Vec<BlockId> {
        take(&self.ids, room)
    }

    /// Gives a vector back.
    pub(crate) fn keep_ids(&self, used: Vec<BlockId>) {
        keep(&self.ids, used);
    }

    /// An empty vector with room for that many identities.
    pub(crate) fn take_identities(&self, room: usize) -> Vec<BlockIdentity> {
        take(&self.identities, room)
    }

    /// Gives a vector back.
    pub(crate) fn keep_identities(&self, used: Vec<BlockIdentity>) {
        keep(&self.identities, used);
    }
}
