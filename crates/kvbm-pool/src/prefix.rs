//! A matched prefix, over several tiers.

use crate::core::registered::Reference;
use crate::found::{ArrivingBlock, Outside, PrefixBlock};
use crate::losses::{Losses, Lost};
use crate::pinned::{Cached, Pinned};
use crate::shared::RegistryState;
use crate::sync::Arc;
use crate::tier::{G1, G2, G3, TierTag};
use kvbm_plan::{BlockIdentity, GroupId, NamespaceId, NodeId, SequenceHash, Tier, VolumeId};
use kvbm_tokens::{ChainLink, ChainOrigin};
use std::fmt;

/// The longest prefix that is on some tier, each block pinned on its nearest one.
///
/// For a Full group the blocks are all of the prefix. For the other kinds the prefix is longer than
/// the list: what comes before `start` is not needed.
#[must_use = "dropping a prefix makes its blocks evictable"]
pub struct Prefix {
    pub(crate) shared: Arc<RegistryState>,
    pub(crate) namespace: NamespaceId,
    pub(crate) group: GroupId,
    /// Hashes of the chain from its first block, at least up to the end of the prefix.
    pub(crate) hashes: Vec<SequenceHash>,
    /// What comes before them.
    pub(crate) origin: ChainOrigin,
    /// Index of the first listed block: positions are 32 bits wide.
    pub(crate) start: u32,
    /// When it was matched.
    pub(crate) losses: Losses,
    pub(crate) blocks: Vec<PrefixBlock>,
    pub(crate) arriving: Vec<ArrivingBlock>,
    /// Where the blocks on G4 are.
    pub(crate) outside: Option<Outside>,
}

/// The time fits beside the namespace.
#[cfg(target_pointer_width = "64")]
const _: () = assert!(size_of::<Prefix>() == 128);

/// A prefix taken apart by tier.
#[derive(Debug)]
pub struct PrefixParts {
    /// Index of the first listed block.
    pub start: usize,
    /// Every block in order; the n-th of a tier is the n-th of that tier's part.
    pub blocks: Vec<PrefixBlock>,
    /// The blocks on G1.
    pub g1: Cached<G1>,
    /// The blocks on G2.
    pub g2: Cached<G2>,
    /// The blocks on G3.
    pub g3: Cached<G3>,
}

impl Prefix {
    /// Cache group of the blocks.
    pub const fn group(&self) -> GroupId {
        self.group
    }

    /// Hashes of the listed blocks.
    pub fn hashes(&self) -> &[SequenceHash] {
        &self.hashes[self.start()..self.len()]
    }

    /// Blocks that the prefix covers, from the first of the sequence.
    pub fn len(&self) -> usize {
        self.start() + self.blocks.len()
    }

    /// Whether nothing was found.
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Index of the first listed block; 0 for a Full group.
    pub const fn start(&self) -> usize {
        self.start as usize
    }

    /// The pinned blocks, in order, from [`start`](Self::start) on.
    pub fn blocks(&self) -> &[PrefixBlock] {
        &self.blocks
    }

    /// Blocks on `tier`.
    pub fn count(&self, tier: Tier) -> usize {
        self.blocks.iter().filter(|block| block.tier == tier).count()
    }

    /// Blocks just after the prefix that are on their way, as far as nothing else is missing
    /// between: with them the prefix would be longer. Look again when the transfers of these
    /// tickets are over.
    pub fn arriving(&self) -> &[ArrivingBlock] {
        &self.arriving
    }

    /// What listed block `index` holds.
    pub fn identity(&self, index: usize) -> Option<BlockIdentity> {
        if index < self.blocks.len() { self.identity_at(self.start() + index) } else { None }
    }

    fn identity_at(&self, at: usize) -> Option<BlockIdentity> {
        let ChainLink { hash, parent, position } = self.origin.link(&self.hashes, at)?;
        Some(BlockIdentity { namespace: self.namespace, group: self.group, hash, parent, position })
    }

    /// Says what comes before the chain, and lets go of blocks from the first one on that is
    /// registered with another parent or position. Whether there is none.
    pub(crate) fn begin_at(&mut self, origin: ChainOrigin) -> bool {
        self.origin = origin;
        let hold = self.shared.store.lock();
        let same = |(at, block): (usize, &PrefixBlock)| {
            if block.tier == Tier::G4 {
                // The registry knows nothing of it.
                return true;
            }
            let found = hold.identity_in(block.tier.index(), block.block.0);
            let wanted = self.identity_at(self.start() + at);
            wanted.is_some_and(|wanted| (wanted.parent, wanted.position) == (found.parent, found.position))
        };
        let right = self.blocks.iter().enumerate().take_while(|&place| same(place)).count();
        drop(hold);
        let agrees = right == self.blocks.len();
        if !agrees {
            self.truncate(self.start() + right);
            self.arriving.clear();
        }
        agrees
    }

    /// What the listed blocks hold.
    pub fn identities(&self) -> Vec<BlockIdentity> {
        (0..self.blocks.len()).filter_map(|index| self.identity_at(self.start() + index)).collect()
    }

    /// For each listed block that is not on [`Tier::G4`] whether its slot still is one of the
    /// block's, see [`Pinned::registered`]. Those on G4 are left out.
    pub fn registered(&self) -> Vec<bool> {
        let slotted = self.blocks.iter().filter(|block| block.tier != Tier::G4);
        self.shared.store.lock().are_registered(slotted.map(|block| (block.tier.index(), block.block)))
    }

    /// When it was matched.
    pub const fn losses(&self) -> Losses {
        self.losses
    }

    /// The nearest of the tiers with listed blocks that lost what it held since they were matched,
    /// if one did: match the prefix again.
    pub fn lost(&self) -> Option<Lost> {
        let is_lost = |tier: &Tier| {
            self.shared.store.losses.is_lost(tier.index(), self.losses) && self.count(*tier) > 0
        };
        Tier::SLOTTED.into_iter().find(is_lost).map(|tier| Lost { tier })
    }

    /// The volume that the blocks on [`Tier::G4`] are on, if they are on one.
    pub const fn volume(&self) -> Option<VolumeId> {
        match self.outside {
            Some(Outside::Volume(volume)) => Some(volume),
            _ => None,
        }
    }

    /// The peer in whose memory the blocks listed as [`Tier::G4`] are, if they are in one's.
    pub const fn node(&self) -> Option<NodeId> {
        match self.outside {
            Some(Outside::Node(node)) => Some(node),
            _ => None,
        }
    }

    /// What the chain holds from its first block to the end of the prefix, the blocks before
    /// [`start`](Self::start) included.
    pub fn chain_identities(&self) -> Vec<BlockIdentity> {
        (0..self.len()).filter_map(|at| self.identity_at(at)).collect()
    }

    /// Adds the next `more` blocks of the sequence that was looked up, which lie on no tier of the
    /// registry but on `volume`, as the caller knows. They count as on [`Tier::G4`], have no slot
    /// and are not pinned. At most as many as the sequence has; how many.
    pub fn extend_on_volume(&mut self, volume: VolumeId, namespace: NamespaceId, more: usize) -> usize {
        self.extend_outside(Outside::Volume(volume), namespace, more)
    }

    /// The same for blocks in the memory of a peer. They are listed as on [`Tier::G4`] too; a
    /// prefix has blocks on a volume or of one peer, not both.
    pub fn extend_on_node(&mut self, node: NodeId, namespace: NamespaceId, more: usize) -> usize {
        self.extend_outside(Outside::Node(node), namespace, more)
    }

    fn extend_outside(&mut self, outside: Outside, namespace: NamespaceId, more: usize) -> usize {
        let more = more.min(self.hashes.len().saturating_sub(self.len()));
        if self.blocks.is_empty() {
            self.namespace = namespace;
        }
        if more > 0 {
            self.outside = Some(outside);
        }
        self.blocks.extend(std::iter::repeat_n(PrefixBlock::OUTSIDE, more));
        more
    }

    /// Keeps the first `len` blocks of the prefix and lets go of the others.
    pub fn truncate(&mut self, len: usize) {
        drop(self.split_off(len));
    }

    /// Lets go of all blocks: the prefix covers nothing. A part of a window is of no use.
    pub fn clear(&mut self) {
        self.truncate(0);
        self.start = 0;
    }

    /// Cuts the prefix in two: what covers blocks from `at` on is given back.
    pub fn split_off(&mut self, at: usize) -> Self {
        let keep = at.saturating_sub(self.start()).min(self.blocks.len());
        let blocks = self.blocks.split_off(keep);
        let arriving = std::mem::take(&mut self.arriving);
        let outside = self.outside.filter(|_| has_outside(&blocks));
        self.outside = self.outside.filter(|_| has_outside(&self.blocks));
        Self {
            shared: Arc::clone(&self.shared),
            namespace: self.namespace,
            group: self.group,
            hashes: self.hashes.clone(),
            origin: self.origin,
            start: self.start + keep as u32,
            losses: self.losses,
            blocks,
            arriving,
            outside,
        }
    }

    /// Takes the prefix apart; every block stays pinned.
    pub fn into_parts(mut self) -> PrefixParts {
        let blocks = std::mem::take(&mut self.blocks);
        PrefixParts {
            start: self.start(),
            g1: self.part(&blocks),
            g2: self.part(&blocks),
            g3: self.part(&blocks),
            blocks,
        }
    }

    /// The pins of `blocks` on one tier, which the caller has taken out of this prefix.
    fn part<T: TierTag>(&self, blocks: &[PrefixBlock]) -> Cached<T> {
        let on_tier = blocks.iter().filter(|block| block.tier == T::TIER);
        Cached::new(Pinned {
            shared: Arc::clone(&self.shared),
            tier: T::TIER,
            ids: on_tier.map(|block| block.block).collect(),
            reference: Reference::Use,
            losses: self.losses,
        })
    }
}

/// Whether some of these lie on no tier of the registry.
fn has_outside(blocks: &[PrefixBlock]) -> bool {
    blocks.iter().any(|block| block.tier == Tier::G4)
}

impl Drop for Prefix {
    fn drop(&mut self) {
        if self.blocks.is_empty() {
            return;
        }
        let slotted = self.blocks.iter().rev().filter(|block| block.tier != Tier::G4);
        let mut hold = self.shared.store.lock();
        for block in slotted {
            hold.drop_reference(block.tier.index(), block.block.0, Reference::Use);
        }
    }
}

impl fmt::Debug for Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Prefix")
            .field("start", &self.start)
            .field("blocks", &self.blocks)
            .field("arriving", &self.arriving)
            .finish_non_exhaustive()
    }
}
