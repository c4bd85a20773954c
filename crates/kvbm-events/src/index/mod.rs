//! Who has which prefix: an index over the blocks of many workers and tiers.
//!
//! Blocks of a chain lie in *runs*: stretches without a branch inside, at most 256 long. A run
//! keeps the hashes of its blocks once, whoever holds them, and for each place (worker, tier, node,
//! volume, shard) the intervals that it holds. A table leads from a hash to its run. So a block
//! costs its hash, 11 to 22 bytes of table and a share of its run. Every further worker that holds
//! the same chains costs only an interval of six bytes a run, and four bytes more in the worker's
//! list of runs.
//!
//! A run whose blocks are mostly held by nobody is taken apart, so memory follows what is held.

mod find;
mod run;
mod spans;
mod store;
mod table;
#[cfg(test)]
mod tests;
mod workers;

pub use find::PrefixMatch;
pub use workers::Place;

use crate::{EventKind, KvEvent, SourceId, StreamId};
use kvbm_plan::{GroupId, SequenceHash, Tier};
use run::BlockRun;
use table::Table;
use workers::{At, Workers};

/// Counters of a [`KvIndex`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IndexStats {
    /// Blocks that somebody holds, each once.
    pub blocks: u64,
    /// Sources known, with or without blocks.
    pub workers: usize,
    /// Stretches of chains.
    pub runs: usize,
    /// Bytes of memory: what was allocated, used or not.
    pub bytes: usize,
    /// Stored blocks that were not taken in because a limit was reached: prefixes that contain them
    /// look shorter.
    pub refused: u64,
}

/// A prefix index over the blocks of many workers and tiers; see the module's text.
///
/// Feed it the events of each stream in order. It is as right as they are: after a gap,
/// [`clear`](Self::clear) the stream and apply a snapshot.
#[derive(Debug)]
pub struct KvIndex {
    runs: Vec<BlockRun>,
    free: Vec<u32>,
    table: Table,
    workers: Workers,
    max_blocks: usize,
    refused: u64,
    /// Hashes of a chain that is being gathered.
    chain: Vec<SequenceHash>,
}

impl Default for KvIndex {
    fn default() -> Self {
        Self::new(Self::DEFAULT_MAX_BLOCKS)
    }
}

impl KvIndex {
    /// Blocks that an index takes in by default.
    pub const DEFAULT_MAX_BLOCKS: usize = 64 << 20;

    /// An empty index for at most `max_blocks` different blocks, 65,536 workers and 256 places of
    /// each; what is beyond is refused and counted.
    pub fn new(max_blocks: usize) -> Self {
        Self {
            runs: Vec::new(),
            free: Vec::new(),
            table: Table::default(),
            workers: Workers::default(),
            max_blocks,
            refused: 0,
            chain: Vec::new(),
        }
    }

    /// Applies events of a stream, in their order.
    pub fn apply(&mut self, stream: StreamId, events: &[KvEvent]) {
        let mut chain = std::mem::take(&mut self.chain);
        let mut rest = events;
        while let Some((event, after)) = rest.split_first() {
            rest = after;
            match &event.kind {
                EventKind::Cleared => self.clear(stream.source, stream.shard),
                EventKind::Remove(block) => {
                    let place =
                        Place { source: stream.source, shard: stream.shard, location: block.location };
                    self.remove(place, block.identity.group, &[block.identity.hash]);
                }
                EventKind::Store(block) => {
                    chain.clear();
                    chain.push(block.identity.hash);
                    // Blocks of one chain that follow each other are stored at once.
                    while let Some((KvEvent { kind: EventKind::Store(next), .. }, after)) = rest.split_first()
                    {
                        let follows = next.identity.parent.as_ref() == chain.last();
                        if !follows
                            || next.location != block.location
                            || next.identity.group != block.identity.group
                        {
                            break;
                        }
                        chain.push(next.identity.hash);
                        rest = after;
                    }
                    let place =
                        Place { source: stream.source, shard: stream.shard, location: block.location };
                    self.store(place, block.identity.group, block.identity.parent, &chain);
                }
            }
        }
        self.chain = chain;
    }

    /// Forgets what a source holds at a place. Blocks that it does not hold are ignored.
    pub fn remove(&mut self, place: Place, group: GroupId, blocks: &[SequenceHash]) {
        let Some(id) = self.workers.known(&place) else { return };
        for hash in blocks {
            let Some(at) = self.table.find(&self.runs, group, hash) else { continue };
            let run = &mut self.runs[at.run as usize];
            if run.spans.remove(id.worker, id.place, at.block) {
                self.workers.count(id, -1);
                if !run.spans.has_worker(id.worker) {
                    self.workers.leave(id.worker);
                }
                if !run.spans.hold(at.block) {
                    run.set_dead(at.block);
                    self.settle(at.run);
                }
                self.tidy_runs(id.worker);
            }
        }
    }

    /// Forgets everything that a shard of a source holds, on all tiers. The cost depends on what
    /// the source holds, not on what others hold elsewhere.
    pub fn clear(&mut self, source: SourceId, shard: u16) {
        let Some(slot) = self.workers.slot(source) else { return };
        let places = self.workers.places_of_shard(slot, shard);
        self.drop_spans(slot, |span| places[usize::from(span.place)]);
    }

    /// Forgets a source and everything that it holds: it has died or has restarted. The cost is
    /// that of [`clear`](Self::clear).
    pub fn forget(&mut self, source: SourceId) {
        let Some(slot) = self.workers.slot(source) else { return };
        self.drop_spans(slot, |_| true);
        self.workers.forget(source);
    }

    /// Drops the spans of a worker that `gone` selects.
    fn drop_spans(&mut self, worker: u16, gone: impl Fn(&spans::Span) -> bool) {
        let mut kept = self.workers.take_runs(worker);
        kept.retain(|&index| {
            let (run, workers) = (&mut self.runs[index as usize], &mut self.workers);
            if !run.spans.has_worker(worker) {
                return false;
            }
            let dropped = run.spans.drop_where(|span| {
                let gone = span.worker == worker && gone(span);
                if gone {
                    let id = workers::PlaceId { worker: span.worker, place: span.place, tier: span.tier };
                    workers.count(id, -i64::from(spans::width(*span)));
                }
                gone
            });
            if !dropped {
                return true;
            }
            run.refresh_live();
            let holds = run.spans.has_worker(worker);
            if !holds {
                self.workers.leave(worker);
            }
            // May move what is left to other runs, and notes that itself.
            self.settle(index);
            holds
        });
        self.workers.return_runs(worker, kept);
        self.tidy_runs(worker);
    }

    /// Drops the stale entries of a worker's list of runs when they are most of it.
    fn tidy_runs(&mut self, worker: u16) {
        if self.workers.is_stale(worker) {
            let mut runs = self.workers.take_runs(worker);
            runs.retain(|&run| self.runs[run as usize].spans.has_worker(worker));
            self.workers.return_runs(worker, runs);
        }
    }

    /// Gives up what nobody holds any more, after blocks of a run have died.
    fn settle(&mut self, index: u32) {
        let run = &mut self.runs[index as usize];
        while let Some(hash) = run.pop_dead() {
            let at = At { run: index, block: run.hashes().len() as u8 };
            self.table.remove(run.group, &hash, at);
        }
        if run.hashes().is_empty() {
            *run = BlockRun::default();
            self.free.push(index);
            self.table.shrink(&self.runs);
        } else if run.is_hollow() {
            self.take_apart(index);
        }
    }

    /// Makes a run of each stretch that somebody holds.
    fn take_apart(&mut self, index: u32) {
        let run = &self.runs[index as usize];
        for (block, hash) in run.hashes().iter().enumerate() {
            self.table.remove(run.group, hash, At { run: index, block: block as u8 });
        }
        for worker in run.spans.workers() {
            self.workers.leave(worker);
        }
        let mut parts = run.live_parts().into_iter();
        let mut taken = vec![index];
        // A hollow run holds something, else it would have been freed.
        self.runs[index as usize] = parts.next().unwrap_or_default();
        for part in parts {
            taken.push(self.add_run(part));
        }
        for &run in &taken {
            for worker in self.runs[run as usize].spans.workers() {
                self.workers.enter(worker, run);
            }
        }
        for run in taken {
            for block in 0..self.runs[run as usize].hashes().len() {
                if self.table.insert(&self.runs, At { run, block: block as u8 }) {
                    return;
                }
            }
        }
    }

    fn add_run(&mut self, run: BlockRun) -> u32 {
        if let Some(index) = self.free.pop() {
            self.runs[index as usize] = run;
            return index;
        }
        self.runs.push(run);
        (self.runs.len() - 1) as u32
    }

    /// Blocks that a source holds by tier. A block at two places of one tier counts twice.
    pub fn blocks(&self, source: SourceId) -> [u64; Tier::ALL.len()] {
        self.workers.blocks(source)
    }

    /// Every source known.
    pub fn sources(&self) -> impl Iterator<Item = SourceId> + '_ {
        self.workers.sources()
    }

    /// Every block at every place, in no order.
    pub fn holdings(&self) -> impl Iterator<Item = (Place, GroupId, SequenceHash)> + '_ {
        self.runs.iter().flat_map(move |run| {
            run.spans.as_slice().iter().flat_map(move |span| {
                let place = self.workers.place_of(span.worker, span.place);
                let blocks = &run.hashes()[usize::from(span.first)..=usize::from(span.last)];
                place
                    .into_iter()
                    .flat_map(move |place| blocks.iter().map(move |hash| (place, run.group, *hash)))
            })
        })
    }

    /// Counters; takes time by the number of runs.
    pub fn stats(&self) -> IndexStats {
        IndexStats {
            blocks: self.runs.iter().map(|run| run.num_live() as u64).sum(),
            workers: self.workers.len(),
            runs: self.runs.len() - self.free.len(),
            bytes: self.bytes(),
            refused: self.refused,
        }
    }

    fn bytes(&self) -> usize {
        self.runs.capacity() * size_of::<BlockRun>()
            + self.runs.iter().map(BlockRun::heap_bytes).sum::<usize>()
            + self.free.capacity() * size_of::<u32>()
            + self.table.heap_bytes()
            + self.workers.heap_bytes()
    }
}
