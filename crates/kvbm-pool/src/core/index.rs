//! Finding entries, making and releasing them.

use super::mail::Letter;
use super::shards::{MOST_UNUSED, VACANT_AT_ONCE};
use super::table::{Few, Key, Mixed, Writing};
use super::{Arc, Core, NONE, Presence};
use crate::near;
use crate::tier::TIERS;
use kvbm_plan::{BlockIdentity, GroupId, NamespaceId, SequenceHash};

/// Blocks looked up at the same time.
pub(crate) const LOOKUPS: usize = 32;

impl Core<'_> {
    /// The entry of a block. Of a shard that is not held it is a hint, and so is that there is none: the block may come
    /// at this moment.
    #[inline]
    pub(crate) fn find(&self, group: GroupId, hash: SequenceHash) -> Option<u32> {
        self.store.about_to_look();
        let table = self.table();
        table.find(&table.key(group, hash), &self.store.entries)
    }

    /// Reads the table's lines of up to [`LOOKUPS`] blocks, so that they are near when each is asked for.
    pub(crate) fn fetch(&self, blocks: impl Iterator<Item = (GroupId, SequenceHash)>) {
        let table = self.table();
        for (group, hash) in blocks.take(LOOKUPS) {
            table.prefetch(table.mix(group, hash));
        }
    }

    /// The entry of `identity`, new in `home` if there is none. Its parent's entry comes into being with it if need be (groups
    /// whose blocks outlive their parents). `before` is the entry that was asked for last: in a chain that is the parent.
    /// All shards are held.
    #[inline]
    pub(crate) fn find_or_insert(
        &mut self,
        identity: &BlockIdentity,
        before: Option<u32>,
        home: usize,
    ) -> u32 {
        let store = self.store;
        let BlockIdentity { group, hash, namespace, position, .. } = *identity;
        let key = self.table().key(group, hash);
        let found = self.table().find(&key, &store.entries);
        let known = found.is_some_and(|index| store.entries[index].parent.get() != NONE);
        let Some(parent) = identity.parent.filter(|_| !known) else {
            return found.unwrap_or_else(|| self.insert(home, &key, namespace, position));
        };
        let is_parent = |&before: &u32| store.entries[before].is_block(group, parent);
        let above = before.filter(is_parent).or_else(|| self.find(group, parent));
        // A chain stays in its shard.
        let shard = above.map_or(home, |above| store.shard_of(above));
        let index = found.unwrap_or_else(|| self.insert(shard, &key, namespace, position));
        let entry = &store.entries[index];
        let above = above.unwrap_or_else(|| {
            let key = self.table().key(group, parent);
            self.insert(entry.shard(), &key, namespace, position.saturating_sub(1))
        });
        if !self.link(index, above) {
            self.unused(above);
        }
        index
    }

    /// Makes `above` the parent of an entry that has none. One that is somewhere already, for it came in a batch that contradicted itself,
    /// is counted there from now on: then both are held. Positions that rise along every chain keep chains free of cycles, whatever
    /// the caller names as parent: where they do not, nothing happens.
    #[inline]
    pub(crate) fn link(&mut self, index: u32, above: u32) -> bool {
        let store = self.store;
        let (entry, parent) = (&store.entries[index], &store.entries[above]);
        let fits = parent.comes_before(entry.position.get());
        if fits {
            entry.parent.set(above);
            parent.add_link();
            if !entry.is_nowhere() {
                self.count_late_child(index, above);
            }
        }
        fits
    }

    #[cold]
    fn count_late_child(&mut self, index: u32, above: u32) {
        let store = self.store;
        for tier in (0..TIERS).filter(|&tier| store.entries[index].presence(tier) != Presence::Absent) {
            store.entries[above].add_child(tier);
            self.update_evictable(above, tier);
        }
    }

    /// A new entry of a block that has none. All shards are held; where no entry is vacant there are more.
    #[inline]
    fn insert(&mut self, shard: usize, key: &Key, namespace: NamespaceId, position: u32) -> u32 {
        let index = match self.take_vacant(shard) {
            Some(index) => index,
            None => self.one_of_more(shard),
        };
        let store = self.store;
        let writing = Writing::begin(store.table_lock());
        store.entries[index].begin(shard, key.group, key.hash, namespace, position);
        self.table().insert(&writing, key.mixed, index);
        drop(writing);
        self.numbered(shard).used += 1;
        index
    }

    /// Where up to [`LOOKUPS`] blocks are in the table: what looking them up reads first is asked for, for later.
    #[inline]
    pub(crate) fn ask_table(&self, blocks: &[BlockIdentity]) -> [Mixed; LOOKUPS] {
        let table = self.table();
        let mut keys = [Mixed::default(); LOOKUPS];
        for (block, key) in blocks.iter().zip(&mut keys) {
            *key = table.mix(block.group, block.hash);
            table.prefetch(*key);
        }
        keys
    }

    /// The entries of blocks that were asked for, and are most likely new, as far as they have some.
    #[inline]
    pub(crate) fn find_new(&self, blocks: &[BlockIdentity], keys: &[Mixed; LOOKUPS]) -> [u32; LOOKUPS] {
        self.store.about_to_look();
        let mut found = [NONE; LOOKUPS];
        for ((block, &mixed), found) in blocks.iter().zip(keys).zip(&mut found) {
            let key = Key { group: block.group, hash: block.hash, mixed };
            *found = self.table().find(&key, &self.store.entries).unwrap_or(NONE);
        }
        found
    }

    /// New entries in a shard that is held for those of up to [`LOOKUPS`] blocks that have none (`NONE` in `entries`), none of
    /// them linked to its parent. False where one of the blocks has an entry after all, made by another shard at this moment or because the
    /// block comes twice, or where there is no vacant entry: then some are made and some are not.
    #[inline]
    pub(crate) fn insert_many(
        &mut self,
        shard: usize,
        blocks: &[BlockIdentity],
        keys: &[Mixed; LOOKUPS],
        entries: &mut [u32],
    ) -> bool {
        let store = self.store;
        let mut vacant = [NONE; LOOKUPS];
        for (vacant, _) in vacant.iter_mut().zip(&*entries).filter(|(_, index)| **index == NONE) {
            let Some(index) = self.take_vacant(shard) else { break };
            near::prefetch(&store.entries[index]);
            *vacant = index;
        }
        let (mut complete, mut made) = (true, 0);
        let (table, mut new) = (self.table(), Few::default());
        let writing = Writing::begin(store.table_lock());
        for (((block, &mixed), entry), vacant) in blocks.iter().zip(keys).zip(entries).zip(&mut vacant) {
            if *entry != NONE {
                continue;
            }
            // By another shard, or by this batch, if the same hash comes twice in it.
            let may_be_taken = new.may_have(mixed) || writing.has_others();
            let key = Key { group: block.group, hash: block.hash, mixed };
            let taken = may_be_taken && table.find(&key, &store.entries).is_some();
            if *vacant == NONE || taken {
                complete = false;
                break;
            }
            store.entries[*vacant].begin(shard, block.group, block.hash, block.namespace, block.position);
            table.insert(&writing, mixed, *vacant);
            *entry = std::mem::replace(vacant, NONE);
            made += 1;
        }
        drop(writing);
        self.numbered(shard).used += made;
        for index in vacant.into_iter().filter(|&index| index != NONE) {
            self.put_vacant(shard, index);
        }
        complete
    }

    /// A vacant entry of more entries. Those that nothing keeps are not given up for it: the caller may be about to use one of
    /// them. That is done when a hold begins and when it ends.
    #[cold]
    fn one_of_more(&mut self, shard: usize) -> u32 {
        loop {
            self.grow();
            if let Some(index) = self.take_vacant(shard) {
                return index;
            }
        }
    }

    /// More entries: the array doubles, and the table with it.
    #[cold]
    fn grow(&mut self) {
        let store = self.store;
        let old = store.entries.len() as u32;
        assert!(
            store.entries.grow(),
            "a registry has at most three times 2^28 slots, and entries for as many again"
        );
        let table = Arc::new(self.table().grown(&store.entries));
        for shard in self.shards_mut() {
            shard.table = Arc::clone(&table);
        }
        if store.is_whole() {
            self.first_mut().fresh = old..store.entries.len() as u32;
        }
    }

    /// A vacant entry, if there is one at hand or to be had.
    #[inline]
    fn take_vacant(&mut self, number: usize) -> Option<u32> {
        let store = self.store;
        if !store.is_whole() {
            return self.take_at_hand(number);
        }
        let shard = self.first_mut();
        let first = shard.vacant;
        if first == NONE {
            return shard.fresh.next();
        }
        shard.vacant = store.entries[first].parent.get();
        Some(first)
    }

    /// The same where there are several shards.
    #[inline(never)]
    fn take_at_hand(&mut self, number: usize) -> Option<u32> {
        let store = self.store;
        let shard = self.numbered(number);
        if shard.at_hand.is_empty() && shard.fresh.is_empty() {
            let mut others = store.vacant.lock();
            if let Some(parcel) = others.parcels.pop() {
                shard.at_hand.extend_from_slice(&parcel);
            } else {
                let end = (store.entries.len() as u32).min(others.fresh + VACANT_AT_ONCE as u32);
                shard.fresh = others.fresh..end;
                others.fresh = end;
            }
        }
        shard.at_hand.pop().or_else(|| shard.fresh.next())
    }

    /// Keeps a vacant entry at hand, and gives some to the others where these are many.
    #[inline]
    fn put_vacant(&mut self, number: usize, index: u32) {
        let store = self.store;
        if !store.is_whole() {
            return self.put_at_hand(number, index);
        }
        let shard = self.first_mut();
        store.entries[index].parent.set(shard.vacant);
        shard.vacant = index;
    }

    /// The same where there are several shards.
    #[inline(never)]
    fn put_at_hand(&mut self, number: usize, index: u32) {
        let store = self.store;
        let shard = self.numbered(number);
        shard.at_hand.push(index);
        if shard.at_hand.len() == 2 * VACANT_AT_ONCE {
            // Those that were vacated last are still near.
            let mut parcel = [NONE; VACANT_AT_ONCE];
            parcel.copy_from_slice(&shard.at_hand[..VACANT_AT_ONCE]);
            shard.at_hand.drain(..VACANT_AT_ONCE);
            store.vacant.lock().parcels.push(parcel);
        }
    }

    /// Something that kept an entry is gone. Where nothing else does, it is given up when the events of this hold have
    /// their numbers ([`settle`](Self::settle)).
    #[inline]
    pub(crate) fn unused(&mut self, index: u32) {
        let entry = &self.store.entries[index];
        if entry.is_nowhere() && entry.links.get() == 0 {
            self.first_mut().unused.push(index);
        }
    }

    /// Gives up the entries that nothing keeps, and then their ancestors. Only now may another shard make an entry of such a
    /// block, so all that it tells of the block gets larger numbers than what this shard told: the last event is the truth.
    /// They are vacant when all have been looked at: one that is named twice must not be another's by then.
    pub(super) fn give_up_unused(&mut self) {
        let mut unused = std::mem::take(&mut self.first_mut().unused);
        let mut ended = std::mem::take(&mut self.first_mut().ended);
        let mut next = unused.drain(..);
        while let Some(first) = next.next() {
            let mut above = first;
            while above != NONE {
                // Others wait for the table's lock no longer than for a part of what a hold leaves behind.
                above = self.give_up_some(above, &mut next, &mut ended);
            }
        }
        drop(next);
        for (index, shard) in ended.drain(..) {
            self.numbered(shard).used -= 1;
            self.put_vacant(shard, index);
        }
        self.first_mut().unused = unused;
        self.first_mut().ended = ended;
    }

    /// Gives up at most [`MOST_UNUSED`] entries in one hold of the table's lock: `index`, and then those of `next`, each with its
    /// ancestors. Returns the ancestor to go on with.
    fn give_up_some(
        &mut self,
        index: u32,
        next: &mut impl Iterator<Item = u32>,
        ended: &mut Vec<(u32, usize)>,
    ) -> u32 {
        let store = self.store;
        let table = Arc::clone(&self.first().table);
        let writing = Writing::begin(store.table_lock());
        let most = ended.len() + MOST_UNUSED;
        let mut index = index;
        while ended.len() < most {
            let entry = &store.entries[index];
            // It may be in use again, or have been given up as an ancestor.
            if entry.in_use() && entry.is_nowhere() && entry.links.get() == 0 {
                table.remove(&writing, table.mix(entry.group(), entry.hash()), index);
                ended.push((index, entry.shard()));
                entry.end();
                index = self.take_link_back(entry.parent.get());
            } else {
                index = NONE;
            }
            if index == NONE {
                let Some(other) = next.next() else { break };
                index = other;
            }
        }
        index
    }

    /// A child of `parent` is gone for good. Returns the parent, if it is held and may go as well.
    fn take_link_back(&mut self, parent: u32) -> u32 {
        if parent == NONE {
            return NONE;
        }
        if self.holds(parent) {
            self.store.entries[parent].drop_link();
            return parent;
        }
        self.write(Letter::Link { parent });
        NONE
    }

    /// Indices in use are below this.
    pub(crate) fn end(&self) -> usize {
        if self.store.is_whole() { self.first().fresh.start as usize } else { self.store.entries.len() }
    }

    /// Indices of the entries in use; all shards are held.
    pub(crate) fn in_use(&self) -> impl Iterator<Item = u32> + '_ {
        (0..self.end() as u32).filter(|&index| self.store.entries[index].in_use())
    }
}
