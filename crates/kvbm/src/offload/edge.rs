//! One edge of the tiers: the offloads that wait and run on it, within a share of the upper tier.

use super::accounts::Interval;
use super::wear::WearBudget;
use crate::config::EdgeConfig;
use kvbm_plan::{GroupId, Path, SequenceHash};
use kvbm_pool::Pinned;
use parking_lot::Mutex;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};

/// Two transfers a path: one in the hands of the hardware, one ready behind it, per thread that a
/// worker gives to the path.
const MAX_RUNNING: usize = 8;

/// Blocks of one transfer: several are under way for a large batch, and one that finds no room
/// fails alone.
const MAX_BATCH: usize = 128;

/// Blocks among which to choose for each that the write budget allows.
const CHOICE: usize = 4;

/// See the module.
pub(crate) struct Edge {
    pub(crate) path: Path,
    pub(crate) triggers: EdgeConfig,
    /// Blocks that may be queued and running.
    pub(crate) limit: usize,
    /// Only for disks.
    pub(crate) wear: Option<WearBudget>,
    state: Mutex<EdgeState>,
    /// Something was dropped since the queue was empty.
    overflowing: AtomicBool,
}

/// Blocks that go down together.
pub(crate) struct Batch {
    pub(crate) blocks: Pinned,
    /// When they were requested.
    pub(crate) interval: Interval,
}

impl Batch {
    fn len(&self) -> usize {
        self.blocks.len()
    }

    fn split_off(&mut self, at: usize) -> Self {
        Self { blocks: self.blocks.split_off(at), interval: self.interval }
    }
}

/// Blocks that cannot go before an ancestor that is on its way to their tier.
pub(super) struct Waiting {
    pub(super) batch: Batch,
    pub(super) group: GroupId,
    pub(super) ancestor: SequenceHash,
}

/// What the blocks of a batch are worth, each: bits of a number that is not negative, which have
/// its order.
type Worth = u32;

/// A batch's place among those that may be dropped: the first goes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    worth: Worth,
    pushed: u64,
    /// Later parts of what was pushed together continue the earlier ones.
    part: Reverse<u32>,
}

/// Uses that are expected of a block of these, in the mean, times its priority. Where the policy
/// expects nothing in particular, the priority alone tells them apart.
fn worth_of(blocks: &Pinned) -> Worth {
    let worth = |(reuse, priority): (Option<f32>, u8)| match reuse {
        Some(reuse) => reuse.max(0.0) * (1.0 + f32::from(priority)),
        None => f32::from(priority),
    };
    let sum: f32 = blocks.expected_reuse().into_iter().zip(blocks.priorities()).map(worth).sum();
    let mean = sum / blocks.len().max(1) as f32;
    // Without a sign: that of zero would make it the dearest.
    if mean.is_finite() { mean.abs().to_bits() } else { 0 }
}

#[derive(Default)]
struct EdgeState {
    /// By what may be dropped first.
    queue: BTreeMap<Place, Batch>,
    /// By whose turn it is: what was pushed first, its first part first.
    turns: BTreeMap<(u64, u32), Worth>,
    pushed: u64,
    /// Batches of the queue about which nothing is decided yet: they have no turn.
    undecided: Vec<Place>,
    undecided_blocks: usize,
    /// Blocks that were taken to be decided about.
    deciding_blocks: usize,
    /// Without the undecided ones.
    queued_blocks: usize,
    waiting: Vec<Waiting>,
    waiting_blocks: usize,
    running_blocks: usize,
    running: usize,
}

impl EdgeState {
    fn waits_for_turn(&self) -> usize {
        self.queued_blocks + self.undecided_blocks + self.deciding_blocks + self.waiting_blocks
    }

    /// Blocks beyond `limit` if `more` were queued.
    fn over(&self, more: usize, limit: usize) -> usize {
        let held = self.waits_for_turn() + self.running_blocks;
        (held + more).saturating_sub(limit)
    }

    /// Makes room for `batch`, or shortens it. What has to go.
    fn make_room(&mut self, batch: &mut Batch, worth: Worth, limit: usize) -> Vec<Batch> {
        let mut dropped = Vec::new();
        while batch.len() > 0 {
            let over = self.over(batch.len(), limit);
            if over == 0 {
                break;
            }
            match self.queue.first_key_value() {
                Some((place, _)) if place.worth <= worth => dropped.extend(self.let_go_of_least(over)),
                _ => {
                    let kept = batch.len().saturating_sub(over);
                    dropped.push(batch.split_off(kept));
                }
            }
        }
        dropped
    }

    /// Takes up to `count` blocks from the end of the batch that is least worth keeping.
    fn let_go_of_least(&mut self, count: usize) -> Option<Batch> {
        let (place, mut batch) = self.queue.pop_first()?;
        let dropped = batch.split_off(batch.len().saturating_sub(count));
        if self.undecided.contains(&place) {
            self.undecided_blocks -= dropped.len();
        } else {
            self.queued_blocks -= dropped.len();
        }
        if batch.len() > 0 {
            self.queue.insert(place, batch);
        } else {
            self.turns.remove(&(place.pushed, place.part.0));
            self.undecided.retain(|known| *known != place);
        }
        Some(dropped)
    }
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
        Self {
            path,
            triggers,
            limit: limit.max(1),
            wear,
            state: Mutex::default(),
            overflowing: AtomicBool::new(false),
        }
    }

    pub(crate) fn backlog(&self) -> OffloadBacklog {
        let state = self.state.lock();
        OffloadBacklog { queued_blocks: state.waits_for_turn(), running_blocks: state.running_blocks }
    }

    /// Queues `batch` for a decision. What no longer fits comes back, as with [`push`](Self::push).
    pub(crate) fn mark(&self, mut batch: Batch) -> Vec<Batch> {
        let worth = worth_of(&batch.blocks);
        let mut state = self.state.lock();
        let dropped = state.make_room(&mut batch, worth, self.limit);
        if batch.len() > 0 {
            state.pushed += 1;
            let place = Place { worth, pushed: state.pushed, part: Reverse(0) };
            state.undecided.push(place);
            state.undecided_blocks += batch.len();
            state.queue.insert(place, batch);
        }
        dropped
    }

    /// Takes all batches that wait for a decision, in the order of their marks. They count as
    /// queued until [`decided`](Self::decided).
    pub(crate) fn take_undecided(&self) -> Vec<Batch> {
        let mut state = self.state.lock();
        let places = std::mem::take(&mut state.undecided);
        state.deciding_blocks += std::mem::take(&mut state.undecided_blocks);
        places.iter().filter_map(|place| state.queue.remove(place)).collect()
    }

    /// So many blocks are about to be queued, or were refused.
    pub(crate) fn decided(&self, blocks: usize) {
        let mut state = self.state.lock();
        state.deciding_blocks = state.deciding_blocks.saturating_sub(blocks);
    }

    /// Queues `batch`; what no longer fits comes back to be dropped without the lock. That is what
    /// is least worth keeping, and of equal worth what has waited longest. Each batch gives its
    /// last blocks, for the first are the parents of the others. Of a batch that alone is too large
    /// the first blocks stay.
    pub(crate) fn push(&self, mut batch: Batch) -> Vec<Batch> {
        let worth = worth_of(&batch.blocks);
        let mut state = self.state.lock();
        let dropped = state.make_room(&mut batch, worth, self.limit);
        state.pushed += 1;
        let pushed = state.pushed;
        for part in 0.. {
            if batch.len() == 0 {
                break;
            }
            let rest = batch.split_off(MAX_BATCH);
            state.queued_blocks += batch.len();
            state.turns.insert((pushed, part), worth);
            let place = Place { worth, pushed, part: Reverse(part) };
            state.queue.insert(place, std::mem::replace(&mut batch, rest));
        }
        dropped
    }

    /// Keeps a batch until its ancestor has arrived. The batch comes back where it has no room.
    pub(super) fn wait(&self, waiting: Waiting) -> Option<Batch> {
        let mut state = self.state.lock();
        if state.over(waiting.batch.len(), self.limit) > 0 {
            return Some(waiting.batch);
        }
        state.waiting_blocks += waiting.batch.len();
        state.waiting.push(waiting);
        None
    }

    pub(super) fn is_waiting(&self) -> bool {
        !self.state.lock().waiting.is_empty()
    }

    /// Takes the batches whose ancestor is not on its way any more.
    pub(super) fn take_ready(&self, is_arriving: impl Fn(GroupId, SequenceHash) -> bool) -> Vec<Batch> {
        let mut state = self.state.lock();
        if state.waiting.is_empty() {
            return Vec::new();
        }
        let is_ready = |waiting: &mut Waiting| !is_arriving(waiting.group, waiting.ancestor);
        let ready: Vec<_> = state.waiting.extract_if(.., is_ready).map(|waiting| waiting.batch).collect();
        state.waiting_blocks -= ready.iter().map(Batch::len).sum::<usize>();
        ready
    }

    /// Notes that offloads were dropped. Whether it is the first time since the queue was empty.
    pub(crate) fn overflows(&self) -> bool {
        !self.overflowing.swap(true, Ordering::Relaxed)
    }

    /// Blocks that can be queued without dropping others.
    pub(crate) fn room(&self) -> usize {
        let OffloadBacklog { queued_blocks, running_blocks } = self.backlog();
        self.limit.saturating_sub(queued_blocks + running_blocks)
    }

    /// How many of `wanted` blocks the write budget allows, beside those that wait for their turn.
    pub(crate) fn affordable(&self, wanted: usize) -> usize {
        let Some(wear) = &self.wear else { return wanted };
        let waiting = self.state.lock().queued_blocks;
        wear.affordable(wanted.saturating_add(waiting)).saturating_sub(waiting)
    }

    /// How many blocks to offer where `wanted` could go. Where the write budget is smaller than
    /// that, a few times as many as it allows, to choose the best from. None where nothing may be
    /// written.
    pub(crate) fn choice(&self, wanted: usize) -> usize {
        wanted.min(self.affordable(wanted).saturating_mul(CHOICE))
    }

    /// The next batch to start, if one may.
    pub(crate) fn pop(&self) -> Option<Batch> {
        let mut state = self.state.lock();
        if state.running >= MAX_RUNNING {
            return None;
        }
        let Some(((pushed, part), worth)) = state.turns.pop_first() else {
            self.overflowing.store(false, Ordering::Relaxed);
            return None;
        };
        let batch = state.queue.remove(&Place { worth, pushed, part: Reverse(part) })?;
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
        (state.queued_blocks, state.undecided_blocks, state.waiting_blocks) = (0, 0, 0);
        state.turns.clear();
        state.undecided.clear();
        let waiting = std::mem::take(&mut state.waiting).into_iter().map(|waiting| waiting.batch);
        std::mem::take(&mut state.queue).into_values().chain(waiting).collect()
    }

    /// Blocks that the watermark asks for: `int((occupancy - watermark) * capacity) + 1` above it,
    /// where occupancy counts blocks neither free nor copied lower (the formula of the tiering
    /// article).
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
    use kvbm_plan::{GroupId, NamespaceId, SequenceHash};
    use kvbm_pool::{BlockChain, BlockMetadata, BlockPool, Duplicates, G1, Registry, RegistryConfig};

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

    /// Registers a chain of `count` blocks of this priority in G1, and queues it. What was dropped,
    /// by chain.
    fn push(edge: &Edge, pool: &BlockPool<G1>, chain: u8, count: usize, priority: u8) -> Vec<(u8, usize)> {
        let hash =
            |index| SequenceHash::from_bytes([chain, index as u8, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]);
        let hashes: Vec<_> = (0..count).map(hash).collect();
        let partial = pool.get_mutable_blocks(count).unwrap();
        let partial = partial.init_sequence(NamespaceId(0), GroupId(0), 0).unwrap();
        let (complete, _) = partial.commit(BlockChain::of_hashes(&hashes)).unwrap();
        let cached = pool.register_with(complete, Duplicates::Reuse, BlockMetadata { priority }).unwrap();
        let blocks = cached.erase().into_transfer();
        edge.push(Batch { blocks, interval: Interval::default() }).iter().map(described).collect()
    }

    fn described(batch: &Batch) -> (u8, usize) {
        (batch.blocks.identities()[0].hash.as_bytes()[0], batch.len())
    }

    #[test]
    fn what_is_worth_least_is_dropped_first_and_what_came_first_starts_first() {
        let registry = Registry::new(&RegistryConfig::new([64, 64, 0])).unwrap();
        let (pool, edge) = (registry.pool::<G1>(), edge(1.0));
        assert_eq!(push(&edge, &pool, 1, 3, 0), []);
        assert_eq!(push(&edge, &pool, 2, 4, 5), []);
        assert_eq!(push(&edge, &pool, 3, 3, 0), [], "ten fit");
        assert_eq!(push(&edge, &pool, 4, 4, 1), [(1, 3), (3, 1)], "of equal worth the oldest, and its end");
        assert_eq!(
            push(&edge, &pool, 5, 3, 0),
            [(3, 2), (5, 1)],
            "what comes is no better than what is there"
        );
        assert_eq!(push(&edge, &pool, 6, 1, 0), [(5, 1)]);
        assert_eq!(
            push(&edge, &pool, 7, 20, 9),
            [(5, 1), (6, 1), (4, 4), (2, 4), (7, 10)],
            "the first ten stay"
        );
        assert_eq!(edge.backlog(), OffloadBacklog { queued_blocks: 10, running_blocks: 0 });
        assert_eq!(edge.pop().map(|batch| described(&batch)), Some((7, 10)));
        assert_eq!(push(&edge, &pool, 8, 2, 9), [(8, 2)], "what runs is not dropped");
        edge.finished(10);
        for (chain, priority) in [(9, 0), (10, 3), (11, 1)] {
            assert_eq!(push(&edge, &pool, chain, 2, priority), []);
        }
        let order: Vec<_> = std::iter::from_fn(|| edge.pop().map(|batch| described(&batch))).collect();
        assert_eq!(order, [(9, 2), (10, 2), (11, 2)]);
        assert_eq!(edge.backlog(), OffloadBacklog { queued_blocks: 0, running_blocks: 6 });
    }
}
