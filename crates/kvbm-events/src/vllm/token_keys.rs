//! Engines' blocks by their tokens, which is what a router has.
//!
//! Engines hash blocks in ways of their own, many with a seed that changes at every start, so
//! nobody else can compute those hashes. But they publish the tokens. A *token key* chains them:
//! equal for equal tokens, adapter and extra keys, whichever engine holds them under whatever hash.

use super::engine_blocks::Adapter;
use super::event::{BlockStored, EngineHash, Raw};
use crate::msgpack::{Head, Reader};
use kvbm_plan::{GroupId, SequenceHash};
use kvbm_tokens::{BlockHasher, ExtraKey, Namespace};
use std::collections::{BTreeSet, HashMap};

/// Token keys of the complete blocks of a prompt. An adapter is identified by its name, or by its
/// number where it has none. `extra_keys` are the extra keys of its first blocks as JSON, without
/// the adapter's name, `None` for a block without.
pub fn token_keys(
    block_tokens: u32,
    adapter: &Adapter,
    extra_keys: &[Option<String>],
    tokens: &[u32],
) -> Vec<SequenceHash> {
    let Some(hasher) = hasher(block_tokens) else { return Vec::new() };
    let mut parent = None;
    let blocks = tokens.chunks_exact(hasher.page_size()).enumerate();
    let keys = blocks.map(|(at, tokens)| {
        let extra = extra_keys.get(at).and_then(Option::as_deref);
        let key = key(&hasher, parent, adapter.id, adapter.name.as_deref(), extra, tokens);
        parent = Some(key);
        key
    });
    keys.collect()
}

fn hasher(block_tokens: u32) -> Option<BlockHasher> {
    Namespace::new("engine").page_size(block_tokens).hasher().ok()
}

/// The adapter counts for the first block alone: the others follow it.
fn key(
    hasher: &BlockHasher,
    parent: Option<SequenceHash>,
    lora_id: Option<u64>,
    lora_name: Option<&str>,
    extra: Option<&str>,
    tokens: &[u32],
) -> SequenceHash {
    // Of any length, unlike the other kinds.
    let mixed = |kind: &str, text: &str| ExtraKey::prompt_embeddings(format!("{kind}:{text}").as_bytes());
    let adapter = match (lora_name, lora_id) {
        _ if parent.is_some() => None,
        (Some(name), _) => Some(mixed("adapter", name)),
        (None, Some(id)) => Some(mixed("adapter number", &id.to_string())),
        (None, None) => None,
    };
    let extra = extra.map(|text| mixed("extra", text));
    let keys: Vec<ExtraKey> = adapter.into_iter().chain(extra).collect();
    hasher.hash_block(parent, tokens, &keys)
}

/// What an engine calls the blocks that it holds, and their token keys.
#[derive(Debug)]
pub(super) struct TokenKeys {
    known: HashMap<(GroupId, SequenceHash), Named>,
    max_blocks: usize,
    hashers: HashMap<u32, BlockHasher>,
    sizes: BTreeSet<u32>,
}

#[derive(Debug)]
struct Named {
    key: SequenceHash,
    /// Bits of the tiers that hold it.
    tiers: u8,
}

/// Sizes of blocks of one engine: more are a lie.
const MAX_SIZES: usize = 16;

impl TokenKeys {
    pub(super) fn new(max_blocks: usize) -> Self {
        Self { known: HashMap::new(), max_blocks, hashers: HashMap::new(), sizes: BTreeSet::new() }
    }

    /// Tokens in a block, of all blocks so far.
    pub(super) const fn sizes(&self) -> &BTreeSet<u32> {
        &self.sizes
    }

    pub(super) fn key(&self, group: GroupId, hash: &EngineHash) -> Option<SequenceHash> {
        self.known.get(&(group, hash.index_key())).map(|named| named.key)
    }

    pub(super) fn clear(&mut self) {
        self.known.clear();
    }

    /// Notes that the blocks are on a tier, a bit; appends their keys to `keys`, as far as there is
    /// room. Gives the key of the block before them. A block without tokens has its engine's hash
    /// as key.
    pub(super) fn store(
        &mut self,
        group: GroupId,
        tier: u8,
        stored: &BlockStored,
        keys: &mut Vec<SequenceHash>,
    ) -> Option<SequenceHash> {
        let parent = stored.parent_block_hash.as_ref();
        let parent = parent.map(|hash| self.key(group, hash).unwrap_or_else(|| hash.index_key()));
        let size = stored.block_size;
        let hasher = self.hasher_of(size).filter(|_| {
            let tokens = stored.block_hashes.len().checked_mul(size as usize);
            size > 0 && tokens == Some(stored.token_ids.len())
        });
        let extra = stored.extra_keys.as_ref();
        let extra = extra.map(|raw| extra_keys(raw, stored.block_hashes.len(), stored.lora_name.as_deref()));
        let mut before = parent;
        let mut room = self.max_blocks.saturating_sub(self.known.len());
        for (at, hash) in stored.block_hashes.iter().enumerate() {
            let name = (group, hash.index_key());
            let key = match self.known.get_mut(&name) {
                Some(named) => {
                    named.tiers |= tier;
                    named.key
                }
                None if room == 0 => break,
                None => {
                    room -= 1;
                    let extra = extra.as_ref().and_then(|extra| extra.get(at)).and_then(Option::as_deref);
                    let lora = stored.lora_name.as_deref();
                    let key = hasher.as_ref().map_or(name.1, |hasher| {
                        let tokens = &stored.token_ids[at * size as usize..][..size as usize];
                        key(hasher, before, stored.lora_id, lora, extra, tokens)
                    });
                    self.known.insert(name, Named { key, tiers: tier });
                    key
                }
            };
            keys.push(key);
            before = Some(key);
        }
        parent
    }

    /// Notes that the blocks left a tier; appends the keys of those that were there to `keys`.
    pub(super) fn remove(
        &mut self,
        group: GroupId,
        tier: u8,
        hashes: &[EngineHash],
        keys: &mut Vec<SequenceHash>,
    ) {
        for hash in hashes {
            let name = (group, hash.index_key());
            let Some(named) = self.known.get_mut(&name) else { continue };
            keys.push(named.key);
            named.tiers &= !tier;
            if named.tiers == 0 {
                self.known.remove(&name);
            }
        }
    }

    fn hasher_of(&mut self, size: u32) -> Option<BlockHasher> {
        if self.sizes.len() < MAX_SIZES {
            self.sizes.insert(size);
        }
        if let Some(known) = self.hashers.get(&size) {
            return Some(*known);
        }
        let made = hasher(size)?;
        if self.hashers.len() < MAX_SIZES {
            self.hashers.insert(size, made);
        }
        Some(made)
    }
}

/// Of each of the first `blocks` blocks, its extra keys as JSON, without the name of the adapter,
/// which vLLM lists among them.
fn extra_keys(raw: &Raw, blocks: usize, lora_name: Option<&str>) -> Vec<Option<String>> {
    let mut reader = Reader::new(raw.bytes());
    let Ok(Head::Array(said)) = reader.head() else { return Vec::new() };
    let mut of_blocks = Vec::new();
    for _ in 0..blocks.min(said as usize) {
        let Ok(value) = reader.raw(1) else { break };
        of_blocks.push(extra_keys_of_block(value, lora_name));
    }
    of_blocks
}

fn extra_keys_of_block(value: &[u8], lora_name: Option<&str>) -> Option<String> {
    let mut reader = Reader::new(value);
    let Ok(Head::Array(len)) = reader.head() else {
        return (value != [0xC0]).then(|| Raw(value.to_vec()).to_string());
    };
    let mut keys = Vec::new();
    for _ in 0..len {
        let Ok(key) = reader.raw(1) else { break };
        let is_adapter = |name: &str| Reader::new(key).head() == Ok(Head::Str(name.as_bytes()));
        if !lora_name.is_some_and(is_adapter) {
            keys.push(Raw(key.to_vec()).to_string());
        }
    }
    (!keys.is_empty()).then(|| format!("[{}]", keys.join(",")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::msgpack::{write_array, write_nil, write_str, write_uint};

    const GROUP: GroupId = GroupId(0);

    fn stored(seed: u64, blocks: std::ops::Range<u32>) -> BlockStored {
        let name = |block: u32| EngineHash::Uint(seed + u64::from(block));
        BlockStored {
            block_hashes: blocks.clone().map(name).collect(),
            parent_block_hash: blocks.start.checked_sub(1).map(name),
            token_ids: (2 * blocks.start..2 * blocks.end).collect(),
            block_size: 2,
            ..BlockStored::default()
        }
    }

    fn keys(names: &mut TokenKeys, tier: u8, stored: &BlockStored) -> Vec<SequenceHash> {
        let mut keys = Vec::new();
        names.store(GROUP, tier, stored, &mut keys);
        keys
    }

    #[test]
    fn equal_tokens_have_equal_keys_whatever_engines_call_them() {
        let (mut a, mut b) = (TokenKeys::new(9), TokenKeys::new(9));
        let first = keys(&mut a, 1, &stored(100, 0..3));
        assert_eq!(keys(&mut b, 1, &stored(7000, 0..2)), first[..2]);
        assert_eq!(keys(&mut b, 1, &stored(7000, 2..3)), first[2..], "chained behind what is known");
        assert_eq!(token_keys(2, &Adapter::default(), &[], &[0, 1, 2, 3, 4, 5, 6]), first);
        assert_ne!(token_keys(2, &Adapter::default(), &[], &[0, 1, 2, 9])[1], first[1]);
        assert_eq!(token_keys(0, &Adapter::default(), &[], &[1, 2]), []);
        let poet = Adapter { id: None, name: Some("poet".into()) };
        let adapted = BlockStored { lora_name: Some("poet".into()), ..stored(50, 0..2) };
        let adapted = keys(&mut TokenKeys::new(9), 1, &adapted);
        assert_eq!(adapted, token_keys(2, &poet, &[], &[0, 1, 2, 3]));
        assert!(adapted.iter().all(|key| !first.contains(key)));
        // By its name, if it has one, and else by its number: never the model without an adapter.
        let named = BlockStored { lora_id: Some(7), lora_name: Some("poet".into()), ..stored(60, 0..2) };
        assert_eq!(keys(&mut TokenKeys::new(9), 1, &named), adapted);
        let by_number = |id| BlockStored { lora_id: Some(id), ..stored(70, 0..2) };
        let seven = keys(&mut TokenKeys::new(9), 1, &by_number(7));
        let question = Adapter { id: Some(7), name: None };
        assert_eq!(seven, token_keys(2, &question, &[], &[0, 1, 2, 3]));
        let eight = keys(&mut TokenKeys::new(9), 1, &by_number(8));
        assert!(seven.iter().all(|key| ![&first, &adapted, &eight].iter().any(|other| other.contains(key))));
        assert_eq!(a.sizes().iter().copied().collect::<Vec<_>>(), [2]);
    }

    #[test]
    fn blocks_without_tokens_go_by_their_hashes() {
        let mut names = TokenKeys::new(9);
        let bare = BlockStored { token_ids: vec![], ..stored(100, 0..2) };
        let by_hash = [100, 101].map(|number| EngineHash::Uint(number).index_key());
        assert_eq!(keys(&mut names, 1, &bare), by_hash);
        let odd = BlockStored { block_size: u32::MAX, ..stored(1, 0..2) };
        assert_eq!(keys(&mut names, 1, &odd)[0], EngineHash::Uint(1).index_key(), "not what was said");
    }

    /// Mutation that makes it fail: `remove` that forgets the name with the first tier.
    #[test]
    fn a_name_is_kept_as_long_as_a_tier_has_the_block() {
        let mut names = TokenKeys::new(3);
        let there = keys(&mut names, 1, &stored(100, 0..3));
        keys(&mut names, 2, &stored(100, 0..3));
        assert_eq!(keys(&mut names, 1, &stored(500, 0..1)), [], "there is no room");
        let mut gone = Vec::new();
        names.remove(GROUP, 1, &[EngineHash::Uint(102), EngineHash::Uint(9)], &mut gone);
        assert_eq!(
            (gone.as_slice(), names.key(GROUP, &EngineHash::Uint(102))),
            (&there[2..], Some(there[2]))
        );
        names.remove(GROUP, 2, &[EngineHash::Uint(102)], &mut gone);
        assert_eq!(names.key(GROUP, &EngineHash::Uint(102)), None);
        names.clear();
        assert_eq!(names.key(GROUP, &EngineHash::Uint(100)), None);
    }

    #[test]
    fn extra_keys_keep_blocks_apart_and_the_adapter_is_no_extra_key() {
        let mut raw = Vec::new();
        write_array(&mut raw, 3);
        write_array(&mut raw, 2);
        write_str(&mut raw, "poet");
        write_str(&mut raw, "tenant-a");
        write_nil(&mut raw);
        write_array(&mut raw, 1);
        write_array(&mut raw, 2);
        write_str(&mut raw, "cat");
        write_uint(&mut raw, 5);
        let extra_keys = Some(Raw(raw));
        let event = BlockStored { extra_keys, lora_name: Some("poet".into()), ..stored(1, 0..3) };
        let poet = Adapter { id: None, name: Some("poet".into()) };
        let wanted = [Some(r#"["tenant-a"]"#.to_owned()), None, Some(r#"[["cat",5]]"#.to_owned())];
        let tokens: Vec<u32> = (0..6).collect();
        let wanted = token_keys(2, &poet, &wanted, &tokens);
        assert_eq!(keys(&mut TokenKeys::new(9), 1, &event), wanted);
        assert_ne!(wanted, token_keys(2, &poet, &[], &tokens));
    }
}
