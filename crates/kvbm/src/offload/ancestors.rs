//! Ancestors of a block that the lower tier lacks: they go down before the block.

use super::edge::{Batch, Edge, Waiting};
use super::{Interval, Offload};
use crate::metrics::DropReason;
use kvbm_plan::{BlockIdentity, GroupId, Path, SequenceHash, Tier};
use kvbm_pool::{G1, G2, Pinned};
use std::collections::HashSet;

impl Offload {
    /// The orphans behind those of their ancestors that the lower tier lacks and the upper one has.
    /// A block whose ancestor is on its way to the upper tier waits for it: requests that share a
    /// prefix save in parallel. A block that lacks an ancestor otherwise is left out and counted.
    pub(super) fn with_ancestors(
        &self,
        edge: &Edge,
        interval: Interval,
        orphans: &[BlockIdentity],
    ) -> Pinned {
        let mut family = self.nothing(edge.path.src);
        let mut known: HashSet<(GroupId, SequenceHash)> = HashSet::new();
        for orphan in orphans {
            let chain = match self.chain(edge, orphan, &known) {
                Ok(chain) => chain,
                Err(lacking) => {
                    self.wait_for(edge, interval, orphan, lacking);
                    continue;
                }
            };
            for member in chain {
                known.extend(member.identities().iter().map(|identity| (identity.group, identity.hash)));
                if family.len() < edge.limit {
                    // Of the same registry, tier and kind of pin, so it is never refused.
                    let _refused = family.append(member);
                }
            }
        }
        family
    }

    /// Keeps `orphan` until its ancestor has arrived; counts it as dropped where the ancestor is
    /// not on its way.
    fn wait_for(&self, edge: &Edge, interval: Interval, orphan: &BlockIdentity, ancestor: SequenceHash) {
        let Path { src, .. } = edge.path;
        // An arrival that ends after this check is found by the next look.
        let blocks = self.registry.is_arriving(src, orphan.group, ancestor);
        let blocks = blocks.then(|| self.pin(src, orphan.group, orphan.hash)).flatten();
        let Some(blocks) = blocks else {
            self.metrics.path(edge.path).dropped(DropReason::MissingParent).add(1);
            return;
        };
        self.accounts.add(interval, blocks.len());
        let batch = Batch { blocks, interval };
        let refused = edge.wait(Waiting { batch, group: orphan.group, ancestor });
        self.drop_all(edge, refused.into_iter().collect(), DropReason::QueueFull);
        self.wake();
    }

    /// Queues the blocks whose ancestor has arrived, or will not arrive.
    pub(super) fn requeue_waiting(&self, edge: &Edge) {
        let is_arriving = |group, hash| self.registry.is_arriving(edge.path.src, group, hash);
        for Batch { blocks, interval } in edge.take_ready(is_arriving) {
            let count = blocks.len();
            self.enqueue(edge, interval, blocks);
            self.accounts.remove(interval, count);
        }
    }

    /// A block with its missing ancestors, topmost first; else the ancestor, or the block itself,
    /// that is on neither tier.
    fn chain(
        &self,
        edge: &Edge,
        orphan: &BlockIdentity,
        known: &HashSet<(GroupId, SequenceHash)>,
    ) -> Result<Vec<Pinned>, SequenceHash> {
        let pin = |hash| self.pin(edge.path.src, orphan.group, hash).ok_or(hash);
        let mut chain = vec![pin(orphan.hash)?];
        let mut parent = orphan.parent;
        while let Some(hash) = parent.filter(|hash| !known.contains(&(orphan.group, *hash))) {
            if self.is_below(edge.path.dst, orphan.group, hash) || chain.len() >= edge.limit {
                break;
            }
            let pinned = pin(hash)?;
            parent = pinned.identities().first().and_then(|identity| identity.parent);
            chain.push(pinned);
        }
        chain.reverse();
        Ok(chain)
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
