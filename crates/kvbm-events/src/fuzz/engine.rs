//! What engines publish.

use super::holdings::Holdings;
use crate::vllm::{EngineBatch, EngineEvent, EngineHash, EngineSource, Follower, decode, encode};
use crate::{KvIndex, Place, SourceId};
use kvbm_plan::{GroupId, Location, NodeId};

const WORKER: EngineSource = EngineSource { source: SourceId(1), node: NodeId(2) };

/// A payload that is read is written in a form that is read as the same, and shown in a bounded
/// number of characters. An index that follows it holds what its events say.
pub fn engine(input: &[u8]) {
    match decode(input) {
        Ok(batch) => {
            is_written_and_read_again(&batch);
            // Hex takes two characters for a byte, a control character six; a field that is missing
            // has its name.
            let most = 1024 + 64 * input.len();
            assert!(batch.to_string().len() <= most, "{} bytes as JSON", batch.to_string().len());
            is_followed(&batch, input);
        }
        Err(error) => {
            assert!(!error.to_string().is_empty());
            let (mut index, mut follower) = (KvIndex::default(), Follower::new(WORKER));
            assert!(follower.receive(&mut index, 0, input).is_err() && follower.stats().malformed == 1);
        }
    }
}

/// Bytes are compared: a timestamp may be no number.
fn is_written_and_read_again(batch: &EngineBatch) {
    let written = encode(batch);
    let again = decode(&written).unwrap_or_else(|error| panic!("written, but cannot be read: {error}"));
    assert_eq!((&again.events, again.data_parallel_rank), (&batch.events, batch.data_parallel_rank));
    assert_eq!(encode(&again), written);
}

fn is_followed(batch: &EngineBatch, payload: &[u8]) {
    let holdings = holdings(batch);
    for follower in [Follower::new(WORKER), Follower::new(WORKER).by_tokens(64)] {
        let by_hash = follower.block_sizes().is_none();
        let (mut index, mut follower) = (KvIndex::default(), follower);
        // What is said twice is as true.
        for sequence in 0..2 {
            assert!(follower.receive(&mut index, sequence, payload).is_ok());
            if by_hash {
                holdings.agree_with(&index);
            }
        }
        assert_eq!(follower.stats().events, 2 * batch.events.len() as u64);
        follower.forget(&mut index);
        Holdings::default().agree_with(&index);
    }
}

/// What the engine has said, by its own hashes.
fn holdings(batch: &EngineBatch) -> Holdings {
    let mut holdings = Holdings::default();
    for event in &batch.events {
        let place =
            |tier| Place { source: WORKER.source, shard: 0, location: Location::on(WORKER.node, tier) };
        match event {
            EngineEvent::AllBlocksCleared => holdings.clear(0),
            EngineEvent::Unknown(_) => {}
            EngineEvent::Stored(stored) => {
                let Some(tier) = stored.medium_tier() else { continue };
                for hash in stored.block_hashes.iter().map(EngineHash::index_key) {
                    holdings.store(place(tier), GroupId(stored.group_idx.unwrap_or(0)), hash);
                }
            }
            EngineEvent::Removed(removed) => {
                let Some(tier) = removed.medium_tier() else { continue };
                for hash in removed.block_hashes.iter().map(EngineHash::index_key) {
                    holdings.remove(place(tier), GroupId(removed.group_idx.unwrap_or(0)), hash);
                }
            }
        }
    }
    holdings
}
