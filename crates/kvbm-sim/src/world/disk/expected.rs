//! What a disk must have, by what its worker was told: the naive model that the real engine and its
//! recovery are compared with.

use super::Record;
use kvbm_disk::stepped::Held;
use kvbm_plan::{BlockId, BlockIdentity, NamespaceId, SequenceHash};
use std::collections::BTreeMap;

/// What a slot has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Nothing,
    Block(Record),
    Quarantined,
}

impl State {
    /// Whether this is what the engine says.
    fn is(self, held: Held) -> bool {
        match (self, held) {
            (Self::Nothing, Held::Nothing) | (Self::Quarantined, Held::Quarantined) => true,
            (Self::Block(record), Held::Block(identity)) => record.identity == identity,
            _ => false,
        }
    }

    pub(super) fn record(self) -> Option<Record> {
        match self {
            Self::Block(record) => Some(record),
            _ => None,
        }
    }
}

/// A slot from the last state that is durable for certain up to now. A recovery may find any of
/// these states, and no other.
#[derive(Clone, Debug)]
struct History {
    first: State,
    later: Vec<State>,
    /// The slot may have been half overwritten when a worker ended.
    torn: bool,
    /// Bits of the slot or of a record of it have flipped. A record of an earlier time may be the
    /// newest that is intact.
    rotten: bool,
    /// It was written since they flipped.
    is_rewritten: bool,
    /// A block whose record recovery passed over for a newer copy in another slot. No commit has
    /// removed the record yet: where that of the newer copy rots, it counts again. So it does after
    /// a write to the slot that a loss of power undid.
    passed_over: Option<Record>,
}

impl History {
    const NEW: Self = Self {
        first: State::Nothing,
        later: Vec::new(),
        torn: false,
        rotten: false,
        is_rewritten: false,
        passed_over: None,
    };

    fn last(&self) -> State {
        self.later.last().copied().unwrap_or(self.first)
    }

    fn states(&self) -> impl DoubleEndedIterator<Item = State> + '_ {
        std::iter::once(self.first).chain(self.later.iter().copied())
    }

    fn push(&mut self, state: State) {
        if self.last() != state {
            self.later.push(state);
        }
    }

    /// The block that was found, if certainly nothing was written over it: then all of its bytes
    /// are there. Where the same block was there before, it may be that one's record which counts.
    fn whole(&self, found: Held) -> Option<Record> {
        let mut alike = self.states().filter(|state| state.is(found));
        let (only, another) = (alike.next()?, alike.next());
        if self.torn || another.is_some() || only != self.last() {
            return None;
        }
        only.record()
    }
}

/// See the module.
pub(super) struct Expected {
    slots: Vec<History>,
    /// Changes so far.
    pub(super) changes: u64,
    /// Every block that a slot was ever given.
    given: BTreeMap<(BlockId, NamespaceId, SequenceHash), Record>,
}

impl Expected {
    pub(super) fn new(slots: u32) -> Self {
        Self { slots: vec![History::NEW; slots as usize], changes: 0, given: BTreeMap::new() }
    }

    pub(super) fn slots(&self) -> impl Iterator<Item = BlockId> + use<> {
        (0..self.slots.len() as u32).map(BlockId)
    }

    /// What a slot has now.
    pub(super) fn last(&self, slot: BlockId) -> State {
        self.slots.get(slot.index()).map_or(State::Nothing, History::last)
    }

    /// Whether a slot has, or may have after a loss of power, some block.
    pub(super) fn may_hold(&self, slot: BlockId) -> bool {
        self.slots.get(slot.index()).is_some_and(|slot| slot.states().any(|state| state.record().is_some()))
    }

    /// Whether bits have flipped there.
    pub(super) fn is_rotten(&self, slot: BlockId) -> bool {
        self.slots.get(slot.index()).is_some_and(|slot| slot.rotten)
    }

    /// Whether the bytes of a slot may be wrong.
    pub(super) fn is_suspect(&self, slot: BlockId) -> bool {
        self.slots.get(slot.index()).is_some_and(|slot| slot.rotten || slot.torn)
    }

    /// The block of a slot is gone, or its bytes are out of use.
    pub(super) fn push(&mut self, slot: BlockId, state: State) {
        if let Some(slot) = self.slots.get_mut(slot.index()) {
            slot.push(state);
            self.changes += 1;
        }
    }

    /// A block was written as a whole.
    pub(super) fn write(&mut self, slot: BlockId, record: Record) {
        let Some(history) = self.slots.get_mut(slot.index()) else { return };
        history.push(State::Nothing);
        history.push(State::Block(record));
        (history.torn, history.is_rewritten) = (false, true);
        self.changes += 1;
        self.given.insert((slot, record.identity.namespace, record.identity.hash), record);
    }

    /// A block was read as a whole.
    pub(super) fn prove(&mut self, slot: BlockId) {
        if let Some(slot) = self.slots.get_mut(slot.index()) {
            slot.torn = false;
        }
    }

    /// Bits of a slot, or of one of its records, flip.
    pub(super) fn rot(&mut self, slot: BlockId) {
        if let Some(slot) = self.slots.get_mut(slot.index()) {
            (slot.rotten, slot.is_rewritten) = (true, false);
        }
    }

    /// All that was written is durable.
    pub(super) fn settle(&mut self) {
        for slot in &mut self.slots {
            slot.first = slot.last();
            slot.later.clear();
            slot.passed_over = None;
            // A block that was released before a commit has left no record.
            slot.rotten &= !slot.is_rewritten || slot.first == State::Nothing;
        }
    }

    /// The disk was replaced by an empty one.
    pub(super) fn wipe(&mut self) {
        self.slots.fill(History { rotten: true, ..History::NEW });
        self.given.clear();
    }

    /// What a recovery has found against what it may find. The blocks that must be whole then, or
    /// what is wrong. Of a disk that has lied only blocks are wrong that it was never given.
    pub(super) fn judge(&self, found: &[Held], has_lied: bool) -> Result<Vec<(BlockId, Record)>, String> {
        let mut whole = Vec::new();
        for (slot, (history, &held)) in self.slots.iter().zip(found).enumerate() {
            let slot = BlockId(slot as u32);
            let is_exempt = has_lied || history.rotten;
            if history.states().any(|state| state.is(held)) {
                whole.extend(history.whole(held).filter(|_| !is_exempt).map(|record| (slot, record)));
                continue;
            }
            // Of a block in two slots recovery keeps the newer copy.
            let is_copy = held == Held::Nothing && history.states().any(|state| is_among(state, found));
            let is_passed_over = history.passed_over.is_some_and(|record| {
                held == Held::Block(record.identity) && self.has_rotten_copy(slot, record)
            });
            let was_given = match held {
                Held::Block(identity) => self.record(slot, &identity).is_some(),
                Held::Nothing | Held::Quarantined => true,
            };
            if !is_copy && !is_passed_over && !(is_exempt && was_given) {
                let states: Vec<_> = history.states().map(Brief).collect();
                return Err(format!("slot {slot} has {held:?} after recovery, and may have {states:?}"));
            }
        }
        Ok(whole)
    }

    /// What a recovery has found is what there is from now on. Who writes on it takes it for
    /// durable.
    pub(super) fn recover(&mut self, found: &[Held]) {
        for (at, &held) in found.iter().enumerate() {
            let slot = BlockId(at as u32);
            let state = match held {
                Held::Nothing => State::Nothing,
                Held::Quarantined => State::Quarantined,
                Held::Block(identity) => {
                    let by_state = self.slots[at].states().rev().find(|state| state.is(held));
                    let record = by_state.and_then(State::record).or_else(|| self.record(slot, &identity));
                    record.map_or(State::Nothing, State::Block)
                }
            };
            let history = &mut self.slots[at];
            history.passed_over = match held {
                Held::Nothing => {
                    let newest = history.states().rev().find(|state| is_among(*state, found));
                    newest.and_then(State::record).or(history.passed_over)
                }
                Held::Block(_) | Held::Quarantined => None,
            };
            history.torn = state.record().is_some() && history.whole(held).is_none();
            history.first = state;
            history.later.clear();
            // What a recovery has found may be older than the damage.
            history.is_rewritten = false;
        }
    }

    /// Whether another slot may have the block, and its record may be gone.
    fn has_rotten_copy(&self, slot: BlockId, record: Record) -> bool {
        let is_copy = |state: State| state.record().is_some_and(|it| it.identity == record.identity);
        let others = self.slots.iter().enumerate().filter(|(at, _)| *at != slot.index());
        others.into_iter().any(|(_, other)| other.rotten && other.states().any(is_copy))
    }

    fn record(&self, slot: BlockId, identity: &BlockIdentity) -> Option<Record> {
        let given = self.given.get(&(slot, identity.namespace, identity.hash)).copied();
        given.filter(|record| record.identity == *identity)
    }

    /// What a loss of power may leave of a namespace that was asked for before a step.
    pub(super) fn remains(&self, namespace: NamespaceId, before: u64) -> Option<(BlockId, Record)> {
        let old = |record: &Record| record.identity.namespace == namespace && record.asked < before;
        self.slots.iter().enumerate().filter(|(_, slot)| !slot.rotten).find_map(|(at, slot)| {
            let record = slot.states().filter_map(State::record).find(old)?;
            Some((BlockId(at as u32), record))
        })
    }
}

/// Whether recovery has found this block in some slot.
fn is_among(state: State, found: &[Held]) -> bool {
    let is_it = |held: &Held| state.record().is_some_and(|record| Held::Block(record.identity) == *held);
    found.iter().any(is_it)
}

/// A state as a violation names it.
struct Brief(State);

impl std::fmt::Debug for Brief {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            State::Nothing => f.write_str("nothing"),
            State::Quarantined => f.write_str("quarantined"),
            State::Block(record) => {
                write!(f, "block {} ({})", record.identity.position, record.identity.hash)
            }
        }
    }
}
