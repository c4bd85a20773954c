//! What callers ask of a volume: blobs to read and to write, and the form of their payloads.

use crate::{BlobKey, ObjectSeal};

/// Most pieces of a payload.
pub const MAX_PIECES: u32 = 4096;

/// In which order the elements of a block lie in a payload.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum StoredOrder {
    /// As its writer likes: only a writer of the same configuration can use it.
    #[default]
    Opaque,
    /// Head, layer, outer, token, element: what one rank wrote is a range of what a rank with more
    /// heads wrote.
    Universal,
}

/// How a payload lies in its object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PayloadForm {
    /// Order of the elements.
    pub order: StoredOrder,
    /// Pieces of equal length that have a checksum each, 1 to [`MAX_PIECES`].
    pub pieces: u32,
}

impl Default for PayloadForm {
    /// Opaque, in one piece.
    fn default() -> Self {
        Self { order: StoredOrder::Opaque, pieces: 1 }
    }
}

/// A blob to read.
#[derive(Debug)]
pub struct GetRequest<'a> {
    /// The object.
    pub key: BlobKey,
    /// The form that its payload must have.
    pub form: PayloadForm,
    /// How it must be summed.
    pub seal: ObjectSeal,
    /// Where its payload goes, in order; together exactly as long as the payload. After an error
    /// the content is unspecified and must not be used.
    pub pieces: Vec<&'a mut [u8]>,
}

/// A blob to write.
#[derive(Debug)]
pub struct PutRequest<'a> {
    /// The object.
    pub key: BlobKey,
    /// The form of its payload.
    pub form: PayloadForm,
    /// How it is summed.
    pub seal: ObjectSeal,
    /// Its payload, in order.
    pub pieces: Vec<&'a [u8]>,
}
