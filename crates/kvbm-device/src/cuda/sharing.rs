//! Device memory that processes share. Which handle it has depends on how it was allocated. Memory
//! of `cuMemAlloc` has a legacy IPC handle. Memory that was created and mapped on its own has what
//! it was created for: a file descriptor, or a handle that is good on every node of a fabric.

use std::ffi::{c_char, c_int, c_void};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use super::functions::call;
use super::functions::sys::{
    CUdevice_attribute, CUipcMem_flags, CUipcMemHandle, CUmemAccess_flags, CUmemAccessDesc,
    CUmemAllocationGranularity_flags, CUmemAllocationHandleType, CUmemAllocationProp,
    CUmemAllocationProp_st__bindgen_ty_1, CUmemAllocationType, CUmemGenericAllocationHandle, CUmemLocation,
    CUmemLocationType, CUresult,
};
use super::{CudaContext, CudaDevice};
use crate::{DeviceError, DeviceMemory, Owner};

const POSIX_FD: CUmemAllocationHandleType =
    CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
const FABRIC: CUmemAllocationHandleType = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_FABRIC;

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
struct PhysicalMemory {
    context: Arc<CudaContext>,
    handle: CUmemGenericAllocationHandle,
}

impl Drop for PhysicalMemory {
    fn drop(&mut self) {
        // SAFETY: created, imported or retained once, released once.
        self.context.release(|driver| unsafe { call!(driver, cuMemRelease(self.handle)) });
    }
}

/// Addresses, given back when dropped.
struct AddressRange {
    context: Arc<CudaContext>,
    start: u64,
    len: usize,
}

impl Drop for AddressRange {
    fn drop(&mut self) {
        let Self { context, start, len } = self;
        // SAFETY: reserved once, freed once; what was mapped there is unmapped before.
        context.release(|driver| unsafe { call!(driver, cuMemAddressFree(*start, *len)) });
    }
}

/// Physical memory at addresses of its own; unmapped when dropped, before the addresses are given
/// back.
struct Mapped {
    addresses: AddressRange,
    _object: PhysicalMemory,
}

impl Drop for Mapped {
    fn drop(&mut self) {
        let AddressRange { context, start, len } = &self.addresses;
        // SAFETY: mapped once, unmapped once; work on it held this owner until it was complete.
        context.release(|driver| unsafe { call!(driver, cuMemUnmap(*start, *len)) });
    }
}

/// Memory of another process; closed when dropped.
struct OpenedMemory {
    context: Arc<CudaContext>,
    base: u64,
}

impl Drop for OpenedMemory {
    fn drop(&mut self) {
        // SAFETY: opened once, closed once; work on it held this owner until it was complete.
        self.context.release(|driver| unsafe { call!(driver, cuIpcCloseMemHandle(self.base)) });
    }
}

impl CudaDevice {
    /// Allocates memory that [`CudaDevice::share`] gives a handle of another kind than the legacy
    /// one: a fabric handle if `fabric`, else a descriptor. Rounded up to the device's granularity,
    /// 2 MiB as a rule.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] where the device has no such handles, [`DeviceError::Driver`].
    pub fn allocate_shareable(&self, len: u64, fabric: bool) -> Result<DeviceMemory, DeviceError> {
        let context = &self.context;
        let (kind, attribute, operation) = if fabric {
            (
                FABRIC,
                CUdevice_attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED,
                "handles of a fabric between nodes (it needs NVLink switches and IMEX)",
            )
        } else {
            (
                POSIX_FD,
                CUdevice_attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
                "sharing memory by file descriptors",
            )
        };
        if len == 0 {
            let rule = "an allocation needs at least one byte";
            return Err(DeviceError::Invalid { what: "length", value: len, rule });
        }
        if context.attribute(attribute)? == 0 {
            return Err(DeviceError::Unsupported { device: context.name.clone(), operation });
        }
        let wanted = CUmemAllocationProp {
            type_: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            requestedHandleTypes: kind,
            location: context.location(),
            win32HandleMetaData: std::ptr::null_mut(),
            allocFlags: CUmemAllocationProp_st__bindgen_ty_1 {
                compressionType: 0,
                gpuDirectRDMACapable: 0,
                usage: 0,
                reserved: [0; 4],
            },
        };
        let (mut granularity, mut handle) = (0_usize, 0);
        let (unit, created, properties) = (&raw mut granularity, &raw mut handle, &raw const wanted);
        let least = CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        let functions = context.functions();
        // SAFETY: it writes a number through a pointer to one, and reads the properties.
        context.check(unsafe { call!(functions, cuMemGetAllocationGranularity(unit, properties, least)) })?;
        let bytes = len.checked_next_multiple_of(granularity.max(1) as u64);
        let bytes = bytes.and_then(|bytes| usize::try_from(bytes).ok()).ok_or(DeviceError::Invalid {
            what: "length",
            value: len,
            rule: "it must fit the address space",
        })?;
        // SAFETY: it writes a handle through a pointer to one, and reads the properties.
        context.must(|driver| unsafe { call!(driver, cuMemCreate(created, bytes, properties, 0)) })?;
        let object = PhysicalMemory { context: Arc::clone(context), handle };
        let mapped = map(context, object, bytes)?;
        let address = mapped.addresses.start;
        // SAFETY: the range is mapped for this device until the owner unmaps it.
        Ok(unsafe { DeviceMemory::from_raw(context.id, address, len, false, Arc::new(mapped) as Owner) })
    }

    /// A handle by which another process can open a range of this device's memory, ours or an
    /// engine's. The memory must stay allocated for as long as the other process has it open.
    ///
    /// # Errors
    /// [`DeviceError::UnknownMemory`] if the range is not inside one allocation,
    /// [`DeviceError::Unsupported`] if it was allocated in a way that cannot be shared,
    /// [`DeviceError::Driver`].
    pub fn share(&self, memory: &DeviceMemory) -> Result<SharedMemory, DeviceError> {
        let context = &self.context;
        if memory.device() != context.id {
            return Err(DeviceError::WrongDevice { expected: context.id, found: memory.device() });
        }
        let (base, whole) = context.range_of(memory.address(), memory.len())?;
        let offset = memory.address() - base;
        let via = if let Some(object) = object_at(context, base)? {
            export(context, &object)?
        } else {
            let mut handle = CUipcMemHandle { reserved: [0; 64] };
            let into = &raw mut handle;
            // SAFETY: it writes a handle through a pointer to one.
            context.must(|driver| unsafe { call!(driver, cuIpcGetMemHandle(into, base)) })?;
            SharedVia::Legacy(handle.reserved.map(c_char::cast_unsigned))
        };
        Ok(SharedMemory { via, whole, offset, len: memory.len() })
    }

    /// Opens memory of another process; closed when the last clone of the handle is gone and no
    /// queued work holds it.
    ///
    /// # Errors
    /// [`DeviceError::OutOfRange`] if the range is not inside the allocation,
    /// [`DeviceError::Driver`].
    ///
    /// # Safety
    /// The other process keeps the memory allocated until then, and its length is correct.
    pub unsafe fn open_shared(&self, memory: &SharedMemory) -> Result<DeviceMemory, DeviceError> {
        let context = &self.context;
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
                let handle = CUipcMemHandle { reserved: handle.map(u8::cast_signed) };
                let flags = CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
                let mut base = 0;
                let into = &raw mut base;
                context.must(|driver| {
                    // SAFETY: it writes an address through a pointer to one.
                    unsafe { call!(driver, cuIpcOpenMemHandle_v2(into, handle, flags)) }
                })?;
                (base, Arc::new(OpenedMemory { context: Arc::clone(context), base }))
            }
            SharedVia::Descriptor(file) => {
                let file = std::ptr::without_provenance_mut(usize::try_from(file.as_raw_fd()).unwrap_or(0));
                let mapped = map(context, import(context, file, POSIX_FD)?, size)?;
                (mapped.addresses.start, Arc::new(mapped))
            }
            SharedVia::Fabric(handle) => {
                let mut handle = *handle;
                let object = import(context, handle.as_mut_ptr().cast(), FABRIC)?;
                let mapped = map(context, object, size)?;
                (mapped.addresses.start, Arc::new(mapped))
            }
        };
        // SAFETY: the range lies inside what was opened, which the owner closes when it goes; the
        // caller says that it is there.
        Ok(unsafe { DeviceMemory::from_raw(context.id, base + offset, *len, true, owner) })
    }
}

/// The physical memory that is mapped at an address; `None` for memory that is not made that way.
fn object_at(context: &Arc<CudaContext>, address: u64) -> Result<Option<PhysicalMemory>, DeviceError> {
    let at = std::ptr::without_provenance_mut::<c_void>(address as usize);
    let mut handle = 0;
    let into = &raw mut handle;
    let result = context.in_context(|driver| {
        // SAFETY: it writes a handle through a pointer to one, and only looks the address up.
        unsafe { call!(driver, cuMemRetainAllocationHandle(into, at)) }
    })?;
    // There is no such memory here.
    if result.is(CUresult::CUDA_ERROR_INVALID_VALUE) {
        return Ok(None);
    }
    context.check(result)?;
    Ok(Some(PhysicalMemory { context: Arc::clone(context), handle }))
}

/// A handle of the kind that the memory was created for; one for the fabric if it has both.
fn export(context: &Arc<CudaContext>, object: &PhysicalMemory) -> Result<SharedVia, DeviceError> {
    // Not read as a whole: a newer driver may name a kind of place that the bindings do not know.
    let mut properties = MaybeUninit::<CUmemAllocationProp>::zeroed();
    let into = properties.as_mut_ptr();
    context.must(|driver| {
        // SAFETY: it writes a structure through a pointer to one.
        unsafe { call!(driver, cuMemGetAllocationPropertiesFromHandle(into, object.handle)) }
    })?;
    // SAFETY: the field is inside the structure, and every number is one of its values.
    let kinds = unsafe { (*into).requestedHandleTypes };
    let mut bytes = [0_u8; 64];
    let mut file: c_int = -1;
    let (kind, into) = if kinds.0 & FABRIC.0 != 0 {
        (FABRIC, bytes.as_mut_ptr().cast::<c_void>())
    } else if kinds.0 & POSIX_FD.0 != 0 {
        (POSIX_FD, (&raw mut file).cast())
    } else {
        let operation =
            "sharing memory that was created without a handle to share it by; allocate it for sharing";
        return Err(DeviceError::Unsupported { device: context.name.clone(), operation });
    };
    context.must(|driver| {
        // SAFETY: it writes a handle of this kind, for which there is room.
        unsafe { call!(driver, cuMemExportToShareableHandle(into, object.handle, kind, 0)) }
    })?;
    if kind == FABRIC {
        return Ok(SharedVia::Fabric(bytes));
    }
    // SAFETY: the driver opened the descriptor for the caller, who closes it.
    Ok(SharedVia::Descriptor(unsafe { OwnedFd::from_raw_fd(file) }))
}

fn import(
    context: &Arc<CudaContext>,
    handle: *mut c_void,
    kind: CUmemAllocationHandleType,
) -> Result<PhysicalMemory, DeviceError> {
    let mut object = 0;
    let into = &raw mut object;
    context.must(|driver| {
        // SAFETY: it writes a handle through a pointer to one; the other one is of this kind.
        unsafe { call!(driver, cuMemImportFromShareableHandle(into, handle, kind)) }
    })?;
    Ok(PhysicalMemory { context: Arc::clone(context), handle: object })
}

/// Maps physical memory at addresses of its own, for this device.
fn map(context: &Arc<CudaContext>, object: PhysicalMemory, len: usize) -> Result<Mapped, DeviceError> {
    let mut start = 0;
    let into = &raw mut start;
    // SAFETY: it writes an address through a pointer to one.
    context.must(|driver| unsafe { call!(driver, cuMemAddressReserve(into, len, 0, 0, 0)) })?;
    let addresses = AddressRange { context: Arc::clone(context), start, len };
    // SAFETY: the addresses are reserved and nothing is mapped there.
    context.must(|driver| unsafe { call!(driver, cuMemMap(start, len, 0, object.handle, 0)) })?;
    let mapped = Mapped { addresses, _object: object };
    let access = CUmemAccessDesc {
        location: context.location(),
        flags: CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    };
    let access = &raw const access;
    // SAFETY: the range was mapped above; the driver reads the description during the call.
    context.must(|driver| unsafe { call!(driver, cuMemSetAccess(start, len, access, 1)) })?;
    Ok(mapped)
}

impl CudaContext {
    /// This device as a place of memory.
    fn location(&self) -> CUmemLocation {
        CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: self.handle }
    }
}
