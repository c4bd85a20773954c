//! Vectors of batches that are over, kept for the next ones: in steady state nobody asks the heap for memory.

use crate::core::homes::Homes;
use crate::sync::Mutex;
use kvbm_plan::{BlockId, BlockIdentity};

/// Vectors kept of each kind, and the largest that is kept, in elements.
const KEPT: usize = 16;
const LARGEST: usize = 16_384;

/// Threads that have spares of their own; further ones share. What another core wrote last is far away.
const HEAPS: usize = 8;

#[derive(Default)]
pub(crate) struct Spares {
    heaps: [Heap; HEAPS],
}

/// Leaf locks: nothing else is locked while one is held, and whoever finds it taken does without.
#[derive(Default)]
#[repr(align(128))]
struct Heap {
    ids: Mutex<Vec<Vec<BlockId>>>,
    identities: Mutex<Vec<Vec<BlockIdentity>>>,
}

fn take<T>(kept: &Mutex<Vec<Vec<T>>>, room: usize) -> Vec<T> {
    let spare = kept.try_lock().and_then(|mut kept| kept.pop());
    let mut taken = spare.unwrap_or_default();
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

impl Spares {
    fn heap(&self) -> &Heap {
        &self.heaps[Homes::thread(HEAPS)]
    }

    /// An empty vector with room for that many ids.
    pub(crate) fn take_ids(&self, room: usize) -> Vec<BlockId> {
        take(&self.heap().ids, room)
    }

    /// Gives a vector back.
    pub(crate) fn keep_ids(&self, used: Vec<BlockId>) {
        keep(&self.heap().ids, used);
    }

    /// An empty vector with room for that many identities.
    pub(crate) fn take_identities(&self, room: usize) -> Vec<BlockIdentity> {
        take(&self.heap().identities, room)
    }

    /// Gives a vector back.
    pub(crate) fn keep_identities(&self, used: Vec<BlockIdentity>) {
        keep(&self.heap().identities, used);
    }
}
