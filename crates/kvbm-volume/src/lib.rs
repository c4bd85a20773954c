//! G4: KV blocks in blob stores.
//!
//! A *volume* keeps blobs by key: [`Volume::get`], [`put`](Volume::put), [`exists`](Volume::exists) and
//! [`delete`](Volume::delete), all in batches with a deadline, and lists them. Volumes are made, mounted and formatted by whoever owns
//! them; a [`VolumeRegistry`] makes them known by descriptor and forgets them again.
//!
//! **Knows:** keys, objects and their headers.
//! **Must never know:** which blocks are worth keeping, where else they lie, how their bytes are laid out; and it never
//! mounts, formats or creates a store.
//!
//! What comes back from a volume is untrusted: every object names its key, length and checksum, and is checked before its
//! bytes are used. A missing or damaged object is an error for which [`VolumeError::is_miss`] holds: recompute the block.
//!
//! ```
//! use std::time::{Duration, Instant};
//! use kvbm_plan::{GroupId, NamespaceId, NamespaceTag, SequenceHash, VolumeId};
//! use kvbm_volume::{BlobKey, BlobSlice, PutRequest, VolumeDescriptor, VolumeExt, VolumeRegistry};
//!
//! let registry = VolumeRegistry::new();
//! let volume = registry.register_volume(VolumeDescriptor::new(VolumeId(1), "memory:"))?;
//! let key = BlobKey {
//!     namespace: NamespaceTag::from_bytes([1; 16]),
//!     label: NamespaceId(1),
//!     group: GroupId(0),
//!     hash: SequenceHash::from_bytes([2; 16]),
//!     slice: BlobSlice { first_layer: 0, num_layers: 32, first_head: 0, num_heads: 8 },
//! };
//! let deadline = Instant::now() + Duration::from_secs(1);
//! volume.put_one(&key, b"keys and values", deadline)?;
//! assert_eq!(volume.get_one(&key, 15, deadline)?, b"keys and values");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

// The page for implementers is compiled and run with the tests.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/write-a-backend.md")]
struct WriteABackend;

mod access;
mod batch;
mod claims;
pub mod conformance;
mod directory;
mod error;
mod folders;
#[cfg(any(test, feature = "fuzz"))]
#[doc(hidden)]
pub mod fuzz;
mod key;
mod memory;
pub mod object;
mod probe;
mod quota;
mod registry;
#[cfg(feature = "s3")]
mod s3;
mod volume;

pub use batch::{Keyed, one_by_one};
pub use directory::DirectoryVolume;
pub use error::{Corruption, RegistryError, VolumeError};
pub use key::{BlobKey, BlobScope, BlobSlice};
pub use kvbm_plan::VolumeDescriptor;
pub use memory::MemoryVolume;
pub use object::{HEADER_BYTES, MAX_ALIGNMENT, MAX_PIECES, PayloadForm, StoredOrder};
pub use probe::{Probe, probe};
pub use registry::{OpenVolume, VolumeRegistry};
#[cfg(feature = "s3")]
pub use s3::S3Volume;
pub use volume::{GetRequest, PutRequest, StoreFacts, Volume, VolumeExt};
