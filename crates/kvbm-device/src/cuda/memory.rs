//! Memory of a GPU: ours, and an engine's.

use std::sync::Arc;

use super::functions::call;
use super::functions::sys::CUresult;
use super::{CudaContext, GRANULARITY};
use crate::{DeviceError, DeviceMemory, Owner};

/// Freed when dropped.
struct DriverAllocation {
    context: Arc<CudaContext>,
    base: u64,
}

impl Drop for DriverAllocation {
    fn drop(&mut self) {
        // SAFETY: allocated once, freed once; work on it held this owner until it was complete.
        self.context.release(|driver| unsafe { call!(driver, cuMemFree_v2(self.base)) });
    }
}

pub(super) fn allocate(
    context: &Arc<CudaContext>,
    len: u64,
    alignment: u64,
) -> Result<DeviceMemory, DeviceError> {
    let invalid = |what, value, rule| Err(DeviceError::Invalid { what, value, rule });
    if len == 0 {
        return invalid("length", len, "an allocation needs at least one byte");
    }
    if !alignment.is_power_of_two() {
        return invalid("alignment", alignment, "it must be a power of two");
    }
    let slack = if alignment > GRANULARITY { alignment } else { 0 };
    // Of more than there is, drivers say different things.
    let asked = len.checked_add(slack).filter(|asked| *asked <= context.total_bytes);
    let Some(asked) = asked.and_then(|asked| usize::try_from(asked).ok()) else {
        return Err(out_of_memory(context, len));
    };
    let mut base = 0;
    let into = &raw mut base;
    // SAFETY: it writes an address through a pointer to one.
    let result = context.in_context(|driver| unsafe { call!(driver, cuMemAlloc_v2(into, asked)) })?;
    if result.is(CUresult::CUDA_ERROR_OUT_OF_MEMORY) {
        return Err(out_of_memory(context, len));
    }
    context.check(result)?;
    let owner: Owner = Arc::new(DriverAllocation { context: Arc::clone(context), base });
    let address = base.next_multiple_of(alignment);
    // SAFETY: the range lies inside the allocation, which the owner frees when it goes.
    Ok(unsafe { DeviceMemory::from_raw(context.id, address, len, false, owner) })
}

fn out_of_memory(context: &CudaContext, asked: u64) -> DeviceError {
    let free = context.free_bytes().unwrap_or(0);
    DeviceError::OutOfMemory { device: context.id, asked, free, total: context.total_bytes, largest: free }
}

/// # Safety
/// The range stays allocated until the last clone of the handle is gone and all work on it is
/// complete.
pub(super) unsafe fn register_external(
    context: &Arc<CudaContext>,
    address: u64,
    len: u64,
) -> Result<DeviceMemory, DeviceError> {
    context.range_of(address, len)?;
    let owner: Owner = Arc::new(Arc::clone(context));
    // SAFETY: the caller keeps the memory; the owner keeps the context.
    Ok(unsafe { DeviceMemory::from_raw(context.id, address, len, true, owner) })
}

impl CudaContext {
    /// Start and length of the allocation that the range lies in.
    pub(super) fn range_of(&self, address: u64, len: u64) -> Result<(u64, u64), DeviceError> {
        let unknown =
            |nearest: String| Err(DeviceError::UnknownMemory { device: self.id, address, len, nearest });
        let (mut base, mut size) = (0, 0_usize);
        let into = (&raw mut base, &raw mut size);
        let result = self.in_context(|driver| {
            // SAFETY: it writes numbers through pointers to them. An address that is not memory of
            // the device is an error.
            unsafe { call!(driver, cuMemGetAddressRange_v2(into.0, into.1, address)) }
        })?;
        if let Err(error) = self.check(result) {
            return unknown(error.to_string());
        }
        let end = base.saturating_add(size as u64);
        if address.checked_add(len).is_none_or(|last| address < base || last > end) {
            return unknown(format!("the allocation there is {size} bytes at {base:#x}"));
        }
        Ok((base, size as u64))
    }
}
