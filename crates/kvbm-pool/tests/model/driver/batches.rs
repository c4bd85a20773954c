//! Batches in exclusive use: allocated, registered, given back.

use super::{Driver, Victims};
use crate::oracle::{Pin, Refused, Slot};
use kvbm_plan::{BlockId, Tier};
use kvbm_pool::{
    BlockBatch, BlockChain, BlockMetadata, Duplicates, EventRecordKind, G1, G2, G3, RegisterError, Reset,
    TierTag,
};

pub(super) enum Held {
    G1(BlockBatch<G1, Reset>),
    G2(BlockBatch<G2, Reset>),
    G3(BlockBatch<G3, Reset>),
}

impl Held {
    pub(super) fn tier(&self) -> usize {
        match self {
            Self::G1(_) => 0,
            Self::G2(_) => 1,
            Self::G3(_) => 2,
        }
    }

    pub(super) fn blocks(&self) -> &[BlockId] {
        match self {
            Self::G1(blocks) => blocks.block_ids(),
            Self::G2(blocks) => blocks.block_ids(),
            Self::G3(blocks) => blocks.block_ids(),
        }
    }

    pub(super) fn is_lost(&self) -> bool {
        match self {
            Self::G1(blocks) => blocks.is_lost(),
            Self::G2(blocks) => blocks.is_lost(),
            Self::G3(blocks) => blocks.is_lost(),
        }
    }
}

impl Driver {
    pub(super) fn allocate<T: TierTag>(&mut self, hold: fn(BlockBatch<T, Reset>) -> Held) {
        if self.held.len() > 6 {
            return self.drop_held();
        }
        let n = self.rng.below(5);
        let tier = T::TIER.index();
        let allocated = self.registry.pool::<T>().get_mutable_blocks(n);
        let given: Vec<BlockId> = allocated.iter().flat_map(BlockBatch::block_ids).copied().collect();
        self.follow_victims(T::TIER, &given);
        let expected = self.oracle.allocate(tier, n, 0);
        match allocated {
            Ok(blocks) => {
                let allowed = expected.expect("the model has no room");
                assert_eq!(blocks.len(), n);
                for block in blocks.block_ids() {
                    assert!(allowed.contains(&block.0), "{block} of {} is not to be given", T::TIER);
                    let slot = &mut self.oracle.tiers[tier].slots[block.index()];
                    *slot = Slot::Held { lost: false };
                }
                self.held.push(hold(blocks));
            }
            Err(error) => {
                assert_eq!(expected, None, "{error}");
                assert_eq!(error.tier, T::TIER);
                assert!(error.to_string().contains(error.way_out()));
            }
        }
    }

    /// Where victims are not foretold, the model takes those that went in the last operation:
    /// events name blocks that left, and where a copy took over, its slot is another's now (one of
    /// `given`) or free.
    pub(super) fn follow_victims(&mut self, tier: Tier, given: &[BlockId]) {
        if self.setup.victims != Victims::Told {
            return;
        }
        let Some(seen) = &self.oracle.spied else { return };
        let mut seen = seen.lock().expect("nobody panicked with it");
        let vacant = self.registry.vacant_slots(tier);
        for slot in self.oracle.replaceable(tier.index()) {
            if given.contains(&BlockId(slot)) || vacant.contains(&BlockId(slot)) {
                seen.chosen.push_back((tier.index(), slot));
                self.tally.replaced += 1;
            }
        }
        let before = self.drain.len();
        self.registry.drain_events(&mut self.drain, usize::MAX);
        for event in self.drain[before..].iter().filter(|event| event.kind == EventRecordKind::Remove) {
            seen.chosen.push_back((event.tier.index(), event.block.0));
        }
    }

    /// Priority makes chance choose: only where nobody has to foretell it.
    pub(super) fn metadata(&mut self) -> BlockMetadata {
        let dear = self.setup.victims != Victims::Foretold && self.rng.one_in(4);
        BlockMetadata { priority: if dear { [1, 1, 2, 9, 255][self.rng.below(5)] } else { 0 } }
    }

    fn take_held(&mut self) -> Option<Held> {
        let index = self.rng.below(self.held.len());
        (!self.held.is_empty()).then(|| self.held.swap_remove(index))
    }

    pub(super) fn drop_held(&mut self) {
        let Some(held) = self.take_held() else { return };
        for block in held.blocks() {
            self.oracle.tiers[held.tier()].slots[block.index()] = Slot::Free;
        }
        drop(held);
    }

    pub(super) fn register(&mut self) {
        match self.take_held() {
            Some(Held::G1(blocks)) => self.register_on(blocks, Held::G1),
            Some(Held::G2(blocks)) => self.register_on(blocks, Held::G2),
            Some(Held::G3(blocks)) => self.register_on(blocks, Held::G3),
            None => self.allocate::<G1>(Held::G1),
        }
    }

    fn register_on<T: TierTag>(
        &mut self,
        blocks: BlockBatch<T, Reset>,
        hold: fn(BlockBatch<T, Reset>) -> Held,
    ) {
        let path = self.any_path();
        // Most often what continues the part that is there.
        let (start, found) = self.oracle.longest_prefix(&path, &[0, 1, 2]);
        let known = start + found.len();
        let start =
            if self.rng.below(4) == 0 { self.rng.below(path.len()) } else { known.min(path.len() - 1) };
        let first = self.oracle.universe[path[0]];
        let partial =
            blocks.init_sequence(first.namespace, first.group, start as u32).expect("a short sequence");
        let hashes = self.hashes(&path);
        let (complete, rest) = match partial.commit(BlockChain::of_hashes(&hashes)) {
            Ok(split) => split,
            Err(rejected) => panic!("{rejected}"),
        };
        if !rest.is_empty() {
            self.held.push(hold(rest.into_reset()));
        }
        let tier = T::TIER.index();
        let slots: Vec<u32> = complete.block_ids().iter().map(|block| block.0).collect();
        let nodes = &path[start..start + slots.len()];
        let duplicates = if self.rng.one_in(2) { Duplicates::Reuse } else { Duplicates::Allow };
        let metadata = self.metadata();
        let is_lost = complete.is_lost();
        let expected = match self.oracle.register(tier, &slots, nodes, duplicates) {
            // The model has nothing of an empty batch that could have been lost.
            Ok(_) if slots.is_empty() && is_lost => Err(Refused::Lost),
            expected => expected,
        };
        match self.registry.pool::<T>().register_with(complete, duplicates, metadata) {
            Ok(cached) => {
                let expected = expected.expect("the model refuses");
                assert_eq!(cached.block_ids().iter().map(|block| block.0).collect::<Vec<_>>(), expected);
                self.pinned.push((cached.erase(), Pin::Use));
            }
            Err(rejected) => {
                let refused = match rejected.error {
                    RegisterError::Lost(lost) if lost.tier == T::TIER => Refused::Lost,
                    RegisterError::MissingParent { .. } => Refused::MissingParent,
                    error => panic!("{error}"),
                };
                assert_eq!(expected, Err(refused), "{rejected}");
                self.held.push(hold(rejected.batch.into_reset()));
            }
        }
    }
}
