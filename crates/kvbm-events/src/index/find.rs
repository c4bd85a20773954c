//! Finding the longest cached prefix.

use super::KvIndex;
use super::spans::Span;
use crate::SourceId;
use kvbm_plan::{GroupId, SequenceHash, Tier};

/// What one worker has of a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefixMatch {
    /// Whose cache.
    pub source: SourceId,
    /// Blocks of the chain from its start that the worker holds, each on some tier; at least 1.
    pub blocks: u32,
    /// How many of them it holds on each tier. A block at two places of one tier counts twice.
    pub by_tier: [u32; Tier::ALL.len()],
    slot: u16,
}

impl KvIndex {
    /// For each worker that has the first block of a chain, how much it has of it from there;
    /// replaces `out`.
    ///
    /// `chain` are the sequence hashes of consecutive blocks. Takes time by the number of runs they
    /// lie in and of the workers, hardly by their number.
    pub fn find(&self, group: GroupId, chain: &[SequenceHash], out: &mut Vec<PrefixMatch>) {
        out.clear();
        let mut done = 0;
        while let Some(first) = chain.get(done) {
            let Some(at) = self.table.find(&self.runs, group, first) else { return };
            let run = &self.runs[at.run as usize];
            let part = Part { first: at.block, len: run.matching(at.block, &chain[done..]) };
            if done == 0 {
                self.begin(run.spans.as_slice(), part, out);
            } else if !go_on(run.spans.as_slice(), part, done, out) {
                return;
            }
            done += part.len;
        }
    }

    fn begin(&self, spans: &[Span], part: Part, out: &mut Vec<PrefixMatch>) {
        for spans in spans.chunk_by(|a, b| a.worker == b.worker) {
            let slot = spans[0].worker;
            let mut found =
                PrefixMatch { source: SourceId(0), blocks: 0, by_tier: [0; Tier::ALL.len()], slot };
            part.add(spans, &mut found);
            if found.blocks > 0 {
                found.source = self.workers.source(slot);
                out.push(found);
            }
        }
    }
}

/// Extends the matches that reach the start of this part; whether there were any.
fn go_on(spans: &[Span], part: Part, done: usize, out: &mut [PrefixMatch]) -> bool {
    let mut rest = spans;
    let mut any = false;
    for found in out.iter_mut().filter(|found| found.blocks as usize == done) {
        // Both are sorted by worker.
        let skip = rest.iter().position(|span| span.worker >= found.slot).unwrap_or(rest.len());
        rest = &rest[skip..];
        let len = rest.iter().position(|span| span.worker != found.slot).unwrap_or(rest.len());
        let (own, after) = rest.split_at(len);
        rest = after;
        part.add(own, found);
        any |= found.blocks as usize > done;
    }
    any
}

/// Blocks of a run that the chain has as well.
#[derive(Clone, Copy)]
struct Part {
    first: u8,
    len: usize,
}

impl Part {
    /// Adds what one worker's spans cover of this part from its start without a hole.
    fn add(self, spans: &[Span], found: &mut PrefixMatch) {
        let (start, end) = (usize::from(self.first), usize::from(self.first) + self.len);
        let mut reach = start;
        for span in spans {
            if usize::from(span.first) > reach {
                break;
            }
            let (first, last) = (usize::from(span.first).max(start), (usize::from(span.last) + 1).min(end));
            if last > first {
                found.by_tier[usize::from(span.tier)] += (last - first) as u32;
                reach = reach.max(last);
            }
        }
        found.blocks += (reach - start) as u32;
    }
}
