//! A real directory whose slot file fails, stalls or lies on request.

use kvbm_disk::medium::{BlockFile, DirMedium, Medium, OpenFile};
use parking_lot::{Condvar, Mutex};
use std::io::{self, IoSlice, IoSliceMut};
use std::path::Path;
use std::sync::Arc;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskFault {
    /// `EIO` from reads that touch this file offset.
    FailRead(u64),
    /// `EIO` from writes that touch this file offset.
    FailWrite(u64),
    /// Reads at this file offset wait until the fault is cleared.
    StallRead(u64),
    /// Writes at this file offset wait until the fault is cleared.
    StallWrite(u64),
    /// Making writes durable waits until the fault is cleared.
    StallSync,
    /// `EIO` from making writes durable.
    FailSync,
}

#[derive(Debug, Default)]
struct Faults {
    active: Mutex<(Vec<DiskFault>, usize)>,
    changed: Condvar,
}

impl Faults {
    /// Waits while stalled; an error if the operation is to fail.
    fn apply(&self, write: bool, offset: u64, len: u64) -> io::Result<()> {
        let hits = |at: u64| (offset..offset + len).contains(&at);
        let mut active = self.active.lock();
        loop {
            let fails = active.0.iter().any(|fault| match fault {
                DiskFault::FailRead(at) => !write && hits(*at),
                DiskFault::FailWrite(at) => write && hits(*at),
                _ => false,
            });
            if fails {
                return Err(io::Error::from_raw_os_error(5));
            }
            let stalls = active.0.iter().any(|fault| match fault {
                DiskFault::StallRead(at) => !write && hits(*at),
                DiskFault::StallWrite(at) => write && hits(*at),
                _ => false,
            });
            if !stalls {
                return Ok(());
            }
            active.1 += 1;
            self.changed.notify_all();
            self.changed.wait(&mut active);
            active.1 -= 1;
        }
    }
}

impl Faults {
    /// Waits while stalled; an error if it is to fail.
    fn apply_sync_fault(&self) -> io::Result<()> {
        let mut active = self.active.lock();
        while active.0.contains(&DiskFault::StallSync) {
            active.1 += 1;
            self.changed.notify_all();
            self.changed.wait(&mut active);
            active.1 -= 1;
        }
        let fails = active.0.contains(&DiskFault::FailSync);
        if fails { Err(io::Error::from_raw_os_error(5)) } else { Ok(()) }
    }
}

#[derive(Debug)]
pub struct FaultMedium {
    inner: DirMedium,
    faults: Arc<Faults>,
}

impl FaultMedium {
    pub fn at(dir: &Path) -> Self {
        Self { inner: DirMedium::lock(dir).unwrap(), faults: Arc::default() }
    }

    pub fn inject(&self, fault: DiskFault) {
        self.faults.active.lock().0.push(fault);
    }

    /// Ends all faults.
    pub fn clear(&self) {
        self.faults.active.lock().0.clear();
        self.faults.changed.notify_all();
    }

    /// Waits until an operation is stalled.
    pub fn wait_stalled(&self) {
        let mut active = self.faults.active.lock();
        while active.1 == 0 {
            assert!(
                !self.faults.changed.wait_until(&mut active, super::soon()).timed_out(),
                "nothing stalled"
            );
        }
    }
}

impl Medium for FaultMedium {
    fn location(&self) -> String {
        self.inner.location()
    }

    fn open(&self, name: &str, how: OpenFile) -> io::Result<Arc<dyn BlockFile>> {
        let inner = self.inner.open(name, how)?;
        if !name.contains("slots") {
            return Ok(inner);
        }
        Ok(Arc::new(FaultFile { inner, faults: Arc::clone(&self.faults) }))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.inner.rename(from, to)
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.inner.remove(name)
    }

    fn sync_dir(&self) -> io::Result<()> {
        self.inner.sync_dir()
    }
}

#[derive(Debug)]
struct FaultFile {
    inner: Arc<dyn BlockFile>,
    faults: Arc<Faults>,
}

impl BlockFile for FaultFile {
    fn len(&self) -> io::Result<u64> {
        self.inner.len()
    }

    fn read_at(&self, offset: u64, buffers: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        self.faults.apply(false, offset, buffers.iter().map(|buffer| buffer.len() as u64).sum())?;
        self.inner.read_at(offset, buffers)
    }

    fn write_at(&self, offset: u64, buffers: &[IoSlice<'_>]) -> io::Result<usize> {
        self.faults.apply(true, offset, buffers.iter().map(|buffer| buffer.len() as u64).sum())?;
        self.inner.write_at(offset, buffers)
    }

    fn set_len(&self, bytes: u64) -> io::Result<()> {
        self.inner.set_len(bytes)
    }

    fn reserve(&self, bytes: u64) -> io::Result<bool> {
        self.inner.reserve(bytes)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.faults.apply_sync_fault()?;
        self.inner.sync_data()
    }

    fn drop_cache(&self) {
        self.inner.drop_cache();
    }
}
