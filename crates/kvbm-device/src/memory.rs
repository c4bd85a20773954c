//! Device memory: an address that the CPU must not touch, and what keeps it allocated.

use std::fmt;

use crate::{DeviceError, DeviceId, Owner};

/// A range of device memory. Clones share it; owned memory is freed when the last clone is gone and
/// no queued copy holds it.
#[derive(Clone)]
pub struct DeviceMemory {
    device: DeviceId,
    address: u64,
    len: u64,
    external: bool,
    owner: Owner,
}

impl DeviceMemory {
    /// For implementers of [`Device`](crate::Device): `len` bytes at `address` of `device`,
    /// allocated while `owner` lives. `external`: another owner frees it.
    ///
    /// # Safety
    /// The range must be device memory of `device` that streams of that device may access for as
    /// long as `owner` lives.
    pub unsafe fn from_raw(device: DeviceId, address: u64, len: u64, external: bool, owner: Owner) -> Self {
        Self { device, address, len, external, owner }
    }

    /// The device it lies on.
    pub fn device(&self) -> DeviceId {
        self.device
    }

    /// Device address of the first byte. Not for the CPU.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether the range is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether another owner (the engine) frees the memory.
    pub fn is_external(&self) -> bool {
        self.external
    }

    /// A part of this memory, which keeps the whole alive.
    ///
    /// # Errors
    /// [`DeviceError::OutOfRange`].
    pub fn slice(&self, offset: u64, len: u64) -> Result<Self, DeviceError> {
        let address = self.address_of(offset, len)?;
        Ok(Self { address, len, ..self.clone() })
    }

    /// Device address of `len` bytes at `offset`.
    ///
    /// # Errors
    /// [`DeviceError::OutOfRange`].
    pub fn address_of(&self, offset: u64, len: u64) -> Result<u64, DeviceError> {
        match offset.checked_add(len) {
            Some(end) if end <= self.len => Ok(self.address + offset),
            _ => Err(DeviceError::OutOfRange { memory: self.to_string(), offset, len, size: self.len }),
        }
    }

    pub(crate) fn owner(&self) -> &Owner {
        &self.owner
    }
}

impl fmt::Display for DeviceMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let whose = if self.external { "engine-owned memory" } else { "allocation" };
        write!(f, "{whose} {:#x} of device {}", self.address, self.device)
    }
}

impl fmt::Debug for DeviceMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceMemory({self}, {} bytes)", self.len)
    }
}
