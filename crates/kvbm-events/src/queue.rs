//! The bounded queue of one subscriber.

use crate::{EventReceiver, InProcessConfig, Payload, TransportError};
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Holds what a subscriber has not read yet.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    state: Mutex<QueueState>,
    arrived: Condvar,
}

#[derive(Debug, Default)]
struct QueueState {
    payloads: VecDeque<Payload>,
    bytes: usize,
    dropped: u64,
    closed: bool,
}

impl Queue {
    /// Adds a payload, at the cost of the oldest ones where there is no room.
    pub(crate) fn push(&self, payload: &Payload, limit: &InProcessConfig) {
        let mut state = self.state.lock();
        while !state.payloads.is_empty()
            && (state.payloads.len() >= limit.queue_batches
                || state.bytes + payload.len() > limit.queue_bytes)
        {
            state.pop();
            state.dropped += 1;
        }
        state.bytes += payload.len();
        state.payloads.push_back(Arc::clone(payload));
        self.arrived.notify_one();
    }

    /// Nothing more will come.
    pub(crate) fn close(&self) {
        self.state.lock().closed = true;
        self.arrived.notify_all();
    }
}

impl QueueState {
    fn pop(&mut self) -> Option<Payload> {
        let payload = self.payloads.pop_front()?;
        self.bytes -= payload.len();
        Some(payload)
    }
}

/// The reading end of a queue.
pub(crate) struct QueueReceiver {
    queue: Arc<Queue>,
    transport: &'static str,
}

impl QueueReceiver {
    /// `transport` names the implementer in errors.
    pub(crate) fn new(queue: Arc<Queue>, transport: &'static str) -> Self {
        Self { queue, transport }
    }
}

impl EventReceiver for QueueReceiver {
    fn recv(&mut self, timeout: Duration) -> Result<Option<Payload>, TransportError> {
        let deadline = Instant::now() + timeout;
        let mut state = self.queue.state.lock();
        loop {
            if let Some(payload) = state.pop() {
                return Ok(Some(payload));
            }
            if state.closed {
                return Err(TransportError::Closed { transport: self.transport });
            }
            if self.queue.arrived.wait_until(&mut state, deadline).timed_out() {
                return Ok(state.pop());
            }
        }
    }

    fn dropped(&self) -> u64 {
        self.queue.state.lock().dropped
    }
}
