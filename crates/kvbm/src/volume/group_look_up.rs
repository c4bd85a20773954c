//! Prefixes of several cache groups on volumes: what is known of each volume, and for what is not,
//! the volumes are asked. Of a group with full attention they are asked for the length of its
//! chain, of the others for the blocks that a prefix of that length needs. Where those are not
//! there, shorter prefixes are tried that end where the group that needs fewest blocks has some.

use super::{VolumeTier, Volumes};
use kvbm_plan::{BlockIdentity, Command, GroupId, NamespaceId};
use kvbm_pool::{FoundOutside, Outside};
use kvbm_tokens::BlockChain;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// Blocks that are asked for at a time when a shorter prefix is looked for.
const PART: usize = 256;
/// Parts at most.
const PARTS: usize = 5;
/// Shorter prefixes that are tried at most.
const MAX_TRIES: usize = 8;

/// A chain that is looked up in all cache groups.
pub(crate) struct GroupChain<'a> {
    pub(crate) chain: BlockChain<'a>,
    /// By group, the blocks that a prefix needs; `None`: all.
    pub(crate) needed: Vec<Option<usize>>,
    /// By group, whether each block of the chain is on a tier.
    pub(crate) on_tiers: Vec<Vec<bool>>,
}

impl GroupChain<'_> {
    fn identities(&self, group: usize) -> Vec<BlockIdentity> {
        let (chain, namespace) = (self.chain, NamespaceId::from(self.chain.namespace()));
        BlockIdentity::run(namespace, GroupId(group as u16), chain.origin(), chain.hashes()).collect()
    }

    /// Each group with the blocks that it needs.
    fn groups(&self) -> impl Iterator<Item = (usize, Option<usize>)> + '_ {
        self.needed.iter().copied().enumerate()
    }
}

/// What each of the volumes that a chain may be read from is known to have of it.
pub(crate) fn known_of(volumes: &Volumes, chain: BlockChain<'_>, groups: usize) -> Vec<FoundOutside> {
    let Some(&root) = chain.hashes().first() else { return Vec::new() };
    let usable = volumes.usable(root, NamespaceId::from(chain.namespace())).into_iter();
    usable.map(|volume| known(&volume, chain, groups)).collect()
}

fn known(volume: &VolumeTier, chain: BlockChain<'_>, groups: usize) -> FoundOutside {
    let index = volume.index.lock();
    let of = |group| chain.hashes().iter().map(|hash| index.contains(GroupId(group), *hash)).collect();
    FoundOutside { place: Outside::Volume(volume.descriptor.id), there: (0..groups as u16).map(of).collect() }
}

impl Volumes {
    /// Asks volumes for what is not known to be there of a chain, and adds it to `known`. Whether
    /// anything was found.
    pub(crate) fn ask_groups(&self, chain: &GroupChain<'_>, known: &mut [FoundOutside]) -> bool {
        let volume = |known: &FoundOutside| match known.place {
            Outside::Volume(volume) => self.get(volume),
            Outside::Node(_) => None,
        };
        let volumes: Vec<_> = known.iter().map(volume).collect();
        let mut search = Search { volumes: &volumes, chain, recheck: self.policy.recheck, known };
        let (full, found) = search.full_length();
        found | search.ends_before(full)
    }
}

/// The search for a prefix on volumes, with what tiers have of it. A group may be on another volume
/// than the others.
struct Search<'a> {
    /// None where one went away.
    volumes: &'a [Option<Arc<VolumeTier>>],
    chain: &'a GroupChain<'a>,
    recheck: Duration,
    /// Of each volume.
    known: &'a mut [FoundOutside],
}

impl Search<'_> {
    fn has(&self, group: usize, at: usize) -> bool {
        self.chain.on_tiers[group][at] || self.known.iter().any(|known| known.there[group][at])
    }

    /// Blocks from the first on that all groups with full attention have, each on one volume or
    /// another, and whether one was found to have some.
    fn full_length(&mut self) -> (usize, bool) {
        let (mut length, mut found) = (self.chain.chain.len(), false);
        for (group, _) in self.chain.groups().filter(|(_, needed)| needed.is_none()) {
            let (on_tiers, identities) = (&self.chain.on_tiers[group], self.chain.identities(group));
            let mut longest = 0;
            for (volume, known) in self.volumes.iter().zip(&mut *self.known) {
                let there = &mut known.there[group];
                let run = |there: &[bool]| (0..length).take_while(|&at| on_tiers[at] || there[at]).count();
                let from = run(there);
                let ask =
                    |volume: &Arc<VolumeTier>| volume.probe_chain(self.recheck, &identities[from..length]);
                // Nobody is asked where a volume is known to have all of it.
                let more = if longest < length { volume.as_ref().map_or(0, ask) } else { 0 };
                there[from..from + more].fill(true);
                found |= more > 0;
                longest = longest.max(run(there));
            }
            length = longest;
        }
        (length, found)
    }

    /// Looks for the longest prefix of at most `end` blocks for which the other groups have what
    /// they need. Whether the volume was found to have some of it.
    fn ends_before(&mut self, end: usize) -> bool {
        let others = self.chain.groups().filter_map(|(group, needed)| Some((group, needed?)));
        let Some((fewest, _)) = others.min_by_key(|(_, needed)| *needed).filter(|_| end > 0) else {
            return false;
        };
        let (served, mut found) = self.try_length(end);
        let (mut from, mut tries) = (end - 1, 0);
        let mut is_over = served;
        for _ in 0..PARTS {
            if is_over || from == 0 {
                break;
            }
            // Prefixes of fewer than `end` blocks, longest first.
            let part = from.saturating_sub(PART)..from;
            found |= self.ask(&[(fewest, part.clone())]);
            for length in
                part.clone().rev().filter(|&at| self.has(fewest, at)).map(|at| at + 1).collect::<Vec<_>>()
            {
                let (served, more) = self.try_length(length);
                found |= more;
                tries += 1;
                is_over = served || tries >= MAX_TRIES;
                if is_over {
                    break;
                }
            }
            from = part.start;
        }
        found
    }

    /// Asks for what a prefix of `length` blocks needs. Whether it is there, and whether the volume
    /// was found to have some of it.
    fn try_length(&mut self, length: usize) -> (bool, bool) {
        let of = |(group, needed): (usize, Option<usize>)| {
            let needed: usize = needed?;
            Some((group, length.saturating_sub(needed)..length))
        };
        let wanted: Vec<(usize, Range<usize>)> = self.chain.groups().filter_map(of).collect();
        // Most often it is the last blocks that are there, or are not.
        let last: Vec<_> =
            wanted.iter().map(|(group, places)| (*group, places.end - 1..places.end)).collect();
        let mut found = self.ask(&last);
        if !self.have(&last) {
            return (false, found);
        }
        found |= self.ask(&wanted);
        (self.have(&wanted), found)
    }

    fn have(&self, wanted: &[(usize, Range<usize>)]) -> bool {
        wanted.iter().all(|(group, places)| places.clone().all(|at| self.has(*group, at)))
    }

    /// Asks for blocks of groups that are nowhere yet. Whether some are there.
    fn ask(&mut self, wanted: &[(usize, Range<usize>)]) -> bool {
        let mut open = Vec::new();
        for (group, places) in wanted {
            let identities = self.chain.identities(*group);
            let lacking = places.clone().filter(|&at| !self.has(*group, at));
            open.extend(lacking.map(|at| (*group, at, identities[at])));
        }
        let mut found = false;
        for (volume, known) in self.volumes.iter().zip(&mut *self.known) {
            let Some(volume) = volume else { continue };
            for part in open.chunks(Command::MAX_VOLUME_BLOCKS) {
                let asked: Vec<BlockIdentity> = part.iter().map(|(.., identity)| *identity).collect();
                for ((group, at, _), there) in part.iter().zip(volume.probe_each(self.recheck, &asked)) {
                    known.there[*group][*at] |= there;
                    found |= there;
                }
            }
            // The next one is asked for the rest.
            open.retain(|(group, at, _)| !known.there[*group][*at]);
        }
        found
    }
}
