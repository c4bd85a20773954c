//! Page-locking of host memory, as a driver would do it: `mlock`, and no range twice.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::{DeviceError, HostRegion, PinnedHost};

/// Registered page ranges: first address -> length in bytes.
#[derive(Default)]
pub(super) struct PinTable {
    ranges: Mutex<BTreeMap<u64, u64>>,
}

struct PinnedRange {
    table: Arc<PinTable>,
    start: u64,
    len: u64,
}

/// Locks the pages of `region` and remembers them.
pub(super) fn register(table: &Arc<PinTable>, region: HostRegion) -> Result<PinnedHost, DeviceError> {
    if region.is_empty() {
        return Err(DeviceError::Invalid {
            what: "length",
            value: 0,
            rule: "a registration needs at least one byte",
        });
    }
    let (start, len) = whole_pages(region.address(), region.len());
    table.enter(start, len)?;
    if let Err(error) = lock_pages(start, len) {
        // It may have locked a part.
        unlock_pages(start, len);
        table.leave(start);
        return Err(error);
    }
    let registration = PinnedRange { table: Arc::clone(table), start, len };
    Ok(PinnedHost::new(region, Box::new(registration)))
}

impl Drop for PinnedRange {
    fn drop(&mut self) {
        // Still mapped, since `PinnedHost` holds the region longer than this.
        unlock_pages(self.start, self.len);
        self.table.leave(self.start);
    }
}

impl PinTable {
    fn enter(&self, start: u64, len: u64) -> Result<(), DeviceError> {
        let mut ranges = self.ranges.lock();
        let end = start + len;
        if ranges.range(..end).next_back().is_some_and(|(&at, &size)| at + size > start) {
            return Err(DeviceError::AlreadyPinned { address: start, len });
        }
        ranges.insert(start, len);
        Ok(())
    }

    fn leave(&self, start: u64) {
        self.ranges.lock().remove(&start);
    }
}

fn page_bytes() -> u64 {
    // SAFETY: reads a constant of the system.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    u64::try_from(size).ok().filter(|size| size.is_power_of_two()).unwrap_or(4096)
}

fn whole_pages(address: u64, len: u64) -> (u64, u64) {
    let page = page_bytes();
    let start = address & !(page - 1);
    (start, (address + len).next_multiple_of(page) - start)
}

fn lock_pages(start: u64, len: u64) -> Result<(), DeviceError> {
    // SAFETY: `mlock` changes no byte and fails on ranges that are not mapped.
    if unsafe { libc::mlock(start as *const c_void, len as usize) } == 0 {
        return Ok(());
    }
    let error = std::io::Error::last_os_error();
    match (error.raw_os_error(), lock_limit()) {
        // Linux says ENOMEM beyond the limit, EPERM with a limit of zero, EAGAIN when it could lock
        // only a part.
        (Some(libc::ENOMEM | libc::EPERM | libc::EAGAIN), Some(limit)) => {
            Err(DeviceError::PinLimit { asked: len, limit })
        }
        _ => Err(DeviceError::from_io("mlock", &error)),
    }
}

/// Best effort: what stays locked costs the limit, not correctness.
fn unlock_pages(start: u64, len: u64) {
    // SAFETY: `munlock` changes no byte and fails on ranges that are not mapped.
    let _best_effort = unsafe { libc::munlock(start as *const c_void, len as usize) };
}

/// Soft limit of locked memory in bytes; `None` if there is none.
fn lock_limit() -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is a valid place for the result.
    let read = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) };
    (read == 0 && limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
}
