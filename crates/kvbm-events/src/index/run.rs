//! A run: consecutive blocks of one chain, without branches inside, for all sources together.

use super::spans::Spans;
use kvbm_plan::{GroupId, SequenceHash};

/// Most blocks of a run, so that an index into one is a byte.
pub(super) const MAX_RUN: usize = 256;

/// Consecutive blocks of a chain. Branches hang at any block: they are runs of their own, found by
/// the hash of their first block.
#[derive(Debug, Default)]
pub(super) struct BlockRun {
    hashes: Vec<SequenceHash>,
    pub(super) spans: Spans,
    /// A bit for each block that somebody holds.
    live: [u64; MAX_RUN / 64],
    pub(super) group: GroupId,
    /// The block behind which another run branched off last: where the next query is likely to
    /// leave as well.
    pub(super) branch: u8,
}

impl BlockRun {
    pub(super) fn new(group: GroupId) -> Self {
        Self { group, ..Self::default() }
    }

    pub(super) fn hashes(&self) -> &[SequenceHash] {
        &self.hashes
    }

    pub(super) fn is_full(&self) -> bool {
        self.hashes.len() == MAX_RUN
    }

    /// Makes room for `more` blocks at once.
    pub(super) fn reserve(&mut self, more: usize) {
        let most = MAX_RUN - self.hashes.len();
        self.hashes.reserve_exact(more.min(most));
    }

    /// Adds a block at the end; its index. The run must not be full.
    pub(super) fn push(&mut self, hash: SequenceHash) -> u8 {
        let len = self.hashes.len();
        if len == self.hashes.capacity() {
            // By half: most of the index is these vectors, and doubling would leave a third of them
            // empty.
            self.hashes.reserve_exact((len / 2).max(3).min(MAX_RUN - len));
        }
        self.hashes.push(hash);
        len as u8
    }

    /// Blocks from `at` on that are the first of `query`, of which the first one is known to be.
    ///
    /// A sequence hash chains all before it, so blocks that agree somewhere agree everywhere
    /// before, and a search by halves finds where they part.
    pub(super) fn matching(&self, at: u8, query: &[SequenceHash]) -> usize {
        let run = &self.hashes[usize::from(at)..];
        let most = run.len().min(query.len());
        if run[most - 1] == query[most - 1] {
            return most;
        }
        let (mut same, mut other) = (0, most - 1);
        let branch = usize::from(self.branch).wrapping_sub(usize::from(at));
        if branch < other && run[branch] == query[branch] {
            if run[branch + 1] != query[branch + 1] {
                return branch + 1;
            }
            same = branch + 1;
        }
        while other - same > 1 {
            let middle = usize::midpoint(same, other);
            if run[middle] == query[middle] {
                same = middle;
            } else {
                other = middle;
            }
        }
        same + 1
    }

    pub(super) fn set_live(&mut self, first: u8, last: u8) {
        for block in first..=last {
            self.live[usize::from(block) / 64] |= 1 << (block % 64);
        }
    }

    pub(super) fn set_dead(&mut self, block: u8) {
        self.live[usize::from(block) / 64] &= !(1 << (block % 64));
    }

    pub(super) fn is_live(&self, block: u8) -> bool {
        self.live[usize::from(block) / 64] >> (block % 64) & 1 == 1
    }

    /// Blocks that somebody holds.
    pub(super) fn num_live(&self) -> usize {
        self.live.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// Finds out again which blocks are held.
    pub(super) fn refresh_live(&mut self) {
        self.live = [0; MAX_RUN / 64];
        for at in 0..self.spans.as_slice().len() {
            let span = self.spans.as_slice()[at];
            self.set_live(span.first, span.last);
        }
    }

    /// Takes the last block off if nobody holds it.
    pub(super) fn pop_dead(&mut self) -> Option<SequenceHash> {
        let last = self.hashes.len().checked_sub(1)?;
        if self.is_live(last as u8) { None } else { self.hashes.pop() }
    }

    /// Whether most blocks are held by nobody, so that the run is worth taking apart.
    pub(super) fn is_hollow(&self) -> bool {
        2 * self.num_live() < self.hashes.len()
    }

    /// The stretches of blocks that somebody holds, each as a run of its own.
    pub(super) fn live_parts(&self) -> Vec<Self> {
        let mut parts = Vec::new();
        let mut block = 0;
        while block < self.hashes.len() {
            let stretch = (block..self.hashes.len()).take_while(|&at| self.is_live(at as u8)).count();
            if stretch > 0 {
                let (first, last) = (block as u8, (block + stretch - 1) as u8);
                let mut part = Self {
                    hashes: self.hashes[block..block + stretch].to_vec(),
                    spans: self.spans.clipped(first, last),
                    live: [0; MAX_RUN / 64],
                    group: self.group,
                    branch: 0,
                };
                part.refresh_live();
                parts.push(part);
            }
            block += stretch + 1;
        }
        parts
    }

    /// Bytes of its vectors.
    pub(super) fn heap_bytes(&self) -> usize {
        self.hashes.capacity() * size_of::<SequenceHash>()
            + self.spans.capacity() * size_of::<super::spans::Span>()
    }
}
