//! Taking blocks in.

use super::run::{BlockRun, MAX_RUN};
use super::spans::Span;
use super::workers::{At, PlaceId};
use super::{KvIndex, Place};
use kvbm_plan::{GroupId, SequenceHash};

impl KvIndex {
    /// Notes that a source holds `blocks` at a place: consecutive blocks of one chain, the first of
    /// which follows `parent`.
    pub fn store(
        &mut self,
        place: Place,
        group: GroupId,
        parent: Option<SequenceHash>,
        blocks: &[SequenceHash],
    ) {
        let Some(id) = self.workers.place(place) else {
            self.refused += blocks.len() as u64;
            return;
        };
        let mut before = parent.and_then(|parent| self.parent_at(id, group, &parent));
        let mut rest = blocks;
        while let Some(first) = rest.first() {
            let known = match before {
                Some(at) if self.follows(at, first) => Some(At { block: at.block + 1, ..at }),
                _ => {
                    if rest.len() > 1 {
                        self.table.touch(group, &rest[..rest.len().min(MAX_RUN)]);
                    }
                    self.table.find(&self.runs, group, first)
                }
            };
            let stored = match known {
                Some(at) => Some(self.store_known(id, at, rest)),
                None => self.store_new(id, group, before, rest),
            };
            let Some((stored, last)) = stored else {
                self.refused += rest.len() as u64;
                return;
            };
            rest = &rest[stored..];
            before = Some(last);
        }
        if let Some(last) = before {
            self.workers.set_last(id.worker, last);
        }
    }

    /// Where the parent is: usually what this worker stored last.
    fn parent_at(&self, id: PlaceId, group: GroupId, parent: &SequenceHash) -> Option<At> {
        let last = self.workers.last(id.worker);
        let run = self.runs.get(last.run as usize).filter(|run| run.group == group);
        if run.and_then(|run| run.hashes().get(usize::from(last.block))) == Some(parent) {
            return Some(last);
        }
        self.table.find(&self.runs, group, parent)
    }

    /// Whether the block behind `at` in its run is `hash`.
    fn follows(&self, at: At, hash: &SequenceHash) -> bool {
        self.runs[at.run as usize].hashes().get(usize::from(at.block) + 1) == Some(hash)
    }

    /// Stores blocks that stand in a run from `at` on, the first of them certainly; how many, and
    /// the last one.
    fn store_known(&mut self, id: PlaceId, at: At, blocks: &[SequenceHash]) -> (usize, At) {
        let hashes = &self.runs[at.run as usize].hashes()[usize::from(at.block)..];
        let same = hashes.iter().zip(blocks).take_while(|(known, block)| known == block).count();
        let last = (usize::from(at.block) + same - 1) as u8;
        self.hold(id, at.run, at.block, last);
        (same, At { block: last, ..at })
    }

    /// Stores blocks of which the first is in no run: behind `before` if that ends its run, else in
    /// a new run. `None` when the index is full.
    fn store_new(
        &mut self,
        id: PlaceId,
        group: GroupId,
        before: Option<At>,
        blocks: &[SequenceHash],
    ) -> Option<(usize, At)> {
        let room = self.max_blocks.saturating_sub(self.table.len());
        if room == 0 {
            return None;
        }
        let ends = |at: &At| {
            let run = &self.runs[at.run as usize];
            usize::from(at.block) + 1 == run.hashes().len() && !run.is_full()
        };
        let run = match before {
            Some(at) if ends(&at) => at.run,
            Some(at) => {
                self.runs[at.run as usize].branch = at.block;
                self.add_run(BlockRun::new(group))
            }
            None => self.add_run(BlockRun::new(group)),
        };
        if blocks.len() > 1 {
            self.runs[run as usize].reserve(blocks.len());
        }
        let first = self.runs[run as usize].push(blocks[0]);
        self.table.insert(&self.runs, At { run, block: first });
        let (mut stored, mut last) = (1, first);
        for hash in blocks[1..].iter().take(room - 1) {
            if self.runs[run as usize].is_full() {
                break;
            }
            self.table.make_room(&self.runs);
            let Some(vacant) = self.table.vacancy(&self.runs, group, hash) else { break };
            last = self.runs[run as usize].push(*hash);
            self.table.fill(&vacant, At { run, block: last });
            stored += 1;
        }
        self.hold(id, run, first, last);
        Some((stored, At { run, block: last }))
    }

    fn hold(&mut self, id: PlaceId, run: u32, first: u8, last: u8) {
        let index = run;
        let run = &mut self.runs[index as usize];
        let is_new = !run.spans.has_worker(id.worker);
        let added = run.spans.add(Span { worker: id.worker, place: id.place, tier: id.tier, first, last });
        run.set_live(first, last);
        self.workers.count(id, i64::from(added));
        if is_new {
            self.workers.enter(id.worker, index);
            self.tidy_runs(id.worker);
        }
    }
}
