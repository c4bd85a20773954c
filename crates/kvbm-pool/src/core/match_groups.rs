//! The longest prefix that every cache group can serve.

use super::batch_lookup::BatchLookup;
use super::lookup::FoundPrefix;
use super::state::Core;
use crate::entry::{NONE, PresentOn};
use crate::found::PrefixBlock;
use crate::tier::TierMask;
use kvbm_plan::{GroupId, SequenceHash};

/// The search for the end of a prefix in a group that needs its last blocks only. Each block is
/// looked up once, whatever the other groups say: the search moves to the front.
struct EndSearch {
    group: GroupId,
    /// Blocks that a prefix needs, at most.
    needed: usize,
    /// Blocks `from..to` are there; those before `from` were not looked at.
    from: usize,
    to: usize,
}

impl EndSearch {
    /// The longest prefix of at most `end` blocks that the group can serve.
    fn before(&mut self, core: &Core, hashes: &[SequenceHash], tiers: PresentOn, end: usize) -> usize {
        self.to = self.to.min(end);
        self.from = self.from.min(self.to);
        while self.to - self.from < self.needed && self.from > 0 {
            self.from -= 1;
            let found = core.find(self.group, hashes[self.from]);
            if found.is_none_or(|index| core.entry(index).nearest_of(tiers).is_none()) {
                self.to = self.from;
            }
        }
        self.to
    }
}

impl Core {
    /// The longest prefix on `tiers` that every group can serve: pins each block that a group needs
    /// on its nearest tier and passes it to `out` with its group, group by group.
    pub(crate) fn match_groups(
        &mut self,
        hashes: &[SequenceHash],
        tiers: TierMask,
        mut out: impl FnMut(usize, PrefixBlock),
    ) -> Vec<FoundPrefix> {
        let groups = (0..self.groups.len()).map(|group| GroupId(group as u16));
        let length = self.common_length(hashes, PresentOn::some_of(tiers));
        let mut found = Vec::with_capacity(groups.len());
        for (at, group) in groups.enumerate() {
            found.push(self.match_prefix(group, &hashes[..length], tiers, |block| out(at, block), None));
        }
        found
    }

    fn common_length(&self, hashes: &[SequenceHash], tiers: PresentOn) -> usize {
        let mut length = hashes.len();
        let mut searches = Vec::new();
        for (at, config) in self.groups.iter().enumerate() {
            let group = GroupId(at as u16);
            match config.blocks_needed() {
                None => length = self.present_from_front(group, &hashes[..length], tiers),
                Some(needed) => searches.push(EndSearch { group, needed, from: usize::MAX, to: usize::MAX }),
            }
        }
        loop {
            let before = length;
            for search in &mut searches {
                length = search.before(self, hashes, tiers, length);
            }
            if length == before {
                return length;
            }
        }
    }

    /// Blocks from the first on that are on one of `tiers`.
    fn present_from_front(&self, group: GroupId, hashes: &[SequenceHash], tiers: PresentOn) -> usize {
        let mut lookup = BatchLookup::new(self, group, hashes);
        let mut count = 0;
        while let Some(found) = lookup.next(self) {
            let there = |index: &&u32| **index != NONE && self.entry(**index).nearest_of(tiers).is_some();
            let present = found.iter().take_while(there).count();
            count += present;
            if present < found.len() {
                break;
            }
        }
        count
    }
}

#[cfg(all(test, not(any(kvbm_loom, kvbm_shuttle))))]
mod tests {
    use super::*;
    use crate::random::Random;
    use crate::test_chains::{chain, register_as};
    use crate::{BlockChain, G1, G2, GroupConfig, Prefix, Registry, RegistryConfig};
    use kvbm_plan::{GroupKind, NamespaceId, Tier};

    const KINDS: [GroupKind; 4] =
        [GroupKind::SlidingWindow(40), GroupKind::Full, GroupKind::State, GroupKind::SlidingWindow(16)];
    const BLOCKS: usize = 12;

    /// Blocks that a group of this kind needs for a prefix of `length` blocks.
    fn needed(kind: GroupKind, length: usize) -> std::ops::Range<usize> {
        let blocks = match kind {
            GroupKind::Full => length,
            GroupKind::SlidingWindow(tokens) => tokens.div_ceil(16) as usize,
            GroupKind::State => 1,
        };
        length.saturating_sub(blocks)..length
    }

    /// Tries each length, longest first.
    fn naive(there: &[[bool; BLOCKS]; 4]) -> usize {
        let serves = |length: usize| {
            KINDS.iter().zip(there).all(|(kind, there)| needed(*kind, length).all(|at| there[at]))
        };
        (0..=BLOCKS).rev().find(|&length| serves(length)).unwrap_or(0)
    }

    fn registry() -> Registry {
        let groups = KINDS.map(|kind| GroupConfig { kind, tokens_per_block: 16 }).to_vec();
        let config = RegistryConfig { groups, ..RegistryConfig::new([128, 128, 0]) };
        Registry::new(&config).expect("a valid configuration")
    }

    /// The prefix is what trying all lengths finds, and pins exactly what each group needs.
    #[test]
    fn the_prefix_is_the_longest_that_every_group_can_serve() {
        let mut random = Random::new(11);
        let mut seen = [0; BLOCKS + 1];
        for round in 0..400 {
            let registry = registry();
            let hashes = chain(round, BLOCKS as u64);
            let mut there = [[false; BLOCKS]; 4];
            let odds = [2, 8, 40][random.below(3)];
            for (group, there) in (0_u16..).zip(&mut there) {
                for at in 0..BLOCKS {
                    if random.below(odds) == 0 {
                        if KINDS[usize::from(group)] == GroupKind::Full {
                            break;
                        }
                        continue;
                    }
                    there[at] = true;
                    let name = (NamespaceId(5), GroupId(group));
                    let on_host = random.below(2) == 0 && KINDS[usize::from(group)] != GroupKind::Full;
                    let chain = &hashes[..=at];
                    if on_host {
                        drop(register_as::<G2>(name, &registry, chain, at));
                    } else {
                        drop(register_as::<G1>(name, &registry, chain, at));
                    }
                }
            }
            let length = naive(&there);
            seen[length] += 1;
            let parts = registry.match_groups(BlockChain::of_hashes(&hashes), TierMask::ALL);
            for (kind, part) in KINDS.iter().zip(&parts) {
                let wanted = needed(*kind, length);
                assert_eq!(part.blocks().len(), wanted.len(), "{kind:?} of {length}: {there:?}");
                if !part.is_empty() {
                    assert_eq!((part.start(), part.len()), (wanted.start, length), "{kind:?}");
                }
            }
            let pinned: usize = parts.iter().map(|part| part.blocks().len()).sum();
            let active = |tier| registry.occupancy(tier).active as usize;
            assert_eq!(active(Tier::G1) + active(Tier::G2), pinned);
            drop(parts);
            assert_eq!(active(Tier::G1) + active(Tier::G2), 0);
        }
        assert!(seen.iter().filter(|count| **count > 0).count() > 8, "lengths of all sorts: {seen:?}");
    }

    #[test]
    fn tiers_that_are_left_out_hold_nothing() {
        let registry = registry();
        let hashes = chain(1, 3);
        for group in 0..4 {
            let name = (NamespaceId(5), GroupId(group));
            if group == 2 {
                drop(register_as::<G2>(name, &registry, &hashes, 2));
            } else {
                drop(register_as::<G1>(name, &registry, &hashes, 0));
            }
        }
        let length = |tiers| {
            let parts = registry.match_groups(BlockChain::of_hashes(&hashes), tiers);
            parts.iter().map(Prefix::len).max()
        };
        assert_eq!(length(TierMask::ALL), Some(3));
        assert_eq!(length(TierMask::only(Tier::G1)), Some(0), "the state is on G2 alone");
        assert_eq!(registry.match_groups(BlockChain::of_hashes(&[]), TierMask::ALL).len(), 4);
    }
}
