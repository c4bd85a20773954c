//! G4: KV blocks in blob stores.
//!
//! A *volume* keeps blobs by key: [`Volume::get`], [`put`](Volume::put), [`exists`](Volume::exists)
//! and [`delete`](Volume::delete), all in batches with a deadline. It also lists them. Operators
//! create, mount and format volumes. A [`VolumeRegistry`] registers them by descriptor and
//! unregisters them.
//!
//! **Knows:** keys, objects and their headers.
//! **Must never know:** which blocks are worth keeping,
//! where else they lie, how their bytes are laid out; and it never mounts, formats or creates a
//! store.
//!
//! What comes back from a volume is untrusted: every object names its key, length and checksum, and
//! is checked before its bytes are used. A missing or damaged object is an error for which
//! [`VolumeError::is_miss`] holds: recompute the block.
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
//!
//! # Modules
//! | module | what it is | uses |
//! |---|---|---|
//! | `registry` | volumes that a worker knows, by id | `s3`, `memory`, `directory`, `compressed`, `encrypted`, `data_keys`, `volume`, `error`, `compression` |
//! | `s3` | a volume in a bucket of an S3-compatible store | `quota`, `volume`, `object`, `error`, `request`, `key` |
//! | `probe` | puts, reads and deletes an object to test a volume | `volume`, `error`, `key` |
//! | `memory` | a volume in memory, for tests | `quota`, `volume`, `object`, `batch`, `error`, `request`, `key` |
//! | `fuzz` | bodies of the fuzz targets | `object`, `request`, `key_object`, `seal`, `key` |
//! | `compressed` | a volume whose objects are compressed | `adaptive`, `compression`, `volume`, `error`, `request`, `seal`, `key` |
//! | `adaptive` | which way of writing objects is faster | - |
//! | `encrypted` | a volume whose objects are encrypted | `data_keys`, `volume`, `error`, `request`, `key_object`, `seal`, `key` |
//! | `data_keys` | the keys of a deployment on a volume | `key_locks`, `volume`, `error`, `key_object`, `key` |
//! | `directory` | a volume in a directory | `quota`, `key_locks`, `durable_folders`, `volume`, `object`, `batch`, `error`, `request`, `key`, `access` |
//! | `quota` | bytes used of a capacity | `error`, `key_object`, `key` |
//! | `key_locks` | one change of an object at a time | `key` |
//! | `durable_folders` | folders whose names are synced | `access` |
//! | `conformance` | tests that every volume must pass | `volume`, `object`, `error`, `request`, `seal`, `key` |
//! | `volume` | the trait of a blob store | `object`, `error`, `compression`, `request`, `seal`, `key` |
//! | `object` | bytes of an object: header and payload | `error`, `request`, `seal`, `key` |
//! | `batch` | batches over stores that take one object at a time | `error`, `request`, `key` |
//! | `error` | errors | `request`, `key` |
//! | `compression` | whether objects are compressed, with loss or without | - |
//! | `request` | what to read and to write | `seal`, `key` |
//! | `key_object` | objects that hold wrapped data keys | `key` |
//! | `seal` | how objects are summed: with the deployment's key or without | - |
//! | `key` | name of an object | - |
//! | `access` | opens private files and folders | - |
#![forbid(unsafe_code)]

// The page for implementers is compiled and run with the tests.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/write-a-backend.md")]
struct WriteABackend;

mod access;
#[cfg(feature = "compress")]
mod adaptive;
mod batch;
#[cfg(feature = "compress")]
mod compressed;
mod compression;
pub mod conformance;
mod data_keys;
mod directory;
mod durable_folders;
mod encrypted;
mod error;
#[cfg(any(test, feature = "fuzz"))]
#[doc(hidden)]
pub mod fuzz;
mod key;
mod key_locks;
mod key_object;
mod memory;
pub mod object;
mod probe;
mod quota;
mod registry;
mod request;
#[cfg(feature = "s3")]
mod s3;
mod seal;
mod volume;

pub use batch::{Keyed, one_by_one};
#[cfg(feature = "compress")]
pub use compressed::CompressedVolume;
pub use compression::{CompressionStats, LossyCodes, LossyNumbers, LossyTerms, VolumeCompression};
pub use data_keys::{REFRESH, VolumeEncryption};
pub use directory::DirectoryVolume;
pub use encrypted::EncryptedVolume;
pub use error::{ObjectCorruption, RegistryError, VolumeError, VolumeKeysError};
pub use key::{BlobKey, BlobScope, BlobSlice};
pub use kvbm_plan::VolumeDescriptor;
pub use memory::MemoryVolume;
pub use object::{HEADER_BYTES, MAX_ALIGNMENT, STAMP_BYTES};
pub use probe::{Probe, probe};
pub use registry::{OpenVolume, VolumeRegistry, VolumeTerms};
pub use request::{GetRequest, MAX_PIECES, PayloadForm, PutRequest, StoredOrder};
#[cfg(feature = "s3")]
pub use s3::{ObjectMove, ObjectTransport, OpenTransport, S3Volume, TransportStore};
pub use seal::ObjectSeal;
pub use volume::{DestroyedKey, StoreFacts, Volume, VolumeExt};
