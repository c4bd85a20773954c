//! A blob store that all ranks share. Each rank has objects of its own.

use super::Bytes;
use kvbm_plan::{BlockIdentity, FailureKind, GroupId, NamespaceId, Rank, SequenceHash, StoredBlock};
use std::collections::BTreeMap;
use std::ops::Bound;
use std::time::Instant;

/// Names an object: namespace, group, hash, rank.
type Key = (NamespaceId, GroupId, SequenceHash, Rank);

/// What lies in an object.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Object {
    /// `None`: no block at all.
    bytes: Option<Bytes>,
    /// The step in which the leader asked for it.
    pub(crate) asked: u64,
}

/// See the module.
#[derive(Default)]
pub(crate) struct Store {
    objects: BTreeMap<Key, Object>,
    /// Until then it refuses writes for want of room.
    pub(crate) full_until: Option<Instant>,
}

fn key(identity: &BlockIdentity, rank: Rank) -> Key {
    (identity.namespace, identity.group, identity.hash, rank)
}

impl Store {
    /// Blocks of a list at most.
    const PAGE: usize = 16;

    pub(crate) fn put(&mut self, identity: &BlockIdentity, rank: Rank, bytes: Option<Bytes>, asked: u64) {
        self.objects.insert(key(identity, rank), Object { bytes, asked });
    }

    /// What a worker reads, after it has compared the bytes with the block.
    pub(crate) fn get(&self, identity: &BlockIdentity, rank: Rank) -> Result<Bytes, FailureKind> {
        let object = self.objects.get(&key(identity, rank)).ok_or(FailureKind::Missing)?;
        object.bytes.filter(|bytes| bytes == identity.hash.as_bytes()).ok_or(FailureKind::Corrupt)
    }

    pub(crate) fn has(&self, identity: &BlockIdentity, rank: Rank) -> bool {
        self.objects.contains_key(&key(identity, rank))
    }

    pub(crate) fn remove(&mut self, blocks: &[BlockIdentity], rank: Rank) -> u64 {
        let removed = blocks.iter().filter_map(|identity| self.objects.remove(&key(identity, rank)));
        removed.count() as u64
    }

    /// Removes the rank's objects of a namespace, or all of them.
    pub(crate) fn purge(&mut self, namespace: Option<NamespaceId>, rank: Rank) -> u64 {
        let before = self.objects.len();
        let goes = |key: &Key| key.3 == rank && namespace.is_none_or(|namespace| key.0 == namespace);
        self.objects.retain(|key, _| !goes(key));
        (before - self.objects.len()) as u64
    }

    /// The rank's blocks behind `after`, in order.
    pub(crate) fn list(&self, after: Option<StoredBlock>, rank: Rank) -> Vec<StoredBlock> {
        let from = after.map_or(Bound::Unbounded, |block| {
            Bound::Excluded((block.namespace, block.group, block.hash, Rank(u16::MAX)))
        });
        let own = self.objects.range((from, Bound::Unbounded)).filter(|(key, _)| key.3 == rank);
        let block =
            |(&(namespace, group, hash, _), _): (&Key, &Object)| StoredBlock { namespace, group, hash };
        own.map(block).take(Self::PAGE).collect()
    }

    /// Bits of an object flip.
    pub(crate) fn flip(&mut self, at: usize) {
        let count = self.objects.len();
        if let Some(object) = self.objects.values_mut().nth(at.checked_rem(count).unwrap_or(0)) {
            object.bytes = None;
        }
    }

    /// What is there of a namespace.
    pub(crate) fn of(&self, namespace: NamespaceId) -> impl Iterator<Item = (SequenceHash, Rank, &Object)> {
        let own = self.objects.iter().filter(move |(key, _)| key.0 == namespace);
        own.map(|(key, object)| (key.2, key.3, object))
    }
}
