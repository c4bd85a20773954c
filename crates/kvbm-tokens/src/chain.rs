//! Consecutive blocks of one sequence, hashed by kvbm or by an engine.

use std::ops::Range;

use crate::origin::position;
use crate::{
    BlockHasher, ChainLink, ChainOrigin, LocalHash, NamespaceTag, SequenceHash, Token, TokenSequence,
};

/// A run of consecutive complete blocks of one sequence: what kvbm matches, registers and moves.
///
/// A borrowed view of a [`TokenSequence`] or of an [`ExternalSequence`], so that both are treated
/// alike.
#[derive(Debug, Clone, Copy)]
pub struct BlockChain<'a> {
    /// What the hashes are chained in.
    namespace: NamespaceTag,
    /// Hashes from the origin up to the end of the run.
    hashes: &'a [SequenceHash],
    origin: ChainOrigin,
    /// Index of the run's first block in `hashes`.
    start: usize,
    /// The whole sequence, when its tokens are known.
    sequence: Option<&'a TokenSequence>,
}

impl<'a> BlockChain<'a> {
    /// The blocks from the first of a sequence, of which only the hashes are known. Their namespace
    /// is the tag of zeros until [`in_namespace`](Self::in_namespace) names one.
    pub fn of_hashes(hashes: &'a [SequenceHash]) -> Self {
        let (namespace, origin) = (NamespaceTag::from_bytes([0; 16]), ChainOrigin::Root);
        Self { namespace, hashes, origin, start: 0, sequence: None }
    }

    /// The blocks behind block `parent`, whose position in its sequence is `position`: for hosts
    /// that know a part of a sequence only. `tag` is the namespace that the hashes are chained in.
    ///
    /// Parent and position must be the ones that the blocks were stored with: a chain that
    /// contradicts what is registered is not found.
    pub fn after(tag: NamespaceTag, parent: SequenceHash, position: u32, hashes: &'a [SequenceHash]) -> Self {
        let origin = ChainOrigin::After { parent, position: position.saturating_add(1) };
        Self::of_run(tag, origin, hashes)
    }

    /// Blocks behind `origin`.
    pub fn of_run(tag: NamespaceTag, origin: ChainOrigin, hashes: &'a [SequenceHash]) -> Self {
        Self { namespace: tag, hashes, origin, start: 0, sequence: None }
    }

    /// Blocks without parents, each a key of its own: for key-value hosts. `tag` is that of a
    /// namespace of such blocks ([`Namespace::flat`](crate::Namespace::flat)). A run of them is
    /// matched up to the first that is missing.
    pub fn flat(tag: NamespaceTag, hashes: &'a [SequenceHash]) -> Self {
        Self::of_run(tag, ChainOrigin::Flat, hashes)
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

    /// Position in the sequence of the run's first block; 0 where blocks have no parents.
    pub fn first_position(&self) -> u32 {
        match self.origin {
            ChainOrigin::Root => position(self.start),
            ChainOrigin::After { position: first, .. } => first.saturating_add(position(self.start)),
            ChainOrigin::Flat => 0,
        }
    }

    /// What comes before the run: with the run's [`hashes`](Self::hashes) it makes the same links.
    pub fn origin(&self) -> ChainOrigin {
        match self.start.checked_sub(1) {
            Some(before) if self.origin != ChainOrigin::Flat => {
                ChainOrigin::After { parent: self.hashes[before], position: self.first_position() }
            }
            _ => self.origin,
        }
    }

    /// Block `index` of the run.
    pub fn get(&self, index: usize) -> Option<ChainLink> {
        self.origin.link(self.hashes, self.start.checked_add(index)?)
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
        let Self { hashes, origin, .. } = *self;
        (self.start..hashes.len()).map(move |at| origin.link_in(hashes, at))
    }

    /// A part of the run; positions and parents stay those of the sequence. A range beyond the end
    /// is cut.
    #[must_use]
    pub fn slice(&self, range: Range<usize>) -> Self {
        let end = range.end.min(self.len());
        let start = range.start.min(end);
        Self { hashes: &self.hashes[..self.start + end], start: self.start + start, ..*self }
    }
}

impl TokenSequence {
    /// The complete blocks as kvbm takes them.
    pub fn chain(&self) -> BlockChain<'_> {
        let (hasher, hashes) = (self.hasher(), self.hashes());
        let origin = hasher.origin();
        BlockChain { namespace: hasher.tag(), hashes, origin, start: 0, sequence: Some(self) }
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
        let (namespace, origin) = (self.hasher.tag(), self.hasher.origin());
        BlockChain { namespace, hashes: &self.hashes, origin, start: 0, sequence: None }
    }

    /// The same behind a block that is not in this sequence: see [`BlockChain::after`].
    /// `engine_parent` is the engine's hash of that block.
    pub fn chain_after(&self, engine_parent: &[u8], position: u32) -> BlockChain<'_> {
        let parent = self.hasher.external(engine_parent);
        BlockChain::after(self.hasher.tag(), parent, position, &self.hashes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hashes() -> Vec<SequenceHash> {
        (1..=6).map(|byte| SequenceHash::from_bytes([byte; 16])).collect()
    }

    #[test]
    fn a_run_and_its_origin_make_the_links_of_the_whole() {
        let (hashes, tag) = (hashes(), NamespaceTag::from_bytes([9; 16]));
        let parent = SequenceHash::from_bytes([8; 16]);
        let chains = [
            BlockChain::of_hashes(&hashes).in_namespace(tag),
            BlockChain::after(tag, parent, 4, &hashes),
            BlockChain::flat(tag, &hashes),
        ];
        for chain in chains {
            for (start, end) in [(0, 6), (0, 0), (2, 5), (5, 6), (3, 9)] {
                let run = chain.slice(start..end);
                let again = BlockChain::of_run(tag, run.origin(), run.hashes());
                let links: Vec<_> = run.iter().collect();
                assert_eq!(again.iter().collect::<Vec<_>>(), links);
                assert_eq!((0..run.len()).filter_map(|at| run.get(at)).collect::<Vec<_>>(), links);
                assert_eq!(links, chain.iter().skip(start).take(end - start).collect::<Vec<_>>());
                assert!(links.first().is_none_or(|first| first.position == run.first_position()));
                assert_eq!(run.get(run.len()), None);
            }
        }
    }

    #[test]
    fn links_behind_a_block_continue_it_and_flat_ones_have_nothing() {
        let (hashes, tag) = (hashes(), NamespaceTag::from_bytes([9; 16]));
        let parent = SequenceHash::from_bytes([8; 16]);
        let first = BlockChain::after(tag, parent, 0, &hashes).get(0);
        assert_eq!(first, Some(ChainLink { hash: hashes[0], parent: Some(parent), position: 1 }));
        let last = BlockChain::after(tag, parent, u32::MAX, &hashes).get(5).map(|link| link.position);
        assert_eq!(last, Some(u32::MAX), "nothing wraps around");
        let flat = BlockChain::flat(tag, &hashes).get(4);
        assert_eq!(flat, Some(ChainLink { hash: hashes[4], parent: None, position: 0 }));
    }
}
