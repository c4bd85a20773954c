//! Events as engines publish them, for routers that follow engines.

use super::TakeSnapshot;
use kvbm_events::url::PublisherIdentity;
use kvbm_events::vllm::{EngineBlocks, Publishing, PublishingStats};
use kvbm_events::{BatchEncoder, Payload, Replacement, StreamId, TransportError, wire};
use kvbm_plan::Tier;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::Arc;

/// Turns our batches into messages of vLLM's format and sends them, each once and in order.
pub(super) struct Translator {
    publishing: Publishing,
    /// Of the batch that is under way: what the transport has not taken yet.
    unsent: VecDeque<Payload>,
    /// Whether it was said that the transport does not carry everything.
    has_warned: bool,
}

impl Translator {
    /// Publishes blocks with the tokens that `blocks` has. After a loss, `take` gives what is
    /// there.
    pub(super) fn new(
        take: Arc<TakeSnapshot>,
        blocks: Arc<EngineBlocks>,
        speaker: PublisherIdentity,
    ) -> Self {
        let PublisherIdentity { rank, kind } = speaker;
        // The memory that an engine owns is on no tier of the pool: the engine publishes its events
        // itself.
        let publishing = Publishing::new(blocks, &Tier::ALL).with_numbers().with_rank(rank).with_kind(kind);
        let publishing = publishing.with_snapshots(move |stream: StreamId| take(stream.shard));
        Self { publishing, unsent: VecDeque::new(), has_warned: false }
    }

    /// Counters.
    pub(super) fn stats(&self) -> Arc<Mutex<PublishingStats>> {
        self.publishing.stats()
    }

    /// Sends what a batch says; nothing for a heartbeat, which engines do not have. After an error
    /// the same batch comes again, and only what is left of it is sent. A batch that the transport
    /// refuses whole is divided. A block that it refuses alone is counted and not published.
    pub(super) fn send(
        &mut self,
        payload: &Payload,
        mut publish: impl FnMut(&Payload) -> Result<(), TransportError>,
    ) -> Result<(), TransportError> {
        let mut messages = Vec::new();
        let refused = |reason: String| TransportError::Refused { transport: "remote", reason };
        let batch = wire::decode(payload).map_err(|error| refused(error.to_string()))?;
        self.publishing.encode(&batch, &mut messages).map_err(|error| refused(error.to_string()))?;
        self.unsent.extend(messages.into_iter().map(Payload::from));
        while let Some(message) = self.unsent.front() {
            match publish(message) {
                Ok(()) => {
                    self.unsent.pop_front();
                }
                Err(error @ TransportError::Refused { .. }) => {
                    let Some(message) = self.unsent.pop_front() else { break };
                    match self.publishing.refused(&message) {
                        Replacement::Smaller(smaller) => {
                            smaller.into_iter().rev().for_each(|less| self.unsent.push_front(less.into()));
                        }
                        Replacement::Nothing { .. } if !self.has_warned => {
                            self.has_warned = true;
                            tracing::warn!(target: "kvbm", %error, "oversized blocks are not published in the format of engines");
                        }
                        Replacement::Nothing { .. } => {}
                    }
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvbm_events::vllm::{EngineEvent, EngineHash, decode};
    use kvbm_events::{EventBatch, EventBlock, EventKind, KvEvent, SourceId};
    use kvbm_plan::{BlockIdentity, Epoch, GroupId, Location, NamespaceId, NodeId, SequenceHash};

    fn stored(sequence: u64) -> KvEvent {
        let hash = SequenceHash::from_bytes([sequence as u8 + 1; 16]);
        let identity =
            BlockIdentity { namespace: NamespaceId(0), group: GroupId(0), hash, parent: None, position: 0 };
        KvEvent::new(
            sequence,
            EventKind::Store(EventBlock {
                identity,
                prefix_hash: hash,
                local_hash: None,
                block_bytes: 1,
                block_tokens: 16,
                location: Location::on(NodeId(0), Tier::G2),
            }),
        )
    }

    /// Mutation that makes it fail: `send` that drops what is unsent after an error.
    #[test]
    fn what_a_transport_could_not_take_is_sent_when_the_batch_comes_again() {
        let mut translator = Translator::new(
            Arc::new(|_| None),
            Arc::new(EngineBlocks::new(1)),
            PublisherIdentity { rank: 0, kind: "full_attention".into() },
        );
        let stream = StreamId { source: SourceId(1), epoch: Epoch(1), shard: 0 };
        let batch = |numbers: std::ops::Range<u64>| {
            let batch = EventBatch::new(stream, numbers.end, numbers.map(stored).collect());
            Payload::from(wire::encode(&batch).unwrap())
        };
        let away =
            |_: &Payload| Err(TransportError::Unavailable { transport: "test", reason: "it is away".into() });
        let mut told: Vec<EngineEvent> = Vec::new();
        let mut here = |message: &Payload| {
            told.extend(decode(message).unwrap().events);
            Ok(())
        };
        assert!(translator.send(&batch(0..2), away).is_err());
        assert!(translator.send(&batch(0..2), away).is_err());
        translator.send(&batch(0..2), &mut here).unwrap();
        translator.send(&batch(0..2), &mut here).unwrap();
        translator.send(&batch(2..3), &mut here).unwrap();
        let names = told.iter().map(|event| match event {
            EngineEvent::Stored(stored) => stored.block_hashes[0].clone(),
            other => panic!("{other:?}"),
        });
        let wanted = [1u8, 2, 3].map(|byte| EngineHash::Uint(u64::from_le_bytes([byte; 8])));
        assert_eq!(names.collect::<Vec<_>>(), wanted, "each once, in order");
    }

    /// Mutation that makes it fail: `send` that gives up at the first refusal.
    #[test]
    fn what_a_transport_refuses_is_sent_in_pieces_or_counted() {
        let blocks = Arc::new(EngineBlocks::new(9));
        let hash = SequenceHash::from_bytes([3; 16]);
        let token_ids = (0..1000).collect();
        blocks.note(hash, kvbm_events::vllm::EngineBlock { token_ids, ..Default::default() });
        let speaker = PublisherIdentity { rank: 0, kind: "full_attention".into() };
        let mut translator = Translator::new(Arc::new(|_| None), blocks, speaker);
        let stats = translator.stats();
        let stream = StreamId { source: SourceId(1), epoch: Epoch(1), shard: 0 };
        let batch = EventBatch::new(stream, 8, (0..8).map(stored).collect());
        let mut told = Vec::new();
        let narrow = |message: &Payload| {
            if message.len() > 400 {
                return Err(TransportError::Refused { transport: "test", reason: "too long".into() });
            }
            told.extend(decode(message).unwrap().events);
            Ok(())
        };
        translator.send(&Payload::from(wire::encode(&batch).unwrap()), narrow).unwrap();
        let names = told.iter().map(|event| match event {
            EngineEvent::Stored(stored) => stored.block_hashes[0].clone(),
            other => panic!("{other:?}"),
        });
        let wanted = [1u8, 2, 4, 5, 6, 7, 8].map(|byte| EngineHash::Uint(u64::from_le_bytes([byte; 8])));
        assert_eq!(names.collect::<Vec<_>>(), wanted, "each once, in order, but for the large one");
        assert_eq!(stats.lock().refused, 1);
    }
}
