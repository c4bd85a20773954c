//! Copies on the next tier down: what waits for one, what is on its way, and who asked.
//!
//! Nothing here ever makes an allocation wait. What is queued pins its source, so a queue holds at most a share of that
//! tier; beyond it the oldest queued blocks are let go, and counted.

use crate::config::EdgeConfig;
use crate::leader::Leader;
use crate::leader::operation::{Destination, Move, Parts, Purpose};
use crate::leader::wear::WearBudget;
use crate::metrics::DropReason;
use kvbm_plan::{Path, Tier};
use kvbm_pool::{Arrival, Pinned};
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

/// Two operations a path: one in the hands of the hardware, one ready behind it, per thread that a worker gives to the path.
const MAX_RUNNING: usize = 8;

/// One step down.
pub(crate) struct Edge {
    pub(crate) path: Path,
    triggers: EdgeConfig,
    /// Blocks that may be queued and running.
    limit: usize,
    /// Only for disks.
    wear: Option<WearBudget>,
    state: Mutex<EdgeState>,
}

#[derive(Default)]
struct EdgeState {
    queue: VecDeque<Pinned>,
    queued_blocks: usize,
    running_blocks: usize,
    running: usize,
}

/// All steps, and how many blocks are on one.
pub(crate) struct Offloads {
    edges: Vec<Edge>,
    outstanding: Mutex<usize>,
    idle: Condvar,
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
}

impl Offloads {
    pub(crate) fn new(edges: Vec<Edge>) -> Self {
        Self { edges, outstanding: Mutex::new(0), idle: Condvar::new() }
    }

    pub(crate) fn edge(&self, src: Tier) -> Option<&Edge> {
        self.edges.iter().find(|edge| edge.path.src == src)
    }

    pub(crate) fn edges(&self) -> &[Edge] {
        &self.edges
    }

    /// Blocks until nothing is queued or running, or `deadline` passes. Whether it was reached.
    pub(crate) fn wait_idle(&self, deadline: Instant) -> bool {
        let mut outstanding = self.outstanding.lock();
        while *outstanding > 0 {
            if self.idle.wait_until(&mut outstanding, deadline).timed_out() {
                return *outstanding == 0;
            }
        }
        true
    }

    pub(crate) fn add(&self, blocks: usize) {
        *self.outstanding.lock() += blocks;
    }

    pub(crate) fn remove(&self, blocks: usize) {
        let mut outstanding = self.outstanding.lock();
        *outstanding = outstanding.saturating_sub(blocks);
        if *outstanding == 0 {
            self.idle.notify_all();
        }
    }
}

impl Edge {
    pub(crate) fn backlog(&self) -> OffloadBacklog {
        let state = self.state.lock();
        OffloadBacklog { queued_blocks: state.queued_blocks, running_blocks: state.running_blocks }
    }

    /// Queues `batch`; what no longer fits comes back, oldest first, to be dropped without the lock. Of a batch that alone
    /// is too large the first blocks are kept: they are the parents of the others.
    fn push(&self, mut batch: Pinned) -> Vec<Pinned> {
        let mut dropped = Vec::new();
        let mut state = self.state.lock();
        while state.queued_blocks + state.running_blocks + batch.len() > self.limit {
            let Some(oldest) = state.queue.pop_front() else { break };
            state.queued_blocks -= oldest.len();
            dropped.push(oldest);
        }
        let room = self.limit.saturating_sub(state.queued_blocks + state.running_blocks);
        if batch.len() > room {
            dropped.push(batch.split_off(room));
        }
        if !batch.is_empty() {
            state.queued_blocks += batch.len();
            state.queue.push_back(batch);
        }
        dropped
    }

    /// The next batch to start, if one may.
    fn pop(&self) -> Option<Pinned> {
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

    fn finished(&self, blocks: usize) {
        let mut state = self.state.lock();
        state.running_blocks = state.running_blocks.saturating_sub(blocks);
        state.running = state.running.saturating_sub(1);
    }

    /// Blocks that the watermark asks for: `int((occupancy - watermark) * capacity) + 1` above it, where occupancy
    /// counts blocks neither free nor copied lower (the formula of the tiering article).
    fn excess(&self, occupied: usize, capacity: usize) -> usize {
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

/// Ends an offload's share in the accounts, however the offload ends.
struct Running {
    leader: Arc<Leader>,
    src: Tier,
    blocks: usize,
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(edge) = self.leader.offloads.edge(self.src) {
            edge.finished(self.blocks);
        }
        self.leader.offloads.remove(self.blocks);
    }
}

impl Leader {
    /// Blocks became visible on their tier: write-through and the watermark have their say.
    pub(crate) fn registered(self: &Arc<Self>, tier: Tier, blocks: impl FnOnce() -> Pinned) {
        let Some(edge) = self.offloads.edge(tier) else { return };
        if self.is_turned_away() {
            return;
        }
        if edge.triggers.write_through {
            self.enqueue(edge, blocks());
        }
        self.check_watermark(edge);
        self.pump();
    }

    /// An iteration of the engine is over: idle blocks and watermarks.
    pub(crate) fn check_triggers(self: &Arc<Self>) {
        for edge in self.offloads.edges() {
            self.check_watermark(edge);
            self.check_idle(edge);
        }
        self.pump();
    }

    /// Queues an offload that somebody asked for.
    pub(crate) fn offload_now(self: &Arc<Self>, blocks: Pinned) -> bool {
        let Some(edge) = self.offloads.edge(blocks.tier()) else { return false };
        if self.is_turned_away() {
            return false;
        }
        self.enqueue(edge, blocks);
        self.pump();
        true
    }

    /// Starts what may start.
    pub(crate) fn pump(self: &Arc<Self>) {
        for edge in self.offloads.edges() {
            while let Some(batch) = edge.pop() {
                self.start_offload(edge, batch);
            }
        }
    }

    /// Everything on `src` that has no copy on the next tier, in batches, until nothing is left or `deadline` passes.
    pub(crate) fn drain_down(self: &Arc<Self>, src: Tier, deadline: Instant) {
        let Some(edge) = self.offloads.edge(src) else { return };
        while Instant::now() < deadline {
            let batch = self.coldest(edge, edge.limit.min(1024), 0);
            if batch.is_empty() {
                return;
            }
            self.enqueue(edge, batch);
            self.pump();
            if !self.offloads.wait_idle(deadline) {
                return;
            }
        }
    }

    fn check_watermark(self: &Arc<Self>, edge: &Edge) {
        let status = self.registry.occupancy(edge.path.src);
        let excess = edge.excess(status.not_copied_lower as usize, status.capacity as usize);
        if excess == 0 {
            return;
        }
        let backlog = edge.backlog();
        let wanted = excess.saturating_sub(backlog.queued_blocks + backlog.running_blocks);
        self.offload_coldest(edge, wanted, 0);
    }

    fn check_idle(self: &Arc<Self>, edge: &Edge) {
        if edge.triggers.idle_iterations > 0 {
            let room = edge.limit / 4;
            self.offload_coldest(edge, room, edge.triggers.idle_iterations);
        }
    }

    fn offload_coldest(self: &Arc<Self>, edge: &Edge, wanted: usize, min_idle: u64) {
        let affordable = edge.wear.as_ref().map_or(wanted, |wear| wear.affordable(wanted));
        if affordable == 0 {
            return;
        }
        let blocks = self.coldest(edge, affordable, min_idle);
        if !blocks.is_empty() {
            self.enqueue(edge, blocks);
        }
    }

    fn coldest(&self, edge: &Edge, wanted: usize, min_idle: u64) -> Pinned {
        self.registry.coldest(edge.path.src, wanted, edge.path.dst, min_idle)
    }

    fn enqueue(&self, edge: &Edge, blocks: Pinned) {
        if self.is_closed() || blocks.is_empty() {
            return;
        }
        // Holds the account open: the batch may be started and over before this returns.
        self.offloads.add(blocks.len());
        for dropped in edge.push(blocks.into_transfer()) {
            self.metrics.path(edge.path).dropped(DropReason::QueueFull).add(dropped.len() as u64);
            self.offloads.remove(dropped.len());
        }
    }

    /// Reserves the destination and sends the plans; what cannot start is counted and let go.
    fn start_offload(self: &Arc<Self>, edge: &Edge, batch: Pinned) {
        let running = Running { leader: Arc::clone(self), src: edge.path.src, blocks: batch.len() };
        let identities = batch.identities();
        let Ok(arrivals) = self.registry.begin_arrivals(edge.path.dst, &identities) else {
            self.metrics.path(edge.path).dropped(DropReason::NoSlot).add(batch.len() as u64);
            return;
        };
        let sources = batch.block_ids();
        let (mut moves, mut places, mut refused) = (Vec::new(), Vec::new(), 0);
        for (index, arrival) in arrivals.arrivals().iter().enumerate() {
            match *arrival {
                Arrival::Reserved { block: dst, .. } => {
                    let (identity, src) = (identities[index], sources[index]);
                    moves.push(Move { identity, from: edge.path.src, src, dst });
                    places.push(index);
                }
                Arrival::Refused(_) => refused += 1,
                // Somebody else has copied it, or is about to.
                _ => {}
            }
        }
        if refused > 0 {
            self.metrics.path(edge.path).dropped(DropReason::MissingParent).add(refused);
        }
        if moves.is_empty() {
            return;
        }
        if let Some(wear) = &edge.wear {
            wear.charge(moves.len());
        }
        let parts = Parts {
            moves,
            destination: Destination::Reserved { arrivals, places },
            keep: vec![Box::new(batch), Box::new(running)],
            source_check: None,
        };
        let prepared = self.prepare(Purpose::Offload, edge.path.dst, parts);
        self.send(prepared);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn edge(watermark: f64) -> Edge {
        let triggers = EdgeConfig { write_through: false, watermark, idle_iterations: 0, queue_share: 0.25 };
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
