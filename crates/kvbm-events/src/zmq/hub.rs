//! What a publisher shares with its peers: the history for replays, and a bounded queue for each subscriber.

use crate::responders::Responders;
use crate::{InProcessConfig, Payload};
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use tokio::sync::Notify;

/// A payload with the number of its message.
#[derive(Clone)]
pub(super) struct Numbered {
    pub(super) sequence: u64,
    pub(super) payload: Payload,
}

/// The newest messages within limits.
struct Window {
    messages: VecDeque<Numbered>,
    bytes: usize,
}

impl Window {
    const fn new() -> Self {
        Self { messages: VecDeque::new(), bytes: 0 }
    }

    /// Adds a message; how many of the oldest it cost.
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

/// A publisher's state, shared by its peers.
pub(super) struct Hub {
    pub(super) topic: Vec<u8>,
    /// Of this publisher alone: numbers start again in the next one.
    pub(super) life: [u8; 8],
    pub(super) responders: Arc<Responders>,
    queue: InProcessConfig,
    history: InProcessConfig,
    state: Mutex<State>,
    /// Messages that were dropped because a subscriber was too slow.
    dropped: AtomicU64,
    /// Connections that were turned away.
    refused: AtomicU64,
}

struct State {
    next: u64,
    history: Window,
    peers: Vec<Arc<Outbox>>,
}

impl Hub {
    pub(super) fn new(topic: Vec<u8>, queue: InProcessConfig, history: InProcessConfig) -> Self {
        let state = State { next: 0, history: Window::new(), peers: Vec::new() };
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

    /// Numbers a message, keeps it for replays and queues it for everyone who wants it. Never waits.
    pub(super) fn publish(&self, payload: &Payload) {
        let mut state = self.state.lock();
        let message = Numbered { sequence: state.next, payload: Arc::clone(payload) };
        state.next += 1;
        for peer in &state.peers {
            self.dropped.fetch_add(peer.push(message.clone(), &self.topic, &self.queue), Ordering::Relaxed);
        }
        state.history.push(message, &self.history);
    }

    pub(super) fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    /// A connection was turned away: there are enough, or it speaks another protocol.
    pub(super) fn turn_away(&self) {
        self.refused.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }

    pub(super) fn peers(&self) -> usize {
        self.state.lock().peers.len()
    }

    /// A queue for a new subscriber; `None` when there are `most` already.
    pub(super) fn join(&self, most: usize) -> Option<Arc<Outbox>> {
        let mut state = self.state.lock();
        if state.peers.len() >= most {
            return None;
        }
        let outbox = Arc::new(Outbox::default());
        state.peers.push(Arc::clone(&outbox));
        Some(outbox)
    }

    pub(super) fn leave(&self, outbox: &Arc<Outbox>) {
        self.state.lock().peers.retain(|peer| !Arc::ptr_eq(peer, outbox));
    }

    /// The oldest kept messages from number `from` on, at most `most`.
    pub(super) fn replay(&self, from: u64, most: usize) -> Vec<Numbered> {
        let state = self.state.lock();
        let messages = &state.history.messages;
        let first = messages.front().map_or(state.next, |message| message.sequence);
        let skip = usize::try_from(from.saturating_sub(first)).unwrap_or(usize::MAX);
        messages.iter().skip(skip).take(most).cloned().collect()
    }

    /// Whether every subscriber has been sent what was queued for it.
    pub(super) fn is_drained(&self) -> bool {
        self.state.lock().peers.iter().all(|peer| peer.is_empty())
    }

    /// Bytes of the payloads that are kept, each counted once.
    pub(super) fn kept_bytes(&self) -> usize {
        let state = self.state.lock();
        // Every window is a tail of the same row of messages: the longest one contains the others.
        let longest = state.peers.iter().map(|peer| peer.state.lock().window.bytes).max();
        state.history.bytes.max(longest.unwrap_or(0))
    }
}

/// What waits for one subscriber.
#[derive(Default)]
pub(super) struct Outbox {
    state: Mutex<OutboxState>,
    ready: Notify,
    /// Set by a reader or writer whose connection has ended.
    pub(super) ended: AtomicBool,
    /// Grows with every sign that the peer takes what it is sent.
    pub(super) progress: AtomicU64,
}

#[derive(Default)]
struct OutboxState {
    window: Window,
    /// Prefixes of topics that the peer wants; one that was asked for twice has to be cancelled twice.
    wanted: Vec<Vec<u8>>,
    pong: Option<Vec<u8>>,
}

impl Default for Window {
    fn default() -> Self {
        Self::new()
    }
}

/// What a writer sends next.
pub(super) enum Outgoing {
    Message(Numbered),
    Pong(Vec<u8>),
}

impl Outbox {
    /// Most subscriptions of one peer.
    const MAX_WANTED: usize = 1024;

    fn push(&self, message: Numbered, topic: &[u8], limit: &InProcessConfig) -> u64 {
        let mut state = self.state.lock();
        if !state.wanted.iter().any(|prefix| topic.starts_with(prefix)) {
            return 0;
        }
        let dropped = state.window.push(message, limit);
        drop(state);
        self.ready.notify_one();
        dropped
    }

    /// Whether there was room for one more subscription.
    pub(super) fn subscribe(&self, prefix: Vec<u8>) -> bool {
        let mut state = self.state.lock();
        let room = state.wanted.len() < Self::MAX_WANTED;
        if room {
            state.wanted.push(prefix);
        }
        room
    }

    pub(super) fn cancel(&self, prefix: &[u8]) {
        let mut state = self.state.lock();
        if let Some(at) = state.wanted.iter().position(|wanted| wanted == prefix) {
            state.wanted.swap_remove(at);
        }
    }

    /// Answers a PING; a further one before it is sent replaces it.
    pub(super) fn pong(&self, context: Vec<u8>) {
        self.state.lock().pong = Some(context);
        self.ready.notify_one();
    }

    fn is_empty(&self) -> bool {
        self.state.lock().window.messages.is_empty() || self.ended.load(Ordering::Acquire)
    }

    /// Waits for the next thing to send. May be cancelled.
    pub(super) async fn next(&self) -> Outgoing {
        loop {
            {
                let mut state = self.state.lock();
                if let Some(context) = state.pong.take() {
                    return Outgoing::Pong(context);
                }
                if let Some(message) = state.window.pop() {
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
        let hub = Hub::new(b"kv".to_vec(), limit, InProcessConfig { queue_batches: 10, queue_bytes: 5_000 });
        let peers: Vec<_> = (0..5).map(|_| hub.join(5).unwrap()).collect();
        assert!(hub.join(5).is_none(), "five are enough");
        assert!(peers.iter().all(|peer| peer.subscribe(b"k".to_vec())));
        let weak: Vec<_> = (0..1_000)
            .map(|n| {
                let payload = payload(100 + n % 200);
                hub.publish(&payload);
                Arc::downgrade(&payload)
            })
            .collect();
        let alive: usize = weak.iter().filter_map(|payload| Some(payload.upgrade()?.len())).sum();
        assert_eq!(alive, hub.kept_bytes());
        assert!(alive <= 10_000 && alive > 9_000, "{alive} bytes are alive");
        assert!(hub.dropped() > 4_000);
        for peer in &peers {
            hub.leave(peer);
        }
        drop(peers);
        assert!(hub.kept_bytes() <= 5_000, "the history is what is left");
    }

    #[test]
    fn replays_begin_where_they_are_asked_to_or_with_the_oldest() {
        let limit = InProcessConfig { queue_batches: 10, queue_bytes: 1 << 20 };
        let hub = Hub::new(Vec::new(), limit, limit);
        (0..25).for_each(|_| hub.publish(&payload(1)));
        let numbers = |from, most| hub.replay(from, most).iter().map(|m| m.sequence).collect::<Vec<_>>();
        assert_eq!(numbers(20, 3), [20, 21, 22]);
        assert_eq!(numbers(0, 2), [15, 16]);
        assert_eq!(numbers(25, 9), [0; 0]);
        assert_eq!(numbers(u64::MAX, 9), [0; 0]);
    }

    #[test]
    fn only_wanted_topics_are_queued() {
        let limit = InProcessConfig::default();
        let hub = Hub::new(b"kv-events".to_vec(), limit, limit);
        let peer = hub.join(1).unwrap();
        hub.publish(&payload(1));
        assert!(hub.is_drained(), "nothing was asked for");
        assert!(peer.subscribe(b"other".to_vec()) && peer.subscribe(b"kv".to_vec()));
        hub.publish(&payload(1));
        assert!(!hub.is_drained());
        peer.cancel(b"kv");
        hub.publish(&payload(1));
        assert_eq!(peer.state.lock().window.messages.len(), 1);
    }
}
