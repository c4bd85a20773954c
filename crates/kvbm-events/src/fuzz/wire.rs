//! Our own messages.

use super::holdings::Holdings;
use crate::wire::{decode, encode};
use crate::{Answer, EventBatch, EventKind, KvIndex, Place, Question};

/// A batch that is read is written, and read again as the same; an index that takes its events
/// holds what they say.
pub fn batch(input: &[u8]) {
    let batch = match decode(input) {
        Ok(batch) => batch,
        Err(error) => return assert!(!error.to_string().is_empty()),
    };
    let written = encode(&batch).unwrap_or_else(|error| panic!("read, but cannot be written: {error}"));
    assert!(written.len() <= input.len(), "ours is the shortest form");
    assert_eq!(decode(&written).as_ref(), Ok(&batch));
    // A source may have 256 places in an index.
    if batch.events.len() <= 256 {
        is_followed(&batch);
    }
}

fn is_followed(batch: &EventBatch) {
    let (mut index, mut holdings) = (KvIndex::default(), Holdings::default());
    let (source, shard) = (batch.stream.source, batch.stream.shard);
    for event in &batch.events {
        let place = |location| Place { source, shard, location };
        match &event.kind {
            EventKind::Store(block) => {
                holdings.store(place(block.location), block.identity.group, block.identity.hash);
            }
            EventKind::Remove(block) => {
                holdings.remove(place(block.location), block.identity.group, block.identity.hash);
            }
            EventKind::Cleared => holdings.clear(shard),
        }
    }
    index.apply(batch.stream, &batch.events);
    holdings.agree_with(&index);
    index.forget(source);
    Holdings::default().agree_with(&index);
}

/// A question and an answer that are read are written, and read again as the same.
pub fn snapshot(input: &[u8]) {
    match Question::decode(input) {
        Ok(question) => {
            let written = question.encode();
            assert!(written.len() <= input.len(), "ours is the shortest form");
            assert_eq!(Question::decode(&written), Ok(question));
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
    match Answer::decode(input) {
        Ok(answer) => {
            let written = answer.encode();
            assert!(written.len() <= input.len(), "ours is the shortest form");
            assert_eq!(Answer::decode(&written), Ok(answer));
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}
