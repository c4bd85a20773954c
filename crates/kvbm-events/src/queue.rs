//! The bounded queue of one subscriber.

use crate::{EventReceiver, InProcessConfig, Payload, TransportError};
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::sync::Arc;
#[cfg(any(feature = "nats", feature = "zmq"))]
use std::sync::Weak;
use std::time::{Duration, Instant};

/// Holds what a subscriber has not read yet.
#[derive(Debug)]
pub(crate) struct Queue<T = Payload> {
    state: Mutex<QueueState<T>>,
    arrived: Condvar,
}

#[derive(Debug)]
struct QueueState<T> {
    /// With the bytes that each counts for.
    items: VecDeque<(T, usize)>,
    bytes: usize,
    dropped: u64,
    closed: bool,
}

impl<T> Default for Queue<T> {
    fn default() -> Self {
        let state = QueueState { items: VecDeque::new(), bytes: 0, dropped: 0, closed: false };
        Self { state: Mutex::new(state), arrived: Condvar::new() }
    }
}

impl<T> Queue<T> {
    /// Adds an item, at the cost of the oldest ones where there is no room.
    pub(crate) fn push(&self, item: T, bytes: usize, limit: &InProcessConfig) {
        let mut state = self.state.lock();
        while !state.items.is_empty()
            && (state.items.len() >= limit.queue_batches || state.bytes + bytes > limit.queue_bytes)
        {
            state.pop();
            state.dropped += 1;
        }
        state.bytes += bytes;
        state.items.push_back((item, bytes));
        self.arrived.notify_one();
    }

    /// Nothing more will come.
    pub(crate) fn close(&self) {
        self.state.lock().closed = true;
        self.arrived.notify_all();
    }
}

impl<T> QueueState<T> {
    fn pop(&mut self) -> Option<T> {
        let (item, bytes) = self.items.pop_front()?;
        self.bytes -= bytes;
        Some(item)
    }
}

/// The reading end of a queue.
pub(crate) struct QueueReceiver<T = Payload> {
    queue: Arc<Queue<T>>,
    transport: &'static str,
}

impl<T> QueueReceiver<T> {
    /// `transport` names the implementer in errors.
    pub(crate) fn new(queue: Arc<Queue<T>>, transport: &'static str) -> Self {
        Self { queue, transport }
    }

    pub(crate) fn next(&mut self, timeout: Duration) -> Result<Option<T>, TransportError> {
        let deadline = Instant::now() + timeout;
        let mut state = self.queue.state.lock();
        loop {
            if let Some(item) = state.pop() {
                return Ok(Some(item));
            }
            if state.closed {
                return Err(TransportError::Closed { transport: self.transport });
            }
            if self.queue.arrived.wait_until(&mut state, deadline).timed_out() {
                return Ok(state.pop());
            }
        }
    }
}

impl<T: Into<Payload> + Send> EventReceiver for QueueReceiver<T> {
    fn recv(&mut self, timeout: Duration) -> Result<Option<Payload>, TransportError> {
        Ok(self.next(timeout)?.map(Into::into))
    }

    fn dropped(&self) -> u64 {
        self.queue.state.lock().dropped
    }

    fn waiting(&self) -> usize {
        self.queue.state.lock().items.len()
    }
}

/// Where a network's thread puts what comes in, as long as somebody may read it. Says when no more will come.
#[cfg(any(feature = "nats", feature = "zmq"))]
pub(crate) struct Sink<T = Payload> {
    queue: Weak<Queue<T>>,
    limit: InProcessConfig,
}

#[cfg(any(feature = "nats", feature = "zmq"))]
impl<T> Sink<T> {
    pub(crate) fn new(queue: &Arc<Queue<T>>, limit: InProcessConfig) -> Self {
        Self { queue: Arc::downgrade(queue), limit }
    }

    /// Whether somebody may still read.
    pub(crate) fn push(&self, item: T, bytes: usize) -> bool {
        let Some(queue) = self.queue.upgrade() else { return false };
        queue.push(item, bytes, &self.limit);
        true
    }

    pub(crate) fn is_wanted(&self) -> bool {
        self.queue.strong_count() > 0
    }
}

#[cfg(any(feature = "nats", feature = "zmq"))]
impl<T> Drop for Sink<T> {
    fn drop(&mut self) {
        if let Some(queue) = self.queue.upgrade() {
            queue.close();
        }
    }
}
