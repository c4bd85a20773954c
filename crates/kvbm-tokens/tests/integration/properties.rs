//! However a sequence came to be, the same tokens and extra keys give the same hashes.

use kvbm_tokens::{
    BlockChain, BlockHasher, ChainLink, ExternalSequence, ExtraKey, HashAlgorithm, Namespace, SequenceHash,
    Token, TokenSequence,
};
use proptest::prelude::*;

fn hasher(page_size: u32, algorithm: HashAlgorithm) -> BlockHasher {
    Namespace::new("model").page_size(page_size).algorithm(algorithm).hasher().expect("a usable namespace")
}

fn any_hasher() -> impl Strategy<Value = BlockHasher> {
    let algorithm = prop_oneof![Just(HashAlgorithm::Blake3), Just(HashAlgorithm::Xxh3_128)];
    (1..9_u32, algorithm).prop_map(|(page_size, algorithm)| hasher(page_size, algorithm))
}

#[derive(Debug, Clone)]
enum Operation {
    AddToken(Token),
    AddTokens(Vec<Token>),
    /// Ahead of the last token by so many.
    AddExtraKey(usize, u8),
    AddImage(usize, usize, u8),
    Truncate(usize),
    RollBack(usize),
}

fn any_operation() -> impl Strategy<Value = Operation> {
    prop_oneof![
        3 => any::<Token>().prop_map(Operation::AddToken),
        3 => prop::collection::vec(0..4_u32, 0..40).prop_map(Operation::AddTokens),
        1 => (0..20_usize, 0..3_u8).prop_map(|(ahead, id)| Operation::AddExtraKey(ahead, id)),
        1 => (0..20_usize, 0..30_usize, 0..3_u8).prop_map(|(ahead, length, id)| Operation::AddImage(ahead, length, id)),
        1 => (0..100_usize).prop_map(Operation::Truncate),
        1 => (0..10_usize).prop_map(Operation::RollBack),
    ]
}

fn signed(position: usize) -> i64 {
    i64::try_from(position).expect("a small position")
}

fn cut<T>(items: &[T], start: usize, end: usize) -> &[T] {
    let end = end.min(items.len());
    &items[start.min(end)..end]
}

/// What a sequence should hold, kept in the plainest way.
#[derive(Default)]
struct Oracle {
    tokens: Vec<Token>,
    extra: Vec<(usize, ExtraKey)>,
}

impl Oracle {
    fn apply(&mut self, operation: &Operation, page_size: usize) {
        match operation {
            Operation::AddToken(token) => self.tokens.push(*token),
            Operation::AddTokens(tokens) => self.tokens.extend(tokens),
            Operation::AddExtraKey(ahead, id) => {
                let at = self.tokens.len() + ahead;
                self.extra.push((at, ExtraKey::prompt_embeddings(&[*id])));
            }
            Operation::AddImage(ahead, length, id) => {
                let start = self.tokens.len() + ahead;
                let mut touched = None;
                for at in start..start + length {
                    if touched != Some(at / page_size) {
                        touched = Some(at / page_size);
                        let offset = signed(at - at % page_size) - signed(start);
                        self.extra.push((at, ExtraKey::image(&[*id], offset).expect("short")));
                    }
                }
            }
            Operation::Truncate(length) => self.truncate(*length),
            Operation::RollBack(count) if *count <= self.tokens.len() => {
                self.truncate(self.tokens.len() - count);
            }
            Operation::RollBack(_) => {}
        }
    }

    fn truncate(&mut self, length: usize) {
        if length < self.tokens.len() {
            self.tokens.truncate(length);
            self.extra.retain(|(at, _)| *at < length);
        }
    }

    fn hashes(&self, hasher: &BlockHasher) -> Vec<SequenceHash> {
        let mut hashes: Vec<SequenceHash> = Vec::new();
        for (block, tokens) in self.tokens.chunks_exact(hasher.page_size()).enumerate() {
            let keys = self.extra.iter().filter(|(at, _)| at / hasher.page_size() == block);
            let keys: Vec<ExtraKey> = keys.map(|(_, key)| key.clone()).collect();
            hashes.push(hasher.hash_block(hashes.last().copied(), tokens, &keys));
        }
        hashes
    }
}

fn apply(sequence: &mut TokenSequence, operation: &Operation) {
    let length = sequence.len();
    let blocks = sequence.num_blocks();
    match operation {
        Operation::AddToken(token) => {
            let completed = sequence.add_token(*token);
            assert_eq!(completed, (sequence.num_blocks() > blocks).then_some(blocks));
        }
        Operation::AddTokens(tokens) => {
            assert_eq!(sequence.add_tokens(tokens), blocks..sequence.num_blocks());
        }
        Operation::AddExtraKey(ahead, id) => {
            sequence
                .add_extra_key(length + ahead, ExtraKey::prompt_embeddings(&[*id]))
                .expect("an incomplete block");
        }
        Operation::AddImage(ahead, span, id) => {
            let start = length + ahead;
            sequence.add_image(start..start + span, &[*id]).expect("incomplete blocks");
        }
        Operation::Truncate(length) => sequence.truncate(*length),
        Operation::RollBack(count) => assert_eq!(sequence.roll_back(*count).is_ok(), *count <= length),
    }
}

proptest! {
    #[test]
    fn any_history_agrees_with_hashing_block_by_block(
        hasher in any_hasher(),
        operations in prop::collection::vec(any_operation(), 0..40),
    ) {
        let mut sequence = TokenSequence::new(hasher);
        let mut oracle = Oracle::default();
        for operation in &operations {
            apply(&mut sequence, operation);
            oracle.apply(operation, hasher.page_size());
        }
        prop_assert_eq!(sequence.tokens(), &oracle.tokens[..]);
        prop_assert_eq!(sequence.hashes(), &oracle.hashes(&hasher)[..]);
        prop_assert_eq!(sequence.tail().len(), sequence.len() % hasher.page_size());
    }

    #[test]
    fn batch_hashing_agrees_with_single_blocks(
        hasher in any_hasher(),
        tokens in prop::collection::vec(any::<Token>(), 0..100),
        split in 0..100_usize,
    ) {
        let mut whole = Vec::new();
        let count = hasher.hash_blocks(None, &tokens, &mut whole);
        prop_assert_eq!(count, tokens.len() / hasher.page_size());

        let at = (split % (count + 1)) * hasher.page_size();
        let mut parts = Vec::new();
        hasher.hash_blocks(None, &tokens[..at], &mut parts);
        hasher.hash_blocks(parts.last().copied(), &tokens[at..], &mut parts);
        prop_assert_eq!(&parts, &whole);
        let sequence = TokenSequence::from_tokens(hasher, &tokens);
        prop_assert_eq!(sequence.hashes(), &whole[..]);
    }

    #[test]
    fn page_sizes_beyond_the_stack_buffers(algorithm in prop_oneof![Just(HashAlgorithm::Blake3), Just(HashAlgorithm::Xxh3_128)], page_size in 60..700_u32, token in any::<Token>()) {
        // Streaming through a buffer must equal hashing the bytes in one piece; an extra key forces
        // streaming.
        let hasher = hasher(page_size, algorithm);
        let tokens: Vec<Token> = (0..page_size).map(|i| token.wrapping_add(i)).collect();
        let bytes: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
        let mut key = [0; 32];
        key[16..].copy_from_slice(hasher.tag().as_bytes());
        let expected: Vec<u8> = match algorithm {
            HashAlgorithm::Blake3 => blake3::keyed_hash(&key, &bytes).as_bytes()[..16].to_vec(),
            _ => xxhash_rust::xxh3::xxh3_128(&[&key[..], &bytes].concat()).to_be_bytes().to_vec(),
        };
        let hash = hasher.hash_block(None, &tokens, &[]);
        prop_assert_eq!(&hash.as_bytes()[..], &expected[..]);
        prop_assert_eq!(hasher.local_hash(&tokens, &[]).0, xxhash_rust::xxh3::xxh3_64_with_seed(&bytes, 1337));
    }

    #[test]
    fn every_input_of_a_block_changes_its_hash_and_all_after_it(
        hasher in any_hasher(),
        tokens in prop::collection::vec(any::<Token>(), 1..60),
        changed in any::<prop::sample::Index>(),
    ) {
        let at = changed.index(tokens.len());
        let block = at / hasher.page_size();
        let mut other = tokens.clone();
        other[at] ^= 1;
        let mut keyed = TokenSequence::new(hasher);
        keyed.add_extra_key(at, ExtraKey::prompt_embeddings(b"")).expect("an incomplete block");
        keyed.add_tokens(&tokens);

        let original = TokenSequence::from_tokens(hasher, &tokens);
        for variant in [TokenSequence::from_tokens(hasher, &other), keyed] {
            for (i, (a, b)) in original.hashes().iter().zip(variant.hashes()).enumerate() {
                prop_assert_eq!(a == b, i < block);
            }
        }
    }

    #[test]
    fn slices_of_a_chain_keep_positions_and_parents(
        count in 0..20_usize,
        (start, end) in (0..25_usize, 0..25_usize),
        (inner_start, inner_end) in (0..25_usize, 0..25_usize),
    ) {
        let hasher = hasher(2, HashAlgorithm::Blake3);
        let tokens: Vec<Token> = (0..count as Token * 2).collect();
        let sequence = TokenSequence::from_tokens(hasher, &tokens);
        let all: Vec<(ChainLink, &[Token])> = (0..count)
            .map(|i| {
                let hash = sequence.hashes()[i];
                let link = ChainLink { hash, parent: sequence.parent_of(i), position: i as u32 };
                (link, sequence.block_tokens(i).expect("complete"))
            })
            .collect();
        let expected = cut(cut(&all, start, end), inner_start, inner_end);
        let chain = BlockChain::from(&sequence).slice(start..end).slice(inner_start..inner_end);

        prop_assert_eq!(chain.namespace(), hasher.tag());
        let bare = BlockChain::of_hashes(sequence.hashes()).in_namespace(hasher.tag()).slice(start..end);
        prop_assert_eq!(bare.namespace(), hasher.tag());
        prop_assert_eq!(bare.hashes(), cut(sequence.hashes(), start, end));
        prop_assert_eq!(chain.len(), expected.len());
        prop_assert_eq!(chain.is_empty(), expected.is_empty());
        prop_assert_eq!(chain.iter().collect::<Vec<_>>(), expected.iter().map(|(link, _)| *link).collect::<Vec<_>>());
        for (i, (link, tokens)) in expected.iter().enumerate() {
            prop_assert_eq!(chain.get(i), Some(*link));
            prop_assert_eq!(chain.parent_of(i), link.parent);
            prop_assert_eq!(chain.hashes()[i], link.hash);
            prop_assert_eq!(chain.tokens_of(i), Some(*tokens));
            prop_assert!(chain.local_hash_of(i).is_some());
        }
        prop_assert_eq!(chain.get(expected.len()), None);
        prop_assert_eq!(chain.tokens_of(expected.len()), None);
    }

    #[test]
    fn external_sequences_chain_like_token_sequences(engine in prop::collection::vec(any::<[u8; 8]>(), 0..20), keep in 0..25_usize) {
        let hasher = hasher(16, HashAlgorithm::Blake3);
        let mut pushed = ExternalSequence::new(hasher);
        for hash in &engine {
            prop_assert_eq!(pushed.push(hash), SequenceHash::from_external(&hasher, hash));
        }
        prop_assert_eq!(&pushed, &ExternalSequence::from_hashes(hasher, &engine));
        pushed.truncate(keep);
        let chain = BlockChain::from(&pushed);
        prop_assert_eq!(chain.namespace(), hasher.tag());
        prop_assert_eq!(chain.len(), engine.len().min(keep));
        for (i, link) in chain.iter().enumerate() {
            prop_assert_eq!(link.position as usize, i);
            prop_assert_eq!(link.parent, i.checked_sub(1).map(|p| pushed.hashes()[p]));
            prop_assert_eq!(chain.tokens_of(i), None);
            prop_assert_eq!(chain.local_hash_of(i), None);
        }
    }
}
