//! Device memory that processes share. Which handle it has depends on how it was allocated: memory of `cuMemAlloc` has a
//! legacy IPC handle; memory that was created and mapped on its own has a file descriptor, or a handle that is good on
//! every node of a fabric, whichever it was created for.

use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use super::driver::{Access, Handle, Opaque, Properties};
use super::{CudaDevice, Shared};
use crate::{DeviceError, DeviceMemory, Owner};

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`
const POSIX_FD: c_int = 1;
/// `CU_MEM_HANDLE_TYPE_FABRIC`
const FABRIC: c_int = 8;
/// `CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED`
const POSIX_FD_SUPPORTED: c_int = 103;
/// `CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED`
const FABRIC_SUPPORTED: c_int = 128;
/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`
const LAZY_PEER_ACCESS: u32 = 1;
/// `CU_MEM_LOCATION_TYPE_DEVICE`
const ON_DEVICE: c_int = 1;
/// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`
const READ_WRITE: c_int = 3;

/// What another process opens memory by.
#[derive(Debug)]
pub enum SharedVia {
    /// A `CUipcMemHandle`: on this node, for memory of `cuMemAlloc`.
    Legacy([u8; 64]),
    /// A descriptor, to be sent over a Unix socket: on this node.
    Descriptor(OwnedFd),
    /// A `CUmemFabricHandle`: on every node of the fabric.
    Fabric([u8; 64]),
}

/// A range of device memory, for another process to open with [`CudaDevice::open_shared`].
#[derive(Debug)]
pub struct SharedMemory {
    /// What opens the allocation.
    pub via: SharedVia,
    /// Bytes of the allocation.
    pub whole: u64,
    /// Where the range begins in it.
    pub offset: u64,
    /// Bytes of the range.
    pub len: u64,
}

/// Physical memory, released when dropped. What is mapped of it stays.
struct Object {
    shared: Arc<Shared>,
    handle: Handle,
}

impl Drop for Object {
    fn drop(&mut self) {
        if let Ok(_entered) = self.shared.enter() {
            // SAFETY: created, imported or retained once, released once.
            let _nothing_to_do_about_it = unsafe { (self.shared.functions().object_release)(self.handle) };
        }
    }
}

/// Addresses, given back when dropped.
struct Addresses {
    shared: Arc<Shared>,
    start: u64,
    len: usize,
}

impl Drop for Addresses {
    fn drop(&mut self) {
        if let Ok(_entered) = self.shared.enter() {
            // SAFETY: reserved once, freed once; what was mapped there is unmapped before.
            let _nothing_to_do_about_it =
                unsafe { (self.shared.functions().addresses_free)(self.start, self.len) };
        }
    }
}

/// Physical memory at addresses of its own; unmapped when dropped, before the addresses are given back.
struct Mapped {
    addresses: Addresses,
    _object: Object,
}

impl Drop for Mapped {
    fn drop(&mut self) {
        let Addresses { shared, start, len } = &self.addresses;
        if let Ok(_entered) = shared.enter() {
            // SAFETY: mapped once, unmapped once; work on it held this owner until it was complete.
            let _nothing_to_do_about_it = unsafe { (shared.functions().object_unmap)(*start, *len) };
        }
    }
}

/// Memory of another process; closed when dropped.
struct Opened {
    shared: Arc<Shared>,
    base: u64,
}

impl Drop for Opened {
    fn drop(&mut self) {
        if let Ok(_entered) = self.shared.enter() {
            // SAFETY: opened once, closed once; work on it held this owner until it was complete.
            let _nothing_to_do_about_it = unsafe { (self.shared.functions().handle_close)(self.base) };
        }
    }
}

impl CudaDevice {
    /// Allocates memory that [`CudaDevice::share`] gives a handle of another kind than the legacy one: a fabric handle if
    /// `fabric`, else a descriptor. Rounded up to the device's granularity, 2 MiB as a rule.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] where the device has no such handles, [`DeviceError::Driver`].
    pub fn allocate_shareable(&self, len: u64, fabric: bool) -> Result<DeviceMemory, DeviceError> {
        let shared = &self.shared;
        let (kind, attribute, operation) = if fabric {
            (
                FABRIC,
                FABRIC_SUPPORTED,
                "handles of a fabric between nodes (it needs NVLink switches and IMEX)",
            )
        } else {
            (POSIX_FD, POSIX_FD_SUPPORTED, "sharing memory by file descriptors")
        };
        if len == 0 {
            let rule = "an allocation needs at least one byte";
            return Err(DeviceError::Invalid { what: "length", value: len, rule });
        }
        if shared.attribute(attribute)? == 0 {
            return Err(DeviceError::Unsupported { device: shared.name.clone(), operation });
        }
        let wanted = Properties {
            kind: 1,
            handles: kind,
            location: [ON_DEVICE, shared.handle],
            ..Properties::default()
        };
        let mut granularity = 0_usize;
        let (unit, properties) = (&raw mut granularity, &raw const wanted);
        // SAFETY: writes a number through a pointer to one; the properties are read during the call.
        let code = unsafe { (shared.functions().object_granularity)(unit, properties, 0) };
        shared.check("cuMemGetAllocationGranularity", code)?;
        let bytes = len.checked_next_multiple_of(granularity.max(1) as u64);
        let bytes = bytes.and_then(|bytes| usize::try_from(bytes).ok()).ok_or(DeviceError::Invalid {
            what: "length",
            value: len,
            rule: "it must fit the address space",
        })?;
        let entered = shared.enter()?;
        let mut handle = 0;
        // SAFETY: writes a handle through a pointer to one; the properties are read during the call.
        let code = unsafe { (shared.functions().object_create)(&raw mut handle, bytes, properties, 0) };
        drop(entered);
        shared.check("cuMemCreate", code)?;
        let object = Object { shared: Arc::clone(shared), handle };
        let mapped = map(shared, object, bytes)?;
        let address = mapped.addresses.start;
        // SAFETY: the range is mapped for this device until the owner unmaps it.
        Ok(unsafe { DeviceMemory::from_raw(shared.id, address, len, false, Arc::new(mapped) as Owner) })
    }

    /// A handle by which another process can open a range of this device's memory, ours or an engine's. The memory must
    /// stay allocated for as long as the other process has it open.
    ///
    /// # Errors
    /// [`DeviceError::UnknownMemory`] if the range is not inside one allocation, [`DeviceError::Unsupported`] if it was
    /// allocated in a way that cannot be shared, [`DeviceError::Driver`].
    pub fn share(&self, memory: &DeviceMemory) -> Result<SharedMemory, DeviceError> {
        let shared = &self.shared;
        if memory.device() != shared.id {
            return Err(DeviceError::WrongDevice { expected: shared.id, found: memory.device() });
        }
        let (base, whole) = shared.range_of(memory.address(), memory.len())?;
        let offset = memory.address() - base;
        let via = if let Some(object) = object_at(shared, base)? {
            export(shared, &object)?
        } else {
            let mut handle = Opaque([0; 64]);
            let _entered = shared.enter()?;
            // SAFETY: writes 64 bytes through a pointer to as many.
            let code = unsafe { (shared.functions().handle_of)(&raw mut handle, base) };
            shared.check("cuIpcGetMemHandle", code)?;
            SharedVia::Legacy(handle.0)
        };
        Ok(SharedMemory { via, whole, offset, len: memory.len() })
    }

    /// Opens memory of another process; closed when the last clone of the handle is gone and no queued work holds it.
    ///
    /// # Errors
    /// [`DeviceError::OutOfRange`] if the range is not inside the allocation, [`DeviceError::Driver`].
    ///
    /// # Safety
    /// The other process keeps the memory allocated meanwhile, and says the truth about its length.
    pub unsafe fn open_shared(&self, memory: &SharedMemory) -> Result<DeviceMemory, DeviceError> {
        let shared = &self.shared;
        let SharedMemory { via, whole, offset, len } = memory;
        let size = usize::try_from(*whole)
            .ok()
            .filter(|_| offset.checked_add(*len).is_some_and(|end| end <= *whole));
        let Some(size) = size else {
            let memory = "memory of another process".to_owned();
            return Err(DeviceError::OutOfRange { memory, offset: *offset, len: *len, size: *whole });
        };
        let (base, owner): (u64, Owner) = match via {
            SharedVia::Legacy(handle) => {
                let entered = shared.enter()?;
                let mut base = 0;
                // SAFETY: writes an address through a pointer to one.
                let code = unsafe {
                    (shared.functions().handle_open)(&raw mut base, Opaque(*handle), LAZY_PEER_ACCESS)
                };
                drop(entered);
                shared.check("cuIpcOpenMemHandle", code)?;
                (base, Arc::new(Opened { shared: Arc::clone(shared), base }))
            }
            SharedVia::Descriptor(file) => {
                let file = std::ptr::without_provenance_mut(usize::try_from(file.as_raw_fd()).unwrap_or(0));
                let mapped = map(shared, import(shared, file, POSIX_FD)?, size)?;
                (mapped.addresses.start, Arc::new(mapped))
            }
            SharedVia::Fabric(handle) => {
                let mut handle = *handle;
                let object = import(shared, handle.as_mut_ptr().cast(), FABRIC)?;
                let mapped = map(shared, object, size)?;
                (mapped.addresses.start, Arc::new(mapped))
            }
        };
        // SAFETY: the range lies inside what was opened, which the owner closes when it goes; the caller says that it is there.
        Ok(unsafe { DeviceMemory::from_raw(shared.id, base + offset, *len, true, owner) })
    }
}

/// The physical memory that is mapped at an address; `None` for memory that is not made that way.
fn object_at(shared: &Arc<Shared>, address: u64) -> Result<Option<Object>, DeviceError> {
    let _entered = shared.enter()?;
    let mut handle = 0;
    let at = std::ptr::without_provenance_mut::<c_void>(address as usize);
    // SAFETY: writes a handle through a pointer to one; the address is only looked up.
    let code = unsafe { (shared.functions().object_at)(&raw mut handle, at) };
    // CUDA_ERROR_INVALID_VALUE: there is no such memory here.
    if code == 1 {
        return Ok(None);
    }
    shared.check("cuMemRetainAllocationHandle", code)?;
    Ok(Some(Object { shared: Arc::clone(shared), handle }))
}

/// A handle of the kind that the memory was created for; one for the fabric if it has both.
fn export(shared: &Arc<Shared>, object: &Object) -> Result<SharedVia, DeviceError> {
    let _entered = shared.enter()?;
    let mut properties = Properties::default();
    // SAFETY: writes a structure through a pointer to one.
    let code = unsafe { (shared.functions().object_properties)(&raw mut properties, object.handle) };
    shared.check("cuMemGetAllocationPropertiesFromHandle", code)?;
    let mut bytes = [0_u8; 64];
    let mut file: c_int = -1;
    let (kind, into) = if properties.handles & FABRIC != 0 {
        (FABRIC, bytes.as_mut_ptr().cast::<c_void>())
    } else if properties.handles & POSIX_FD != 0 {
        (POSIX_FD, (&raw mut file).cast())
    } else {
        let operation =
            "sharing memory that was created without a handle to share it by; allocate it for sharing";
        return Err(DeviceError::Unsupported { device: shared.name.clone(), operation });
    };
    // SAFETY: writes what this kind of handle is, for which there is room.
    let code = unsafe { (shared.functions().object_export)(into, object.handle, kind.unsigned_abs(), 0) };
    shared.check("cuMemExportToShareableHandle", code)?;
    if kind == FABRIC {
        return Ok(SharedVia::Fabric(bytes));
    }
    // SAFETY: the driver made the descriptor for whoever exports, who closes it.
    Ok(SharedVia::Descriptor(unsafe { OwnedFd::from_raw_fd(file) }))
}

fn import(shared: &Arc<Shared>, handle: *mut c_void, kind: c_int) -> Result<Object, DeviceError> {
    let _entered = shared.enter()?;
    let mut object = 0;
    // SAFETY: writes a handle through a pointer to one; what the other one is, its kind says.
    let code = unsafe { (shared.functions().object_import)(&raw mut object, handle, kind.unsigned_abs()) };
    shared.check("cuMemImportFromShareableHandle", code)?;
    Ok(Object { shared: Arc::clone(shared), handle: object })
}

/// Maps physical memory at addresses of its own, for this device.
fn map(shared: &Arc<Shared>, object: Object, len: usize) -> Result<Mapped, DeviceError> {
    let _entered = shared.enter()?;
    let functions = shared.functions();
    let mut start = 0;
    // SAFETY: writes an address through a pointer to one.
    let code = unsafe { (functions.addresses_reserve)(&raw mut start, len, 0, 0, 0) };
    shared.check("cuMemAddressReserve", code)?;
    let addresses = Addresses { shared: Arc::clone(shared), start, len };
    // SAFETY: the addresses are reserved and nothing is mapped there.
    let code = unsafe { (functions.object_map)(start, len, 0, object.handle, 0) };
    shared.check("cuMemMap", code)?;
    let mapped = Mapped { addresses, _object: object };
    let access = Access { location: [ON_DEVICE, shared.handle], flags: READ_WRITE };
    // SAFETY: the range was mapped above; the description is read during the call.
    let code = unsafe { (functions.set_access)(start, len, &raw const access, 1) };
    shared.check("cuMemSetAccess", code)?;
    Ok(mapped)
}
