//! For tests of this crate: chains of blocks, and their registration.

use crate::{BlockChain, Cached, Duplicates, Registry, TierTag};
use kvbm_plan::{GroupId, NamespaceId, SequenceHash};

pub(crate) const GROUP: GroupId = GroupId(0);

/// The hashes of a chain with this number.
pub(crate) fn chain(number: u64, length: u64) -> Vec<SequenceHash> {
    let hash = |index| u128::from(number) << 64 | u128::from(index);
    (0..length).map(|index| SequenceHash::from_bytes(hash(index).to_le_bytes())).collect()
}

/// Registers the blocks of `chain` from the one at `from` on.
pub(crate) fn register<T: TierTag>(registry: &Registry, chain: &[SequenceHash], from: usize) -> Cached<T> {
    register_as((NamespaceId(0), GROUP), registry, chain, from)
}

/// The same, in a namespace and group.
pub(crate) fn register_as<T: TierTag>(
    (namespace, group): (NamespaceId, GroupId),
    registry: &Registry,
    chain: &[SequenceHash],
    from: usize,
) -> Cached<T> {
    let pool = registry.pool::<T>();
    let fresh = pool.get_mutable_blocks_for(namespace, chain.len() - from).expect("there is room");
    let partial = fresh.init_sequence(namespace, group, from as u32).expect("a position in range");
    let complete = partial.commit(BlockChain::of_hashes(chain)).expect("a whole chain").0;
    pool.register(complete, Duplicates::Reuse).expect("its parent is there")
}
