//! Copies on the next tier down: who asks for them, and how they start.
//!
//! Nothing here ever makes an allocation wait. What is queued pins its source, so a queue holds at most a share of that
//! tier; beyond it the queued blocks that are least likely to be used again are let go, and counted.

use crate::admission::Trigger;
use crate::leader::Leader;
use crate::leader::edge::{Batch, Edge};
use crate::leader::operation::{Destination, Move, Parts, Purpose};
use crate::metrics::DropReason;
use kvbm_plan::{BlockIdentity, Path, Tier};
use kvbm_pool::{AnyArrivals, Arrival, Pinned};
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::Instant;

/// All steps, and how many blocks are on one.
pub(crate) struct Offloads {
    edges: Vec<Edge>,
    accounts: Mutex<Accounts>,
    closed: Condvar,
}

/// Offloads that were asked for between two calls that wait for what is under way; what follows from an offload (the copy on the
/// next tier, ancestors that go first) is of its round.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Round(u64);

#[derive(Default)]
struct Accounts {
    now: Round,
    /// Blocks queued or running, by round; none of them 0. As many rounds as there are callers that wait.
    open: BTreeMap<Round, usize>,
}

impl Offloads {
    pub(crate) fn new(edges: Vec<Edge>) -> Self {
        Self { edges, accounts: Mutex::default(), closed: Condvar::new() }
    }

    pub(crate) fn edge(&self, path: Path) -> Option<&Edge> {
        self.edges.iter().find(|edge| edge.path == path)
    }

    pub(crate) fn edges(&self) -> &[Edge] {
        &self.edges
    }

    /// Blocks until nothing is queued or running, or `deadline` passes. Whether it was reached.
    pub(crate) fn wait_idle(&self, deadline: Instant) -> bool {
        self.wait_closed(self.accounts.lock(), Round(u64::MAX), deadline)
    }

    /// Blocks until what is queued or running now, and what follows from it, is over, or `deadline` passes. What is asked for
    /// meanwhile is not waited for. Whether that was reached.
    pub(crate) fn wait_under_way(&self, deadline: Instant) -> bool {
        let mut accounts = self.accounts.lock();
        let last = accounts.now;
        accounts.now = Round(last.0 + 1);
        self.wait_closed(accounts, last, deadline)
    }

    fn wait_closed(&self, mut accounts: MutexGuard<'_, Accounts>, last: Round, deadline: Instant) -> bool {
        let is_open = |accounts: &Accounts| accounts.open.keys().next().is_some_and(|first| *first <= last);
        while is_open(&accounts) {
            if self.closed.wait_until(&mut accounts, deadline).timed_out() {
                return !is_open(&accounts);
            }
        }
        true
    }

    /// The round of what is asked for now.
    pub(crate) fn round(&self) -> Round {
        self.accounts.lock().now
    }

    pub(crate) fn add(&self, round: Round, blocks: usize) {
        if blocks > 0 {
            *self.accounts.lock().open.entry(round).or_default() += blocks;
        }
    }

    pub(crate) fn remove(&self, round: Round, blocks: usize) {
        let mut accounts = self.accounts.lock();
        let Some(open) = accounts.open.get_mut(&round) else { return };
        *open = open.saturating_sub(blocks);
        if *open == 0 {
            accounts.open.remove(&round);
            self.closed.notify_all();
        }
    }
}

/// Ends an offload's share in the accounts, however the offload ends. It lies in the leader's own table, so it must not keep the
/// leader alive.
pub(crate) struct Running {
    leader: Weak<Leader>,
    /// Where it was popped from a queue, that one.
    queue: Option<Path>,
    round: Round,
    blocks: usize,
}

impl Running {
    /// Of a batch that was taken off the queue of `path`.
    pub(crate) fn queued(leader: &Arc<Leader>, path: Path, round: Round, blocks: usize) -> Self {
        Self { leader: Arc::downgrade(leader), queue: Some(path), round, blocks }
    }

    /// Of blocks that were never queued.
    pub(crate) fn new(leader: &Arc<Leader>, round: Round, blocks: usize) -> Self {
        leader.offloads.add(round, blocks);
        Self { leader: Arc::downgrade(leader), queue: None, round, blocks }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let Some(leader) = self.leader.upgrade() else { return };
        if let Some(edge) = self.queue.and_then(|path| leader.offloads.edge(path)) {
            edge.finished(self.blocks);
        }
        leader.offloads.remove(self.round, self.blocks);
    }
}

impl Leader {
    /// All steps whose end is there: volumes come and go.
    fn open_edges(&self) -> impl Iterator<Item = &Edge> {
        let volumes = !self.volumes.is_empty();
        self.offloads.edges().iter().filter(move |edge| volumes || edge.path.dst != Tier::G4)
    }

    /// Those of them that begin on `src`.
    fn edges_from(&self, src: Tier) -> impl Iterator<Item = &Edge> {
        self.open_edges().filter(move |edge| edge.path.src == src)
    }

    /// Blocks became visible on their tier: write-through and the watermark have their say. `round`: that of the offload that
    /// brought them, if one did.
    pub(crate) fn registered(
        self: &Arc<Self>,
        tier: Tier,
        round: Option<Round>,
        blocks: impl FnOnce() -> Pinned,
    ) {
        if self.is_turned_away() || self.edges_from(tier).next().is_none() {
            return;
        }
        let round = round.unwrap_or_else(|| self.offloads.round());
        let through: Vec<&Edge> = self.edges_from(tier).filter(|edge| edge.triggers.write_through).collect();
        if let Some((last, others)) = through.split_last() {
            let blocks = blocks();
            for edge in others {
                self.write_through(edge, round, blocks.clone());
            }
            self.write_through(last, round, blocks);
        }
        for edge in self.edges_from(tier) {
            self.check_watermark(edge, round);
            self.check_victims(edge, round);
        }
        self.pump();
    }

    fn write_through(&self, edge: &Edge, round: Round, blocks: Pinned) {
        let blocks = self.without_copied(edge, blocks);
        self.enqueue(edge, round, self.admitted(edge, Trigger::WriteThrough, blocks));
    }

    /// `blocks` less the first ones that have a copy below: the next tier holds the beginnings of chains.
    fn without_copied(&self, edge: &Edge, mut blocks: Pinned) -> Pinned {
        let copied = if edge.path.dst == Tier::G4 {
            let identities = blocks.identities();
            let Some(first) = identities.first() else { return blocks };
            let hashes: Vec<_> = identities.iter().map(|identity| identity.hash).collect();
            self.volumes.awaited_prefix(first.group, &hashes)
        } else {
            blocks.prefix_on(edge.path.dst)
        };
        if copied == 0 {
            return blocks;
        }
        let rest = blocks.split_off(copied);
        drop(blocks.into_transfer());
        rest
    }

    /// An iteration of the engine is over: idle blocks and watermarks.
    pub(crate) fn check_triggers(self: &Arc<Self>) {
        if self.is_turned_away() {
            return;
        }
        let round = self.offloads.round();
        for edge in self.open_edges() {
            self.check_watermark(edge, round);
            self.check_idle(edge, round);
        }
        self.pump();
    }

    /// Queues an offload that somebody asked for. `false` where no path leads from there to `to`.
    pub(crate) fn offload_now(self: &Arc<Self>, blocks: Pinned, to: Tier) -> bool {
        let path = Path::new(blocks.tier(), to);
        let Some(edge) = self.open_edges().find(|edge| edge.path == path) else { return false };
        let blocks = self.without_copied(edge, blocks);
        self.enqueue(edge, self.offloads.round(), blocks);
        self.pump();
        true
    }

    /// Starts what may start.
    pub(crate) fn pump(self: &Arc<Self>) {
        for edge in self.offloads.edges() {
            while !self.is_closed()
                && let Some(batch) = edge.pop()
            {
                self.start_offload(edge, batch);
            }
        }
    }

    /// Lets go of everything that is queued: the manager is shut down.
    pub(crate) fn drop_queued(&self) {
        for edge in self.offloads.edges() {
            for batch in edge.take_queued() {
                self.drop_batch(edge, batch, DropReason::ShuttingDown);
            }
        }
    }

    fn check_watermark(&self, edge: &Edge, round: Round) {
        if edge.triggers.watermark >= 1.0 {
            return;
        }
        let src = edge.path.src;
        let occupied = self.registry.not_copied_lower(src) as usize;
        let excess = edge.excess(occupied, self.registry.capacity(src) as usize);
        if excess == 0 {
            return;
        }
        let backlog = edge.backlog();
        let wanted = excess.saturating_sub(backlog.queued_blocks + backlog.running_blocks);
        self.offload_coldest(edge, round, wanted, 0, Trigger::Watermark);
    }

    /// Copies what eviction will take next. The watermark alone does not see to that: blocks that came up from the lower tier
    /// count as copied, wherever they are in the order.
    fn check_victims(&self, edge: &Edge, round: Round) {
        let share = edge.triggers.ahead_share;
        let wanted = edge.choice(edge.room());
        if share > 0.0 && wanted > 0 {
            let Path { src, dst } = edge.path;
            // The registry does not know what is on volumes: where that is the only step, nothing counts as copied.
            let not_on = if dst == Tier::G4 { Tier::G3 } else { dst };
            let victims = self.registry.uncopied_victims(src, share, wanted, not_on);
            if dst == Tier::G3 {
                self.keep_on_volumes(round, &victims);
            }
            self.enqueue(edge, round, self.admitted(edge, Trigger::Eviction, victims));
        }
    }

    /// What is about to leave host memory also goes to a volume, where the configuration says so.
    fn keep_on_volumes(&self, round: Round, victims: &Pinned) {
        let keeps = self.volumes.policy.keeps_victims && !victims.is_empty();
        if let Some(edge) = self.open_edges().find(|edge| keeps && edge.path == Path::G2_G4) {
            let blocks = self.without_copied(edge, victims.clone());
            self.enqueue(edge, round, self.admitted(edge, Trigger::Eviction, blocks));
        }
    }

    fn check_idle(&self, edge: &Edge, round: Round) {
        if edge.triggers.idle_iterations > 0 {
            // A part at a time, so that an idle hour does not fill the queue for a busy minute.
            let wanted = (edge.limit / 4).max(1);
            self.offload_coldest(edge, round, wanted, edge.triggers.idle_iterations, Trigger::Idle);
        }
    }

    fn offload_coldest(&self, edge: &Edge, round: Round, wanted: usize, min_idle: u64, trigger: Trigger) {
        let wanted = edge.choice(wanted.min(edge.room()));
        if wanted > 0 {
            let coldest = self.coldest(edge, wanted, min_idle);
            self.enqueue(edge, round, self.admitted(edge, trigger, coldest));
        }
    }

    fn coldest(&self, edge: &Edge, wanted: usize, min_idle: u64) -> Pinned {
        self.registry.coldest(edge.path.src, wanted, edge.path.dst, min_idle)
    }

    pub(crate) fn enqueue(&self, edge: &Edge, round: Round, blocks: Pinned) {
        let blocks = blocks.into_transfer();
        if self.is_closed() || blocks.is_empty() {
            return;
        }
        // Holds the account open: the batch may be started and over before this returns.
        self.offloads.add(round, blocks.len());
        for dropped in edge.push(Batch { blocks, round }) {
            if edge.overflows() {
                tracing::warn!(path = %edge.path, limit = edge.limit, "offloads come faster than they go down: the queue drops and counts those least likely to be used again");
            }
            self.drop_batch(edge, dropped, DropReason::QueueFull);
        }
    }

    fn drop_batch(&self, edge: &Edge, batch: Batch, reason: DropReason) {
        let Batch { blocks, round } = batch;
        let count = blocks.len();
        self.metrics.path(edge.path).dropped(reason).add(count as u64);
        // Who waits for offloads finds their blocks let go.
        drop(blocks);
        self.offloads.remove(round, count);
    }

    /// Starts a batch; ancestors that were left behind go before it.
    fn start_offload(self: &Arc<Self>, edge: &Edge, batch: Batch) {
        let round = batch.round;
        // Keeps the round open: the batch may be over before its ancestors start.
        let _open = Running::new(self, round, 1);
        let orphans = self.carry(edge, batch);
        if orphans.is_empty() {
            return;
        }
        let family = self.with_ancestors(edge, &orphans);
        if !family.is_empty() {
            edge.start(family.len());
            self.offloads.add(round, family.len());
            let left = self.carry(edge, Batch { blocks: family, round });
            self.metrics.path(edge.path).dropped(DropReason::MissingParent).add(left.len() as u64);
        }
    }

    /// Reserves the destination and sends the plans; what finds no room is counted and let go. Blocks that cannot go before
    /// their parents come back.
    fn carry(self: &Arc<Self>, edge: &Edge, batch: Batch) -> Vec<BlockIdentity> {
        if edge.path.dst == Tier::G4 {
            return self.carry_to_volumes(edge, batch);
        }
        // Ends its account after everything below is let go.
        let running = Running::queued(self, edge.path, batch.round, batch.blocks.len());
        let Batch { blocks: mut batch, round } = batch;
        let _order = (edge.path.dst == Tier::G3).then(|| self.disk_order.lock());
        if edge.path.dst == Tier::G3 {
            drop(self.resting.due(Instant::now()));
        }
        let Some((identities, mut arrivals)) = self.reserve(edge, &mut batch) else { return Vec::new() };
        // Asked after destinations are reserved: what is removed later cancels the arrival, so nothing that was removed (a tenant that was
        // forgotten, what a lost worker had) comes back. The slot is asked for, not the block, which may have come back elsewhere.
        let losses = self.registry.losses();
        let there = batch.registered();
        let sources = batch.block_ids();
        let (mut moves, mut places, mut orphans) = (Vec::new(), Vec::new(), Vec::new());
        let mut removed = Vec::new();
        for (index, &identity) in identities.iter().enumerate() {
            match arrivals.arrivals()[index] {
                Arrival::Reserved { .. } if !there[index] => removed.push(index),
                Arrival::Reserved { block: dst, .. } => {
                    moves.push(Move { identity, from: edge.path.src, src: sources[index], dst });
                    places.push(index);
                }
                Arrival::Refused(_) if there[index] => orphans.push(identity),
                // Somebody else has copied it, or is about to.
                _ => {}
            }
        }
        arrivals.fail_each(removed);
        if moves.is_empty() {
            return orphans;
        }
        if let Some(wear) = &edge.wear {
            wear.charge(moves.len());
        }
        let parts = Parts {
            moves,
            destination: Destination::Reserved { arrivals, places },
            losses,
            keep: vec![Box::new(batch), Box::new(running)],
            source_check: None,
            round: Some(round),
            volume: None,
        };
        let prepared = self.prepare(Purpose::Offload, edge.path.dst, parts);
        self.send(prepared);
        orphans
    }

    /// Destinations for as much of `batch` as there is room for.
    fn reserve(&self, edge: &Edge, batch: &mut Pinned) -> Option<(Vec<BlockIdentity>, AnyArrivals)> {
        loop {
            let identities = batch.identities();
            if let Ok(arrivals) = self.registry.begin_arrivals(edge.path.dst, &identities) {
                return Some((identities, arrivals));
            }
            let homeless = batch.split_off(batch.len() / 2);
            self.metrics.path(edge.path).dropped(DropReason::NoSlot).add(homeless.len() as u64);
            if batch.is_empty() {
                return None;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn what_is_asked_for_later_is_not_waited_for() {
        let offloads = Offloads::new(Vec::new());
        assert!(offloads.wait_under_way(Instant::now()), "nothing is");
        let before = offloads.round();
        offloads.add(before, 3);
        assert!(!offloads.wait_under_way(Instant::now()));
        let after = offloads.round();
        assert!(after > before);
        let reached = std::thread::scope(|scope| {
            let waiter = scope.spawn(|| offloads.wait_under_way(Instant::now() + Duration::from_secs(60)));
            while offloads.round() == after {
                std::thread::yield_now();
            }
            offloads.add(offloads.round(), 2);
            // What follows from a block of the round is of the round.
            offloads.add(before, 1);
            offloads.remove(before, 3);
            offloads.remove(before, 1);
            waiter.join().unwrap()
        });
        assert!(reached);
        assert!(!offloads.wait_idle(Instant::now()), "the later ones go on");
        offloads.remove(offloads.round(), 2);
        assert!(offloads.wait_idle(Instant::now()));
    }
}
