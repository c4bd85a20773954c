//! One step of the chain: parent hash and a block's content to the block's hash.

use xxhash_rust::xxh3;

use crate::{ExtraKey, LocalHash, NamespaceTag, SequenceHash, Token};

/// How sequence hashes are computed. Part of the namespace, so blocks of different algorithms never meet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum HashAlgorithm {
    /// Keyed BLAKE3, cut to 128 bits: nobody can make two prefixes collide. The default.
    #[default]
    Blake3,
    /// XXH3-128 (seed 0) over `parent || tag || message`, each laid out as for BLAKE3, as 16 big-endian (canonical) bytes.
    ///
    /// Not collision resistant: someone who chooses tokens can make two prefixes collide and be served another's KV. Only for
    /// a trusted single tenant.
    Xxh3_128,
}

/// Seed of [`LocalHash`].
const LOCAL_SEED: u64 = 1337;

/// Stands in the parent's place when an engine's own hash is taken in, so that it never equals a hash of tokens.
const EXTERNAL: [u8; 16] = *b"kvbm external v1";

/// Token bytes (256 tokens) that are hashed from one buffer on the stack; longer blocks are streamed through it.
const BUFFER: usize = 1024;
/// The blocks of up to this many token bytes (64 tokens) take a smaller buffer, which costs less to clear.
const SMALL_BUFFER: usize = 256;

/// A namespace made ready for hashing: its tag, algorithm and page size. Small and `Copy`.
///
/// Made by [`Namespace::hasher`](crate::Namespace::hasher).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockHasher {
    tag: NamespaceTag,
    page_size: u32,
    algorithm: HashAlgorithm,
    persistable: bool,
}

impl BlockHasher {
    /// `page_size` must not be zero: [`Namespace::hasher`](crate::Namespace::hasher) checks it.
    pub(crate) fn new(
        tag: NamespaceTag,
        page_size: u32,
        algorithm: HashAlgorithm,
        persistable: bool,
    ) -> Self {
        Self { tag, page_size, algorithm, persistable }
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

    /// The hash of one block of [`page_size`](Self::page_size) tokens behind `parent` (`None` at the root).
    ///
    /// `extra` in any order. Blocks of another length give hashes that no [`TokenSequence`](crate::TokenSequence) has.
    pub fn hash_block(
        &self,
        parent: Option<SequenceHash>,
        tokens: &[Token],
        extra: &[ExtraKey],
    ) -> SequenceHash {
        let extra = encode_extra(extra);
        self.link(parent.map_or([0; 16], |hash| *hash.as_bytes()), tokens, &extra)
    }

    /// Appends the hash of each complete block of `tokens` to `out`; returns their number.
    ///
    /// `parent` is the hash before the first block, `None` at the root. Tokens behind the last complete block are left.
    pub fn hash_blocks(
        &self,
        parent: Option<SequenceHash>,
        tokens: &[Token],
        out: &mut Vec<SequenceHash>,
    ) -> usize {
        let blocks = tokens.chunks_exact(self.page_size());
        let count = blocks.len();
        let mut previous = parent.map_or([0; 16], |hash| *hash.as_bytes());
        out.reserve(count);
        out.extend(blocks.map(|block| {
            let hash = self.link(previous, block, &[]);
            previous = *hash.as_bytes();
            hash
        }));
        count
    }

    /// The hash of a block's tokens and extra keys alone; see [`LocalHash`].
    pub fn local_hash(&self, tokens: &[Token], extra: &[ExtraKey]) -> LocalHash {
        let extra = encode_extra(extra);
        if extra.is_empty() && tokens.len() * 4 <= BUFFER {
            let mut buffer = [0; BUFFER];
            return LocalHash(xxh3::xxh3_64_with_seed(fill(&mut buffer, tokens), LOCAL_SEED));
        }
        let mut state = xxh3::Xxh3::with_seed(LOCAL_SEED);
        stream(tokens, &extra, |bytes| state.update(bytes));
        LocalHash(state.digest())
    }

    /// An engine's own hash as ours; see [`SequenceHash::from_external`].
    pub(crate) fn external(&self, bytes: &[u8]) -> SequenceHash {
        self.link(EXTERNAL, &[], bytes)
    }

    /// `extra` is already encoded (or an external hash's bytes).
    fn link(&self, parent: [u8; 16], tokens: &[Token], extra: &[u8]) -> SequenceHash {
        let mut key = [0; 32];
        key[..16].copy_from_slice(&parent);
        key[16..].copy_from_slice(self.tag.as_bytes());
        SequenceHash::from_bytes(match self.algorithm {
            HashAlgorithm::Blake3 => blake3_128(&key, tokens, extra),
            HashAlgorithm::Xxh3_128 => xxh3_128(&key, tokens, extra),
        })
    }
}

impl SequenceHash {
    /// Takes in a block hash that an engine computed itself (its chain of all tokens so far), of any length.
    ///
    /// Mixed with the namespace tag, so equal engine hashes of two models stay apart, and apart from every hash of tokens. The
    /// result collides when the engine's hashes do: 64-bit engine hashes carry 64 bits of safety.
    /// Give a number always in the same byte order; kvbm's own adapters use little-endian.
    pub fn from_external(hasher: &BlockHasher, bytes: &[u8]) -> Self {
        hasher.external(bytes)
    }
}

fn blake3_128(key: &[u8; 32], tokens: &[Token], extra: &[u8]) -> [u8; 16] {
    let bytes = tokens.len() * 4;
    let digest = if extra.is_empty() && bytes <= SMALL_BUFFER {
        blake3::keyed_hash(key, fill(&mut [0; SMALL_BUFFER], tokens))
    } else if extra.is_empty() && bytes <= BUFFER {
        blake3::keyed_hash(key, fill(&mut [0; BUFFER], tokens))
    } else {
        let mut state = blake3::Hasher::new_keyed(key);
        stream(tokens, extra, |bytes| {
            state.update(bytes);
        });
        state.finalize()
    };
    let mut hash = [0; 16];
    hash.copy_from_slice(&digest.as_bytes()[..16]);
    hash
}

fn xxh3_128(key: &[u8; 32], tokens: &[Token], extra: &[u8]) -> [u8; 16] {
    let bytes = tokens.len() * 4;
    let hash = if extra.is_empty() && bytes <= SMALL_BUFFER {
        let mut buffer = [0; 32 + SMALL_BUFFER];
        buffer[..32].copy_from_slice(key);
        fill(&mut buffer[32..], tokens);
        xxh3::xxh3_128(&buffer[..32 + bytes])
    } else {
        let mut state = xxh3::Xxh3::new();
        state.update(key);
        stream(tokens, extra, |bytes| state.update(bytes));
        state.digest128()
    };
    hash.to_be_bytes()
}

/// Writes the tokens little-endian to the front of `buffer`, which holds at least as many; gives that part back.
fn fill<'a>(buffer: &'a mut [u8], tokens: &[Token]) -> &'a [u8] {
    for (bytes, token) in buffer.chunks_exact_mut(4).zip(tokens) {
        bytes.copy_from_slice(&token.to_le_bytes());
    }
    &buffer[..tokens.len() * 4]
}

fn stream(tokens: &[Token], extra: &[u8], mut update: impl FnMut(&[u8])) {
    let mut buffer = [0; BUFFER];
    for part in tokens.chunks(BUFFER / 4) {
        update(fill(&mut buffer, part));
    }
    if !extra.is_empty() {
        update(extra);
    }
}

/// Extra keys as they enter the hash: in ascending order, so that the order in which an engine names them does not matter.
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

/// A length in four little-endian bytes. Extra keys are bounded far below 2^32 bytes when they are made.
fn length_prefix(length: usize) -> [u8; 4] {
    (length as u32).to_le_bytes()
}
