//! The follower's side: fetches a snapshot part by part.

use super::wire::{Answer, Question};
use super::{Snapshot, SnapshotSource};
use crate::{EventTransport, StreamId};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Asks sources for their snapshots over a transport. A source that does not answer is left alone for a while, longer
/// each time, so that it does not hold up the others.
pub struct RemoteSnapshots {
    transport: Arc<dyn EventTransport>,
    timeout: Duration,
    silent: HashMap<StreamId, Silence>,
}

#[derive(Clone, Copy)]
struct Silence {
    until: Instant,
    pause: Duration,
}

impl RemoteSnapshots {
    /// How long a source may take for an answer by default.
    pub const TIMEOUT: Duration = Duration::from_secs(1);

    const FIRST_PAUSE: Duration = Duration::from_millis(50);
    const LONGEST_PAUSE: Duration = Duration::from_secs(2);
    /// Streams whose silence is remembered.
    const MAX_SILENT: usize = 4096;
    /// Most blocks of a snapshot: more than any pool has, less than a lie could cost.
    const MAX_BLOCKS: usize = 64 << 20;

    /// Asks over `transport` and waits at most [`Self::TIMEOUT`] for each answer.
    pub fn new(transport: Arc<dyn EventTransport>) -> Self {
        Self::with_timeout(transport, Self::TIMEOUT)
    }

    /// Asks over `transport` and waits at most `timeout` for each answer.
    pub fn with_timeout(transport: Arc<dyn EventTransport>, timeout: Duration) -> Self {
        Self { transport, timeout, silent: HashMap::new() }
    }

    fn fetch(&self, stream: StreamId, reach: u64) -> Option<Snapshot> {
        let mut question = Question { stream, reach, ticket: 0, part: 0 };
        let mut snapshot = Snapshot::default();
        loop {
            let asked = question.encode().into();
            let answer = self.transport.ask(stream.source, &asked, self.timeout).ok()?;
            let Ok(Answer::Part(part)) = Answer::decode(&answer) else { return None };
            let same = question.ticket == 0
                || (part.ticket == question.ticket && part.next_sequence == snapshot.next_sequence);
            if part.part != question.part || !same || part.next_sequence < reach {
                return None;
            }
            (snapshot.next_sequence, question.ticket) = (part.next_sequence, part.ticket);
            snapshot.blocks.extend(part.blocks);
            question.part += 1;
            if question.part >= part.parts {
                return Some(snapshot);
            }
            if snapshot.blocks.len() > Self::MAX_BLOCKS {
                return None;
            }
        }
    }
}

impl SnapshotSource for RemoteSnapshots {
    fn snapshot(&mut self, stream: StreamId, reach: u64) -> Option<Snapshot> {
        let silence = self.silent.get(&stream).copied();
        if silence.is_some_and(|silence| Instant::now() < silence.until) {
            return None;
        }
        let snapshot = self.fetch(stream, reach);
        if snapshot.is_some() {
            self.silent.remove(&stream);
        } else {
            let pause = silence.map_or(Self::FIRST_PAUSE, |silence| 2 * silence.pause);
            let pause = pause.min(Self::LONGEST_PAUSE);
            if self.silent.len() >= Self::MAX_SILENT {
                self.silent.clear();
            }
            self.silent.insert(stream, Silence { until: Instant::now() + pause, pause });
        }
        snapshot
    }
}
