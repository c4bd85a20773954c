//! The longest prefix that every cache group can serve.

use super::batch_lookup::BatchLookup;
use super::entries::Entries;
use super::lookup::{FoundPrefix, PrefixLookup};
use super::registered::Reference;
use super::state::Core;
use crate::entry::{NONE, PresentOn};
use crate::found::{Outside, PrefixBlock};
use crate::tier::TierMask;
use kvbm_plan::{BlockId, GroupId, SequenceHash, Tier};
use std::ops::Range;

/// What a volume or a peer has of a chain that is looked up, as the caller knows.
#[derive(Debug)]
pub struct FoundOutside {
    /// Where.
    pub place: Outside,
    /// For each cache group, whether each block of the chain is there.
    pub there: Vec<Vec<bool>>,
}

impl FoundOutside {
    fn has(&self, group: usize, at: usize) -> bool {
        self.there.get(group).and_then(|there| there.get(at)).copied().unwrap_or(false)
    }
}

/// Where blocks of a group may be: on tiers, and in one place outside.
#[derive(Clone, Copy)]
struct Source<'a> {
    group: GroupId,
    tiers: PresentOn,
    outside: Option<&'a FoundOutside>,
}

impl Source<'_> {
    fn has(&self, entries: &Entries, hashes: &[SequenceHash], at: usize) -> bool {
        let found = entries.find(self.group, hashes[at]);
        found.is_some_and(|index| entries[index].nearest_of(self.tiers).is_some())
            || self.outside.is_some_and(|outside| outside.has(usize::from(self.group.0), at))
    }

    /// Blocks from the first on that it has.
    fn count_from_front(&self, entries: &Entries, hashes: &[SequenceHash]) -> usize {
        match self.outside {
            None => present_from_front(entries, self.group, hashes, self.tiers),
            Some(_) => (0..hashes.len()).take_while(|&at| self.has(entries, hashes, at)).count(),
        }
    }
}

/// The search for the end of a prefix in a group that needs its last blocks only. Each block is
/// looked up once, whatever the other groups say: the search moves to the front.
struct EndSearch<'a> {
    source: Source<'a>,
    /// Blocks that a prefix needs, at most.
    needed: usize,
    /// Blocks `from..to` are there; those before `from` were not looked at.
    from: usize,
    to: usize,
}

impl EndSearch<'_> {
    /// The longest prefix of at most `end` blocks that the group can serve.
    fn before(&mut self, entries: &Entries, hashes: &[SequenceHash], end: usize) -> usize {
        self.to = self.to.min(end);
        self.from = self.from.min(self.to);
        while self.to - self.from < self.needed && self.from > 0 {
            self.from -= 1;
            if !self.source.has(entries, hashes, self.from) {
                self.to = self.from;
            }
        }
        self.to
    }
}

/// The part of a group in the prefix that all can serve.
pub(crate) struct GroupPart {
    pub(crate) found: FoundPrefix,
    /// Where the blocks are that are on no tier.
    pub(crate) outside: Option<Outside>,
}

/// The longest prefix that every group can serve from `tiers` and one of the places `outside`. Pins
/// each block that a group needs on its nearest tier and passes it to `out` with its group, group
/// by group. What only such a place has counts as on G4 and is not pinned.
pub(crate) fn match_groups(
    core: &mut Core,
    hashes: &[SequenceHash],
    tiers: TierMask,
    outside: &[FoundOutside],
    mut out: impl FnMut(usize, PrefixBlock),
) -> Vec<GroupPart> {
    let present = PresentOn::some_of(tiers);
    let length = common_length(&core.entries, hashes, present, outside);
    let mut parts = Vec::with_capacity(core.entries.groups().len());
    for at in 0..core.entries.groups().len() {
        let group = GroupId(at as u16);
        if outside.is_empty() {
            let lookup = PrefixLookup::new(group, &hashes[..length], tiers);
            let found = lookup.pin(core, |block| out(at, block));
            parts.push(GroupPart { found, outside: None });
            continue;
        }
        let needed = core.entries.groups()[at].blocks_needed().unwrap_or(length).min(length);
        let places = length - needed..length;
        let serves = |source: &Source<'_>| places.clone().all(|at| source.has(&core.entries, hashes, at));
        let source = sources(group, present, outside).find(serves);
        parts.push(pin_part(core, source, hashes, places, |block| out(at, block)));
    }
    parts
}

/// Pins the blocks of `places` that are on tiers. One source has all of them.
fn pin_part(
    core: &mut Core,
    source: Option<Source<'_>>,
    hashes: &[SequenceHash],
    places: Range<usize>,
    mut out: impl FnMut(PrefixBlock),
) -> GroupPart {
    let mut part = GroupPart { found: FoundPrefix::default(), outside: None };
    let Some(source) = source else { return part };
    part.found = FoundPrefix { start: places.start, count: places.len(), ..part.found };
    for at in places {
        let entry = core.entries.find(source.group, hashes[at]).map(|index| core.entry(index));
        if let Some(entry) = entry
            && let Some(tier) = entry.nearest_of(source.tiers)
        {
            let slot = entry.slot(tier);
            part.found.namespace = entry.namespace();
            core.add_reference(tier, slot, Reference::Use);
            out(PrefixBlock { block: BlockId(slot), tier: Tier::SLOTTED[tier] });
        } else {
            part.outside = source.outside.map(|known| known.place);
            out(PrefixBlock::OUTSIDE);
        }
    }
    part
}

fn common_length(
    entries: &Entries,
    hashes: &[SequenceHash],
    tiers: PresentOn,
    outside: &[FoundOutside],
) -> usize {
    let mut length = hashes.len();
    let mut searches: Vec<Vec<EndSearch<'_>>> = Vec::new();
    for (at, config) in entries.groups().iter().enumerate() {
        let sources = sources(GroupId(at as u16), tiers, outside);
        match config.blocks_needed() {
            None => {
                let there = sources.map(|source| source.count_from_front(entries, &hashes[..length]));
                length = there.max().unwrap_or(0);
            }
            Some(needed) => {
                let search = |source| EndSearch { source, needed, from: usize::MAX, to: usize::MAX };
                searches.push(sources.map(search).collect());
            }
        }
    }
    loop {
        let before = length;
        for group in &mut searches {
            let ends = group.iter_mut().map(|search| search.before(entries, hashes, length));
            length = ends.max().unwrap_or(0);
        }
        if length == before {
            return length;
        }
    }
}

/// Blocks from the first on that are on one of `tiers`.
fn present_from_front(entries: &Entries, group: GroupId, hashes: &[SequenceHash], tiers: PresentOn) -> usize {
    let mut lookup = BatchLookup::new(entries, group, hashes);
    let mut count = 0;
    while let Some(found) = lookup.next(entries) {
        let there = |index: &&u32| **index != NONE && entries[**index].nearest_of(tiers).is_some();
        let present = found.iter().take_while(there).count();
        count += present;
        if present < found.len() {
            break;
        }
    }
    count
}

/// Where blocks of `group` may be: the tiers with each of the places outside, or alone.
fn sources(group: GroupId, tiers: PresentOn, outside: &[FoundOutside]) -> impl Iterator<Item = Source<'_>> {
    let alone = outside.is_empty().then_some(Source { group, tiers, outside: None });
    let with = move |place| Source { group, tiers, outside: Some(place) };
    alone.into_iter().chain(outside.iter().map(with))
}

#[cfg(all(test, not(any(kvbm_loom, kvbm_shuttle))))]
mod tests {
    use super::*;
    use crate::random::Random;
    use crate::test_chains::{chain, register_as};
    use crate::{BlockChain, G1, G2, GroupConfig, Prefix, Registry, RegistryConfig};
    use kvbm_plan::{GroupKind, NamespaceId, VolumeId};

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
            let parts = registry.match_groups(BlockChain::of_hashes(&hashes), TierMask::ALL, &[]);
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

    /// With volumes the prefix is what trying all lengths finds, where each group has its blocks on
    /// tiers and on one volume.
    #[test]
    fn the_prefix_goes_on_where_volumes_have_what_no_tier_has() {
        let mut random = Random::new(12);
        let mut on_both = 0;
        for round in 0..400 {
            let registry = registry();
            let hashes = chain(round, BLOCKS as u64);
            let odds = [2, 4, 12][random.below(3)];
            let mut is_there = |_| (0..BLOCKS).map(|_| random.below(odds) > 0).collect::<Vec<_>>();
            let known = [7, 8].map(|id| FoundOutside {
                place: Outside::Volume(VolumeId(id)),
                there: KINDS.iter().map(&mut is_there).collect(),
            });
            let mut on_tiers = [[false; BLOCKS]; 4];
            for (group, there) in (0_u16..).zip(&mut on_tiers) {
                for at in 0..BLOCKS {
                    let full = KINDS[usize::from(group)] == GroupKind::Full;
                    if random.below(3) == 0 {
                        if full {
                            break;
                        }
                        continue;
                    }
                    there[at] = true;
                    drop(register_as::<G1>((NamespaceId(5), GroupId(group)), &registry, &hashes[..=at], at));
                }
            }
            let serves = |volume: &FoundOutside, group: usize, length: usize| {
                needed(KINDS[group], length).all(|at| on_tiers[group][at] || volume.there[group][at])
            };
            let all_serve = |length: &usize| {
                (0..KINDS.len()).all(|group| known.iter().any(|volume| serves(volume, group, *length)))
            };
            let length = (0..=BLOCKS).rev().find(all_serve).unwrap_or(0);
            let parts = registry.match_groups(BlockChain::of_hashes(&hashes), TierMask::ALL, &known);
            for (group, part) in parts.iter().enumerate() {
                let wanted = needed(KINDS[group], length);
                assert_eq!(part.blocks().len(), wanted.len(), "group {group} of {length}");
                let volume = part.volume().map(|id| &known[usize::from(id == VolumeId(8))]);
                for (at, block) in wanted.zip(part.blocks()) {
                    let outside = block.tier == Tier::G4;
                    assert_eq!(outside, !on_tiers[group][at]);
                    assert!(!outside || volume.is_some_and(|volume| volume.there[group][at]));
                }
                let outside = part.count(Tier::G4);
                on_both += usize::from(outside > 0 && outside < part.blocks().len());
                let identities = part.identities();
                assert_eq!(identities.len(), part.blocks().len());
            }
            drop(parts);
            assert_eq!(registry.occupancy(Tier::G1).active, 0);
        }
        assert!(on_both > 50, "parts on tiers and a volume: {on_both}");
    }

    /// Mutation that makes it fail: `match_run` looks a prefix up, of which a window needs the end.
    #[test]
    fn a_run_of_a_window_is_pinned_from_its_first_block_on() {
        let registry = registry();
        let hashes = chain(1, 5);
        for group in 0..4 {
            for at in 0..4 {
                drop(register_as::<G2>((NamespaceId(5), GroupId(group)), &registry, &hashes[..=at], at));
            }
        }
        for group in (0..4).map(GroupId) {
            let run = registry.pool::<G2>().match_run(group, &hashes[1..]).erase();
            let found: Vec<_> = run.identities().iter().map(|identity| identity.hash).collect();
            assert_eq!(found, hashes[1..4], "group {group}");
        }
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
            let parts = registry.match_groups(BlockChain::of_hashes(&hashes), tiers, &[]);
            parts.iter().map(Prefix::len).max()
        };
        assert_eq!(length(TierMask::ALL), Some(3));
        assert_eq!(length(TierMask::only(Tier::G1)), Some(0), "the state is on G2 alone");
        assert_eq!(registry.match_groups(BlockChain::of_hashes(&[]), TierMask::ALL, &[]).len(), 4);
    }
}
