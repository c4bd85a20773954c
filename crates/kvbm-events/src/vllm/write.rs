//! Writing payloads as vLLM does.

use super::event::{BlockRemoved, BlockStored, EngineBatch, EngineEvent, EngineHash, Raw};
use crate::msgpack::{
    write_array, write_bin, write_float, write_int, write_map, write_nil, write_str, write_uint,
};

/// Encodes a payload; its length is bounded by what the batch holds.
pub fn encode(batch: &EngineBatch) -> Vec<u8> {
    let mut out = Vec::with_capacity(64 + 256 * batch.events.len());
    write_array(&mut out, 3);
    write_float(&mut out, batch.timestamp);
    write_array(&mut out, batch.events.len());
    for event in &batch.events {
        match event {
            EngineEvent::Stored(stored) => write_stored(&mut out, stored),
            EngineEvent::Removed(removed) => write_removed(&mut out, removed),
            EngineEvent::AllBlocksCleared => {
                write_map(&mut out, 1);
                write_type(&mut out, "AllBlocksCleared");
            }
            EngineEvent::Unknown(event) => raw(&mut out, event),
        }
    }
    option(&mut out, batch.data_parallel_rank.as_ref(), |out, rank| write_uint(out, u64::from(*rank)));
    out
}

fn write_type(out: &mut Vec<u8>, name: &str) {
    write_str(out, "type");
    write_str(out, name);
}

/// The value, or nil.
fn option<T: ?Sized>(out: &mut Vec<u8>, value: Option<&T>, write: impl FnOnce(&mut Vec<u8>, &T)) {
    match value {
        Some(value) => write(out, value),
        None => write_nil(out),
    }
}

/// A map whose fields are counted as they are written.
struct Fields {
    out: Vec<u8>,
    count: usize,
}

impl Fields {
    fn new(event: &str) -> Self {
        let mut fields = Self { out: Vec::new(), count: 1 };
        write_type(&mut fields.out, event);
        fields
    }

    fn always(&mut self, name: &str, write: impl FnOnce(&mut Vec<u8>)) {
        write_str(&mut self.out, name);
        write(&mut self.out);
        self.count += 1;
    }

    /// Left out when there is none.
    fn if_some<T: ?Sized>(&mut self, name: &str, value: Option<&T>, write: impl FnOnce(&mut Vec<u8>, &T)) {
        if let Some(value) = value {
            self.always(name, |out| write(out, value));
        }
    }

    fn finish(self, out: &mut Vec<u8>) {
        write_map(out, self.count);
        out.extend_from_slice(&self.out);
    }
}

fn write_stored(out: &mut Vec<u8>, event: &BlockStored) {
    let mut fields = Fields::new("BlockStored");
    fields.always("block_hashes", |out| hashes(out, &event.block_hashes));
    fields.always("parent_block_hash", |out| option(out, event.parent_block_hash.as_ref(), hash));
    fields.always("token_ids", |out| {
        write_array(out, event.token_ids.len());
        event.token_ids.iter().for_each(|token| write_uint(out, u64::from(*token)));
    });
    fields.always("block_size", |out| write_uint(out, u64::from(event.block_size)));
    fields.always("lora_id", |out| option(out, event.lora_id.as_ref(), |out, id| write_uint(out, *id)));
    fields.always("medium", |out| option(out, event.medium.as_deref(), write_str));
    fields.always("lora_name", |out| option(out, event.lora_name.as_deref(), write_str));
    fields.if_some("extra_keys", event.extra_keys.as_ref(), raw);
    fields.if_some("group_idx", event.group_idx.as_ref(), |out, group| write_uint(out, u64::from(*group)));
    fields.if_some("kv_cache_spec_kind", event.kv_cache_spec_kind.as_deref(), write_str);
    fields.if_some(
        "kv_cache_spec_sliding_window",
        event.kv_cache_spec_sliding_window.as_ref(),
        |out, window| {
            write_uint(out, u64::from(*window));
        },
    );
    fields.if_some("locality", event.locality.as_ref(), raw);
    fields.if_some("ownership", event.ownership.as_ref(), raw);
    fields.if_some("session_id", event.session_id.as_ref(), raw);
    event.unknown.iter().for_each(|(name, value)| fields.if_some(name, Some(value), raw));
    fields.finish(out);
}

fn write_removed(out: &mut Vec<u8>, event: &BlockRemoved) {
    let mut fields = Fields::new("BlockRemoved");
    fields.always("block_hashes", |out| hashes(out, &event.block_hashes));
    fields.always("medium", |out| option(out, event.medium.as_deref(), write_str));
    fields.if_some("group_idx", event.group_idx.as_ref(), |out, group| write_uint(out, u64::from(*group)));
    fields.if_some("locality", event.locality.as_ref(), raw);
    fields.if_some("ownership", event.ownership.as_ref(), raw);
    event.unknown.iter().for_each(|(name, value)| fields.if_some(name, Some(value), raw));
    fields.finish(out);
}

fn raw(out: &mut Vec<u8>, raw: &Raw) {
    out.extend_from_slice(&raw.0);
}

fn hashes(out: &mut Vec<u8>, list: &[EngineHash]) {
    write_array(out, list.len());
    for each in list {
        hash(out, each);
    }
}

fn hash(out: &mut Vec<u8>, hash: &EngineHash) {
    match hash {
        EngineHash::Uint(number) => write_uint(out, *number),
        EngineHash::Int(number) => write_int(out, *number),
        EngineHash::Bytes(bytes) => write_bin(out, bytes),
    }
}
