//! Host memory that a GPU reaches: page-locked and registered, in parts on several threads, since
//! the system has to find and lock every page of it.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;

use super::functions::call;
use super::functions::sys::{CU_MEMHOSTREGISTER_PORTABLE, CUresult};
use super::{CudaContext, CudaDevice};
use crate::{DeviceError, HostRegion, PinnedHost};

/// How host memory is divided to be registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PinParts {
    /// Bytes of a part; rounded up to pages.
    pub bytes: u64,
    /// Threads that register, at least 1.
    pub threads: usize,
}

impl Default for PinParts {
    /// Parts of 256 MiB, on up to eight threads: what the system's own locks let through.
    fn default() -> Self {
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(8);
        Self { bytes: 256 << 20, threads }
    }
}

/// Registered until dropped.
struct HostRegistration {
    context: Arc<CudaContext>,
    start: u64,
}

impl Drop for HostRegistration {
    fn drop(&mut self) {
        let start = std::ptr::with_exposed_provenance_mut::<c_void>(self.start as usize);
        // SAFETY: registered once, unregistered once; still mapped, since `PinnedHost` holds the
        // region longer.
        self.context.release(|driver| unsafe { call!(driver, cuMemHostUnregister(start)) });
    }
}

/// All parts of a region, and the places where they meet.
struct HostRegistrations {
    context: Arc<CudaContext>,
    boundaries: Vec<u64>,
    parts: Vec<HostRegistration>,
}

impl Drop for HostRegistrations {
    fn drop(&mut self) {
        self.parts.clear();
        let mut boundaries = self.context.boundaries.write();
        for boundary in &self.boundaries {
            boundaries.remove(boundary);
        }
    }
}

impl CudaDevice {
    /// As [`Device::register_host`](crate::Device::register_host), divided as `parts` says.
    /// `progress` gets the bytes that are done and the bytes in all, from several threads.
    ///
    /// # Errors
    /// As [`Device::register_host`](crate::Device::register_host); then no part of the region stays
    /// registered.
    pub fn register_host_in_parts(
        &self,
        region: HostRegion,
        parts: PinParts,
        progress: &(dyn Fn(u64, u64) + Sync),
    ) -> Result<PinnedHost, DeviceError> {
        let context = &self.context;
        if region.is_empty() {
            let rule = "a registration needs at least one byte";
            return Err(DeviceError::Invalid { what: "length", value: 0, rule });
        }
        let page = page_bytes();
        let start = region.address() / page * page;
        let end = (region.address() + region.len()).next_multiple_of(page);
        let step = parts.bytes.max(1).next_multiple_of(page);
        let starts: Vec<u64> = (start..end).step_by(usize::try_from(step).unwrap_or(usize::MAX)).collect();
        // Known before anybody copies: a copy must lie in one registration.
        let held = register_all(context, &starts, (end, step), parts.threads, progress)?;
        // No copy uses the region before this returns. A region that was refused above has no
        // boundaries to remove.
        let boundaries = starts[1..].to_vec();
        context.boundaries.write().extend(&boundaries);
        let held = HostRegistrations { context: Arc::clone(context), boundaries, parts: held };
        Ok(PinnedHost::new(region, Box::new(held)))
    }
}

/// Registers the parts that begin at `starts`; the last one ends at `end`, the others are `step`
/// bytes long.
fn register_all(
    context: &Arc<CudaContext>,
    starts: &[u64],
    (end, step): (u64, u64),
    threads: usize,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<Vec<HostRegistration>, DeviceError> {
    let total = end - starts[0];
    let (next, done, failed) = (Mutex::new(starts.iter()), AtomicU64::new(0), AtomicBool::new(false));
    let some = || -> Result<Vec<HostRegistration>, DeviceError> {
        let mut held = Vec::new();
        while !failed.load(Ordering::Relaxed) {
            let Some(start) = next.lock().next() else { break };
            let len = step.min(end - start);
            held.push(register(context, *start, len).inspect_err(|_| failed.store(true, Ordering::Relaxed))?);
            progress(done.fetch_add(len, Ordering::Relaxed) + len, total);
        }
        Ok(held)
    };
    let others = threads.clamp(1, starts.len()) - 1;
    let results: Vec<_> = std::thread::scope(|scope| {
        // Where the system refuses threads, fewer do it.
        let spawn = |_| std::thread::Builder::new().name("kvbm-pin".into()).spawn_scoped(scope, some).ok();
        let threads: Vec<_> = (0..others).filter_map(spawn).collect();
        let mine = some();
        let gone = || Err(DeviceError::Abandoned { what: "a thread that registers host memory" });
        let theirs = threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| gone()));
        theirs.chain([mine]).collect()
    });
    let mut all = Vec::new();
    let mut error = None;
    for result in results {
        match result {
            Ok(held) => all.extend(held),
            Err(refused) => error = Some(refused),
        }
    }
    error.map_or(Ok(all), Err)
}

fn register(context: &Arc<CudaContext>, start: u64, len: u64) -> Result<HostRegistration, DeviceError> {
    let pages = std::ptr::with_exposed_provenance_mut::<c_void>(start as usize);
    let result = context.in_context(|driver| {
        // Page-locked for every context of the process.
        let flags = CU_MEMHOSTREGISTER_PORTABLE;
        // SAFETY: the pages of the region are mapped, and stay so until `PinnedHost` drops it.
        unsafe { call!(driver, cuMemHostRegister_v2(pages, len as usize, flags)) }
    })?;
    if result.is(CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED) {
        return Err(DeviceError::AlreadyPinned { address: start, len });
    }
    if result.is(CUresult::CUDA_ERROR_OUT_OF_MEMORY) {
        return Err(DeviceError::PinLimit { asked: len, limit: lock_limit() });
    }
    context.check(result)?;
    Ok(HostRegistration { context: Arc::clone(context), start })
}

/// The system's entry for the device's place on the bus; -1 there means a single node.
pub(super) fn numa_node(context: &CudaContext) -> Option<u32> {
    let name = context.text(|text, bytes| {
        // SAFETY: it writes at most as many bytes as it is told there are, a NUL among them.
        unsafe { call!(context.functions(), cuDeviceGetPCIBusId(text, bytes, context.handle)) }
    });
    let name = name.ok()?.to_lowercase();
    let text = std::fs::read_to_string(format!("/sys/bus/pci/devices/{name}/numa_node")).ok()?;
    text.trim().parse().ok()
}

fn page_bytes() -> u64 {
    // SAFETY: reads a constant of the system.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    u64::try_from(size).ok().filter(|size| size.is_power_of_two()).unwrap_or(4096)
}

fn lock_limit() -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: writes a structure through a pointer to one.
    let failed = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) };
    if failed == 0 { limit.rlim_cur } else { 0 }
}
