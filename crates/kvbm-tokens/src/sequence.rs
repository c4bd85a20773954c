//! A request's tokens and the hashes of its complete blocks.

use std::ops::Range;

use crate::{BlockHasher, ExtraKey, ExtraKeyError, LocalHash, SequenceHash, Token};

/// Extra keys may lie at token positions below this, far above any context length.
pub const MAX_TOKENS: usize = 1 << 28;

/// An operation that a sequence cannot do.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SequenceError {
    /// The block is already hashed, and others may hold its identity.
    #[error(
        "extra key at token {at}: block {block} is already complete; add extra keys before the tokens of their block, or truncate to {first_token} tokens first"
    )]
    BlockComplete {
        /// The token position asked for.
        at: usize,
        /// Its block.
        block: usize,
        /// The block's first token.
        first_token: usize,
    },
    /// The position lies beyond any sequence.
    #[error("extra key at token {at}: sequences end at {MAX_TOKENS} tokens; check the span's bounds")]
    BeyondEnd {
        /// The token position asked for.
        at: usize,
    },
    /// More tokens to take back than there are.
    #[error("roll back {count} tokens: the sequence has only {length}")]
    RollBack {
        /// Tokens to take back.
        count: usize,
        /// Tokens there are.
        length: usize,
    },
    /// The extra key itself is refused.
    #[error(transparent)]
    ExtraKey(#[from] ExtraKeyError),
}

/// The tokens of one request, growing as it is decoded, with the [`SequenceHash`] of every complete
/// block.
///
/// However the tokens arrive (one by one, in pieces, at once, or again after a truncation), the
/// same tokens and extra keys give the same hashes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenSequence {
    hasher: BlockHasher,
    tokens: Vec<Token>,
    hashes: Vec<SequenceHash>,
    /// The request's salt: an extra key of the first block, and so of every chain behind it.
    salt: Option<ExtraKey>,
    /// Extra keys with the token position they belong to, ascending.
    extra: Vec<(usize, ExtraKey)>,
}

impl TokenSequence {
    /// An empty sequence.
    pub fn new(hasher: BlockHasher) -> Self {
        Self { hasher, tokens: Vec::new(), hashes: Vec::new(), salt: None, extra: Vec::new() }
    }

    /// An empty sequence whose blocks are shared only with requests of the same salt.
    pub fn with_salt(hasher: BlockHasher, salt: &[u8]) -> Result<Self, ExtraKeyError> {
        Ok(Self { salt: Some(ExtraKey::salt(salt)?), ..Self::new(hasher) })
    }

    /// A sequence of these tokens, without salt and extra keys.
    pub fn from_tokens(hasher: BlockHasher, tokens: &[Token]) -> Self {
        let mut sequence = Self::new(hasher);
        sequence.add_tokens(tokens);
        sequence
    }

    /// What this sequence hashes with.
    pub fn hasher(&self) -> &BlockHasher {
        &self.hasher
    }

    /// Appends a token. The index of the block that it completed, if it did.
    pub fn add_token(&mut self, token: Token) -> Option<usize> {
        self.tokens.push(token);
        self.hash_complete_blocks().next()
    }

    /// Appends tokens. The indices of the blocks that they completed.
    pub fn add_tokens(&mut self, tokens: &[Token]) -> Range<usize> {
        if self.tail().is_empty() && !self.has_keys_ahead() {
            return self.add_plain_tokens(tokens);
        }
        self.tokens.extend_from_slice(tokens);
        self.hash_complete_blocks()
    }

    /// Adds an extra key to the block of token position `at`, which may lie ahead of the tokens so
    /// far.
    pub fn add_extra_key(&mut self, at: usize, key: ExtraKey) -> Result<(), SequenceError> {
        if at >= MAX_TOKENS {
            return Err(SequenceError::BeyondEnd { at });
        }
        let block = at / self.page_size();
        if block < self.hashes.len() {
            return Err(SequenceError::BlockComplete { at, block, first_token: block * self.page_size() });
        }
        let index = self.extra.partition_point(|(position, _)| *position <= at);
        self.extra.insert(index, (at, key));
        Ok(())
    }

    /// Adds an image (or audio, video) that lies under the tokens `span`: one extra key to every
    /// block it touches.
    ///
    /// `content_hash` is the engine's hash of the processed input. On an error nothing was added.
    pub fn add_image(&mut self, span: Range<usize>, content_hash: &[u8]) -> Result<(), SequenceError> {
        let page_size = self.page_size();
        if span.end > MAX_TOKENS {
            return Err(SequenceError::BeyondEnd { at: span.end });
        }
        let mut at = span.start;
        while at < span.end {
            let first_token = at - at % page_size;
            let offset = signed_distance(span.start, first_token);
            // Blocks are checked in ascending order, so only the first one can be refused.
            self.add_extra_key(at, ExtraKey::image(content_hash, offset)?)?;
            at = first_token + page_size;
        }
        Ok(())
    }

    /// Keeps the first `length` tokens; drops the blocks, and the extra keys, that need more. No
    /// effect if there are fewer.
    pub fn truncate(&mut self, length: usize) {
        if length < self.tokens.len() {
            self.tokens.truncate(length);
            self.hashes.truncate(length / self.page_size());
            self.extra.truncate(self.extra.partition_point(|(position, _)| *position < length));
        }
    }

    /// Takes back the last `count` tokens, as after a rejected speculation.
    pub fn roll_back(&mut self, count: usize) -> Result<(), SequenceError> {
        let length = self.tokens.len();
        let keep = length.checked_sub(count).ok_or(SequenceError::RollBack { count, length })?;
        self.truncate(keep);
        Ok(())
    }

    /// All tokens.
    pub fn tokens(&self) -> &[Token] {
        &self.tokens
    }

    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Whether there are no tokens.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Tokens per block.
    pub fn page_size(&self) -> usize {
        self.hasher.page_size()
    }

    /// Number of complete blocks.
    pub fn num_blocks(&self) -> usize {
        self.hashes.len()
    }

    /// Hashes of the complete blocks.
    pub fn hashes(&self) -> &[SequenceHash] {
        &self.hashes
    }

    /// The hash before block `index`: `None` for the first block, and for an index beyond the block
    /// in progress.
    pub fn parent_of(&self, index: usize) -> Option<SequenceHash> {
        index.checked_sub(1).and_then(|parent| self.hashes.get(parent)).copied()
    }

    /// Tokens of complete block `index`.
    pub fn block_tokens(&self, index: usize) -> Option<&[Token]> {
        (index < self.hashes.len())
            .then(|| &self.tokens[index * self.page_size()..(index + 1) * self.page_size()])
    }

    /// Tokens behind the last complete block.
    pub fn tail(&self) -> &[Token] {
        &self.tokens[self.hashes.len() * self.page_size()..]
    }

    /// Extra keys of block `index` (complete or not), the salt among those of block 0, in the order
    /// in which they are hashed.
    pub fn extra_keys(&self, index: usize) -> Vec<ExtraKey> {
        let mut keys: Vec<ExtraKey> = self.extra_of(index).iter().map(|(_, key)| key.clone()).collect();
        if index == 0 {
            keys.extend(self.salt.clone());
        }
        keys.sort_unstable();
        keys
    }

    /// The hash of complete block `index` without its prefix; see [`LocalHash`].
    pub fn local_hash(&self, index: usize) -> Option<LocalHash> {
        let tokens = self.block_tokens(index)?;
        Some(self.hasher.local_hash(tokens, &self.extra_keys(index)))
    }

    /// Whether extra keys wait for tokens.
    fn has_keys_ahead(&self) -> bool {
        let in_first_block = self.hashes.is_empty() && self.salt.is_some();
        in_first_block || self.extra.last().is_some_and(|(position, _)| *position >= self.tokens.len())
    }

    /// Tokens behind a complete block, without extra keys among them: copied and hashed in one
    /// pass.
    fn add_plain_tokens(&mut self, tokens: &[Token]) -> Range<usize> {
        let Self { hasher, tokens: own, hashes, .. } = self;
        let (first, parent) = (hashes.len(), hashes.last().copied());
        let complete = tokens.len() / hasher.page_size();
        own.reserve(tokens.len());
        hashes.reserve(complete);
        hasher.chain(parent, tokens, |block, hash| {
            own.extend_from_slice(block);
            hashes.push(hash);
        });
        own.extend_from_slice(&tokens[complete * hasher.page_size()..]);
        first..first + complete
    }

    fn extra_of(&self, index: usize) -> &[(usize, ExtraKey)] {
        let page_size = self.page_size();
        let start = self.extra.partition_point(|(position, _)| position / page_size < index);
        let end = self.extra.partition_point(|(position, _)| position / page_size <= index);
        &self.extra[start..end]
    }

    fn hash_complete_blocks(&mut self) -> Range<usize> {
        let first = self.hashes.len();
        let complete = self.tokens.len() / self.page_size();
        while self.hashes.len() < complete {
            let block = self.hashes.len();
            let keys = self.extra_keys(block);
            let end =
                if keys.is_empty() { self.next_block_with_keys(block).min(complete) } else { block + 1 };
            let tokens = &self.tokens[block * self.page_size()..end * self.page_size()];
            let parent = self.hashes.last().copied();
            if keys.is_empty() {
                self.hasher.hash_blocks(parent, tokens, &mut self.hashes);
            } else {
                self.hashes.push(self.hasher.hash_block(parent, tokens, &keys));
            }
        }
        first..complete
    }

    /// The first block behind `block` that has extra keys.
    fn next_block_with_keys(&self, block: usize) -> usize {
        let page_size = self.page_size();
        let index = self.extra.partition_point(|(position, _)| position / page_size <= block);
        self.extra.get(index).map_or(usize::MAX, |(position, _)| position / page_size)
    }
}

/// `to - from`, exact: both are at most [`MAX_TOKENS`].
fn signed_distance(from: usize, to: usize) -> i64 {
    to.wrapping_sub(from).cast_signed() as i64
}
