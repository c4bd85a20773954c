//! A registry that several threads use, and what must be true of it when they are done.

#![allow(dead_code, reason = "each of the tests that share this uses a part of it")]

use kvbm_plan::{BlockIdentity, GroupId, NamespaceId, SequenceHash, Tier};
use kvbm_pool::{
    BlockBatch, BlockChain, BlockPool, Cached, Complete, Duplicates, EventRecord, EventRecordKind, G1, G2,
    PolicyKind, Registry, RegistryConfig, TierTag,
};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

pub(crate) const GROUP: GroupId = GroupId(0);
const NAMESPACE: NamespaceId = NamespaceId(1);

/// What the events have said so far: of each block the last, and the number of the next.
#[derive(Default)]
struct Followed {
    last: BTreeMap<(Tier, SequenceHash), bool>,
    /// What is there, by the block that it continues.
    children: BTreeMap<(Tier, SequenceHash), BTreeSet<SequenceHash>>,
    /// Blocks that a copy was begun of, and those of them that were told of before the block that
    /// they continue was.
    copied: BTreeSet<(Tier, SequenceHash)>,
    early: BTreeMap<(Tier, SequenceHash), SequenceHash>,
    next: u64,
}

impl Followed {
    /// No block is told of before its parent, but for a copy that ended while that of its parent
    /// was on its way: then that one comes, or this one leaves.
    fn note_parent(&mut self, event: &EventRecord) {
        let block = (event.tier, event.identity.hash);
        self.early.remove(&block);
        if event.kind == EventRecordKind::Remove {
            return;
        }
        self.early.retain(|_, parent| *parent != event.identity.hash);
        let Some(parent) = event.identity.parent else { return };
        let is_published = |tier| self.last.get(&(tier, parent)).copied().unwrap_or(false);
        if !Tier::SLOTTED.into_iter().any(is_published) {
            assert!(self.copied.contains(&block), "{event:?} comes before its parent");
            self.early.insert(block, parent);
        }
    }

    /// A block leaves a tier only when nothing continues it there.
    fn note_chain(&mut self, event: &EventRecord) {
        let (tier, hash) = (event.tier, event.identity.hash);
        let siblings = event.identity.parent.map(|parent| self.children.entry((tier, parent)).or_default());
        if event.kind == EventRecordKind::Store {
            siblings.map(|siblings| siblings.insert(hash));
            return;
        }
        siblings.map(|siblings| siblings.remove(&hash));
        let left = self.children.remove(&(tier, hash)).unwrap_or_default();
        assert!(left.is_empty(), "{event:?}, and there is what continues it: {left:?}");
    }
}

#[derive(Clone)]
pub(crate) struct World {
    pub(crate) registry: Registry,
    followed: Arc<Mutex<Followed>>,
}

/// Both halves differ from block to block: policies know them by one.
pub(crate) fn hashes(chain: u64, count: u64) -> Vec<SequenceHash> {
    let hash = |index| u128::from(chain) << 64 | u128::from(chain << 32 | index);
    (0..count).map(|index| SequenceHash::from_bytes(hash(index).to_le_bytes())).collect()
}

pub(crate) fn identities(chain: &[SequenceHash]) -> Vec<BlockIdentity> {
    BlockIdentity::chain(NAMESPACE, GROUP, chain).collect()
}

impl World {
    pub(crate) fn new(capacity: [u32; 3], policy: PolicyKind) -> Self {
        let config = RegistryConfig { policy, event_capacity: 1 << 16, ..RegistryConfig::new(capacity) };
        Self::of(Registry::new(&config).expect("the configuration is valid"))
    }

    /// Of a registry of which nobody has looked at an event.
    pub(crate) fn of(registry: Registry) -> Self {
        Self { registry, followed: Arc::default() }
    }

    pub(crate) fn pool(&self) -> BlockPool<G1> {
        self.registry.pool()
    }

    /// Registers blocks `known ..` of `chain` on G1; nothing where there is no room, or a block
    /// before is gone.
    pub(crate) fn register(
        &self,
        chain: &[SequenceHash],
        known: usize,
        duplicates: Duplicates,
    ) -> Option<Cached<G1>> {
        self.register_on(chain, known, duplicates)
    }

    pub(crate) fn register_on<T: TierTag>(
        &self,
        chain: &[SequenceHash],
        known: usize,
        duplicates: Duplicates,
    ) -> Option<Cached<T>> {
        self.registry.pool::<T>().register(self.complete(chain, known)?, duplicates).ok()
    }

    /// Blocks `known ..` of `chain`, to be registered; nothing where there is no room.
    pub(crate) fn complete<T: TierTag>(
        &self,
        chain: &[SequenceHash],
        known: usize,
    ) -> Option<BlockBatch<T, Complete>> {
        let blocks = self.registry.pool::<T>().get_mutable_blocks(chain.len() - known).ok()?;
        let partial = blocks.init_sequence(NAMESPACE, GROUP, known as u32).ok()?;
        Some(partial.commit(BlockChain::of_hashes(chain)).ok()?.0)
    }

    /// Events that nobody has looked at yet.
    pub(crate) fn events(&self) -> Vec<EventRecord> {
        let mut events = Vec::new();
        self.registry.drain_events(&mut events, 1024);
        events
    }

    /// Those of `chain` that are on some tier.
    pub(crate) fn present(&self, chain: &[SequenceHash]) -> Vec<SequenceHash> {
        let there = |hash: &&SequenceHash| !self.registry.tiers_of(GROUP, **hash).is_empty();
        chain.iter().filter(there).copied().collect()
    }

    /// With no handle left: events are dense and end with the truth, every slot is accounted for.
    pub(crate) fn check(&self) {
        self.check_events();
        for tier in Tier::SLOTTED {
            let (blocks, _) = self.registry.snapshot(tier);
            let status = self.registry.occupancy(tier);
            assert_eq!(status.inactive as usize, blocks.len(), "no user is left and no copy: {status:?}");
            assert_eq!(status.free + status.inactive, status.capacity, "{status:?}");
            assert_eq!(status.transfer_pins, 0);
        }
    }

    /// With no handle left: nothing keeps a block on any tier, and where all have gone nothing is
    /// left over.
    pub(crate) fn all_may_go(&self) {
        self.check();
        let capacity = Tier::SLOTTED.map(|tier| self.registry.capacity(tier) as usize);
        let upper = self.registry.pool::<G1>().get_mutable_blocks(capacity[0]).expect("all of it may go");
        let lower = self.registry.pool::<G2>().get_mutable_blocks(capacity[1]).expect("all of it may go");
        assert_eq!([upper.len(), lower.len(), 0], capacity, "of G3 no test has any");
        assert_eq!(self.registry.known_blocks(), 0, "nothing keeps an entry");
        self.check_events();
    }

    /// Copies of these blocks begin.
    pub(crate) fn note_copies(&self, tier: Tier, blocks: &[BlockIdentity]) {
        let mut followed = self.followed.lock().expect("no thread panicked with it");
        followed.copied.extend(blocks.iter().map(|block| (tier, block.hash)));
    }

    /// Events are dense, none repeats the one before of its block, none tells of a block before its
    /// parent, none says that a block is gone which another continues on that tier, and the last of
    /// each block tells the truth.
    pub(crate) fn check_events(&self) {
        let mut followed = self.followed.lock().expect("no thread panicked with it");
        let mut events = Vec::new();
        loop {
            events.clear();
            let drained = self.registry.drain_events(&mut events, 1024);
            assert_eq!(drained.lost, 0, "the ring is large enough");
            if drained.records == 0 {
                break;
            }
            for event in &events {
                assert_eq!(event.seq, followed.next, "numbers are dense");
                followed.next += 1;
                let stored = event.kind == EventRecordKind::Store;
                let before = followed.last.insert((event.tier, event.identity.hash), stored);
                assert_ne!(before.unwrap_or(false), stored, "{event:?} repeats the event before");
                followed.note_chain(event);
                followed.note_parent(event);
            }
        }
        assert!(
            followed.early.is_empty(),
            "these came, and what they continue did not: {:?}",
            followed.early
        );
        for tier in Tier::SLOTTED {
            let (blocks, _) = self.registry.snapshot(tier);
            let stored = followed.last.iter().filter(|((on, _), stored)| *on == tier && **stored).count();
            assert_eq!(blocks.len(), stored, "what events say is on {tier}");
            for (_, identity) in &blocks {
                assert_eq!(followed.last.get(&(tier, identity.hash)), Some(&true), "{identity:?}");
                assert!(self.registry.tiers_of(GROUP, identity.hash).contains(tier));
            }
        }
    }
}
