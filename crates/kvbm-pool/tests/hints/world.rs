//! Chains that share beginnings, on two tiers, and what events say of them.

use kvbm_plan::{GroupId, NamespaceId, SequenceHash, Tier};
use kvbm_pool::{
    BlockChain, Duplicates, EventRecord, EventRecordKind, G1, G2, PolicyKind, Registry, RegistryConfig,
    TierTag,
};
use std::collections::BTreeSet;

pub(crate) const GROUP: GroupId = GroupId(0);
pub(crate) const CAPACITY: u32 = 40;
pub(crate) const POLICIES: [PolicyKind; 2] = [PolicyKind::LruLeaf, PolicyKind::Hazard];

pub(crate) type Chain = Vec<SequenceHash>;

pub(crate) struct Rng(pub(crate) u64);

impl Rng {
    pub(crate) fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % end.max(1)
    }
}

/// `count` blocks of branch `branch`, behind the first `shared` ones of branch `from`.
pub(crate) fn chain(from: u8, shared: usize, branch: u8, count: usize) -> Chain {
    let block = |branch: u8, at: usize| {
        SequenceHash::from_bytes([branch, at as u8, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2, 3, 4])
    };
    (0..shared).map(|at| block(from, at)).chain((shared..count).map(|at| block(branch, at))).collect()
}

/// Twelve chains of 4 to 15 blocks; three in four share a beginning with an earlier one.
pub(crate) fn chains() -> Vec<Chain> {
    (0..12_u8)
        .map(|branch| {
            let shared = if branch % 4 == 0 { 0 } else { 1 + usize::from(branch % 3) };
            chain(branch / 4 * 4, shared, branch, 4 + usize::from(branch))
        })
        .collect()
}

pub(crate) struct World {
    pub(crate) registry: Registry,
    /// What is on each tier, by the events.
    pub(crate) announced: [BTreeSet<SequenceHash>; 2],
    drained: Vec<EventRecord>,
}

impl World {
    pub(crate) fn new(policy: PolicyKind) -> Self {
        Self::seeded(policy, 0)
    }

    pub(crate) fn seeded(policy: PolicyKind, policy_seed: u64) -> Self {
        let config = RegistryConfig { policy, policy_seed, ..RegistryConfig::new([CAPACITY, CAPACITY, 0]) };
        Self { registry: Registry::new(&config).unwrap(), announced: Default::default(), drained: Vec::new() }
    }

    /// Makes the chain present on `T` as far as there is room, and lets go of it.
    pub(crate) fn serve<T: TierTag>(&mut self, chain: &[SequenceHash], namespace: NamespaceId) {
        let pool = self.registry.pool::<T>();
        let cached = pool.match_sequence_hashes(GROUP, chain);
        if let Ok(fresh) = pool.get_mutable_blocks(chain.len() - cached.len()) {
            let partial = fresh.init_sequence(namespace, GROUP, cached.len() as u32).unwrap();
            // Nothing to commit where the whole chain was there.
            if let Ok((done, _)) = partial.commit(BlockChain::of_hashes(chain)) {
                drop(pool.register(done, Duplicates::Reuse).unwrap());
            }
        }
        self.registry.touch(GROUP, chain);
    }

    pub(crate) fn serve_on(&mut self, tier: usize, chain: &[SequenceHash], namespace: NamespaceId) {
        match tier {
            0 => self.serve::<G1>(chain, namespace),
            _ => self.serve::<G2>(chain, namespace),
        }
    }

    /// Follows the events; they must tell what is there, no more and no less, parents before
    /// children.
    pub(crate) fn check_events(&mut self) {
        self.registry.drain_events(&mut self.drained, usize::MAX);
        for record in self.drained.drain(..) {
            let announced = &mut self.announced[record.tier.index()];
            let (hash, parent) = (record.identity.hash, record.identity.parent);
            match record.kind {
                EventRecordKind::Store => {
                    assert!(parent.is_none_or(|parent| announced.contains(&parent)), "{record:?}");
                    assert!(announced.insert(hash), "{record:?}");
                }
                EventRecordKind::Remove => assert!(announced.remove(&hash), "{record:?}"),
            }
        }
        for tier in [Tier::G1, Tier::G2] {
            let (all, _) = self.registry.snapshot(tier);
            let there: BTreeSet<_> = all.iter().map(|(_, identity)| identity.hash).collect();
            assert_eq!(there, self.announced[tier.index()]);
        }
    }
}
