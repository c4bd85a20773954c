//! A trace's requests as chains of sequence hashes.

use kvbm::tokens::BlockHasher;
use kvbm::{BlockChain, SequenceHash};

use crate::rng::Rng;
use crate::trace::Trace;
use std::collections::HashSet;

/// Every request's hashes, one after the other: each block id of the trace stands for a full block
/// behind those before it.
pub(super) struct Requests {
    hashers: Vec<BlockHasher>,
    /// Which of them is each request's.
    namespaces: Vec<usize>,
    hashes: Vec<SequenceHash>,
    /// Where each request ends in `hashes`.
    ends: Vec<usize>,
}

impl Requests {
    /// Hashes `trace`, each tenant's requests in a namespace of their own, the first being
    /// nobody's. With one namespace all are in that.
    pub(super) fn new(trace: &Trace, hashers: Vec<BlockHasher>) -> Self {
        let mut hashes = Vec::with_capacity(trace.num_blocks() as usize);
        let mut ends = Vec::with_capacity(trace.requests().len());
        let of = |tenant: usize| if tenant < hashers.len() { tenant } else { 0 };
        let namespaces: Vec<usize> = trace.requests().iter().map(|request| of(request.tenant())).collect();
        for (request, &namespace) in trace.requests().iter().zip(&namespaces) {
            let mut parent = None;
            hashes.extend(trace.blocks(request).iter().map(|id| {
                let hash = hash(&hashers[namespace], parent, *id);
                parent = Some(hash);
                hash
            }));
            ends.push(hashes.len());
        }
        Self { hashers, namespaces, hashes, ends }
    }

    /// The number of the namespace of request `index`.
    pub(super) fn namespace(&self, index: usize) -> usize {
        self.namespaces.get(index).copied().unwrap_or(0)
    }

    /// Number of requests.
    pub(super) fn len(&self) -> usize {
        self.ends.len()
    }

    /// Blocks of all requests.
    pub(super) fn num_blocks(&self) -> u64 {
        self.hashes.len() as u64
    }

    /// The hashes of request `index`; none beyond the end.
    pub(super) fn hashes(&self, index: usize) -> &[SequenceHash] {
        let Some(&end) = self.ends.get(index) else { return &[] };
        let start = index.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.hashes[start..end]
    }

    /// For each request whether its last two blocks occur in no later request; each answer is
    /// flipped with probability `1 - accuracy`, as `seed` decides.
    pub(super) fn endings(&self, accuracy: f64, seed: u64) -> Vec<bool> {
        const PARTS: u64 = 1 << 32;
        // Not the numbers that made the workload.
        let mut rng = Rng::new(seed ^ 0x656e_6469_6e67_7321);
        let mut later: HashSet<SequenceHash> = HashSet::new();
        let mut ends = vec![false; self.len()];
        for (index, end) in ends.iter_mut().enumerate().rev() {
            let hashes = self.hashes(index);
            let truth = !hashes.iter().rev().take(2).any(|hash| later.contains(hash));
            *end = truth ^ (rng.below(PARTS) as f64 >= accuracy * PARTS as f64);
            later.extend(hashes);
        }
        ends
    }

    /// Hashes of request `index` as a chain.
    pub(super) fn chain<'a>(&self, index: usize, hashes: &'a [SequenceHash]) -> BlockChain<'a> {
        BlockChain::of_hashes(hashes).in_namespace(self.hashers[self.namespace(index)].tag())
    }
}

/// The block that a trace calls `id`, behind `parent`. Ids begin anew in each trace: two traces
/// that are replayed on the same directory or volume share blocks only where all before them is the
/// same too.
fn hash(hasher: &BlockHasher, parent: Option<SequenceHash>, id: u64) -> SequenceHash {
    let parent = parent.as_ref().map_or(&[][..], |parent| parent.as_bytes());
    SequenceHash::from_external(hasher, &[parent, &id.to_le_bytes()].concat())
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvbm::tokens::Namespace;

    #[test]
    fn a_request_ends_its_branch_where_its_last_two_blocks_do_not_come_again() {
        let mut trace = Trace::default();
        for (at, blocks) in
            [&[1, 2, 3][..], &[1, 2, 3, 4], &[1, 9], &[1, 2, 5], &[1, 2]].into_iter().enumerate()
        {
            trace.push(at as u64, 0, blocks);
        }
        let hasher = Namespace::new("test").page_size(16).hasher().unwrap();
        let requests = Requests::new(&trace, vec![hasher]);
        let truth = [false, true, false, false, true];
        assert_eq!(requests.endings(1.0, 3), truth);
        assert_eq!(requests.endings(0.0, 3), truth.map(|end| !end));
        assert_eq!(requests.endings(0.5, 3), requests.endings(0.5, 3));
    }

    /// Mutation that makes it fail: a block's hash is that of its id alone.
    #[test]
    fn an_id_behind_other_blocks_is_another_block() {
        let mut trace = Trace::default();
        for blocks in [&[1, 2, 3][..], &[4, 2, 3], &[1, 2, 5]] {
            trace.push(0, 0, blocks);
        }
        let hasher = Namespace::new("test").page_size(16).hasher().unwrap();
        let requests = Requests::new(&trace, vec![hasher]);
        let [first, other, third] = [0, 1, 2].map(|index| requests.hashes(index));
        assert!(first.iter().zip(other).all(|(a, b)| a != b));
        assert_eq!((first[..2] == third[..2], first[2] == third[2]), (true, false));
    }
}
