//! A trace's requests as chains of sequence hashes.

use kvbm::tokens::BlockHasher;
use kvbm::{BlockChain, SequenceHash};

use crate::trace::Trace;

/// Every request's hashes, one after the other: each block id of the trace stands for a full block and all before it.
pub(super) struct Requests {
    hasher: BlockHasher,
    hashes: Vec<SequenceHash>,
    /// Where each request ends in `hashes`.
    ends: Vec<usize>,
}

impl Requests {
    /// Hashes `trace` in the namespace of `hasher`.
    pub(super) fn new(trace: &Trace, hasher: BlockHasher) -> Self {
        let mut hashes = Vec::with_capacity(trace.num_blocks() as usize);
        let mut ends = Vec::with_capacity(trace.requests().len());
        for request in trace.requests() {
            let ids = trace.blocks(request).iter();
            hashes.extend(ids.map(|id| SequenceHash::from_external(&hasher, &id.to_le_bytes())));
            ends.push(hashes.len());
        }
        Self { hasher, hashes, ends }
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

    /// The same as a chain.
    pub(super) fn chain<'a>(&self, hashes: &'a [SequenceHash]) -> BlockChain<'a> {
        BlockChain::of_hashes(hashes).in_namespace(self.hasher.tag())
    }
}
