//! What the store must have, by what workers were asked for: the naive model that real volumes are
//! compared with.

use super::Bytes;
use kvbm_plan::{BlockIdentity, FailureKind, GroupId, NamespaceId, Rank, SequenceHash, StoredBlock};
use std::collections::{BTreeMap, BTreeSet};

/// Names an object: namespace, group, hash, rank.
pub(super) type Key = (NamespaceId, GroupId, SequenceHash, Rank);

/// An object.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry {
    pub(super) identity: BlockIdentity,
    /// What was put.
    pub(super) bytes: Bytes,
    /// The step in which the leader asked for it.
    pub(crate) asked: u64,
    /// Bytes that it takes.
    pub(super) stored: u64,
    /// Somebody changed it in the store.
    pub(super) is_damaged: bool,
    /// Its data key may be gone: it may be unreadable, and nothing is wrong then.
    pub(super) may_lack_key: bool,
    /// A write that was reported as failed put it in the place of a damaged one. Its worker may
    /// still take it for that one, and remove it.
    pub(super) replaces_damaged: bool,
}

impl Entry {
    /// Whether it may be removed as damaged.
    pub(super) fn may_count_as_damaged(&self) -> bool {
        self.is_damaged || self.may_lack_key || self.replaces_damaged
    }
}

/// See the module.
#[derive(Default)]
pub(super) struct Expected {
    objects: BTreeMap<Key, Entry>,
    /// Bytes of all.
    used: u64,
    /// Objects that something was done to since they were compared.
    touched: BTreeSet<Key>,
    /// How often data keys of a namespace were destroyed or damaged.
    key_losses: BTreeMap<NamespaceId, u64>,
    /// Ranks that may still write with a key that is gone.
    stale: BTreeSet<(Rank, NamespaceId)>,
}

pub(super) fn key(identity: &BlockIdentity, rank: Rank) -> Key {
    (identity.namespace, identity.group, identity.hash, rank)
}

impl Expected {
    pub(super) fn get(&self, key: &Key) -> Option<&Entry> {
        self.objects.get(key)
    }

    pub(super) fn get_mut(&mut self, key: &Key) -> Option<&mut Entry> {
        self.touched.insert(*key);
        self.objects.get_mut(key)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&Key, &Entry)> {
        self.objects.iter()
    }

    pub(super) fn len(&self) -> usize {
        self.objects.len()
    }

    pub(super) fn used(&self) -> u64 {
        self.used
    }

    pub(super) fn put(&mut self, key: Key, entry: Entry) {
        self.used += entry.stored;
        if let Some(before) = self.objects.insert(key, entry) {
            self.used -= before.stored;
        }
        self.touched.insert(key);
    }

    pub(super) fn remove(&mut self, key: &Key) -> Option<Entry> {
        let removed = self.objects.remove(key)?;
        self.used -= removed.stored;
        self.touched.insert(*key);
        Some(removed)
    }

    pub(super) fn is_touched(&self) -> bool {
        !self.touched.is_empty()
    }

    /// Objects that something was done to since the last call, of those ranks that `is_open` says.
    pub(super) fn take_touched(&mut self, is_open: impl Fn(Rank) -> bool) -> BTreeSet<Key> {
        let touched = std::mem::take(&mut self.touched);
        let (touched, later): (BTreeSet<_>, BTreeSet<_>) =
            touched.into_iter().partition(|key| is_open(key.3));
        self.touched = later;
        touched
    }

    /// Everything is compared the next time.
    pub(super) fn touch_all(&mut self) {
        self.touched.extend(self.objects.keys().copied());
    }

    /// The rank's blocks behind `after`, in order.
    pub(super) fn behind(&self, after: Option<StoredBlock>, rank: Rank) -> impl Iterator<Item = StoredBlock> {
        let own = self.objects.keys().filter(move |key| key.3 == rank);
        let blocks = own.map(|&(namespace, group, hash, _)| StoredBlock { namespace, group, hash });
        let place = |block: &StoredBlock| (block.namespace, block.group, block.hash);
        blocks.filter(move |block| after.is_none_or(|after| place(block) > place(&after)))
    }

    /// Data keys of a namespace are destroyed by `by`, or damaged by nobody that knows it.
    pub(super) fn lose_keys(&mut self, namespace: NamespaceId, by: Option<Rank>, ranks: usize) {
        *self.key_losses.entry(namespace).or_default() += 1;
        for entry in self.objects.values_mut().filter(|entry| entry.identity.namespace == namespace) {
            entry.may_lack_key = true;
        }
        for rank in (0..ranks).map(|rank| Rank(rank as u16)) {
            if Some(rank) == by {
                self.stale.remove(&(rank, namespace));
            } else {
                self.stale.insert((rank, namespace));
            }
        }
    }

    pub(super) fn key_losses(&self, namespace: NamespaceId) -> u64 {
        self.key_losses.get(&namespace).copied().unwrap_or(0)
    }

    /// Whether a rank may write with a key that is gone.
    pub(super) fn is_stale(&self, rank: Rank, namespace: NamespaceId) -> bool {
        self.stale.contains(&(rank, namespace))
    }

    /// A rank has opened the volume anew, and knows the keys that are there.
    pub(super) fn reopen(&mut self, rank: Rank) {
        self.stale.retain(|(stale, _)| *stale != rank);
    }

    /// What is wrong with what a worker read; the payload must be `content` of what was put.
    pub(super) fn judge(
        &self,
        key: &Key,
        read: Result<&[u8], FailureKind>,
        content: impl FnOnce(Bytes) -> Vec<u8>,
    ) -> Result<(), String> {
        let entry = self.objects.get(key);
        let is_right = match (entry, read) {
            (None, Err(FailureKind::Missing)) => return Ok(()),
            (Some(entry), Err(FailureKind::Corrupt)) if entry.is_damaged || entry.may_lack_key => {
                return Ok(());
            }
            (Some(entry), Ok(payload)) => !entry.is_damaged && content(entry.bytes) == payload,
            _ => false,
        };
        if is_right {
            return Ok(());
        }
        let found = match read {
            Ok(_) => "is read".to_owned(),
            Err(kind) => format!("fails with {kind:?}"),
        };
        let was = match entry {
            None => "is not there".to_owned(),
            Some(entry) if entry.is_damaged => format!("was put in step {} and damaged", entry.asked),
            Some(entry) => format!("was put in step {} with other bytes, or is sound", entry.asked),
        };
        Err(format!("{} of {} {was}, and {found}", key.2, key.3))
    }
}
