//! What a publisher shares with its subscribers: the history for replays, and a bounded queue for
//! each subscriber.

use crate::responders::Responders;
use crate::{InProcessConfig, Payload};
use kvbm_zmtp::{Subscriptions, ZmtpError};
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tokio::sync::Notify;

/// A payload with the number of its message.
#[derive(Clone)]
pub(super) struct Numbered {
    pub(super) sequence: u64,
    pub(super) payload: Payload,
}

/// The newest messages within limits.
#[derive(Default)]
struct Window {
    messages: VecDeque<Numbered>,
    bytes: usize,
}

impl Window {
    /// Adds a message; returns how many of the oldest it dropped.
    fn push(&mut self, message: Numbered, limit: &InProcessConfig) -> u64 {
        let mut dropped = 0;
        self.bytes += message.payload.len();
        self.messages.push_back(message);
        while self.messages.len() > 1
            && (self.messages.len() > limit.queue_batches || self.bytes > limit.queue_bytes)
        {
            dropped += u64::from(self.pop().is_some());
        }
        dropped
    }

    fn pop(&mut self) -> Option<Numbered> {
        let message = self.messages.pop_front()?;
        self.bytes -= message.payload.len();
        Some(message)
    }
}

/// A publisher's state, shared with the tasks that serve its subscribers.
pub(super) struct FanOut {
    pub(super) topic: Vec<u8>,
    /// Identifies this publisher's life: its sequence numbers start at 0.
    pub(super) life: [u8; 8],
    pub(super) responders: Arc<Responders>,
    queue: InProcessConfig,
    history: InProcessConfig,
    state: Mutex<FanOutState>,
    /// Messages that were dropped because a subscriber was too slow.
    dropped: AtomicU64,
    /// Connections that were refused.
    refused: AtomicU64,
}

struct FanOutState {
    next: u64,
    history: Window,
    subscribers: Vec<Arc<SubscriberQueue>>,
}

impl FanOut {
    pub(super) fn new(topic: Vec<u8>, queue: InProcessConfig, history: InProcessConfig) -> Self {
        let state = FanOutState { next: 0, history: Window::default(), subscribers: Vec::new() };
        Self {
            topic,
            life: RandomState::new().hash_one(std::process::id()).to_be_bytes(),
            responders: Arc::default(),
            queue,
            history,
            state: Mutex::new(state),
            dropped: AtomicU64::new(0),
            refused: AtomicU64::new(0),
        }
    }

    /// Numbers a message, keeps it for replays and queues it for every subscriber of the topic.
    /// Never waits.
    pub(super) fn publish(&self, payload: &Payload) {
        let mut state = self.state.lock();
        let message = Numbered { sequence: state.next, payload: Arc::clone(payload) };
        state.next += 1;
        for subscriber in &state.subscribers {
            let dropped = subscriber.push(message.clone(), &self.topic, &self.queue);
            self.dropped.fetch_add(dropped, Ordering::Relaxed);
        }
        state.history.push(message, &self.history);
    }

    pub(super) fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    /// Counts a refused connection.
    pub(super) fn refuse(&self) {
        self.refused.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }

    pub(super) fn subscribers(&self) -> usize {
        self.state.lock().subscribers.len()
    }

    /// A queue for a new subscriber; `None` when there are `max_peers` already.
    pub(super) fn join(&self, max_peers: usize) -> Option<Arc<SubscriberQueue>> {
        let mut state = self.state.lock();
        if state.subscribers.len() >= max_peers {
            return None;
        }
        let queue = Arc::new(SubscriberQueue::default());
        state.subscribers.push(Arc::clone(&queue));
        Some(queue)
    }

    pub(super) fn leave(&self, queue: &Arc<SubscriberQueue>) {
        self.state.lock().subscribers.retain(|other| !Arc::ptr_eq(other, queue));
    }

    /// The oldest kept messages from number `from` on, at most `most`.
    pub(super) fn replay(&self, from: u64, most: usize) -> Vec<Numbered> {
        let state = self.state.lock();
        let messages = &state.history.messages;
        let first = messages.front().map_or(state.next, |message| message.sequence);
        let skip = usize::try_from(from.saturating_sub(first)).unwrap_or(usize::MAX);
        messages.iter().skip(skip).take(most).cloned().collect()
    }

    /// Whether every message was written to its subscribers.
    pub(super) fn is_drained(&self) -> bool {
        self.state.lock().subscribers.iter().all(|queue| queue.is_drained())
    }

    /// Bytes of the payloads that are kept, each counted once, and of the subscriptions.
    pub(super) fn kept_bytes(&self) -> usize {
        let state = self.state.lock();
        let (mut longest, mut subscriptions) = (state.history.bytes, 0);
        for queue in &state.subscribers {
            let queue = queue.state.lock();
            // Every window holds the newest messages: the longest one contains the others.
            longest = longest.max(queue.window.bytes);
            subscriptions += queue.subscriptions.bytes();
        }
        longest + subscriptions
    }
}

/// The messages that wait for one subscriber.
#[derive(Default)]
pub(super) struct SubscriberQueue {
    state: Mutex<QueueState>,
    ready: Notify,
    /// Grows with every message that the subscriber took.
    pub(super) progress: AtomicU64,
}

#[derive(Default)]
struct QueueState {
    window: Window,
    subscriptions: Subscriptions,
    pong: Option<Vec<u8>>,
    /// A message has left the window and is not written completely yet.
    writing: bool,
    /// The writer has ended.
    ended: bool,
}

/// What a writer sends next.
pub(super) enum Outgoing {
    Message(Numbered),
    Pong(Vec<u8>),
}

impl SubscriberQueue {
    fn push(&self, message: Numbered, topic: &[u8], limit: &InProcessConfig) -> u64 {
        let mut state = self.state.lock();
        if !state.subscriptions.matches(topic) {
            return 0;
        }
        let dropped = state.window.push(message, limit);
        drop(state);
        self.ready.notify_one();
        dropped
    }

    pub(super) fn subscribe(&self, prefix: Vec<u8>) -> Result<(), ZmtpError> {
        self.state.lock().subscriptions.add(prefix)
    }

    pub(super) fn cancel(&self, prefix: &[u8]) {
        self.state.lock().subscriptions.cancel(prefix);
    }

    /// Answers a PING; a further one replaces an answer that was not sent yet.
    pub(super) fn pong(&self, context: Vec<u8>) {
        self.state.lock().pong = Some(context);
        self.ready.notify_one();
    }

    /// The message that [`next`](Self::next) returned was written, or never will be.
    pub(super) fn is_written(&self) {
        self.state.lock().writing = false;
        self.progress.fetch_add(1, Ordering::Relaxed);
    }

    /// The writer ends: nothing more is sent.
    pub(super) fn end(&self) {
        self.state.lock().ended = true;
    }

    pub(super) fn has_ended(&self) -> bool {
        self.state.lock().ended
    }

    fn is_drained(&self) -> bool {
        let state = self.state.lock();
        state.ended || (state.window.messages.is_empty() && !state.writing)
    }

    /// Waits for the next thing to send. The future may be dropped.
    pub(super) async fn next(&self) -> Outgoing {
        loop {
            {
                let mut state = self.state.lock();
                if let Some(context) = state.pong.take() {
                    return Outgoing::Pong(context);
                }
                if let Some(message) = state.window.pop() {
                    state.writing = true;
                    return Outgoing::Message(message);
                }
            }
            self.ready.notified().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn payload(len: usize) -> Payload {
        vec![0; len].into()
    }

    #[test]
    fn stalled_subscribers_hold_one_queue_of_memory_between_them() {
        let limit = InProcessConfig { queue_batches: 100, queue_bytes: 10_000 };
        let fan_out =
            FanOut::new(b"kv".to_vec(), limit, InProcessConfig { queue_batches: 10, queue_bytes: 5_000 });
        let peers: Vec<_> = (0..5).map(|_| fan_out.join(5).unwrap()).collect();
        assert!(fan_out.join(5).is_none(), "five are enough");
        assert!(peers.iter().all(|peer| peer.subscribe(b"k".to_vec()).is_ok()));
        let weak: Vec<_> = (0..1_000)
            .map(|n| {
                let payload = payload(100 + n % 200);
                fan_out.publish(&payload);
                Arc::downgrade(&payload)
            })
            .collect();
        let alive: usize = weak.iter().filter_map(|payload| Some(payload.upgrade()?.len())).sum();
        let subscriptions: usize = peers.iter().map(|peer| peer.state.lock().subscriptions.bytes()).sum();
        assert_eq!(alive, fan_out.kept_bytes() - subscriptions);
        assert!(alive <= 10_000 && alive > 9_000, "{alive} bytes are alive");
        assert!(fan_out.dropped() > 4_000);
        for peer in &peers {
            fan_out.leave(peer);
        }
        drop(peers);
        assert!(fan_out.kept_bytes() <= 5_000, "the history is what is left");
    }

    #[test]
    fn replays_begin_where_they_are_asked_to_or_with_the_oldest() {
        let limit = InProcessConfig { queue_batches: 10, queue_bytes: 1 << 20 };
        let fan_out = FanOut::new(Vec::new(), limit, limit);
        (0..25).for_each(|_| fan_out.publish(&payload(1)));
        let numbers = |from, most| fan_out.replay(from, most).iter().map(|m| m.sequence).collect::<Vec<_>>();
        assert_eq!(numbers(20, 3), [20, 21, 22]);
        assert_eq!(numbers(0, 2), [15, 16]);
        assert_eq!(numbers(25, 9), [0; 0]);
        assert_eq!(numbers(u64::MAX, 9), [0; 0]);
    }

    #[test]
    fn only_wanted_topics_are_queued() {
        let limit = InProcessConfig::default();
        let fan_out = FanOut::new(b"kv-events".to_vec(), limit, limit);
        let peer = fan_out.join(1).unwrap();
        fan_out.publish(&payload(1));
        assert!(fan_out.is_drained(), "nothing was subscribed");
        peer.subscribe(b"other".to_vec()).unwrap();
        peer.subscribe(b"kv".to_vec()).unwrap();
        fan_out.publish(&payload(1));
        assert!(!fan_out.is_drained());
        peer.cancel(b"kv");
        fan_out.publish(&payload(1));
        assert_eq!(peer.state.lock().window.messages.len(), 1);
    }

    /// Mutation that makes it fail: `is_drained` without `writing`.
    #[test]
    fn a_message_that_is_being_written_is_not_drained() {
        let limit = InProcessConfig::default();
        let fan_out = FanOut::new(b"kv".to_vec(), limit, limit);
        let peer = fan_out.join(1).unwrap();
        peer.subscribe(Vec::new()).unwrap();
        fan_out.publish(&payload(1));
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        assert!(matches!(runtime.block_on(peer.next()), Outgoing::Message(_)));
        assert!(!fan_out.is_drained());
        peer.is_written();
        assert!(fan_out.is_drained());
    }
}
