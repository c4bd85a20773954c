//! Events of an engine, gathered: blocks that follow each other travel together.

use super::engine_blocks::{Adapter, EngineBlock};
use super::event::{BlockRemoved, BlockStored, EngineEvent, EngineHash, Raw};
use crate::msgpack::{write_array, write_nil};
use kvbm_plan::{GroupId, Tier};

/// Most blocks of a payload.
pub(super) const MAX_BLOCKS: usize = 4096;

/// Most bytes of a payload of more than one block, so that it stays far below what followers read.
/// A single block takes what its tokens take: up to 5 MiB where it has a million of them.
pub(super) const MAX_PAYLOAD: usize = 1 << 20;

/// Most bytes of an event beside its blocks, its texts and a payload's frame around it.
const EVENT_BYTES: usize = 512;

/// Most bytes of a token.
const TOKEN_BYTES: usize = 5;

/// Where and what a block of an event is.
pub(super) struct GatheredBlock<'a> {
    pub(super) tier: Tier,
    pub(super) group: GroupId,
    pub(super) name: EngineHash,
    pub(super) kind: Option<&'a str>,
}

/// Events in their order.
#[derive(Default)]
pub(super) struct EventGatherer {
    events: Vec<EngineEvent>,
    /// Most bytes that each of them takes.
    sizes: Vec<usize>,
    /// Extra keys of the blocks of the last event, where it stores.
    extra: Vec<Option<Raw>>,
}

impl EventGatherer {
    pub(super) fn stored(
        &mut self,
        of: GatheredBlock<'_>,
        parent: Option<EngineHash>,
        block_size: u32,
        known: EngineBlock,
    ) {
        let adapter = known.adapter.as_deref().cloned().unwrap_or_default();
        let size = hash_bytes(&of.name)
            + TOKEN_BYTES * known.token_ids.len()
            + known.extra_keys.as_ref().map_or(1, |keys| keys.bytes().len());
        if let (Some(EngineEvent::Stored(last)), Some(bytes)) =
            (self.events.last_mut(), self.sizes.last_mut())
            && *bytes + size <= MAX_PAYLOAD
            && follows(last, &of, parent.as_ref(), block_size, &known, &adapter)
        {
            last.block_hashes.push(of.name);
            last.token_ids.extend_from_slice(&known.token_ids);
            self.extra.push(known.extra_keys);
            *bytes += size;
            return;
        }
        self.close();
        let texts = adapter.name.as_ref().map_or(0, String::len) + of.kind.map_or(0, str::len);
        self.sizes.push(EVENT_BYTES + texts + size);
        self.extra.push(known.extra_keys);
        self.events.push(EngineEvent::Stored(BlockStored {
            block_hashes: vec![of.name],
            parent_block_hash: parent,
            token_ids: known.token_ids.into_vec(),
            block_size,
            lora_id: adapter.id,
            medium: Some(medium(of.tier).to_owned()),
            lora_name: adapter.name,
            group_idx: Some(of.group.0),
            kv_cache_spec_kind: of.kind.map(str::to_owned),
            ..BlockStored::default()
        }));
    }

    pub(super) fn removed(&mut self, of: GatheredBlock<'_>) {
        self.close();
        let medium = medium(of.tier);
        let size = hash_bytes(&of.name);
        if let (Some(EngineEvent::Removed(last)), Some(bytes)) =
            (self.events.last_mut(), self.sizes.last_mut())
            && last.medium.as_deref() == Some(medium)
            && last.group_idx == Some(of.group.0)
            && last.block_hashes.len() < MAX_BLOCKS
        {
            last.block_hashes.push(of.name);
            *bytes += size;
            return;
        }
        self.sizes.push(EVENT_BYTES + size);
        self.events.push(EngineEvent::Removed(BlockRemoved {
            block_hashes: vec![of.name],
            medium: Some(medium.to_owned()),
            group_idx: Some(of.group.0),
            ..BlockRemoved::default()
        }));
    }

    /// The events in lists of at most [`MAX_BLOCKS`] blocks and [`MAX_PAYLOAD`] bytes, or a single
    /// event.
    pub(super) fn into_payloads(mut self) -> Vec<Vec<EngineEvent>> {
        self.close();
        let (mut payloads, mut blocks, mut bytes) = (Vec::<Vec<EngineEvent>>::new(), 0, 0);
        for (event, size) in self.events.into_iter().zip(self.sizes) {
            let more = super::split::blocks(&event);
            blocks += more;
            bytes += size;
            match payloads.last_mut() {
                Some(last) if blocks <= MAX_BLOCKS && bytes <= MAX_PAYLOAD => last.push(event),
                _ => {
                    payloads.push(vec![event]);
                    (blocks, bytes) = (more, size);
                }
            }
        }
        payloads
    }

    /// Writes the extra keys of the last event. vLLM lists those of its own memory always, of other
    /// media never; those of other media are listed here where there are any.
    fn close(&mut self) {
        let extra = std::mem::take(&mut self.extra);
        let Some(EngineEvent::Stored(last)) = self.events.last_mut() else { return };
        let is_gpu = last.medium.as_deref() == Some(medium(Tier::G1));
        if extra.is_empty() || !(is_gpu || extra.iter().any(Option::is_some)) {
            return;
        }
        let mut list = Vec::new();
        write_array(&mut list, extra.len());
        for keys in extra {
            match keys {
                Some(keys) => list.extend_from_slice(keys.bytes()),
                None => write_nil(&mut list),
            }
        }
        last.extra_keys = Some(Raw(list));
    }
}

/// Most bytes of a hash.
const fn hash_bytes(hash: &EngineHash) -> usize {
    match hash {
        EngineHash::Uint(_) | EngineHash::Int(_) => 9,
        EngineHash::Bytes(bytes) => 5 + bytes.len(),
    }
}

/// Whether a block is the next one of the same chain in the same place.
fn follows(
    last: &BlockStored,
    of: &GatheredBlock<'_>,
    parent: Option<&EngineHash>,
    block_size: u32,
    known: &EngineBlock,
    adapter: &Adapter,
) -> bool {
    let has_tokens = last.token_ids.len() == last.block_hashes.len() * block_size as usize;
    parent.is_some()
        && last.block_hashes.last() == parent
        && last.block_hashes.len() < MAX_BLOCKS
        && last.medium.as_deref() == Some(medium(of.tier))
        && last.group_idx == Some(of.group.0)
        && last.block_size == block_size
        && has_tokens == (known.token_ids.len() == block_size as usize)
        && (last.lora_id, &last.lora_name) == (adapter.id, &adapter.name)
}

/// vLLM's names, and SGLang's for the blob store, which vLLM has no name for.
const fn medium(tier: Tier) -> &'static str {
    match tier {
        Tier::G1 => "GPU",
        Tier::G2 => "CPU",
        Tier::G3 => "STORAGE",
        Tier::G4 => "EXTERNAL",
    }
}
