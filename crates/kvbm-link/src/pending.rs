//! Connections whose peer has not shown yet that it belongs here: how many there may be, and which
//! one is closed when there are too many.

use parking_lot::Mutex;
use rustix::fd::OwnedFd;
use rustix::net::{Shutdown, shutdown};
use std::collections::VecDeque;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::sync::Arc;

/// The connections of a listener. A silent peer that connects again and again keeps nobody out:
/// where there is no room, a connection whose peer has not shown that it belongs here is closed,
/// and the new one takes its place. Unauthenticated peers cannot foresee which one.
#[derive(Debug)]
pub struct PendingConnections {
    most: usize,
    state: Mutex<PendingState>,
    random: RandomState,
}

#[derive(Debug, Default)]
struct PendingState {
    /// How many came.
    came: u64,
    /// Those whose peer has shown nothing yet, the one that came first in front.
    pending: VecDeque<(u64, OwnedFd)>,
    /// Those that are served.
    served: usize,
    /// Those that were closed for another one, and have not ended yet.
    closed: usize,
}

/// A place among the connections, until it is dropped.
#[derive(Debug)]
pub struct ConnectionPermit {
    connections: Arc<PendingConnections>,
    number: u64,
    has_replaced: bool,
    is_served: bool,
}

impl PendingConnections {
    /// At most so many connections at a time, at least one. As many again may be about to end.
    pub fn new(most: usize) -> Arc<Self> {
        let (most, state) = (most.max(1), Mutex::default());
        Arc::new(Self { most, state, random: RandomState::new() })
    }

    /// A place for a connection. `socket` is a descriptor of it, by which it may be closed. `None`
    /// where all connections are served, or too many that were closed have not ended.
    pub fn enter(self: &Arc<Self>, socket: OwnedFd) -> Option<ConnectionPermit> {
        let mut state = self.state.lock();
        if state.closed >= self.most {
            return None;
        }
        state.came += 1;
        let (number, mut has_replaced) = (state.came, false);
        if state.pending.len() + state.served >= self.most {
            let at = self.random.hash_one(number).checked_rem(state.pending.len() as u64)?;
            if let Some((_, other)) = state.pending.remove(at as usize) {
                // A socket that is closed already is as good.
                let _closed = shutdown(&other, Shutdown::Both);
                state.closed += 1;
                has_replaced = true;
            }
        }
        state.pending.push_back((number, socket));
        Some(ConnectionPermit { connections: Arc::clone(self), number, has_replaced, is_served: false })
    }
}

impl PendingState {
    /// Whether the connection was still pending.
    fn take(&mut self, number: u64) -> bool {
        let before = self.pending.len();
        self.pending.retain(|(pending, _)| *pending != number);
        self.pending.len() < before
    }
}

impl ConnectionPermit {
    /// Whether another connection was closed for this one.
    pub fn has_replaced(&self) -> bool {
        self.has_replaced
    }

    /// The peer has shown that it belongs here: nobody takes its place any more. `false` where
    /// another connection has it already.
    pub fn keep(&mut self) -> bool {
        let mut state = self.connections.state.lock();
        if !self.is_served && state.take(self.number) {
            self.is_served = true;
            state.served += 1;
        }
        self.is_served
    }
}

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        let mut state = self.connections.state.lock();
        if self.is_served {
            state.served -= 1;
        } else if !state.take(self.number) {
            state.closed -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    /// Both ends of a connection.
    struct Ends {
        peer: UnixStream,
        _own: UnixStream,
    }

    fn enter(connections: &Arc<PendingConnections>) -> Option<(Ends, ConnectionPermit)> {
        let (peer, own) = UnixStream::pair().expect("a pair");
        let socket = own.try_clone().expect("a descriptor");
        Some((Ends { peer, _own: own }, connections.enter(socket.into())?))
    }

    fn is_closed(ends: &mut Ends) -> bool {
        ends.peer.set_nonblocking(true).expect("a socket");
        matches!(ends.peer.read(&mut [0]), Ok(0))
    }

    #[test]
    fn whoever_is_served_keeps_its_place_and_a_silent_one_loses_it() {
        let connections = PendingConnections::new(2);
        let (mut served, mut permit) = enter(&connections).expect("room");
        assert!(permit.keep() && permit.keep());
        let (mut silent, mut lost) = enter(&connections).expect("room");
        let (mut next, mut last) = enter(&connections).expect("the silent one's place");
        assert!(is_closed(&mut silent) && !lost.keep());
        assert!(last.has_replaced() && !lost.has_replaced() && !permit.has_replaced());
        assert!(!is_closed(&mut served) && !is_closed(&mut next) && last.keep());
        assert!(enter(&connections).is_none(), "both are served");
        drop((permit, lost));
        assert!(enter(&connections).is_some());
    }

    #[test]
    fn those_that_were_closed_and_have_not_ended_are_bounded() {
        let connections = PendingConnections::new(2);
        let mut all: Vec<_> = (0..4).map(|_| enter(&connections).expect("room")).collect();
        assert!(enter(&connections).is_none(), "two have not ended");
        let (closed, open): (Vec<_>, Vec<_>) = all.drain(..).partition(|(_, permit)| {
            !connections.state.lock().pending.iter().any(|(number, _)| *number == permit.number)
        });
        assert_eq!((closed.len(), open.len()), (2, 2));
        drop(closed);
        assert!(enter(&connections).is_some());
        drop(open);
        let state = connections.state.lock();
        assert_eq!((state.pending.len(), state.served, state.closed), (0, 0, 0));
    }
}
