//! What else than tokens decides the KV of a block.

use std::fmt;

/// The most bytes that an image's content hash or a request salt may have.
pub const MAX_EXTRA_KEY_BYTES: usize = 4096;

/// An input of a block beside its tokens: an image under placeholder tokens, prompt embeddings, a
/// request's salt.
///
/// Two blocks with equal tokens and different extra keys have different
/// [`SequenceHash`](crate::SequenceHash)es, and so have all blocks after them. Encoded as a kind
/// byte and a payload:
///
/// | kind | what | payload |
/// |---|---|---|
/// | 0 | request salt | the bytes |
/// | 1 | image | offset (i64 little-endian), then the content hash |
/// | 2 | prompt embeddings | length (u64 little-endian), then the 32-byte BLAKE3 hash of the bytes |
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ExtraKey {
    encoded: Box<[u8]>,
}

/// An extra key that cannot be taken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ExtraKeyError {
    /// The bytes given are too many to be kept in every sequence.
    #[error("{what} of {length} bytes: at most {MAX_EXTRA_KEY_BYTES} are allowed; pass a hash of it instead")]
    TooLong {
        /// Which input.
        what: &'static str,
        /// Its length in bytes.
        length: usize,
    },
}

const SALT: u8 = 0;
const IMAGE: u8 = 1;
const EMBEDDINGS: u8 = 2;

impl ExtraKey {
    /// A salt that keeps a request's blocks apart from those of requests with another salt.
    pub fn salt(salt: &[u8]) -> Result<Self, ExtraKeyError> {
        check_length("salt", salt)?;
        Ok(Self::encode(SALT, &[salt]))
    }

    /// An image (or audio, video) of which a part lies under this block's tokens.
    ///
    /// `content_hash` is the engine's hash of the processed input. `offset` is the block's first
    /// token minus the image's first token: how far into the image this block begins, negative when
    /// the image begins inside the block.
    pub fn image(content_hash: &[u8], offset: i64) -> Result<Self, ExtraKeyError> {
        check_length("image content hash", content_hash)?;
        Ok(Self::encode(IMAGE, &[&offset.to_le_bytes(), content_hash]))
    }

    /// Prompt embeddings that take the place of this block's tokens, as raw bytes of any length.
    pub fn prompt_embeddings(bytes: &[u8]) -> Self {
        let length = bytes.len() as u64;
        Self::encode(EMBEDDINGS, &[&length.to_le_bytes(), blake3::hash(bytes).as_bytes()])
    }

    /// The bytes that enter the hash, after their length.
    pub fn as_bytes(&self) -> &[u8] {
        &self.encoded
    }

    fn encode(kind: u8, parts: &[&[u8]]) -> Self {
        let mut encoded = vec![kind];
        for part in parts {
            encoded.extend_from_slice(part);
        }
        Self { encoded: encoded.into() }
    }
}

impl fmt::Debug for ExtraKey {
    /// The kind and length only: salts get no place in a log.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.encoded.first() {
            Some(&SALT) => "salt",
            Some(&IMAGE) => "image",
            _ => "prompt embeddings",
        };
        write!(f, "ExtraKey({kind}, {} bytes)", self.encoded.len())
    }
}

fn check_length(what: &'static str, bytes: &[u8]) -> Result<(), ExtraKeyError> {
    if bytes.len() > MAX_EXTRA_KEY_BYTES {
        return Err(ExtraKeyError::TooLong { what, length: bytes.len() });
    }
    Ok(())
}
