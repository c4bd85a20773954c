//! Where blocks are, without using them.

use crate::remote::Peers;
use crate::volume::Volumes;
use kvbm_plan::{GroupId, NamespaceId, NodeId, SequenceHash, Tier, VolumeId};
use kvbm_pool::{Registry, TierMask};
use kvbm_tokens::BlockChain;

/// Where a block is, as far as this manager knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Places {
    /// G1, G2 and G3.
    pub tiers: TierMask,
    /// G4: the volume that has it. What others keep there, and nobody asked for yet, is not known.
    pub volume: Option<VolumeId>,
    /// The peer that has it in its memory, of blocks that are nowhere here.
    pub node: Option<NodeId>,
}

/// On these tiers and no volume.
impl From<TierMask> for Places {
    fn from(tiers: TierMask) -> Self {
        Self { tiers, volume: None, node: None }
    }
}

impl Places {
    /// Whether it is on `tier`.
    pub fn contains(&self, tier: Tier) -> bool {
        if tier == Tier::G4 { self.volume.is_some() } else { self.tiers.contains(tier) }
    }

    /// The tier nearest to the compute that has it.
    pub fn nearest(&self) -> Option<Tier> {
        self.tiers.nearest().or(self.volume.map(|_| Tier::G4))
    }

    /// Whether it is nowhere, here or at a peer.
    pub fn is_empty(&self) -> bool {
        self.nearest().is_none() && self.node.is_none()
    }
}

/// As [`look_up`], and behind that what a peer has.
pub(crate) fn look_up_with_peers(
    registry: &Registry,
    volumes: &Volumes,
    peers: Option<&dyn Peers>,
    group: GroupId,
    chain: BlockChain<'_>,
) -> Vec<Places> {
    let mut places = look_up(registry, volumes, group, chain);
    if let Some((node, blocks)) = peers.and_then(|peers| peers.holder(group, chain, places.len())) {
        let there = Places { node: Some(node), ..Places::from(TierMask::NONE) };
        places.extend(std::iter::repeat_n(there, blocks));
    }
    places
}

/// Where the blocks of `chain` in `group` are, up to the first that is nowhere. Asks no volume,
/// pins nothing and counts as no use.
fn look_up(registry: &Registry, volumes: &Volumes, group: GroupId, chain: BlockChain<'_>) -> Vec<Places> {
    let (hashes, namespace) = (chain.hashes(), NamespaceId::from(chain.namespace()));
    let on_tiers = registry.peek_prefix(group, hashes);
    let mut places: Vec<_> = on_tiers.into_iter().map(Places::from).collect();
    // What a match would not take from a volume is not there.
    let volumes = volumes.answering(namespace);
    if volumes.is_empty() {
        return places;
    }
    for (at, &hash) in hashes.iter().enumerate() {
        let holder = volumes.iter().find(|volume| volume.contains(group, hash));
        let volume = holder.map(|volume| volume.descriptor.id);
        if let Some(known) = places.get_mut(at) {
            known.volume = volume;
            continue;
        }
        // Behind a block that only a volume has, tiers may go on.
        let found = Places { tiers: registry.tiers_of(group, hash), volume, node: None };
        if found.is_empty() {
            break;
        }
        places.push(found);
    }
    places
}

/// Where each block of `chain` in `group` is, also behind blocks that are nowhere. Asks no volume,
/// pins nothing and counts as no use.
pub(crate) fn of_each(
    registry: &Registry,
    volumes: &Volumes,
    group: GroupId,
    chain: BlockChain<'_>,
) -> Vec<Places> {
    let volumes = volumes.answering(NamespaceId::from(chain.namespace()));
    let place = |&hash: &SequenceHash| {
        let holder = volumes.iter().find(|volume| volume.contains(group, hash));
        let volume = holder.map(|volume| volume.descriptor.id);
        Places { tiers: registry.tiers_of(group, hash), volume, node: None }
    };
    chain.hashes().iter().map(place).collect()
}
