//! Divides a payload in two, for a transport that refuses it whole.

use super::event::{BlockRemoved, BlockStored, EngineBatch, EngineEvent, Raw};
use crate::msgpack::{Head, Reader, write_array};

/// Blocks of an event; 1 where it names none.
pub(super) fn blocks(event: &EngineEvent) -> usize {
    match event {
        EngineEvent::Stored(stored) => stored.block_hashes.len(),
        EngineEvent::Removed(removed) => removed.block_hashes.len(),
        EngineEvent::AllBlocksCleared | EngineEvent::Unknown(_) => 1,
    }
}

/// Two payloads that together say the same as `payload`. A payload of one block cannot be divided
/// and stays as it is.
pub(super) fn split(mut batch: EngineBatch) -> Result<[EngineBatch; 2], EngineBatch> {
    let EngineBatch { timestamp, data_parallel_rank, .. } = batch;
    let of = |events| EngineBatch { timestamp, events, data_parallel_rank };
    if batch.events.len() > 1 {
        let second = batch.events.split_off(batch.events.len() / 2);
        return Ok([batch, of(second)]);
    }
    match batch.events.pop() {
        Some(EngineEvent::Stored(first)) if first.block_hashes.len() > 1 => {
            let [first, second] = split_stored(first);
            Ok([of(vec![EngineEvent::Stored(first)]), of(vec![EngineEvent::Stored(second)])])
        }
        Some(EngineEvent::Removed(mut first)) if first.block_hashes.len() > 1 => {
            let block_hashes = first.block_hashes.split_off(first.block_hashes.len() / 2);
            let second = BlockRemoved { block_hashes, ..first.clone() };
            Ok([of(vec![EngineEvent::Removed(first)]), of(vec![EngineEvent::Removed(second)])])
        }
        one => Err(of(one.into_iter().collect())),
    }
}

fn split_stored(mut first: BlockStored) -> [BlockStored; 2] {
    let (blocks, middle) = (first.block_hashes.len(), first.block_hashes.len() / 2);
    let block_hashes = first.block_hashes.split_off(middle);
    // All of them have tokens, or none.
    let token_ids = first.token_ids.split_off(first.token_ids.len() / blocks * middle);
    let extra = first.extra_keys.take();
    let extra = extra.as_ref().and_then(|raw| list(raw, blocks));
    let [extra_of_first, extra_keys] = match &extra {
        Some(keys) => [&keys[..middle], &keys[middle..]].map(|keys| Some(raw_list(keys))),
        None => [None, None],
    };
    first.extra_keys = extra_of_first;
    let parent_block_hash = first.block_hashes.last().cloned();
    let second = BlockStored { block_hashes, parent_block_hash, token_ids, extra_keys, ..first.clone() };
    [first, second]
}

/// The elements of a list that has one for each block.
fn list(raw: &Raw, blocks: usize) -> Option<Vec<&[u8]>> {
    let mut reader = Reader::new(raw.bytes());
    let Ok(Head::Array(len)) = reader.head() else { return None };
    let keys = (0..len).map(|_| reader.raw(1).ok()).collect::<Option<Vec<_>>>()?;
    (keys.len() == blocks).then_some(keys)
}

fn raw_list(elements: &[&[u8]]) -> Raw {
    let mut list = Vec::new();
    write_array(&mut list, elements.len());
    for element in elements {
        list.extend_from_slice(element);
    }
    Raw(list)
}

#[cfg(test)]
mod tests {
    use super::super::event::EngineHash;
    use super::*;
    use crate::msgpack::{write_nil, write_uint};

    #[test]
    fn halves_say_together_what_the_whole_says() {
        let mut raw = Vec::new();
        write_array(&mut raw, 3);
        write_nil(&mut raw);
        write_array(&mut raw, 1);
        write_uint(&mut raw, 7);
        write_nil(&mut raw);
        let name = EngineHash::Uint;
        let stored = BlockStored {
            block_hashes: [1, 2, 3].map(name).to_vec(),
            parent_block_hash: Some(name(0)),
            token_ids: (0..6).collect(),
            block_size: 2,
            extra_keys: Some(Raw(raw)),
            ..BlockStored::default()
        };
        let removed = BlockRemoved { block_hashes: [1, 2].map(name).to_vec(), ..BlockRemoved::default() };
        let events = vec![
            EngineEvent::Stored(stored.clone()),
            EngineEvent::Removed(removed),
            EngineEvent::AllBlocksCleared,
        ];
        let mut rest = vec![EngineBatch { timestamp: 1.0, events, data_parallel_rank: Some(3) }];
        let mut single = Vec::new();
        while let Some(batch) = rest.pop() {
            assert_eq!((batch.timestamp, batch.data_parallel_rank), (1.0, Some(3)));
            match split(batch) {
                Ok([first, second]) => rest.extend([second, first]),
                Err(one) => single.extend(one.events),
            }
        }
        assert_eq!(single.len(), 6);
        for (at, event) in single.iter().enumerate().take(3) {
            let EngineEvent::Stored(event) = event else { panic!("{event:?}") };
            assert_eq!(event.block_hashes, [name(at as u64 + 1)]);
            assert_eq!(event.parent_block_hash, Some(name(at as u64)));
            assert_eq!(event.token_ids, [2 * at as u32, 2 * at as u32 + 1]);
            let keys = if at == 1 { &[0x91, 0x91, 7][..] } else { &[0x91, 0xC0] };
            assert_eq!(event.extra_keys.as_ref().unwrap().bytes(), keys);
        }
        assert_eq!(single[5], EngineEvent::AllBlocksCleared);
    }
}
