//! Blocks that an engine offers where there is no host memory: they go from its memory to the disk.

use super::Offload;
use crate::admission::{Candidate, Trigger, Verdict};
use crate::metrics::DropReason;
use crate::transfers::Move;
use kvbm_plan::{BlockIdentity, Path, Tier};
use kvbm_pool::{AllocError, AnyArrivals, BlockMetadata};

impl Offload {
    /// The tier that blocks of G1 are copied to: host memory, or the disk where there is none.
    pub(crate) fn below_g1(&self) -> Tier {
        if self.edge(Path::G1_G3).is_some() { Tier::G3 } else { Tier::G2 }
    }

    /// Places of the blocks that may go to `to`, in order, of those that an engine offers. On the
    /// way to a disk, what it lacks is left to the admission policy, and as much goes as the disk
    /// takes. What stays is counted.
    pub(crate) fn offered(&self, identities: &[BlockIdentity], to: Tier) -> Vec<usize> {
        let all = 0..identities.len();
        let Some(edge) = self.edge(Path::G1_G3).filter(|_| to == Tier::G3) else { return all.collect() };
        let is_there = |identity: &BlockIdentity| {
            let BlockIdentity { group, hash, .. } = *identity;
            self.registry.tiers_of(group, hash).contains(to) || self.registry.is_arriving(to, group, hash)
        };
        let (there, fresh): (Vec<usize>, Vec<usize>) = all.partition(|&at| is_there(&identities[at]));
        let candidate = |&at: &usize| Candidate { identity: identities[at], expected_reuse: None };
        let candidates: Vec<Candidate> = fresh.iter().map(candidate).collect();
        let verdicts = self.judged(edge, Trigger::WriteThrough, &candidates);
        let admitted = fresh.into_iter().zip(verdicts).filter(|(_, verdict)| *verdict == Verdict::Admit);
        let mut chosen: Vec<usize> = admitted.map(|(at, _)| at).collect();
        let writable = self.slots.writable(chosen.len());
        let refused = chosen.len() - writable;
        self.metrics.path(edge.path).dropped(DropReason::DiskDown).add(refused as u64);
        chosen.truncate(writable);
        chosen.extend(there);
        chosen.sort_unstable();
        chosen
    }

    /// Destinations on `to`. Slots of the disk whose directories take no writes now are withheld.
    /// The caller keeps slots from changing hands until the transfer has begun.
    pub(crate) fn reserve_for_engine(
        &self,
        identities: &[BlockIdentity],
        to: Tier,
        metadata: BlockMetadata,
    ) -> Result<AnyArrivals, AllocError> {
        let path = Path::new(Tier::G1, to);
        self.withholding(path, || self.registry.begin_arrivals_with(to, identities, metadata))
    }

    /// Writes of an engine's blocks are about to begin.
    pub(crate) fn charge_for_engine(&self, moves: &[Move], to: Tier) {
        if let Some(edge) = self.edge(Path::new(Tier::G1, to)) {
            self.charge(edge, moves);
        }
    }
}
