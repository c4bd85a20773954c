//! Unauthenticated peers whose handshake is under way: how many there may be, and which one is
//! disconnected when there are too many.

use crate::listener::UnverifiedConnection;
use parking_lot::Mutex;
use rustix::fd::OwnedFd;
use rustix::net::{Shutdown, shutdown};
use std::collections::VecDeque;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::io;

/// Handshakes that wait for the other end at a time.
const MAX_WAITING: usize = 32;
/// Handshakes at a time, those that are about to end included.
pub(crate) const MAX_HANDSHAKES: usize = 2 * MAX_WAITING;

/// See the module.
#[derive(Default)]
pub(crate) struct Waiting {
    state: Mutex<State>,
    /// Unauthenticated peers cannot foresee which one it picks.
    random: RandomState,
}

#[derive(Default)]
struct State {
    /// How many came.
    came: u64,
    /// Handshakes under way.
    now: usize,
    /// Those that wait for the other end's offer, the one that came first in front.
    waiting: VecDeque<(u64, OwnedFd)>,
}

/// A place among the handshakes.
pub(crate) struct HandshakePermit<'a> {
    waiting: &'a Waiting,
    number: u64,
}

impl Waiting {
    /// A place for a stranger. Where as many wait as may, one of them picked at random loses its
    /// line: whoever comes has a place although silent ones come again and again. None where too
    /// many handshakes are about to end.
    pub(crate) fn enter(&self, stranger: &UnverifiedConnection) -> io::Result<Option<HandshakePermit<'_>>> {
        let socket = stranger.socket()?;
        let mut state = self.state.lock();
        if state.now >= MAX_HANDSHAKES {
            return Ok(None);
        }
        state.came += 1;
        let number = state.came;
        if state.waiting.len() >= MAX_WAITING {
            let at = self.random.hash_one(number) % MAX_WAITING as u64;
            if let Some((_, other)) = state.waiting.remove(at as usize) {
                // A socket that is closed already is as good.
                let _closed = shutdown(&other, Shutdown::Both);
            }
        }
        state.now += 1;
        state.waiting.push_back((number, socket));
        Ok(Some(HandshakePermit { waiting: self, number }))
    }
}

impl HandshakePermit<'_> {
    /// The other end has made its offer: nobody takes its place any more. Whether nobody has.
    pub(crate) fn keep(&self) -> bool {
        let waiting = &mut self.waiting.state.lock().waiting;
        let before = waiting.len();
        waiting.retain(|(number, _)| *number != self.number);
        waiting.len() < before
    }
}

impl Drop for HandshakePermit<'_> {
    fn drop(&mut self) {
        self.keep();
        self.waiting.state.lock().now -= 1;
    }
}
