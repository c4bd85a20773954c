//! Host memory that somebody else allocated.

use std::ptr::NonNull;

use kvbm_device::{HostRegion, Owner};

use crate::system::check_request;
use crate::{Backing, Storage, StorageError, StorageKind};

/// Host memory that the engine allocated, such as the KV tensors of an engine that computes on the
/// CPU. It is never freed here.
#[derive(Debug)]
pub struct HostStorage {
    region: HostRegion,
    alignment: u64,
}

impl HostStorage {
    /// `len` bytes at `start`. `owner` keeps them allocated: it is dropped after this storage, all
    /// bound layouts over it, and all transfers on them.
    ///
    /// # Errors
    /// [`StorageError::Invalid`]: no bytes, or more than 2^63 - 1.
    ///
    /// # Safety
    /// - The bytes are initialised, in one allocation, and valid for reads and writes until the
    ///   last clone of `owner` is dropped.
    /// - They are *shared bytes* ([`HostRegion`]) from now on. Nobody holds a Rust reference to
    ///   them while a transfer may touch them. The engine writes a block only while no transfer
    ///   reads or writes it, and reads it only while no transfer writes it.
    pub unsafe fn from_external(start: NonNull<u8>, len: u64, owner: Owner) -> Result<Self, StorageError> {
        check_request(len, 1)?;
        let region_len = usize::try_from(len).map_err(|_| {
            let rule = "host memory has at most as many bytes as an address can count";
            StorageError::Invalid { what: "length", value: len, rule }
        })?;
        // SAFETY: the caller gives the promise that a region asks for.
        let region = unsafe { HostRegion::new(start, region_len, owner) };
        let alignment = 1 << region.address().trailing_zeros().min(30);
        Ok(Self { region, alignment })
    }

    /// The memory.
    pub fn region(&self) -> &HostRegion {
        &self.region
    }
}

impl Storage for HostStorage {
    fn kind(&self) -> StorageKind {
        StorageKind::System
    }

    fn backing(&self) -> Backing<'_> {
        Backing::Host(&self.region)
    }

    fn alignment(&self) -> u64 {
        self.alignment
    }
}
