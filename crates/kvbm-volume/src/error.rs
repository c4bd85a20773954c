//! What can go wrong, and what to do then.

use std::io;

use kvbm_keys::KeyId;
use kvbm_plan::{NamespaceTag, VolumeId};

use crate::{BlobKey, BlobScope, PayloadForm};

/// Why one blob of a batch could not be got, put, asked for or deleted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VolumeError {
    /// No such object. A miss: recompute the block.
    #[error("volume {volume}: no object {key}")]
    NotFound {
        /// The volume.
        volume: VolumeId,
        /// The object.
        key: BlobKey,
    },
    /// The object is damaged or is another one. A miss: recompute the block, and delete the object.
    #[error("volume {volume}: object {key} is corrupt ({reason}); treat it as a miss")]
    Corrupt {
        /// The volume.
        volume: VolumeId,
        /// The object.
        key: BlobKey,
        /// What is wrong with it.
        reason: ObjectCorruption,
    },
    /// The object is sound but holds another number of bytes. A miss: the block was written by a
    /// different configuration.
    #[error(
        "volume {volume}: object {key} holds {stored} bytes, {asked} were asked for; \
         model or layout differ from those of the writer: check the namespace"
    )]
    LengthMismatch {
        /// The volume.
        volume: VolumeId,
        /// The object.
        key: BlobKey,
        /// Payload bytes in the object.
        stored: u64,
        /// Bytes in the caller's buffers.
        asked: u64,
    },
    /// The object is sound but its payload lies in another order or in other pieces. A miss:
    /// another configuration wrote the block.
    #[error(
        "volume {volume}: object {key} has the form {stored:?}, {asked:?} was asked for; recompute the block"
    )]
    OtherForm {
        /// The volume.
        volume: VolumeId,
        /// The object.
        key: BlobKey,
        /// Form of the object.
        stored: PayloadForm,
        /// Form that the caller expects.
        asked: PayloadForm,
    },
    /// The payload cannot be cut as asked: nothing was written.
    #[error(
        "volume {volume}: {key}: a payload of {length} bytes cannot be cut into {pieces} equal pieces; \
         use 1 to 4096 pieces that divide its length"
    )]
    BadForm {
        /// The volume.
        volume: VolumeId,
        /// The object.
        key: BlobKey,
        /// Pieces asked for.
        pieces: u32,
        /// Payload bytes.
        length: u64,
    },
    /// The volume's capacity is used up, or the room of its store: delete objects, or raise what is
    /// used up.
    #[error(
        "volume {volume}: full, {needed} bytes needed, {free} free; delete objects, or raise the volume's capacity or make room in its store"
    )]
    Full {
        /// The volume.
        volume: VolumeId,
        /// Bytes that the object takes, header included.
        needed: u64,
        /// Bytes left.
        free: u64,
    },
    /// The deadline passed before this blob's turn; nothing was done for it.
    #[error(
        "volume {volume}: deadline passed before {operation} of {key}; give more time or recompute the block"
    )]
    DeadlineExceeded {
        /// The volume.
        volume: VolumeId,
        /// `get`, `put`, `exists` or `delete`.
        operation: &'static str,
        /// The object.
        key: BlobKey,
    },
    /// The store failed. After a failed put the object may or may not be there; putting again is
    /// harmless.
    #[error("volume {volume}: {operation} of {key}: {source}")]
    Io {
        /// The volume.
        volume: VolumeId,
        /// `get`, `put`, `exists` or `delete`.
        operation: &'static str,
        /// The object.
        key: BlobKey,
        /// The store's error.
        source: io::Error,
    },
    /// The objects could not be listed.
    #[error("volume {volume}: list of {scope}: {source}")]
    List {
        /// The volume.
        volume: VolumeId,
        /// What was to be listed.
        scope: BlobScope,
        /// The store's error; of kind [`TimedOut`](io::ErrorKind::TimedOut) where the deadline
        /// passed.
        source: io::Error,
    },
}

impl VolumeError {
    /// Whether the block simply is not there for the caller: recompute it, nothing needs an
    /// operator.
    pub fn is_miss(&self) -> bool {
        match self {
            Self::NotFound { .. }
            | Self::Corrupt { .. }
            | Self::LengthMismatch { .. }
            | Self::OtherForm { .. } => true,
            Self::Io { source, .. } => source.kind() == io::ErrorKind::StaleNetworkFileHandle,
            Self::Full { .. } | Self::BadForm { .. } | Self::DeadlineExceeded { .. } | Self::List { .. } => {
                false
            }
        }
    }

    /// Whether the store did not answer in time: try again later.
    pub fn is_late(&self) -> bool {
        match self {
            Self::DeadlineExceeded { .. } => true,
            Self::Io { source, .. } | Self::List { source, .. } => source.kind() == io::ErrorKind::TimedOut,
            _ => false,
        }
    }

    /// Whether there is no room for the object, by the volume's capacity or by that of its store:
    /// it was not written.
    pub fn is_full(&self) -> bool {
        const FULL: [io::ErrorKind; 2] = [io::ErrorKind::StorageFull, io::ErrorKind::QuotaExceeded];
        match self {
            Self::Full { .. } => true,
            Self::Io { source, .. } => FULL.contains(&source.kind()),
            _ => false,
        }
    }

    /// Whether the store refuses writes of this process. Reads may still work.
    pub fn is_forbidden(&self) -> bool {
        const FORBIDDEN: [io::ErrorKind; 2] =
            [io::ErrorKind::ReadOnlyFilesystem, io::ErrorKind::PermissionDenied];
        match self {
            Self::Io { operation: "put" | "delete", source, .. } => FORBIDDEN.contains(&source.kind()),
            _ => false,
        }
    }

    /// Whether the object cannot be used as it is: count it. It may be another build's:
    /// [`is_damaged`](Self::is_damaged).
    pub fn is_corrupt(&self) -> bool {
        matches!(self, Self::Corrupt { .. })
    }

    /// Whether no reader can use the object: delete it. One of a newer version, of a build with
    /// compression, or of nodes that encrypt (or do not) is useful to others of a shared volume.
    pub fn is_damaged(&self) -> bool {
        use ObjectCorruption::{Compressed, Encryption, Version};
        matches!(self, Self::Corrupt { reason, .. } if !matches!(reason, Version(_) | Encryption { .. } | Compressed))
    }
}

/// What is wrong with an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ObjectCorruption {
    /// Shorter than its header.
    #[error("{0} bytes are too few for a header")]
    NoHeader(u64),
    /// Does not begin as an object does.
    #[error("not a kvbm object")]
    Magic,
    /// Written in a format that this version cannot read.
    #[error("format version {0} is unknown here; written by a newer version?")]
    Version(u16),
    /// Signed with another key, or with none where there is one now.
    #[error("it is signed with {}, ours is {}", key_name(*found), key_name(*ours))]
    OtherSeal {
        /// Beginning of the name of its key.
        found: Option<u32>,
        /// Of ours.
        ours: Option<u32>,
    },
    /// The header's checksum does not match.
    #[error("header checksum mismatch")]
    HeaderChecksum,
    /// The header is sound but its fields are not.
    #[error("header field {0} out of range")]
    HeaderField(&'static str),
    /// The object was written under another key.
    #[error("it belongs to another key")]
    OtherKey,
    /// The object's length is not what its header says.
    #[error("{actual} bytes long, its header says {expected}")]
    Length {
        /// Bytes by the header.
        expected: u64,
        /// Bytes found.
        actual: u64,
    },
    /// The object ended while it was read.
    #[error("it was cut while it was read")]
    Cut,
    /// The payload's checksum does not match.
    #[error("payload checksum mismatch")]
    PayloadChecksum,
    /// Its payload is encrypted where no other one is, or the other way round.
    #[error("its payload is {}encrypted, those of this deployment are{}", if *encrypted { "" } else { "not " }, if *encrypted { " not" } else { "" })]
    Encryption {
        /// Whether it is.
        encrypted: bool,
    },
    /// Its payload is compressed, and who reads it knows nothing of that.
    #[error("its payload is compressed, which needs a build with the feature compress")]
    Compressed,
    /// The payload does not decompress to the block.
    #[cfg(feature = "compress")]
    #[error("its payload: {0}")]
    Frame(kvbm_codec::FrameError),
    /// Its data key was destroyed, or is wrapped with another operator's key.
    #[error(
        "its data key {0} is not there: its namespace was forgotten, or another operator's key is needed"
    )]
    NoKey(KeyId),
    /// The payload does not decrypt.
    #[error("its payload does not decrypt with data key {0}: it was changed, or is another one's")]
    Tag(KeyId),
}

fn key_name(key: Option<u32>) -> String {
    key.map_or("no key".to_owned(), |id| format!("key {:08x}", id.swap_bytes()))
}

/// Why a volume cannot be registered, found or unregistered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegistryError {
    /// The id is taken.
    #[error("volume {id} is already registered as {uri:?}; unregister it first or use another id")]
    Duplicate {
        /// The id.
        id: VolumeId,
        /// URI of the volume that has it.
        uri: String,
    },
    /// No volume has this id.
    #[error("volume {id} is not registered; registered: {known:?}")]
    Unknown {
        /// The id.
        id: VolumeId,
        /// The ids that are registered.
        known: Vec<VolumeId>,
    },
    /// No implementation for the URI's scheme.
    #[error("volume {id}: no implementation for {uri:?}; known schemes: {known:?}")]
    Scheme {
        /// The id.
        id: VolumeId,
        /// The URI.
        uri: String,
        /// Schemes that would work.
        known: Vec<String>,
    },
    /// A value of the descriptor cannot be honoured.
    #[error("volume {id}: {field} {value} is not allowed: {rule}")]
    Descriptor {
        /// The id.
        id: VolumeId,
        /// The descriptor's field.
        field: &'static str,
        /// Its value.
        value: String,
        /// What is allowed.
        rule: &'static str,
    },
    /// The store behind the URI cannot be used.
    #[error(
        "volume {id}: cannot use {uri:?}: {source}; create or mount it first, writable for this user: volumes are never created here"
    )]
    Open {
        /// The id.
        id: VolumeId,
        /// The URI.
        uri: String,
        /// The store's error.
        source: io::Error,
    },
    /// The objects of the deployment are encrypted in another way.
    #[error("volume {id} ({uri:?}): {source}")]
    Keys {
        /// The id.
        id: VolumeId,
        /// The URI.
        uri: String,
        /// What differs.
        source: Box<VolumeKeysError>,
    },
}

/// Why a deployment's objects on a volume cannot be encrypted, or read, as they are to be.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VolumeKeysError {
    /// They are encrypted, and no key is configured.
    #[error(
        "objects of namespace {namespace} are encrypted with the operator's key {operator}: set volumes.encrypt with \
         encryption.key_file or encryption.key_command"
    )]
    Encrypted {
        /// The deployment's namespace.
        namespace: NamespaceTag,
        /// The key.
        operator: KeyId,
    },
    /// They are encrypted with another operator's key.
    #[error(
        "data keys of namespace {namespace} are wrapped with the operator's key {found}, and given {}: give that key as \
         encryption.key_file, or as encryption.previous_key_file where it was replaced; if it is lost, delete all \
         objects below {namespace}/",
        given(*ours, *previous)
    )]
    Operator {
        /// The deployment's namespace.
        namespace: NamespaceTag,
        /// The key that is needed.
        found: KeyId,
        /// Ours.
        ours: KeyId,
        /// The one before ours.
        previous: Option<KeyId>,
    },
    /// There are objects that are not encrypted.
    #[error(
        "objects of namespace {namespace} are there that are not encrypted: delete all objects below {namespace}/, choose \
         another place, or leave volumes.encrypt off"
    )]
    NotEncrypted {
        /// The deployment's namespace.
        namespace: NamespaceTag,
    },
    /// More keys than a deployment can have.
    #[error(
        "namespace {namespace} has more than {most} objects of keys: delete all objects below {namespace}/"
    )]
    TooMany {
        /// The deployment's namespace.
        namespace: NamespaceTag,
        /// As many may be there.
        most: usize,
    },
    /// The store cannot be asked, or does not take the keys.
    #[error("its keys: {0}; an encrypted volume must answer when it is opened")]
    Store(#[from] VolumeError),
}

fn given(ours: KeyId, previous: Option<KeyId>) -> String {
    match previous {
        Some(previous) => format!("are {ours} and, before it, {previous}"),
        None => format!("is {ours}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::BlobSlice;
    use kvbm_plan::{GroupId, NamespaceId, NamespaceTag, SequenceHash};

    #[test]
    fn a_store_that_takes_nothing_more_is_not_broken() {
        let slice = BlobSlice { first_layer: 0, num_layers: 1, first_head: 0, num_heads: 1 };
        let key = BlobKey {
            namespace: NamespaceTag::from_bytes([1; 16]),
            label: NamespaceId(0),
            group: GroupId(0),
            hash: SequenceHash::from_bytes([2; 16]),
            slice,
        };
        let volume = VolumeId(1);
        let of =
            |operation, kind: io::ErrorKind| VolumeError::Io { volume, operation, key, source: kind.into() };
        let io = |kind| of("put", kind);
        for kind in [io::ErrorKind::StorageFull, io::ErrorKind::QuotaExceeded] {
            assert!(io(kind).is_full() && !io(kind).is_miss() && !io(kind).is_late(), "{kind}");
        }
        assert!(VolumeError::Full { volume, needed: 2, free: 1 }.is_full());
        // One that may not be changed has room, and can be read; one that may not be read fails.
        for kind in [io::ErrorKind::ReadOnlyFilesystem, io::ErrorKind::PermissionDenied] {
            let (put, deleted, got) = (io(kind), of("delete", kind), of("get", kind));
            assert!(put.is_forbidden() && deleted.is_forbidden() && !got.is_forbidden(), "{kind}");
            assert!(!put.is_full() && !put.is_miss() && !put.is_late(), "{kind}");
        }
        assert!(!io(io::ErrorKind::StorageFull).is_forbidden());
    }
}
