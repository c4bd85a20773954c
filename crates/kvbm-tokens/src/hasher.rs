//! One step of the chain: parent hash and a block's content to the block's hash.

use xxhash_rust::xxh3;

use crate::chunk;
use crate::{ChainOrigin, ExtraKey, LocalHash, NamespaceTag, SequenceHash, Token};

/// How sequence hashes are computed. Part of the namespace, so blocks of different algorithms never
/// meet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum HashAlgorithm {
    /// Keyed BLAKE3, cut to 128 bits: two prefixes cannot be made to collide. The default.
    #[default]
    Blake3,
    /// XXH3-128 (seed 0) over `parent || tag || message`, each laid out as for BLAKE3, as 16
    /// big-endian (canonical) bytes.
    ///
    /// Not collision resistant: someone who chooses tokens can make two prefixes collide and be
    /// served another's KV. Only for a trusted single tenant.
    Xxh3_128,
}

/// Seed of [`LocalHash`].
const LOCAL_SEED: u64 = 1337;

/// Stands in the parent's place when an engine's own hash is taken in, so that it never equals a
/// hash of tokens.
const EXTERNAL: SequenceHash = SequenceHash::from_bytes(*b"kvbm external v1");

/// Tokens that a buffer on the stack takes; longer messages are streamed through it.
const BUFFER_TOKENS: usize = 256;
/// Blocks of up to this many tokens take a smaller buffer, which costs less to clear.
const SMALL_TOKENS: usize = 64;
/// Most blocks have this many tokens: what hashes them is compiled for it.
const USUAL_TOKENS: usize = 16;
/// Bytes before the tokens in a message for XXH3: parent and tag.
const PREFIX: usize = 32;

/// A namespace made ready for hashing: its tag, algorithm and page size. Small and `Copy`.
///
/// Made by [`Namespace::hasher`](crate::Namespace::hasher).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockHasher {
    tag: NamespaceTag,
    page_size: u32,
    algorithm: HashAlgorithm,
    persistable: bool,
    flat: bool,
}

impl BlockHasher {
    /// `page_size` must not be zero: [`Namespace::hasher`](crate::Namespace::hasher) checks it.
    pub(crate) fn new(
        tag: NamespaceTag,
        page_size: u32,
        algorithm: HashAlgorithm,
        persistable: bool,
        flat: bool,
    ) -> Self {
        Self { tag, page_size, algorithm, persistable, flat }
    }

    /// What the chains of the namespace begin with.
    pub(crate) fn origin(&self) -> ChainOrigin {
        if self.flat { ChainOrigin::Flat } else { ChainOrigin::Root }
    }

    /// Whether blocks have no parents: see [`Namespace::flat`](crate::Namespace::flat).
    pub fn is_flat(&self) -> bool {
        self.flat
    }

    /// The namespace's tag.
    pub fn tag(&self) -> NamespaceTag {
        self.tag
    }

    /// Tokens per block; never zero.
    pub fn page_size(&self) -> usize {
        self.page_size as usize
    }

    /// The namespace's algorithm.
    pub fn algorithm(&self) -> HashAlgorithm {
        self.algorithm
    }

    /// Whether these hashes mean anything to another process: see [`ChainRoot`](crate::ChainRoot).
    pub fn is_persistable(&self) -> bool {
        self.persistable
    }

    /// The hash of one block of [`page_size`](Self::page_size) tokens behind `parent` (`None` at
    /// the root).
    ///
    /// `extra` in any order. Blocks of another length give hashes that no
    /// [`TokenSequence`](crate::TokenSequence) has.
    pub fn hash_block(
        &self,
        parent: Option<SequenceHash>,
        tokens: &[Token],
        extra: &[ExtraKey],
    ) -> SequenceHash {
        let extra = encode_extra(extra);
        self.link(self.prefix(parent), tokens, &extra)
    }

    /// Appends the hash of each complete block of `tokens` to `out`; returns their number.
    ///
    /// `parent` is the hash before the first block, `None` at the root. Tokens behind the last
    /// complete block are left.
    pub fn hash_blocks(
        &self,
        parent: Option<SequenceHash>,
        tokens: &[Token],
        out: &mut Vec<SequenceHash>,
    ) -> usize {
        let count = tokens.len() / self.page_size();
        out.reserve(count);
        self.chain(parent, tokens, |_, hash| out.push(hash));
        count
    }

    /// Gives each complete block of `tokens` with its hash to `each`, in order.
    #[inline]
    pub(crate) fn chain(
        &self,
        parent: Option<SequenceHash>,
        tokens: &[Token],
        each: impl FnMut(&[Token], SequenceHash),
    ) {
        if self.page_size() == USUAL_TOKENS {
            let (blocks, _) = tokens.as_chunks::<USUAL_TOKENS>();
            self.chain_blocks(parent, blocks.iter().map(<[Token; USUAL_TOKENS]>::as_slice), each);
        } else {
            self.chain_blocks(parent, tokens.chunks_exact(self.page_size()), each);
        }
    }

    #[inline]
    fn chain_blocks<'a>(
        &self,
        parent: Option<SequenceHash>,
        blocks: impl Iterator<Item = &'a [Token]>,
        mut each: impl FnMut(&[Token], SequenceHash),
    ) {
        let mut prefix = self.prefix(parent);
        match self.algorithm {
            HashAlgorithm::Blake3 if self.page_size() <= chunk::MAX_TOKENS => {
                chain_blake3(words(&prefix), blocks, each);
            }
            HashAlgorithm::Xxh3_128 if self.page_size() <= SMALL_TOKENS => chain_xxh3(&prefix, blocks, each),
            _ => blocks.for_each(|block| {
                let hash = self.link(prefix, block, &[]);
                prefix[..16].copy_from_slice(hash.as_bytes());
                each(block, hash);
            }),
        }
    }

    /// The hash of a block's tokens and extra keys alone; see [`LocalHash`].
    pub fn local_hash(&self, tokens: &[Token], extra: &[ExtraKey]) -> LocalHash {
        let extra = encode_extra(extra);
        if extra.is_empty() && tokens.len() <= BUFFER_TOKENS {
            let mut buffer = [0; 4 * BUFFER_TOKENS];
            return LocalHash(xxh3::xxh3_64_with_seed(fill(&mut buffer, tokens), LOCAL_SEED));
        }
        let mut state = xxh3::Xxh3::with_seed(LOCAL_SEED);
        stream(tokens, &extra, |bytes| state.update(bytes));
        LocalHash(state.digest())
    }

    /// An engine's own hash as ours; see [`SequenceHash::from_external`].
    pub(crate) fn external(&self, bytes: &[u8]) -> SequenceHash {
        self.link(self.prefix(Some(EXTERNAL)), &[], bytes)
    }

    /// What a message is keyed with: parent, then tag.
    fn prefix(&self, parent: Option<SequenceHash>) -> [u8; PREFIX] {
        let mut prefix = [0; PREFIX];
        if let Some(parent) = parent {
            prefix[..16].copy_from_slice(parent.as_bytes());
        }
        prefix[16..].copy_from_slice(self.tag.as_bytes());
        prefix
    }

    /// `extra` is already encoded (or an external hash's bytes).
    fn link(&self, prefix: [u8; PREFIX], tokens: &[Token], extra: &[u8]) -> SequenceHash {
        SequenceHash::from_bytes(match self.algorithm {
            HashAlgorithm::Blake3 => blake3_128(&prefix, tokens, extra),
            HashAlgorithm::Xxh3_128 => xxh3_128(&prefix, tokens, extra),
        })
    }
}

impl SequenceHash {
    /// Takes in a block hash that an engine computed itself (its chain of all tokens so far), of
    /// any length.
    ///
    /// Mixed with the namespace tag, so equal engine hashes of two models stay apart, and apart
    /// from every hash of tokens. The result collides when the engine's hashes do: 64-bit engine
    /// hashes carry 64 bits of safety. Give a number always in the same byte order; kvbm's own
    /// adapters use little-endian.
    pub fn from_external(hasher: &BlockHasher, bytes: &[u8]) -> Self {
        hasher.external(bytes)
    }
}

// The two loops are functions of their own so that each has all registers: what goes from block to
// block stays in them.

#[inline(never)]
fn chain_blake3<'a>(
    mut key: [u32; 8],
    blocks: impl Iterator<Item = &'a [Token]>,
    mut each: impl FnMut(&[Token], SequenceHash),
) {
    for block in blocks {
        let hash = chunk::keyed_128(key, block);
        key[..4].copy_from_slice(&hash);
        each(block, SequenceHash::from_bytes(bytes(hash)));
    }
}

/// Blocks are at most [`SMALL_TOKENS`] long.
#[inline(never)]
fn chain_xxh3<'a>(
    prefix: &[u8; PREFIX],
    blocks: impl Iterator<Item = &'a [Token]>,
    mut each: impl FnMut(&[Token], SequenceHash),
) {
    let mut message = [0; PREFIX + 4 * SMALL_TOKENS];
    message[..PREFIX].copy_from_slice(prefix);
    let mut parent = u128::from_le_bytes(std::array::from_fn(|i| prefix[i]));
    for block in blocks {
        message[..16].copy_from_slice(&parent.to_le_bytes());
        let length = PREFIX + fill(&mut message[PREFIX..], block).len();
        parent = xxh3::xxh3_128(&message[..length]).swap_bytes();
        each(block, SequenceHash::from_bytes(parent.to_le_bytes()));
    }
}

fn blake3_128(key: &[u8; PREFIX], tokens: &[Token], extra: &[u8]) -> [u8; 16] {
    if extra.is_empty() && tokens.len() <= chunk::MAX_TOKENS {
        return bytes(chunk::keyed_128(words(key), tokens));
    }
    let mut state = blake3::Hasher::new_keyed(key);
    stream(tokens, extra, |bytes| {
        state.update(bytes);
    });
    let mut hash = [0; 16];
    hash.copy_from_slice(&state.finalize().as_bytes()[..16]);
    hash
}

fn xxh3_128(prefix: &[u8; PREFIX], tokens: &[Token], extra: &[u8]) -> [u8; 16] {
    let mut state = xxh3::Xxh3::new();
    state.update(prefix);
    stream(tokens, extra, |bytes| state.update(bytes));
    state.digest128().to_be_bytes()
}

/// Bytes as little-endian words.
fn words(bytes: &[u8; PREFIX]) -> [u32; PREFIX / 4] {
    let (words, _) = bytes.as_chunks::<4>();
    std::array::from_fn(|i| u32::from_le_bytes(words[i]))
}

/// Little-endian words as bytes.
fn bytes(words: [u32; 4]) -> [u8; 16] {
    let [a, b, c, d] = words.map(u128::from);
    (a | b << 32 | c << 64 | d << 96).to_le_bytes()
}

/// Writes the tokens little-endian to the front of `buffer`, which holds at least as many; gives
/// that part back.
fn fill<'a>(buffer: &'a mut [u8], tokens: &[Token]) -> &'a [u8] {
    for (bytes, token) in buffer.chunks_exact_mut(4).zip(tokens) {
        bytes.copy_from_slice(&token.to_le_bytes());
    }
    &buffer[..tokens.len() * 4]
}

fn stream(tokens: &[Token], extra: &[u8], mut update: impl FnMut(&[u8])) {
    let mut buffer = [0; 4 * BUFFER_TOKENS];
    for part in tokens.chunks(BUFFER_TOKENS) {
        update(fill(&mut buffer, part));
    }
    if !extra.is_empty() {
        update(extra);
    }
}

/// Extra keys as they enter the hash: in ascending order, so that the order in which an engine
/// names them does not matter.
fn encode_extra(extra: &[ExtraKey]) -> Vec<u8> {
    let mut sorted: Vec<&[u8]> = extra.iter().map(ExtraKey::as_bytes).collect();
    sorted.sort_unstable();
    let mut encoded = Vec::new();
    for bytes in sorted {
        encoded.extend_from_slice(&length_prefix(bytes.len()));
        encoded.extend_from_slice(bytes);
    }
    encoded
}

/// A length in four little-endian bytes. Extra keys are bounded far below 2^32 bytes when they are
/// made.
fn length_prefix(length: usize) -> [u8; 4] {
    (length as u32).to_le_bytes()
}
