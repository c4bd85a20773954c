//! What is proposed, and when.

use crate::{Advisor, Chain, PlaceKey, Prefix};
use kvbm_events::SourceId;
use kvbm_plan::{Location, Tier};
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::time::{Duration, Instant};

/// When something is hot, cold or fragmented.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Policy {
    /// A prefix's heat halves in this time.
    pub half_life: Duration,
    /// From this heat for each block on, a prefix is worth faster storage.
    pub hot: f64,
    /// Below this heat for each block, it is worth only slower storage.
    pub cold: f64,
    /// A place is worth rewriting when more than this share of the most that it held was removed
    /// and not filled again,
    pub dead_share: f64,
    /// and that is at least so many bytes.
    pub dead_bytes: u64,
    /// Or when more than this share of its blocks follow a block that is not there.
    pub orphan_share: f64,
    /// Most different blocks that are known.
    pub max_blocks: usize,
    /// Most work for a report in looking for blocks that follow none, in comparisons of two places:
    /// where there are more blocks, as many as this allows say it for all.
    pub max_compared: usize,
}

impl Default for Policy {
    /// Five minutes; hot from 4 and cold below 0.25 a block; half dead, at least 64 MiB, or a
    /// quarter orphaned; 4 million blocks, 16 million comparisons (some 50 ms).
    fn default() -> Self {
        Self {
            half_life: Duration::from_secs(300),
            hot: 4.0,
            cold: 0.25,
            dead_share: 0.5,
            dead_bytes: 64 << 20,
            orphan_share: 0.25,
            max_blocks: 4 << 20,
            max_compared: 16 << 20,
        }
    }
}

/// What the storage could do. Nobody has to.
#[derive(Clone, Debug, PartialEq)]
pub enum Proposal {
    /// Blocks of a hot prefix lie on slow storage: move them to fast storage.
    Promote {
        /// The prefix.
        prefix: Prefix,
        /// Where its blocks are.
        from: Location,
        /// How many, and how large together.
        blocks: usize,
        /// Bytes of them.
        bytes: u64,
        /// Heat for each block.
        heat: f64,
    },
    /// Blocks of a cold prefix lie on fast storage: move them to slow storage.
    Demote {
        /// The prefix.
        prefix: Prefix,
        /// Where its blocks are.
        from: Location,
        /// How many.
        blocks: usize,
        /// Bytes of them.
        bytes: u64,
        /// Heat for each block.
        heat: f64,
    },
    /// A place has many holes: rewrite what is left, chains side by side.
    Compact {
        /// Whose.
        source: SourceId,
        /// The place.
        at: Location,
        /// Bytes that are left.
        live_bytes: u64,
        /// Bytes that were removed and not filled again.
        hole_bytes: u64,
        /// Blocks that follow a block that is not there, of those that were looked at
        /// ([`Policy::max_compared`]).
        orphans: usize,
    },
}

impl fmt::Display for Proposal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let moved = |f: &mut fmt::Formatter<'_>,
                     what: &str,
                     to: &str,
                     place: (&Prefix, &Location),
                     figures| {
            let (prefix, from) = place;
            let (blocks, bytes, heat): (usize, u64, f64) = figures;
            write!(
                f,
                "{what} prefix {}: {blocks} blocks, {bytes} bytes from {} of node {} to {to} storage (heat {heat:.2} a block)",
                prefix.hash, from.tier, from.node.0
            )
        };
        match self {
            Self::Promote { prefix, from, blocks, bytes, heat } => {
                moved(f, "promote", "faster", (prefix, from), (*blocks, *bytes, *heat))
            }
            Self::Demote { prefix, from, blocks, bytes, heat } => {
                moved(f, "demote", "slower", (prefix, from), (*blocks, *bytes, *heat))
            }
            Self::Compact { source, at, live_bytes, hole_bytes, orphans } => write!(
                f,
                "compact {} of node {} of source {source}: {live_bytes} bytes are left, {hole_bytes} are holes, \
                 {orphans} blocks follow none",
                at.tier, at.node.0
            ),
        }
    }
}

/// Of each kind at most `most`, in their order: many promotions must not hide that something should
/// be compacted.
pub fn best_of_each(proposals: &[Proposal], most: usize) -> Vec<&Proposal> {
    let mut seen = [0; 3];
    let fits = |proposal: &&Proposal| {
        let kind = match proposal {
            Proposal::Promote { .. } => 0,
            Proposal::Demote { .. } => 1,
            Proposal::Compact { .. } => 2,
        };
        seen[kind] += 1;
        seen[kind] <= most
    };
    proposals.iter().filter(fits).collect()
}

/// Storage below host memory: what a vendor moves.
fn is_storage(location: &Location) -> bool {
    matches!(location.tier, Tier::G3 | Tier::G4)
}

impl Advisor {
    /// What could be done now, the most useful first. Nothing is proposed for device and host
    /// memory: those are the manager's own.
    pub fn proposals(&self, now: Instant) -> Vec<Proposal> {
        let mut moves: Vec<(f64, Proposal)> =
            self.chains.iter().flat_map(|(prefix, chain)| self.moves(*prefix, chain, now)).collect();
        // The hottest first; cold ones by what they free.
        moves.sort_by(|(a, _), (b, _)| b.total_cmp(a));
        moves.into_iter().map(|(_, proposal)| proposal).chain(self.compactions()).collect()
    }

    fn moves(&self, prefix: Prefix, chain: &Chain, now: Instant) -> Vec<(f64, Proposal)> {
        let heat = chain.heat.now(now, self.policy.half_life) / chain.blocks.len().max(1) as f64;
        let mut places: BTreeMap<u8, (Location, usize, u64)> = BTreeMap::new();
        for block in chain.blocks.values() {
            for location in block.holders.iter().map(|holder| holder.location).filter(is_storage) {
                let place = places.entry(location.tier.index() as u8).or_insert((location, 0, 0));
                (place.1, place.2) = (place.1 + 1, place.2 + block.bytes);
            }
        }
        let proposal = |(from, blocks, bytes): (Location, usize, u64)| {
            if heat >= self.policy.hot {
                Some((heat, Proposal::Promote { prefix, from, blocks, bytes, heat }))
            } else if heat < self.policy.cold && from.tier == Tier::G3 {
                Some((-1.0 / bytes.max(1) as f64, Proposal::Demote { prefix, from, blocks, bytes, heat }))
            } else {
                None
            }
        };
        places.into_values().filter_map(proposal).collect()
    }

    fn compactions(&self) -> impl Iterator<Item = Proposal> + '_ {
        let orphans = self.orphans();
        self.places.iter().filter(|(_, (at, _))| is_storage(at)).filter_map(move |(place, (at, room))| {
            let (blocks, orphans) = orphans.get(place).copied().unwrap_or_default();
            let hole_bytes = room.hole_bytes();
            let dead = hole_bytes >= self.policy.dead_bytes
                && hole_bytes as f64 > self.policy.dead_share * room.peak_bytes as f64;
            let torn = blocks > 0 && orphans as f64 > self.policy.orphan_share * blocks as f64;
            let live_bytes = room.live_bytes;
            let (source, at) = (place.0, *at);
            (dead || torn).then_some(Proposal::Compact { source, at, live_bytes, hole_bytes, orphans })
        })
    }

    /// Blocks on storage by place, and those of them whose parent is not there: all in one pass,
    /// which ends where [`Policy::max_compared`] does.
    fn orphans(&self) -> HashMap<PlaceKey, (usize, usize)> {
        let (mut found, mut compared) = (HashMap::<_, (usize, usize)>::new(), 0);
        for chain in self.chains.values() {
            for block in chain.blocks.values() {
                if compared >= self.policy.max_compared {
                    return found;
                }
                let parent = block.parent.map(|parent| chain.blocks.get(&parent));
                let parents = parent.flatten().map_or(&[][..], |parent| &parent.holders);
                compared += block.holders.len() * parents.len().max(1);
                for holder in block.holders.iter().filter(|holder| is_storage(&holder.location)) {
                    let (blocks, orphans) = found.entry(holder.place()).or_default();
                    *blocks += 1;
                    *orphans += usize::from(parent.is_some() && !parents.contains(holder));
                }
            }
        }
        found
    }

    /// A place was rewritten: its holes are gone.
    pub fn compacted(&mut self, source: SourceId, at: Location) {
        let there = |(of, ..): &PlaceKey, location: Location| *of == source && location == at;
        for (_, (_, room)) in self.places.iter_mut().filter(|(of, (location, _))| there(of, *location)) {
            room.peak_bytes = room.live_bytes;
        }
    }
}
