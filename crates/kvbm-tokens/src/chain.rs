//! Consecutive blocks of one sequence, hashed by kvbm or by an engine.

use std::ops::Range;

use crate::{BlockHasher, LocalHash, NamespaceTag, SequenceHash, Token, TokenSequence};

/// One block of a chain, with what travels beside its hash.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChainLink {
    /// The block's identity.
    pub hash: SequenceHash,
    /// The block before it; `None` for the first block of a sequence.
    pub parent: Option<SequenceHash>,
    /// The block's index in its sequence.
    pub position: u32,
}

/// A run of consecutive complete blocks of one sequence: what kvbm matches, registers and moves.
///
/// A borrowed view of a [`TokenSequence`] or of an [`ExternalSequence`], so that both are treated
/// alike.
#[derive(Debug, Clone, Copy)]
pub struct BlockChain<'a> {
    /// What the hashes are chained in.
    namespace: NamespaceTag,
    /// Hashes of the whole sequence from its first block up to the end of the run.
    hashes: &'a [SequenceHash],
    /// Index of the run's first block in `hashes`.
    start: usize,
    /// The whole sequence, when its tokens are known.
    sequence: Option<&'a TokenSequence>,
}

impl<'a> BlockChain<'a> {
    /// The blocks from the first of a sequence, of which only the hashes are known. Their namespace
    /// is the tag of zeros until [`in_namespace`](Self::in_namespace) names one.
    pub fn of_hashes(hashes: &'a [SequenceHash]) -> Self {
        Self { namespace: NamespaceTag::from_bytes([0; 16]), hashes, start: 0, sequence: None }
    }

    /// The same blocks, labelled as of namespace `tag`.
    #[must_use]
    pub fn in_namespace(self, tag: NamespaceTag) -> Self {
        Self { namespace: tag, ..self }
    }

    /// The namespace that the hashes are chained in.
    pub fn namespace(&self) -> NamespaceTag {
        self.namespace
    }

    /// Number of blocks.
    pub fn len(&self) -> usize {
        self.hashes.len() - self.start
    }

    /// Whether there are no blocks.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Hashes of the run's blocks.
    pub fn hashes(&self) -> &'a [SequenceHash] {
        &self.hashes[self.start..]
    }

    /// Position in the sequence of the run's first block.
    pub fn first_position(&self) -> u32 {
        position(self.start)
    }

    /// Block `index` of the run.
    pub fn get(&self, index: usize) -> Option<ChainLink> {
        let at = self.start.checked_add(index)?;
        let hash = *self.hashes.get(at)?;
        Some(ChainLink { hash, parent: self.hash_before(at), position: position(at) })
    }

    /// The hash before block `index` of the run; `None` at the start of the sequence and beyond the
    /// run's end.
    pub fn parent_of(&self, index: usize) -> Option<SequenceHash> {
        self.get(index).and_then(|link| link.parent)
    }

    /// Tokens of block `index` of the run, if this chain knows tokens.
    pub fn tokens_of(&self, index: usize) -> Option<&'a [Token]> {
        self.get(index)?;
        self.sequence?.block_tokens(self.start + index)
    }

    /// The hash of block `index` of the run without its prefix, if this chain knows tokens; see
    /// [`LocalHash`](crate::LocalHash).
    pub fn local_hash_of(&self, index: usize) -> Option<LocalHash> {
        self.get(index)?;
        self.sequence?.local_hash(self.start + index)
    }

    /// The run's blocks in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = ChainLink> + DoubleEndedIterator + 'a {
        let chain = *self;
        (self.start..self.hashes.len()).map(move |at| ChainLink {
            hash: chain.hashes[at],
            parent: chain.hash_before(at),
            position: position(at),
        })
    }

    /// A part of the run; positions and parents stay those of the sequence. A range beyond the end
    /// is cut.
    #[must_use]
    pub fn slice(&self, range: Range<usize>) -> Self {
        let end = range.end.min(self.len());
        let start = range.start.min(end);
        Self { hashes: &self.hashes[..self.start + end], start: self.start + start, ..*self }
    }

    fn hash_before(&self, at: usize) -> Option<SequenceHash> {
        at.checked_sub(1).map(|parent| self.hashes[parent])
    }
}

impl TokenSequence {
    /// The complete blocks as kvbm takes them.
    pub fn chain(&self) -> BlockChain<'_> {
        let (namespace, hashes) = (self.hasher().tag(), self.hashes());
        BlockChain { namespace, hashes, start: 0, sequence: Some(self) }
    }
}

impl<'a> From<&'a TokenSequence> for BlockChain<'a> {
    fn from(sequence: &'a TokenSequence) -> Self {
        sequence.chain()
    }
}

impl<'a> From<&'a ExternalSequence> for BlockChain<'a> {
    fn from(sequence: &'a ExternalSequence) -> Self {
        sequence.chain()
    }
}

/// The blocks of a request whose engine hashes them itself.
///
/// Each engine hash must stand for all tokens up to the block's end, as a [`SequenceHash`] does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExternalSequence {
    hasher: BlockHasher,
    hashes: Vec<SequenceHash>,
}

impl ExternalSequence {
    /// A sequence without blocks.
    pub fn new(hasher: BlockHasher) -> Self {
        Self { hasher, hashes: Vec::new() }
    }

    /// A sequence of engine hashes, first block first.
    pub fn from_hashes<B: AsRef<[u8]>>(
        hasher: BlockHasher,
        engine_hashes: impl IntoIterator<Item = B>,
    ) -> Self {
        let mut sequence = Self::new(hasher);
        sequence.hashes.extend(engine_hashes.into_iter().map(|bytes| hasher.external(bytes.as_ref())));
        sequence
    }

    /// Appends the engine's hash of the next complete block.
    pub fn push(&mut self, engine_hash: &[u8]) -> SequenceHash {
        let hash = self.hasher.external(engine_hash);
        self.hashes.push(hash);
        hash
    }

    /// Keeps the first `blocks` blocks.
    pub fn truncate(&mut self, blocks: usize) {
        self.hashes.truncate(blocks);
    }

    /// What this sequence hashes with.
    pub fn hasher(&self) -> &BlockHasher {
        &self.hasher
    }

    /// Number of blocks.
    pub fn num_blocks(&self) -> usize {
        self.hashes.len()
    }

    /// Identities of the blocks.
    pub fn hashes(&self) -> &[SequenceHash] {
        &self.hashes
    }

    /// The blocks as kvbm takes them.
    pub fn chain(&self) -> BlockChain<'_> {
        BlockChain::of_hashes(&self.hashes).in_namespace(self.hasher.tag())
    }
}

/// A block index as it is stored. A sequence of 2^32 blocks does not fit a machine's memory.
fn position(index: usize) -> u32 {
    index as u32
}
