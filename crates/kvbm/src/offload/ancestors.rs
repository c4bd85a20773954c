//! Ancestors of a block that the lower tier lacks: they go down before the block.

use super::Offload;
use super::edge::Edge;
use crate::metrics::DropReason;
use kvbm_plan::{BlockIdentity, GroupId, SequenceHash, Tier};
use kvbm_pool::{G1, G2, Pinned};
use std::collections::HashSet;

impl Offload {
    /// The orphans behind those of their ancestors that the lower tier lacks and the upper one has.
    /// What lacks one on both is left out and counted.
    pub(super) fn with_ancestors(&self, edge: &Edge, orphans: &[BlockIdentity]) -> Pinned {
        let mut family = self.nothing(edge.path.src);
        let mut known: HashSet<SequenceHash> = HashSet::new();
        for orphan in orphans {
            let Some(chain) = self.chain(edge, orphan, &known) else {
                self.metrics.path(edge.path).dropped(DropReason::MissingParent).add(1);
                continue;
            };
            for member in chain {
                known.extend(member.identities().iter().map(|identity| identity.hash));
                if family.len() < edge.limit {
                    // Of the same registry, tier and kind of pin, so it is never refused.
                    let _refused = family.append(member);
                }
            }
        }
        family
    }

    /// A block with its missing ancestors, topmost first. `None` where one of them is on neither
    /// tier.
    fn chain(
        &self,
        edge: &Edge,
        orphan: &BlockIdentity,
        known: &HashSet<SequenceHash>,
    ) -> Option<Vec<Pinned>> {
        let mut chain = vec![self.pin(edge.path.src, orphan.group, orphan.hash)?];
        let mut parent = orphan.parent;
        while let Some(hash) = parent.filter(|hash| !known.contains(hash)) {
            if self.is_below(edge.path.dst, orphan.group, hash) || chain.len() >= edge.limit {
                break;
            }
            let pinned = self.pin(edge.path.src, orphan.group, hash)?;
            parent = pinned.identities().first().and_then(|identity| identity.parent);
            chain.push(pinned);
        }
        chain.reverse();
        Some(chain)
    }

    fn is_below(&self, tier: Tier, group: GroupId, hash: SequenceHash) -> bool {
        match tier {
            Tier::G4 => self.volumes.awaits(group, hash),
            _ => self.registry.tiers_of(group, hash).contains(tier),
        }
    }

    /// One block of `tier`, held for a transfer, if it is there.
    pub(crate) fn pin(&self, tier: Tier, group: GroupId, hash: SequenceHash) -> Option<Pinned> {
        let pinned = match tier {
            Tier::G1 => self.registry.pool::<G1>().match_sequence_hashes(group, &[hash]).erase(),
            Tier::G2 => self.registry.pool::<G2>().match_sequence_hashes(group, &[hash]).erase(),
            Tier::G3 | Tier::G4 => return None,
        };
        Some(pinned.into_transfer()).filter(|pinned| !pinned.is_empty())
    }

    /// An empty batch to add to.
    pub(crate) fn nothing(&self, tier: Tier) -> Pinned {
        self.registry.coldest(tier, 0, tier, 0)
    }
}
