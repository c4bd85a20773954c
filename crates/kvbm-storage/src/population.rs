//! Pages of host memory, provided before they are used.
//!
//! The system provides a page when it is touched first. That takes longer than the copy of a block
//! into it, and on a virtual machine up to thirty times as long.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use kvbm_device::HostRegion;

use crate::mapping;

/// Bytes that one system call populates. A stop waits for the end of that call.
const STEP: u64 = 4 << 20;
/// Bytes between two checks of the machine's free memory.
const LOOK: u64 = 64 << 20;
/// The share of the machine's memory that stays free.
const RESERVE: u64 = 16;

/// Touches host memory in the background. Its contents stay as they are, whoever uses it meanwhile.
/// Dropping it stops the thread.
#[derive(Debug)]
pub struct Population {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Population {
    /// Starts with the first byte of the first region. `merges`: has the system make huge pages of
    /// shared memory, which it does not by itself. `ended` is called on the thread when it ends.
    ///
    /// # Errors
    /// The system refuses a thread.
    pub fn start(
        regions: Vec<HostRegion>,
        merges: bool,
        ended: impl FnOnce(PopulationEnd) + Send + 'static,
    ) -> io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::Builder::new().name("kvbm-populate".to_owned());
        let thread = thread.spawn(move || ended(populate(&regions, merges, &stopped, available)))?;
        Ok(Self { stop, thread: Some(thread) })
    }

    /// Waits until all is populated, or as much as can be.
    pub fn wait(mut self) {
        self.join();
    }

    fn join(&mut self) {
        // A panic of `ended` is its caller's, who has seen its message.
        drop(self.thread.take().map(JoinHandle::join));
    }
}

impl Drop for Population {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.join();
    }
}

/// How a population ended.
#[derive(Debug)]
pub enum PopulationEnd {
    /// Every page is there.
    Complete {
        /// Bytes for which the kernel accepted the request for huge pages.
        merged: u64,
    },
    /// It was dropped.
    Stopped,
    /// Little memory is left on this machine.
    Low {
        /// Bytes that are there.
        done: u64,
        /// Bytes that the machine has left.
        available: u64,
    },
    /// The system does not provide pages ahead of their use.
    Refused {
        /// Bytes that are there.
        done: u64,
        /// What it says.
        error: io::Error,
    },
}

/// `memory`: bytes that are available and bytes in all, where the system says so.
fn populate(
    regions: &[HostRegion],
    merges: bool,
    stop: &AtomicBool,
    memory: impl Fn() -> Option<(u64, u64)>,
) -> PopulationEnd {
    let (mut done, mut looked, mut merged) = (0, None, 0);
    let mut merges = merges;
    for region in regions {
        let mut at = 0;
        while at < region.len() {
            if stop.load(Ordering::Relaxed) {
                return PopulationEnd::Stopped;
            }
            if looked.is_none_or(|looked| done - looked >= LOOK) {
                looked = Some(done);
                if let Some((available, total)) = memory()
                    && available < total / RESERVE + LOOK
                {
                    return PopulationEnd::Low { done, available };
                }
            }
            let step = STEP.min(region.len() - at);
            if merges {
                match mapping::collapse(region, at, step) {
                    Ok(()) => merged += step,
                    // It cannot: the others had the wrong pages, or no memory in one piece.
                    Err(error) if error.kind() == io::ErrorKind::InvalidInput => merges = false,
                    Err(_) => {}
                }
            }
            if let Err(error) = mapping::populate(region, at, step) {
                return PopulationEnd::Refused { done, error };
            }
            (at, done) = (at + step, done + step);
        }
    }
    PopulationEnd::Complete { merged }
}

/// Memory of the machine: what is available, and all of it.
fn available() -> Option<(u64, u64)> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = |name: &str| -> Option<u64> {
        let value = text.lines().find_map(|line| line.strip_prefix(name))?;
        Some(value.trim_start_matches(':').split_whitespace().next()?.parse::<u64>().ok()? << 10)
    };
    Some((line("MemAvailable")?, line("MemTotal")?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{HugePages, SystemStorage};

    fn memory(len: u64) -> SystemStorage {
        SystemStorage::new(len, 4096, HugePages::No).unwrap()
    }

    /// Pages of this process that are in memory, of `region`.
    fn resident(region: &HostRegion) -> usize {
        let pages = region.len().div_ceil(4096) as usize;
        let mut seen = vec![0_u8; pages];
        // SAFETY: the range is mapped, and `seen` has a byte for each of its pages.
        let result =
            unsafe { libc::mincore(region.as_ptr().cast(), region.len() as usize, seen.as_mut_ptr()) };
        assert_eq!(result, 0, "{}", io::Error::last_os_error());
        seen.iter().filter(|page| **page & 1 == 1).count()
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri has no pages")]
    fn every_page_is_there_and_no_byte_changes() {
        let (first, second) = (memory((9 << 20) + 4096), memory(8192));
        let bytes = [7_u8; 16];
        // SAFETY: nobody else knows the memory.
        unsafe { first.region().write_at(5 << 20, &bytes) }.unwrap();
        assert!(resident(first.region()) < 600);
        let regions = vec![first.region().clone(), second.region().clone()];
        Population::start(regions, false, |_| ()).unwrap().wait();
        assert_eq!(resident(first.region()), 9 * 256 + 1);
        assert_eq!(resident(second.region()), 2);
        let mut read = [0; 16];
        // SAFETY: nobody writes.
        unsafe { first.region().read_at(5 << 20, &mut read) }.unwrap();
        assert_eq!(read, bytes);
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri has no pages")]
    fn little_memory_and_a_stop_end_it() {
        let storage = memory(LOOK + STEP);
        let regions = [storage.region().clone()];
        let run = AtomicBool::new(false);
        let looks = std::cell::Cell::new(0);
        let scarce = || {
            looks.set(looks.get() + 1);
            Some((if looks.get() == 1 { 1 << 40 } else { LOOK }, 1 << 34))
        };
        assert!(matches!(
            populate(&regions, false, &run, scarce),
            PopulationEnd::Low { done: LOOK, available: LOOK }
        ));
        let stopped = AtomicBool::new(true);
        assert!(matches!(populate(&regions, false, &stopped, || None), PopulationEnd::Stopped));
        assert!(matches!(populate(&regions, false, &run, || None), PopulationEnd::Complete { merged: 0 }));
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn the_machine_says_how_much_memory_it_has() {
        let (available, total) = available().unwrap();
        assert!(0 < available && available <= total, "{available} of {total}");
    }
}
