//! The bounded queue of one subscriber.

use crate::deadline;
use crate::{EventReceiver, Payload, TransportError};
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::sync::Arc;
#[cfg(any(feature = "nats", feature = "zmq"))]
use std::sync::Weak;
use std::task::Waker;
#[cfg(feature = "zmq")]
use std::task::{Context, Poll};
use std::time::Duration;

/// Limits of each subscriber's queue. The oldest payloads are dropped to keep both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InProcessConfig {
    /// Most payloads waiting for one subscriber; at least 1 is kept.
    pub queue_batches: usize,
    /// Most bytes waiting for one subscriber. A payload larger than this is refused.
    pub queue_bytes: usize,
}

impl Default for InProcessConfig {
    /// 1,024 payloads and 64 MiB.
    fn default() -> Self {
        Self { queue_batches: 1024, queue_bytes: 64 << 20 }
    }
}

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
    /// Tasks that wait for room. Woken when half of the queue is free, so that they do not wake for
    /// each item.
    waiting: Vec<Waker>,
    /// Items at most until they are woken.
    wake_at: usize,
}

impl<T> Default for Queue<T> {
    fn default() -> Self {
        let (items, waiting) = (VecDeque::new(), Vec::new());
        let state = QueueState { items, bytes: 0, dropped: 0, closed: false, waiting, wake_at: 0 };
        Self { state: Mutex::new(state), arrived: Condvar::new() }
    }
}

impl<T> Queue<T> {
    /// Adds an item, at the cost of the oldest ones where there is no room.
    pub(crate) fn push(&self, item: T, bytes: usize, limit: &InProcessConfig) {
        let mut state = self.state.lock();
        while !state.has_room(bytes, limit) {
            state.pop();
            state.dropped += 1;
        }
        state.push(item, bytes);
        self.arrived.notify_one();
    }

    /// Adds the item when there is room for it, and takes it out of `item` then.
    #[cfg(feature = "zmq")]
    fn poll_push(
        &self,
        item: &mut Option<T>,
        bytes: usize,
        limit: &InProcessConfig,
        task: &Context<'_>,
    ) -> Poll<()> {
        let mut state = self.state.lock();
        if !state.has_room(bytes, limit) {
            if !state.waiting.iter().any(|waker| waker.will_wake(task.waker())) {
                state.waiting.push(task.waker().clone());
            }
            state.wake_at = state.items.len() / 2;
            return Poll::Pending;
        }
        if let Some(item) = item.take() {
            state.push(item, bytes);
            self.arrived.notify_one();
        }
        Poll::Ready(())
    }

    /// Nothing more will come.
    pub(crate) fn close(&self) {
        self.state.lock().closed = true;
        self.arrived.notify_all();
    }
}

impl<T> QueueState<T> {
    /// One item fits into an empty queue, however large it is.
    fn has_room(&self, bytes: usize, limit: &InProcessConfig) -> bool {
        self.items.is_empty()
            || (self.items.len() < limit.queue_batches && self.bytes + bytes <= limit.queue_bytes)
    }

    fn push(&mut self, item: T, bytes: usize) {
        self.bytes += bytes;
        self.items.push_back((item, bytes));
    }

    fn pop(&mut self) -> Option<T> {
        let (item, bytes) = self.items.pop_front()?;
        self.bytes -= bytes;
        Some(item)
    }

    /// Who waits for room, when there is enough of it.
    fn due(&mut self) -> Vec<Waker> {
        if self.items.len() <= self.wake_at { std::mem::take(&mut self.waiting) } else { Vec::new() }
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
        let deadline = deadline::after(timeout);
        let mut state = self.queue.state.lock();
        let mut in_time = true;
        loop {
            if let Some(item) = state.pop() {
                let due = state.due();
                drop(state);
                due.into_iter().for_each(Waker::wake);
                return Ok(Some(item));
            }
            if state.closed {
                return Err(TransportError::Closed { transport: self.transport });
            }
            if !in_time {
                return Ok(None);
            }
            in_time = !self.queue.arrived.wait_until(&mut state, deadline).timed_out();
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

/// Where a network's thread puts what comes in, as long as somebody may read it. Says when no more
/// will come.
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
    #[cfg(feature = "nats")]
    pub(crate) fn push(&self, item: T, bytes: usize) -> bool {
        let Some(queue) = self.queue.upgrade() else { return false };
        queue.push(item, bytes, &self.limit);
        true
    }

    /// Waits for room and puts the item there; it stays in `item` where this is cancelled, or
    /// nobody reads any more. A reader that goes wakes nobody: look every now and then whether the
    /// sink is still wanted.
    #[cfg(feature = "zmq")]
    pub(crate) async fn offer(&self, item: &mut Option<T>, bytes: usize) {
        std::future::poll_fn(|task| match self.queue.upgrade() {
            Some(queue) => queue.poll_push(item, bytes, &self.limit, task),
            None => Poll::Ready(()),
        })
        .await;
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
