//! Block sets that cannot be sent or must not be used.

use kvbm_keys::KeyId;
use kvbm_layout::WireError;
use kvbm_plan::NamespaceTag;

/// Why a block set cannot be exported: a peer would refuse it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ExportError {
    /// A field that is out of its bounds, or contradicts another.
    #[error("block set: {field} is {value}; {rule}")]
    Field {
        /// The field.
        field: &'static str,
        /// Its value.
        value: String,
        /// What is allowed.
        rule: &'static str,
    },
    /// The layout cannot be written.
    #[error("block set: {0}")]
    Layout(#[from] WireError),
}

/// Why bytes that a peer sent are not a block set to use. Nothing was kept of them.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ImportError {
    /// Longer than any block set.
    #[error("block set of {length} bytes: at most {limit} are read; it is damaged, or not a block set")]
    TooLong {
        /// Bytes received.
        length: usize,
        /// Bytes allowed.
        limit: usize,
    },
    /// Ends too early.
    #[error("block set ends in {field}: {length} bytes in all; ask the peer for it again")]
    Truncated {
        /// The field that is cut.
        field: &'static str,
        /// Bytes received.
        length: usize,
    },
    /// Not a block set.
    #[error("not a kvbm block set: its first bytes are {found:02x?}")]
    Magic {
        /// The first bytes.
        found: [u8; 8],
    },
    /// Written in a format that this version cannot read.
    #[error(
        "block set format version {found}: this kvbm reads version {known}; run the same version on both sides"
    )]
    Version {
        /// Its version.
        found: u16,
        /// Our version.
        known: u16,
    },
    /// Signed with another key, or with none where there is one.
    #[error(
        "the announcement is signed with {}, ours is {}; give all nodes of the deployment the same namespace.deployment_secret, \
         and let nobody else write where they announce themselves",
        key_name(*found), key_name(*ours)
    )]
    Key {
        /// The key that it names.
        found: Option<KeyId>,
        /// Ours.
        ours: Option<KeyId>,
    },
    /// The checksum does not match.
    #[error("block set checksum mismatch: it was damaged on its way; ask the peer for it again")]
    Checksum,
    /// Sound bytes, impossible value.
    #[error("block set: {field} is {value}; {rule}")]
    Field {
        /// The field.
        field: &'static str,
        /// Its value.
        value: String,
        /// What is allowed.
        rule: &'static str,
    },
    /// The layout in it is not one, or does not fit its memory.
    #[error("block set: {0}")]
    Layout(#[from] WireError),
    /// Bytes behind the end.
    #[error("block set has {extra} bytes behind its end; ask the peer for it again")]
    Trailing {
        /// Surplus bytes.
        extra: usize,
    },
    /// The peer's blocks are of another model, or another configuration of it.
    #[error(
        "block set is of namespace {found}, ours is {expected}; compare model, weights, dtype, page size and salts of both sides"
    )]
    Namespace {
        /// Ours.
        expected: NamespaceTag,
        /// The peer's.
        found: NamespaceTag,
    },
}

fn key_name(key: Option<KeyId>) -> String {
    key.map_or("no key".to_owned(), |key| format!("key {key}"))
}

impl From<ExportError> for ImportError {
    fn from(error: ExportError) -> Self {
        match error {
            ExportError::Field { field, value, rule } => Self::Field { field, value, rule },
            ExportError::Layout(error) => Self::Layout(error),
        }
    }
}
