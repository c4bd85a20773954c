//! What is on the volume, as far as this leader knows: a hint that saves asking. Beside the pool,
//! whose entries have slots; here are only hashes, prefix-closed: a block goes only after what
//! continues it.

use super::history::{History, Moment};
use super::log::{Change, Log};
use super::writes::{Landing, Writes};
use kvbm_plan::{BlockIdentity, GroupId, NamespaceId, SequenceHash, VolumeId};
use parking_lot::Mutex;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Instant;

type Key = (GroupId, SequenceHash);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CopyState {
    /// Not there, but something that continues it is.
    Gone,
    /// On its way.
    Arriving,
    /// There, by what a probe of other blocks implies. No event was published.
    Assumed,
    /// There, and its event was published.
    Present,
}

impl CopyState {
    fn is_there(self) -> bool {
        matches!(self, Self::Assumed | Self::Present)
    }
}

struct Entry {
    identity: BlockIdentity,
    root: SequenceHash,
    state: CopyState,
    /// Entries that continue it and were made after it.
    children: u32,
    /// Whether it counts among the children of its parent.
    counted: bool,
    /// Place in the order of use.
    used: u64,
}

/// What a block that is to be written finds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Admission {
    /// Write it; it counts as on its way.
    New,
    /// It is there or on its way.
    Known,
    /// The block before it is not.
    Orphan,
    /// It is being removed: what is written now may be what the removal finds.
    Leaving,
}

/// See the module.
pub(crate) struct Index {
    entries: HashMap<Key, Entry>,
    /// Blocks that are there and that nothing continues, least recently used first.
    leaves: BTreeMap<u64, Key>,
    clock: u64,
    present: usize,
    capacity: usize,
    volume: VolumeId,
    /// Of all volumes.
    log: Arc<Mutex<Log>>,
    /// Blocks whose removal from the store is not confirmed, and by how many orders.
    leaving: HashMap<Key, u32>,
    /// Namespaces, or everything, whose removal is not confirmed.
    purging: HashSet<Option<NamespaceId>>,
    /// What may land yet.
    writes: Writes,
    /// What came and went while somebody looked.
    history: History,
    /// The volume was unregistered: nothing is there any more.
    retired: bool,
    /// By cache group, whether a block is useless without those before it. The others have no
    /// families here: each block goes by its own use.
    full: Arc<[bool]>,
}

impl Index {
    /// At most `capacity` blocks.
    pub(crate) fn new(volume: VolumeId, capacity: usize, log: Arc<Mutex<Log>>, full: Arc<[bool]>) -> Self {
        Self {
            entries: HashMap::new(),
            leaves: BTreeMap::new(),
            clock: 0,
            present: 0,
            capacity,
            volume,
            log,
            leaving: HashMap::new(),
            purging: HashSet::new(),
            writes: Writes::default(),
            history: History::default(),
            retired: false,
            full,
        }
    }

    /// Whether a block of the group is useless without those before it.
    pub(super) fn is_full(&self, group: GroupId) -> bool {
        self.full.get(usize::from(group.0)).copied().unwrap_or(true)
    }

    /// Blocks that are there.
    pub(crate) fn len(&self) -> usize {
        self.present
    }

    pub(crate) fn contains(&self, group: GroupId, hash: SequenceHash) -> bool {
        self.entries.get(&(group, hash)).is_some_and(|entry| entry.state.is_there())
    }

    /// Whether the block is there or on its way.
    pub(crate) fn awaits(&self, group: GroupId, hash: SequenceHash) -> bool {
        self.entries.get(&(group, hash)).is_some_and(|entry| entry.state != CopyState::Gone)
    }

    /// Whether the block before this one is there or on its way, or this place of the chain in
    /// another group.
    pub(super) fn has_beside(&self, identity: &BlockIdentity) -> bool {
        let before = identity.parent.is_some_and(|parent| self.awaits(identity.group, parent));
        let groups = (0..self.full.len() as u16).map(GroupId);
        before || groups.into_iter().any(|group| self.awaits(group, identity.hash))
    }

    /// How many of `hashes`, from the first on, are there.
    pub(crate) fn prefix(&self, group: GroupId, hashes: &[SequenceHash]) -> usize {
        hashes.iter().take_while(|hash| self.contains(group, **hash)).count()
    }

    /// A use of these blocks, the last one first: the head of a chain is the last to go.
    pub(crate) fn touch(&mut self, group: GroupId, hashes: &[SequenceHash]) {
        for &hash in hashes.iter().rev() {
            self.clock += 1;
            let clock = self.clock;
            let Some(entry) = self.entries.get_mut(&(group, hash)) else { continue };
            if entry.state.is_there() && entry.children == 0 {
                self.leaves.remove(&entry.used);
                self.leaves.insert(clock, (group, hash));
            }
            entry.used = clock;
        }
    }

    /// When a look at the volume that begins now begins.
    pub(crate) fn now(&self) -> Moment {
        self.history.now()
    }

    /// The volume is unregistered: whatever was there leaves, and nothing comes any more. How many
    /// were there.
    pub(crate) fn retire(&mut self) -> u64 {
        self.retired = true;
        self.remove_all(|_| true)
    }

    pub(crate) fn is_retired(&self) -> bool {
        self.retired
    }

    /// These blocks are about to be removed from the store: until
    /// [`end_removal`](Self::end_removal) they are neither written nor learned of.
    pub(crate) fn begin_removal(&mut self, blocks: &[BlockIdentity]) {
        for block in blocks {
            *self.leaving.entry((block.group, block.hash)).or_default() += 1;
        }
    }

    /// The removal is over, whatever came of it.
    pub(crate) fn end_removal(&mut self, blocks: &[Key]) {
        for key in blocks {
            self.history.went(key.1);
            if let Some(orders) = self.leaving.get_mut(key) {
                *orders -= 1;
                if *orders == 0 {
                    self.leaving.remove(key);
                }
            }
        }
    }

    /// Whether the removal of the block is not confirmed.
    pub(crate) fn is_leaving(&self, group: GroupId, hash: SequenceHash) -> bool {
        self.leaving.contains_key(&(group, hash))
    }

    /// A namespace, or everything, is about to be removed from the store: its blocks are gone, and
    /// until [`purged`](Self::purged) they are neither written nor learned of. How many were there.
    pub(crate) fn purge(&mut self, namespace: Option<NamespaceId>) -> u64 {
        self.purging.insert(namespace);
        self.remove_all(|found| namespace.is_none_or(|wanted| found == wanted))
    }

    /// What of a namespace, or of everything, may land yet. While it is being [purged](Self::purge)
    /// nothing is added to that.
    pub(super) fn landing(&self, namespace: Option<NamespaceId>, now: Instant) -> Landing {
        self.writes.landing(namespace, now)
    }

    /// That removal is confirmed, and nothing lands any more.
    pub(crate) fn purged(&mut self, namespace: Option<NamespaceId>) {
        self.purging.remove(&namespace);
        self.history.purged();
    }

    /// Whether a removal that is not confirmed may find what is written under this name now.
    fn is_on_its_way_out(&self, identity: &BlockIdentity) -> bool {
        self.is_leaving(identity.group, identity.hash)
            || self.purging.contains(&None)
            || self.purging.contains(&Some(identity.namespace))
    }

    /// Whether what a look that began at `since` found may have been removed.
    fn may_have_gone(&self, identity: &BlockIdentity, since: Moment) -> bool {
        self.is_on_its_way_out(identity) || self.history.has_gone(identity.hash, since)
    }

    /// How many of these blocks, from the first on, are there if a look that began at `since` found
    /// them: no removal is or was about them.
    pub(crate) fn staying(&self, blocks: &[BlockIdentity], since: Moment) -> usize {
        blocks.iter().take_while(|block| self.stays(block, since)).count()
    }

    /// Whether this block is there if a look that began at `since` found it.
    pub(super) fn stays(&self, block: &BlockIdentity, since: Moment) -> bool {
        self.contains(block.group, block.hash) || !self.may_have_gone(block, since)
    }

    /// Begins to write a block.
    pub(crate) fn begin(&mut self, identity: &BlockIdentity) -> Admission {
        if self.awaits(identity.group, identity.hash) {
            return Admission::Known;
        }
        if self.is_on_its_way_out(identity) {
            return Admission::Leaving;
        }
        let lacks = |parent| self.is_full(identity.group) && !self.awaits(identity.group, parent);
        if self.retired || identity.parent.is_some_and(lacks) {
            return Admission::Orphan;
        }
        self.enter(identity, CopyState::Arriving);
        self.writes.begin(identity.namespace);
        Admission::New
    }

    /// A block that was on its way is there. Not, where it was removed meanwhile. Once for each
    /// that [began](Self::begin).
    pub(crate) fn complete(&mut self, identity: &BlockIdentity) -> bool {
        let key = (identity.group, identity.hash);
        self.writes.end(identity.namespace, None);
        self.history.came(identity.hash);
        let arriving = self.entries.get(&key).is_some_and(|entry| entry.state == CopyState::Arriving);
        if arriving {
            self.set(key, CopyState::Present);
        }
        arriving
    }

    /// A block that was on its way did not arrive, as far as is known. Where that is not certain,
    /// it may land until then. Once for each that [began](Self::begin).
    pub(crate) fn fail(&mut self, identity: &BlockIdentity, doubtful_until: Option<Instant>) {
        let key = (identity.group, identity.hash);
        self.writes.end(identity.namespace, doubtful_until);
        if self.entries.get(&key).is_some_and(|entry| entry.state == CopyState::Arriving) {
            self.set(key, CopyState::Gone);
        }
    }

    /// A block was found to be there by a look that began at `since`. `certain` where it was looked
    /// at itself.
    pub(crate) fn learn(&mut self, identity: &BlockIdentity, certain: bool, since: Moment) {
        let key = (identity.group, identity.hash);
        if self.retired || self.may_have_gone(identity, since) {
            return;
        }
        match self.entries.get(&key).map(|entry| entry.state) {
            Some(CopyState::Present | CopyState::Arriving) => {}
            Some(CopyState::Assumed) if !certain => {}
            Some(_) => self.set(key, if certain { CopyState::Present } else { CopyState::Assumed }),
            None => self.enter(identity, if certain { CopyState::Present } else { CopyState::Assumed }),
        }
    }

    /// A block is not there, or is damaged, by a look that began at `since`. Whether it was thought
    /// to be there: once for each time that it was. One that is on its way, or came since, is
    /// another object than the one that was looked at.
    pub(crate) fn remove(&mut self, group: GroupId, hash: SequenceHash, since: Moment) -> bool {
        let there = self.contains(group, hash) && !self.history.has_come(hash, since);
        if there {
            self.set((group, hash), CopyState::Gone);
        }
        there
    }

    /// Removes what `select` picks. How many were there.
    pub(crate) fn remove_all(&mut self, select: impl Fn(NamespaceId) -> bool) -> u64 {
        let awaited = |entry: &&Entry| entry.state != CopyState::Gone && select(entry.identity.namespace);
        let mut picked: Vec<_> = self.entries.values().filter(awaited).map(|entry| entry.identity).collect();
        // Children first, so that nothing is kept for their sake.
        picked.sort_unstable_by_key(|identity| std::cmp::Reverse(identity.position));
        let mut removed = 0;
        for identity in picked {
            removed += u64::from(self.contains(identity.group, identity.hash));
            self.set((identity.group, identity.hash), CopyState::Gone);
        }
        removed
    }

    /// What can land yet of an earlier registration of the same place, which is over; at the latest
    /// then.
    pub(super) fn inherit(&mut self, earlier: &Self, until: Instant) {
        self.writes.inherit(&earlier.writes, until);
    }

    /// Forgets what cannot land any more.
    pub(super) fn tidy_writes(&mut self, now: Instant) {
        self.writes.tidy(now);
    }

    /// Lets go of the least recently used blocks that nothing continues: what would be beyond the
    /// capacity with `more`.
    pub(crate) fn evict(&mut self, more: usize) -> Vec<BlockIdentity> {
        let wanted = (self.present + more).saturating_sub(self.capacity).min(self.present);
        self.let_go(wanted)
    }

    /// The store is full although this one is not. Lets go of as many as it refused, and of a part
    /// of all so that this is not so at once again.
    pub(crate) fn yield_room(&mut self, refused: usize) -> Vec<BlockIdentity> {
        if refused == 0 { Vec::new() } else { self.let_go(refused + self.present / 16) }
    }

    fn let_go(&mut self, wanted: usize) -> Vec<BlockIdentity> {
        let mut evicted = Vec::new();
        while evicted.len() < wanted
            && let Some((_, &key)) = self.leaves.first_key_value()
        {
            evicted.extend(self.entries.get(&key).map(|entry| entry.identity));
            self.set(key, CopyState::Gone);
        }
        evicted
    }

    fn enter(&mut self, identity: &BlockIdentity, state: CopyState) {
        let (key, parent) = ((identity.group, identity.hash), identity.parent);
        let (mut root, mut counted, full) = (identity.hash, false, self.is_full(identity.group));
        if !self.entries.contains_key(&key)
            && let Some(parent) = parent
        {
            root = parent;
            if let Some(before) = self.entries.get_mut(&(identity.group, parent)) {
                (root, counted) = (before.root, full);
                before.children += u32::from(full);
                if full && before.children == 1 && before.state.is_there() {
                    self.leaves.remove(&before.used);
                }
            }
        }
        self.clock += 1;
        let fresh = Entry {
            identity: *identity,
            root,
            state: CopyState::Gone,
            children: 0,
            counted,
            used: self.clock,
        };
        self.entries.entry(key).or_insert(fresh);
        self.set(key, state);
    }

    /// Every change of state, with what follows from it for the order, the count and whoever is
    /// published.
    fn set(&mut self, key: Key, state: CopyState) {
        let Some(entry) = self.entries.get_mut(&key) else { return };
        let before = std::mem::replace(&mut entry.state, state);
        if entry.children == 0 {
            match (before.is_there(), state.is_there()) {
                (false, true) => drop(self.leaves.insert(entry.used, key)),
                (true, false) => drop(self.leaves.remove(&entry.used)),
                _ => {}
            }
        }
        self.present = self.present + usize::from(state.is_there()) - usize::from(before.is_there());
        let (stored, published) = (state == CopyState::Present, before == CopyState::Present);
        if stored != published {
            let change = Change { volume: self.volume, stored, identity: entry.identity, root: entry.root };
            self.log.lock().push(change);
        }
        self.forget_if_idle(key);
    }

    /// Entries that are gone and that nothing continues are not kept, nor is what was kept for
    /// their sake.
    fn forget_if_idle(&mut self, mut key: Key) {
        while self
            .entries
            .get(&key)
            .is_some_and(|entry| entry.state == CopyState::Gone && entry.children == 0)
        {
            let Some(entry) = self.entries.remove(&key) else { return };
            let Some(parent) = entry.identity.parent.filter(|_| entry.counted) else { return };
            key = (key.0, parent);
            let Some(before) = self.entries.get_mut(&key) else { return };
            before.children -= 1;
            if before.children == 0 && before.state.is_there() {
                self.leaves.insert(before.used, key);
            }
        }
    }

    /// The blocks whose events were published, parents first.
    pub(crate) fn published(&self) -> Vec<(BlockIdentity, SequenceHash)> {
        let published = self.entries.values().filter(|entry| entry.state == CopyState::Present);
        let mut held: Vec<_> = published.map(|entry| (entry.identity, entry.root)).collect();
        held.sort_unstable_by_key(|(identity, _)| identity.position);
        held
    }
}

#[cfg(test)]
mod tests;
