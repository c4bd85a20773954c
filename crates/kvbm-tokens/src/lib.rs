//! Tokens to sequence hashes: the identity of KV blocks.
//!
//! A *block* is `page_size` tokens. Its [`SequenceHash`] chains all tokens before it, so equal
//! hashes in one [`Namespace`] mean equal prefixes, and a prefix that two requests share is stored
//! once.
//!
//! **Knows:** token ids, namespaces and hashes.
//! **Must never know:** where a block lies (tiers,
//! pools, layouts, ranks). It does no I/O, starts no thread, uses no runtime.
//!
//! ```
//! use kvbm_tokens::{Namespace, TokenSequence};
//!
//! let hasher = Namespace::new("llama-3-8b").weights("2026-11-01").page_size(4).hasher()?;
//! let mut sequence = TokenSequence::from_tokens(hasher, &[1, 2, 3, 4, 5, 6]);
//! assert_eq!(sequence.num_blocks(), 1);
//! assert_eq!(sequence.tail(), &[5, 6]);
//!
//! sequence.add_tokens(&[7, 8]);
//! assert_eq!(sequence.num_blocks(), 2);
//! assert_eq!(sequence.parent_of(1), Some(sequence.hashes()[0]));
//! # Ok::<(), kvbm_tokens::NamespaceError>(())
//! ```
//!
//! # The hash
//! ```text
//! SequenceHash  = first 16 bytes of BLAKE3-keyed(
//!     key       = parent hash (16 bytes, zero at the root) || namespace tag (16 bytes),
//!     message   = token ids (u32 little-endian)
//!                 || for each extra key of the block, in ascending order of its bytes: length (u32 little-endian) || bytes)
//! ```
//! The namespace fixes `page_size`, so tokens and extra keys cannot be confused. See
//! [`HashAlgorithm`] for the opt-in alternative and [`Namespace`] for the tag.
//!
//! # Modules
//! | module | what it is | uses |
//! |---|---|---|
//! | `namespace` | what two blocks must have in common besides tokens, and its tag | `hasher`, `opaque` |
//! | `chain` | consecutive blocks of one sequence, hashed here or by an engine | `sequence`, `hasher`, `origin`, `opaque` |
//! | `sequence` | the tokens of a request and the hashes of its blocks | `hasher`, `opaque`, `extra` |
//! | `hasher` | block hashes of one namespace | `origin`, `opaque`, `extra`, `chunk` |
//! | `origin` | what comes before a run of blocks | `opaque` |
//! | `opaque` | sequence hashes, local hashes and namespace tags | - |
//! | `extra` | inputs of a block besides its tokens | - |
//! | `chunk` | keyed BLAKE3 of up to 1,024 bytes | - |
#![forbid(unsafe_code)]

mod chain;
mod chunk;
mod extra;
mod hasher;
mod namespace;
mod opaque;
mod origin;
mod sequence;

pub use chain::{BlockChain, ExternalSequence};
pub use extra::{ExtraKey, ExtraKeyError, MAX_EXTRA_KEY_BYTES};
pub use hasher::{BlockHasher, HashAlgorithm};
pub use namespace::{ChainRoot, Namespace, NamespaceError, NotPersistable};
pub use opaque::{LocalHash, NamespaceTag, ParseHashError, SequenceHash};
pub use origin::{ChainLink, ChainOrigin};
pub use sequence::{MAX_TOKENS, SequenceError, TokenSequence};

/// A token id of the model's vocabulary.
pub type Token = u32;
