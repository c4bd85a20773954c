//! Entries: what is known of one block, on all tiers. A flat array with a free list threaded through it.

use super::table::{Key, Table};
use super::{NONE, Presence};
use crate::policy::BlockMemory;
use crate::tier::TIERS;
use kvbm_plan::{BlockIdentity, GroupId, NamespaceId, SequenceHash};

/// One block on all tiers: one cache line.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Entry {
    pub hash: SequenceHash,
    /// Entry of the block before it, or `NONE`. While vacant: the next vacant entry.
    pub parent: u32,
    pub position: u32,
    /// Slot on each tier where the presence there is not `Absent`.
    pub slots: [u32; TIERS],
    /// Entries that continue this one and are Arriving or Present, by tier.
    pub children: [u32; TIERS],
    /// What keeps the entry although it is on no tier: entries that name it as parent, and slots that still hold
    /// its bytes for their users after it was removed.
    pub links: u32,
    pub namespace: NamespaceId,
    /// Iteration of the last use on any tier; wraps.
    pub last_step: u16,
    /// What the eviction policy keeps.
    policy_time: u16,
    policy_class: u8,
    /// A group's number is below [`RegistryConfig::MAX_GROUPS`](crate::RegistryConfig::MAX_GROUPS).
    group: u8,
    /// Two bits for each tier, `KEPT` and `FRESH`.
    presence_bits: u8,
    pub priority: u8,
}

/// The request that registered the block has neither touched it nor let go of it: its first touch is no further use.
const FRESH: u8 = 0x80;
/// The block is pinned until some iteration on some tier.
const KEPT: u8 = 0x40;
const PRESENCE: u8 = 0b11_11_11;

const _: () = assert!(size_of::<Entry>() == 64 && align_of::<Entry>() == 64);

impl Entry {
    pub(crate) const VACANT: Self = Self {
        hash: SequenceHash::from_bytes([0; 16]),
        parent: NONE,
        position: 0,
        slots: [NONE; TIERS],
        children: [0; TIERS],
        links: 0,
        namespace: NamespaceId(0),
        last_step: 0,
        policy_time: 0,
        policy_class: 0,
        group: 0,
        presence_bits: 0,
        priority: 0,
    };

    /// A block that is nowhere yet.
    pub(crate) const fn of(group: GroupId, hash: SequenceHash) -> Self {
        Self { hash, group: group.0 as u8, ..Self::VACANT }
    }

    #[inline]
    pub(crate) fn group(&self) -> GroupId {
        GroupId(u16::from(self.group))
    }

    #[inline]
    pub(crate) fn memory(&self) -> BlockMemory {
        BlockMemory { time: self.policy_time, class: self.policy_class }
    }

    #[inline]
    pub(crate) fn set_memory(&mut self, memory: BlockMemory) {
        self.policy_time = memory.time;
        self.policy_class = memory.class;
    }

    /// Marks the block as just registered.
    #[inline]
    pub(crate) fn set_fresh(&mut self) {
        self.presence_bits |= FRESH;
    }

    /// Whether the block was marked; it is not any more.
    #[inline]
    pub(crate) fn take_fresh(&mut self) -> bool {
        let fresh = self.presence_bits & FRESH != 0;
        self.presence_bits &= !FRESH;
        fresh
    }

    #[inline]
    pub(crate) fn is_kept(&self) -> bool {
        self.presence_bits & KEPT != 0
    }

    #[inline]
    pub(crate) fn set_kept(&mut self, kept: bool) {
        self.presence_bits = self.presence_bits & !KEPT | if kept { KEPT } else { 0 };
    }

    #[inline]
    pub(crate) fn presence(&self, tier: usize) -> Presence {
        match self.presence_bits >> (2 * tier) & 0b11 {
            0 => Presence::Absent,
            1 => Presence::Arriving,
            _ => Presence::Present,
        }
    }

    #[inline]
    pub(crate) fn set_presence(&mut self, tier: usize, presence: Presence) {
        self.presence_bits = self.presence_bits & !(0b11 << (2 * tier)) | (presence as u8) << (2 * tier);
    }

    /// Whether the block is neither Present nor Arriving anywhere.
    #[inline]
    pub(crate) fn is_nowhere(&self) -> bool {
        self.presence_bits & PRESENCE == 0
    }

    /// Nearest tier with the block.
    #[inline]
    pub(crate) fn nearest(&self) -> Option<usize> {
        (0..TIERS).find(|&tier| self.presence(tier) == Presence::Present)
    }
}

/// Blocks looked up at the same time.
pub(crate) const LOOKUPS: usize = 32;

/// All entries and the table that finds them.
pub(crate) struct Entries {
    all: Vec<Entry>,
    vacant: u32,
    used: usize,
    table: Table,
}

impl Entries {
    /// Room for `capacity` entries; grows beyond only for ancestors that are on no tier any more.
    pub(crate) fn new(capacity: usize, seed: u64) -> Self {
        Self { all: Vec::with_capacity(capacity), vacant: NONE, used: 0, table: Table::new(capacity, seed) }
    }

    #[inline]
    pub(crate) fn find(&self, group: GroupId, hash: SequenceHash) -> Option<u32> {
        self.table.find(&self.table.key(group, hash), &self.all)
    }

    /// The entries of up to [`LOOKUPS`] blocks of a group, `NONE` for those that have none. In passes, each of which reads
    /// memory that does not depend on the pass's other reads: the machine waits for the slowest, not for the sum. `next`
    /// are blocks that are looked up after these: what that reads first is read with what these read last.
    #[inline]
    pub(crate) fn find_many(
        &self,
        group: GroupId,
        hashes: &[SequenceHash],
        next: &[SequenceHash],
        out: &mut [u32; LOOKUPS],
    ) {
        let mut keys = [Key::NONE; LOOKUPS];
        for (hash, key) in hashes.iter().zip(&mut keys) {
            *key = self.table.key(group, *hash);
        }
        let keys = &keys[..hashes.len().min(LOOKUPS)];
        self.table.fetch(keys);
        let mut guesses = [None; LOOKUPS];
        for (key, guess) in keys.iter().zip(&mut guesses) {
            *guess = self.table.guess(key);
        }
        let mut sure = [false; LOOKUPS];
        for (at, ((hash, guess), sure)) in hashes.iter().zip(&guesses).zip(&mut sure).enumerate() {
            if let Some(&next) = next.get(at) {
                self.table.prefetch(&self.table.key(group, next));
            }
            *sure = guess.is_some_and(|index| {
                let entry = &self.all[index as usize];
                entry.hash == *hash && entry.group() == group
            });
        }
        for (at, found) in out.iter_mut().take(keys.len()).enumerate() {
            *found = match guesses[at] {
                Some(index) if sure[at] => index,
                _ => self.table.find(&keys[at], &self.all).unwrap_or(NONE),
            };
        }
    }

    /// Reads the table's lines of up to [`LOOKUPS`] blocks, so that they are near when each is asked for.
    pub(crate) fn fetch(&self, blocks: impl Iterator<Item = (GroupId, SequenceHash)>) {
        let mut keys = [Key::NONE; LOOKUPS];
        let mut count = 0;
        for ((group, hash), key) in blocks.zip(&mut keys) {
            *key = self.table.key(group, hash);
            count += 1;
        }
        self.table.fetch(&keys[..count]);
    }

    /// The entry of `identity`, new if there is none. Its parent's entry comes into being with it if need be (groups
    /// whose blocks outlive their parents). `before` is the entry that was asked for last: in a chain that is the parent.
    pub(crate) fn find_or_insert(&mut self, identity: &BlockIdentity, before: Option<u32>) -> u32 {
        let key = self.table.key(identity.group, identity.hash);
        let index = match self.table.find(&key, &self.all) {
            Some(index) => index,
            None => self.insert(&key, identity.namespace, identity.position),
        };
        if let Some(parent) = identity.parent
            && self[index].parent == NONE
        {
            let is_parent =
                |&before: &u32| self[before].hash == parent && self[before].group() == identity.group;
            let parent = before.filter(is_parent).unwrap_or_else(|| {
                let above = self.table.key(identity.group, parent);
                match self.table.find(&above, &self.all) {
                    Some(parent) => parent,
                    None => self.insert(&above, identity.namespace, identity.position.saturating_sub(1)),
                }
            });
            // Positions that rise along every chain keep chains free of cycles, whatever the caller names as parent.
            if self[parent].position.checked_add(1) == Some(self[index].position) {
                self[index].parent = parent;
                self[parent].links += 1;
            } else {
                self.release_unused(parent);
            }
        }
        index
    }

    fn insert(&mut self, key: &Key, namespace: NamespaceId, position: u32) -> u32 {
        let entry = Entry { position, namespace, ..Entry::of(key.group, key.hash) };
        let index = if self.vacant == NONE {
            self.all.push(entry);
            self.all.len() as u32 - 1
        } else {
            let index = self.vacant;
            self.vacant = self.all[index as usize].parent;
            self.all[index as usize] = entry;
            index
        };
        self.used += 1;
        self.table.insert(key, index, &self.all);
        index
    }

    /// Gives up the entry, and then its ancestors, as far as nothing keeps them.
    pub(crate) fn release_unused(&mut self, mut index: u32) {
        while index != NONE {
            let entry = &self[index];
            if !entry.is_nowhere() || entry.links > 0 {
                return;
            }
            let key = self.table.key(entry.group(), entry.hash);
            let parent = entry.parent;
            self.table.remove(&key, &self.all);
            self.all[index as usize] = Entry { parent: self.vacant, slots: VACANT_MARK, ..Entry::VACANT };
            self.vacant = index;
            self.used -= 1;
            if parent != NONE {
                self[parent].links -= 1;
            }
            index = parent;
        }
    }

    /// Every entry in use, with its index.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, &Entry)> {
        let used = |(index, entry): (usize, _)| (index as u32, entry);
        self.all.iter().enumerate().map(used).filter(|(_, entry): &(u32, &Entry)| entry.slots != VACANT_MARK)
    }

    /// Indices in use are below this.
    pub(crate) fn end(&self) -> usize {
        self.all.len()
    }

    /// Entries in use.
    pub(crate) fn used(&self) -> usize {
        self.used
    }

    /// Identity of the block of entry `index`.
    pub(crate) fn identity(&self, index: u32) -> BlockIdentity {
        let entry = &self[index];
        let parent = (entry.parent != NONE).then(|| self[entry.parent].hash);
        let Entry { namespace, hash, position, .. } = *entry;
        let group = entry.group();
        BlockIdentity { namespace, group, hash, parent, position }
    }
}

/// Slots of a vacant entry. No entry in use has it: slot ids end far below.
const VACANT_MARK: [u32; TIERS] = [NONE - 1; TIERS];

impl std::ops::Index<u32> for Entries {
    type Output = Entry;
    #[inline]
    fn index(&self, index: u32) -> &Entry {
        &self.all[index as usize]
    }
}

impl std::ops::IndexMut<u32> for Entries {
    #[inline]
    fn index_mut(&mut self, index: u32) -> &mut Entry {
        &mut self.all[index as usize]
    }
}
