//! What a link does to commands and messages.

use kvbm::worker::Lane;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

/// Events are commands and messages, counted together from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    None,
    /// Every command waits, and overtakes others as its lane allows.
    SlowCommands,
    /// Every message waits.
    SlowMessages,
    /// Every command and every message comes twice.
    Repeat,
    /// This event after the start does not arrive.
    Lose(usize),
    /// The line ends at this event, and its worker serves a new one: a command is lost with it, a
    /// message is the last one.
    Cut(usize),
}

/// What becomes of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    Passes,
    Twice,
    Late,
    Lost,
    Cut,
}

/// A fault, and what it has seen.
pub(super) struct Faults {
    fault: Fault,
    seen: AtomicUsize,
    mended: AtomicBool,
    /// Events until the manager was built.
    start: AtomicUsize,
    /// Cuts that were asked for.
    cuts: AtomicU64,
}

impl Faults {
    pub(super) fn new(fault: Fault) -> Self {
        Self {
            fault,
            seen: AtomicUsize::new(0),
            mended: AtomicBool::new(false),
            start: AtomicUsize::new(usize::MAX),
            cuts: AtomicU64::new(0),
        }
    }

    pub(super) fn ask_cut(&self) {
        self.cuts.fetch_add(1, Ordering::AcqRel);
    }

    pub(super) fn cuts_asked(&self) -> u64 {
        self.cuts.load(Ordering::Acquire)
    }

    /// The manager is built.
    pub(super) fn started(&self) {
        self.start.store(self.seen(), Ordering::Release);
    }

    /// No faults from now on.
    pub(super) fn mend(&self) {
        self.mended.store(true, Ordering::Release);
    }

    /// Whether something was lost, which only a new line makes good.
    pub(super) fn has_lost(&self) -> bool {
        matches!(self.fault, Fault::Lose(_))
    }

    pub(super) fn seen(&self) -> usize {
        self.seen.load(Ordering::Acquire)
    }

    pub(super) fn fate(&self, is_command: bool) -> Fate {
        let at = self.seen.fetch_add(1, Ordering::AcqRel);
        if self.mended.load(Ordering::Acquire) {
            return Fate::Passes;
        }
        match self.fault {
            Fault::SlowCommands if is_command => Fate::Late,
            Fault::SlowMessages if !is_command => Fate::Late,
            Fault::Repeat => Fate::Twice,
            Fault::Lose(event) if at.checked_sub(self.start.load(Ordering::Acquire)) == Some(event) => {
                Fate::Lost
            }
            Fault::Cut(event) if event == at => {
                self.ask_cut();
                Fate::Cut
            }
            _ => Fate::Passes,
        }
    }
}

/// Commands that wait, in the order in which their lanes let them leave.
#[derive(Default)]
pub(super) struct Waiting(VecDeque<(Lane, Vec<u8>)>);

impl Waiting {
    pub(super) fn add(&mut self, lane: Lane, command: Vec<u8>) {
        let at = match lane {
            Lane::Bulk | Lane::Numbered(_) => self.0.len(),
            Lane::Urgent => self.overtaken(),
            Lane::Behind(number) => {
                let own = self.0.iter().position(|(lane, _)| *lane == Lane::Numbered(number));
                own.map_or_else(|| self.overtaken(), |at| at + 1)
            }
        };
        self.0.insert(at, (lane, command));
    }

    /// Behind those that are as urgent.
    fn overtaken(&self) -> usize {
        self.0.iter().take_while(|(lane, _)| matches!(lane, Lane::Urgent | Lane::Behind(_))).count()
    }

    pub(super) fn next(&mut self) -> Option<(Lane, Vec<u8>)> {
        self.0.pop_front()
    }
}
