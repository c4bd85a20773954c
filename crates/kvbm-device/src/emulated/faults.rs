//! Faults on request: the n-th matching operation fails, stops half-way, writes a wrong byte, or
//! stalls until released.

use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;

use crate::{Completer, DeviceError, Direction, Event};

/// Kinds of operations that faults can be aimed at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OpKind {
    /// A batch of copies.
    Copy(Direction),
    /// A fill.
    Fill,
    /// An emulated kernel.
    Launch,
}

/// What happens to the operation. What code above must survive: all of them, without serving a
/// wrong byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// It fails before it touches a byte.
    Fail,
    /// It fails after about half of its bytes.
    FailHalfway,
    /// It reports success, but one bit of its destination is wrong (copies of at least one byte;
    /// else it fails).
    FlipBit,
    /// It waits until the ticket is released or dropped, then goes on as usual.
    Stall,
}

/// Aims a fault at an operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FaultRule {
    /// Only operations of streams with this name; `None`: of all streams.
    pub stream: Option<String>,
    /// Only operations of this kind; `None`: of all kinds.
    pub kind: Option<OpKind>,
    /// How many matching operations go by first; 0 hits the next.
    pub skip: u64,
    /// What happens then, once.
    pub fault: Fault,
}

impl FaultRule {
    /// `fault` for the next operation of any stream.
    pub fn next(fault: Fault) -> Self {
        Self { stream: None, kind: None, skip: 0, fault }
    }

    /// Only on streams of this name.
    #[must_use]
    pub fn on_stream(self, name: &str) -> Self {
        Self { stream: Some(name.to_owned()), ..self }
    }

    /// Only for operations of this kind.
    #[must_use]
    pub fn of_kind(self, kind: OpKind) -> Self {
        Self { kind: Some(kind), ..self }
    }

    /// After `skip` matching operations.
    #[must_use]
    pub fn after(self, skip: u64) -> Self {
        Self { skip, ..self }
    }
}

/// An injected fault: reports when it was injected, and ends a stall. Dropping it ends a stall too.
#[derive(Debug)]
pub struct FaultTicket {
    struck: Event,
    release: Option<Completer>,
}

impl FaultTicket {
    /// Completes when an operation met the fault.
    pub fn struck(&self) -> &Event {
        &self.struck
    }

    /// Blocks until an operation met the fault.
    ///
    /// # Errors
    /// [`DeviceError::Deadline`].
    pub fn wait_struck(&self, deadline: Instant) -> Result<(), DeviceError> {
        self.struck.wait(deadline)
    }

    /// Lets a stalled operation go on.
    pub fn release(mut self) {
        if let Some(release) = self.release.take() {
            release.complete(Ok(()));
        }
    }
}

/// Injects faults into one emulated device. Clones are the same handle.
#[derive(Clone, Debug)]
pub struct FaultHandle {
    state: Arc<Mutex<FaultState>>,
}

#[derive(Debug, Default)]
struct FaultState {
    rules: Vec<ArmedRule>,
    allocations: u64,
    pins: Option<(u64, u64)>,
}

#[derive(Debug)]
struct ArmedRule {
    rule: FaultRule,
    struck: Completer,
    released: Event,
}

/// A fault that an operation has met.
pub(super) struct Strike {
    pub(super) fault: Fault,
    struck: Completer,
    released: Event,
}

impl Strike {
    /// Announces the fault, and stands still as long as a stall asks for.
    pub(super) fn announce(self) -> Fault {
        self.struck.complete(Ok(()));
        if self.fault == Fault::Stall {
            super::queue::wait_in_stream(&self.released);
        }
        self.fault
    }
}

impl FaultHandle {
    pub(super) fn new() -> Self {
        Self { state: Arc::default() }
    }

    /// Arms a fault. Rules are tried in the order in which they were armed; an operation meets at
    /// most one.
    pub fn inject(&self, rule: FaultRule) -> FaultTicket {
        let (struck_event, struck) = Event::completable();
        let (released, release) = Event::completable();
        self.state.lock().rules.push(ArmedRule { rule, struck, released });
        FaultTicket { struck: struck_event, release: Some(release) }
    }

    /// The next `count` allocations fail with [`DeviceError::OutOfMemory`].
    pub fn fail_allocations(&self, count: u64) {
        self.state.lock().allocations = count;
    }

    /// The next `count` registrations of host memory fail as if the limit of locked memory were
    /// `limit` bytes.
    pub fn fail_pins(&self, count: u64, limit: u64) {
        self.state.lock().pins = Some((count, limit));
    }

    /// Faults that are armed and have not struck.
    pub fn armed(&self) -> usize {
        self.state.lock().rules.len()
    }

    pub(super) fn strike_for(&self, stream: &str, kind: OpKind) -> Option<Strike> {
        let mut state = self.state.lock();
        let mut hit = None;
        for (index, armed) in state.rules.iter_mut().enumerate() {
            let rule = &mut armed.rule;
            if rule.stream.as_deref().is_some_and(|name| name != stream)
                || rule.kind.is_some_and(|only| only != kind)
            {
                continue;
            }
            if rule.skip > 0 {
                rule.skip -= 1;
            } else if hit.is_none() {
                hit = Some(index);
            }
        }
        let ArmedRule { rule, struck, released } = state.rules.remove(hit?);
        Some(Strike { fault: rule.fault, struck, released })
    }

    pub(super) fn take_allocation_failure(&self) -> bool {
        let mut state = self.state.lock();
        let fails = state.allocations > 0;
        state.allocations = state.allocations.saturating_sub(1);
        fails
    }

    pub(super) fn take_pin_failure(&self) -> Option<u64> {
        let mut state = self.state.lock();
        let (count, limit) = state.pins?;
        state.pins = (count > 1).then_some((count - 1, limit));
        (count > 0).then_some(limit)
    }
}
