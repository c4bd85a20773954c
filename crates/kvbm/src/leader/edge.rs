//! One step down: what waits for it and what is on its way, within a share of the upper tier.

use crate::config::EdgeConfig;
use crate::leader::offload::Round;
use crate::leader::wear::WearBudget;
use kvbm_plan::Path;
use kvbm_pool::Pinned;
use parking_lot::Mutex;
use std::collections::VecDeque;

/// Two operations a path: one in the hands of the hardware, one ready behind it, per thread that a worker gives to the path.
const MAX_RUNNING: usize = 8;

/// Blocks of one operation: several are under way for a large batch, and one that finds no room fails alone.
const MAX_BATCH: usize = 128;

/// Blocks among which to choose for each that the write budget allows.
const CHOICE: usize = 4;

/// One step down.
pub(crate) struct Edge {
    pub(crate) path: Path,
    pub(crate) triggers: EdgeConfig,
    /// Blocks that may be queued and running.
    pub(crate) limit: usize,
    /// Only for disks.
    pub(crate) wear: Option<WearBudget>,
    state: Mutex<EdgeState>,
}

/// Blocks that go down together.
pub(crate) struct Batch {
    pub(crate) blocks: Pinned,
    /// When they were asked for.
    pub(crate) round: Round,
}

impl Batch {
    fn len(&self) -> usize {
        self.blocks.len()
    }

    fn split_off(&mut self, at: usize) -> Self {
        Self { blocks: self.blocks.split_off(at), round: self.round }
    }
}

#[derive(Default)]
struct EdgeState {
    queue: VecDeque<Batch>,
    queued_blocks: usize,
    running_blocks: usize,
    running: usize,
}

/// What is queued and running on an edge, in blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OffloadBacklog {
    /// Waiting for their turn.
    pub queued_blocks: usize,
    /// In the hands of workers.
    pub running_blocks: usize,
}

impl Edge {
    /// `limit`: blocks of the source tier that offloads may pin.
    pub(crate) fn new(path: Path, triggers: EdgeConfig, limit: usize, wear: Option<WearBudget>) -> Self {
        Self { path, triggers, limit: limit.max(1), wear, state: Mutex::new(EdgeState::default()) }
    }

    pub(crate) fn backlog(&self) -> OffloadBacklog {
        let state = self.state.lock();
        OffloadBacklog { queued_blocks: state.queued_blocks, running_blocks: state.running_blocks }
    }

    /// Queues `batch`; what no longer fits comes back to be dropped without the lock: the oldest that are queued, their last
    /// blocks first, for the first are the parents of the others. Of a batch that alone is too large the first blocks stay.
    pub(crate) fn push(&self, mut batch: Batch) -> Vec<Batch> {
        let mut dropped = Vec::new();
        let mut state = self.state.lock();
        loop {
            let over = (state.queued_blocks + state.running_blocks + batch.len()).saturating_sub(self.limit);
            if over == 0 {
                break;
            }
            let Some(mut oldest) = state.queue.pop_front() else { break };
            state.queued_blocks -= oldest.len();
            if oldest.len() > over {
                let rest = oldest.split_off(oldest.len() - over);
                state.queued_blocks += oldest.len();
                state.queue.push_front(oldest);
                oldest = rest;
            }
            dropped.push(oldest);
        }
        let room = self.limit.saturating_sub(state.queued_blocks + state.running_blocks);
        if batch.len() > room {
            dropped.push(batch.split_off(room));
        }
        while batch.len() > 0 {
            let rest = batch.split_off(MAX_BATCH);
            state.queued_blocks += batch.len();
            state.queue.push_back(std::mem::replace(&mut batch, rest));
        }
        dropped
    }

    /// Blocks that can be queued without dropping others.
    pub(crate) fn room(&self) -> usize {
        let OffloadBacklog { queued_blocks, running_blocks } = self.backlog();
        self.limit.saturating_sub(queued_blocks + running_blocks)
    }

    /// How many of `wanted` blocks the write budget allows, beside those that wait for their turn.
    pub(crate) fn affordable(&self, wanted: usize) -> usize {
        let Some(wear) = &self.wear else { return wanted };
        let waiting = self.backlog().queued_blocks;
        wear.affordable(wanted.saturating_add(waiting)).saturating_sub(waiting)
    }

    /// How many blocks to offer where `wanted` could go: where the write budget is smaller than that, a few times as many as it
    /// allows, to choose the best from; none where nothing may be written.
    pub(crate) fn choice(&self, wanted: usize) -> usize {
        wanted.min(self.affordable(wanted).saturating_mul(CHOICE))
    }

    /// The next batch to start, if one may.
    pub(crate) fn pop(&self) -> Option<Batch> {
        let mut state = self.state.lock();
        if state.running >= MAX_RUNNING {
            return None;
        }
        let batch = state.queue.pop_front()?;
        state.queued_blocks -= batch.len();
        state.running_blocks += batch.len();
        state.running += 1;
        Some(batch)
    }

    /// A batch starts that was never queued: what another one needs before it.
    pub(crate) fn start(&self, blocks: usize) {
        let mut state = self.state.lock();
        state.running_blocks += blocks;
        state.running += 1;
    }

    pub(crate) fn finished(&self, blocks: usize) {
        let mut state = self.state.lock();
        state.running_blocks = state.running_blocks.saturating_sub(blocks);
        state.running = state.running.saturating_sub(1);
    }

    /// Empties the queue.
    pub(crate) fn take_queued(&self) -> Vec<Batch> {
        let mut state = self.state.lock();
        state.queued_blocks = 0;
        state.queue.drain(..).collect()
    }

    /// Blocks that the watermark asks for: `int((occupancy - watermark) * capacity) + 1` above it, where occupancy
    /// counts blocks neither free nor copied lower (the formula of the tiering article).
    pub(crate) fn excess(&self, occupied: usize, capacity: usize) -> usize {
        if capacity == 0 || self.triggers.watermark >= 1.0 {
            return 0;
        }
        let occupancy = occupied as f64 / capacity as f64;
        if occupancy <= self.triggers.watermark {
            return 0;
        }
        ((occupancy - self.triggers.watermark) * capacity as f64) as usize + 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn edge(watermark: f64) -> Edge {
        let triggers = EdgeConfig {
            write_through: false,
            watermark,
            idle_iterations: 0,
            queue_share: 0.25,
            ahead_share: 0.0,
        };
        Edge::new(Path::G1_G2, triggers, 10, None)
    }

    #[test]
    fn the_watermark_asks_for_what_the_formula_says() {
        let table = [
            (90, 100, 0),   // at the mark: nothing
            (91, 100, 2),   // int(0.01 * 100) + 1
            (100, 100, 11), // int(0.10 * 100) + 1
            (0, 0, 0),      // no such tier
        ];
        for (occupied, capacity, expected) in table {
            let excess = edge(0.90).excess(occupied, capacity);
            assert!(excess.abs_diff(expected) <= usize::from(excess > 0), "{occupied}/{capacity}: {excess}");
        }
        assert_eq!(edge(1.0).excess(100, 100), 0, "1 turns the watermark off");
    }
}
