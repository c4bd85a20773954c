//! Policies whose answers are wrong: nothing fails and nothing hangs for that.

#![cfg(not(any(kvbm_loom, kvbm_shuttle)))]
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use kvbm_plan::{GroupId, NamespaceId, SequenceHash, Tier};
use kvbm_pool::{
    BlockChain, BlockMemory, Duplicates, EvictionPolicy, G1, Registry, RegistryConfig, SlotNumbers, SlotSet,
};
use std::collections::BTreeSet;

const SLOTS: u32 = 256;

#[derive(Clone, Copy, Debug)]
enum Answer {
    /// Slots that it was not told of, and some that there are not.
    Others,
    /// All that it was told of, whatever is wanted.
    TooMany,
    /// One slot again and again.
    OneTooOften,
    Nothing,
}

/// A policy that answers so.
struct Wrong {
    answer: Answer,
    listed: BTreeSet<u32>,
}

impl Wrong {
    fn boxed(answer: Answer) -> Box<dyn EvictionPolicy> {
        Box::new(Self { answer, listed: BTreeSet::new() })
    }
}

impl EvictionPolicy for Wrong {
    fn evictable(&mut self, _: SlotSet, slot: u32, _: BlockMemory, _: u8, _: &mut SlotNumbers<'_>) {
        self.listed.insert(slot);
    }

    fn kept(&mut self, _: SlotSet, slot: u32, _: &mut SlotNumbers<'_>) {
        self.listed.remove(&slot);
    }

    fn victims(&mut self, _: SlotSet, want: usize, out: &mut Vec<u32>, _: &mut SlotNumbers<'_>) {
        match self.answer {
            Answer::Others => {
                out.extend((0..SLOTS).filter(|slot| !self.listed.contains(slot)));
                out.extend([SLOTS, u32::MAX]);
            }
            Answer::TooMany => out.extend(std::mem::take(&mut self.listed)),
            Answer::OneTooOften => {
                let one = self.listed.pop_first().into_iter();
                out.extend(one.flat_map(|slot| std::iter::repeat_n(slot, want + 1)));
            }
            Answer::Nothing => {}
        }
    }

    fn has_victim(&self, _: SlotSet) -> bool {
        !matches!(self.answer, Answer::TooMany)
    }
}

fn register(registry: &Registry, chain: u32, blocks: u32) {
    let hashes: Vec<_> = (0..blocks)
        .map(|at| SequenceHash::from_bytes((u128::from(chain) << 64 | u128::from(at)).to_le_bytes()))
        .collect();
    let held = registry.pool::<G1>().get_mutable_blocks(blocks as usize).unwrap();
    let partial = held.init_sequence(NamespaceId(0), GroupId(0), 0).unwrap();
    let (complete, _) = partial.commit(BlockChain::of_hashes(&hashes)).unwrap();
    drop(registry.pool::<G1>().register(complete, Duplicates::Reuse).unwrap());
}

#[test]
fn whatever_a_policy_answers_every_block_may_go() {
    for answer in [Answer::Others, Answer::TooMany, Answer::OneTooOften, Answer::Nothing] {
        let config = RegistryConfig::new([SLOTS, 0, 0]);
        let registry = Registry::with_policy(&config, Wrong::boxed(answer)).unwrap();
        for round in 0..4 {
            for chain in 0..200 {
                register(&registry, 200 * round + chain, 1 + chain % 7);
            }
            // All at once, and in parts; what is evicted is not told of again.
            for part in [SLOTS, 3, 50] {
                let mut held = Vec::new();
                for _ in 0..SLOTS / part {
                    let blocks = registry.pool::<G1>().get_mutable_blocks(part as usize);
                    held.push(blocks.unwrap_or_else(|error| panic!("{answer:?}: {error}")));
                }
                drop(held);
                (0..60).for_each(|chain| register(&registry, 10_000 + chain, 5));
            }
            let error = registry.pool::<G1>().get_mutable_blocks(SLOTS as usize + 1).unwrap_err();
            assert_eq!(error.in_use, 0);
        }
        assert_eq!(registry.occupancy(Tier::G1).active, 0);
    }
}
