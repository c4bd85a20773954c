//! The limit of copies between memories: memcpy of the same fragments.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use kvbm::device::HostRegion;
use kvbm::layout::{CopyPlan, Selection};
use kvbm::plan::Path;
use kvbm::storage::{BoundLayout, RegionBytes, SystemAllocator};

use super::bed::Bed;
use super::pump::{Sample, Watch};

/// One fragment of a block: where it lies in the memory that stands for G1, and in that which stands for G2.
struct Copy {
    g1: *mut u8,
    g2: *mut u8,
    len: usize,
}

// SAFETY: the addresses lie in memory that `Copies` holds and that belongs to no thread.
unsafe impl Sync for Copy {}

/// The fragments of all blocks of a bed, in host memory laid out like its G1 and G2.
pub(super) struct Copies {
    /// Block by block.
    list: Vec<Copy>,
    per_block: usize,
    bytes: u64,
    threads: usize,
    _memory: [BoundLayout; 2],
}

impl Copies {
    pub(super) fn new(bed: &Bed) -> Result<Self> {
        let memory = [bed.g1.layout(), bed.g2.layout()]
            .map(|layout| BoundLayout::allocate(Arc::clone(layout), &SystemAllocator::default()));
        let [g1, g2] = memory;
        let memory = [g1?, g2?];
        let [from, to] = [host_regions(&memory[0])?, host_regions(&memory[1])?];
        let selection = Selection::all();
        let plan = CopyPlan::between(memory[0].layout().as_ref(), memory[1].layout().as_ref(), &selection)?;
        let mut copies = Vec::new();
        for block in 0..bed.shape.slots {
            let [src, dst, _] = bed.slots_of(block);
            for run in plan.runs(src.0, dst.0)? {
                let g1 = from[run.src_region as usize].ptr_at(run.src_offset, run.len)?;
                let g2 = to[run.dst_region as usize].ptr_at(run.dst_offset, run.len)?;
                copies.push(Copy { g1, g2, len: usize::try_from(run.len)? });
            }
        }
        for region in from.iter().chain(&to) {
            // Pages that were never written are all the same one.
            region.fill(0, region.len(), 1)?;
        }
        let per_block = copies.len() / bed.shape.slots as usize;
        let mut limit =
            Self { list: copies, per_block, bytes: bed.shape.set_bytes(), threads: 1, _memory: memory };
        limit.threads = limit.best_threads();
        Ok(limit)
    }

    pub(super) fn threads(&self) -> usize {
        self.threads
    }

    /// Copies all fragments, again and again, for `time`.
    pub(super) fn run(&self, path: Path, time: Duration) -> Sample {
        self.run_on(self.threads, path, time)
    }

    /// The number of threads that copies most.
    fn best_threads(&self) -> usize {
        let most = std::thread::available_parallelism().map_or(1, usize::from).min(8);
        let rate = |threads: usize| {
            let sample = || self.run_on(threads, Path::G1_G2, Duration::ZERO).gb_per_s();
            (0..3).map(|_| sample()).fold(0.0, f64::max)
        };
        let rates: Vec<(usize, f64)> = (1..=most).map(|threads| (threads, rate(threads))).collect();
        rates.iter().max_by(|a, b| a.1.total_cmp(&b.1)).map_or(1, |best| best.0)
    }

    fn run_on(&self, threads: usize, path: Path, time: Duration) -> Sample {
        let share = self.list.len().div_ceil(threads).next_multiple_of(self.per_block);
        let mut bytes = 0;
        let watch = Watch::start();
        while bytes == 0 || watch.elapsed() < time {
            std::thread::scope(|scope| {
                for part in self.list.chunks(share) {
                    scope.spawn(move || part.iter().for_each(|copy| copy.run(path)));
                }
            });
            bytes += self.bytes;
        }
        watch.stop(bytes)
    }
}

impl Copy {
    fn run(&self, path: Path) {
        let (from, to) = if path == Path::G1_G2 { (self.g1, self.g2) } else { (self.g2, self.g1) };
        // SAFETY: both ranges were checked to lie in memory that `Copies` holds; they are of two allocations, and no two
        // copies have bytes in common, so threads work on different ones.
        unsafe { from.copy_to_nonoverlapping(to, self.len) };
    }
}

fn host_regions(bound: &BoundLayout) -> Result<Vec<HostRegion>> {
    let host = |bytes: &RegionBytes| match bytes {
        RegionBytes::Host(region) => Some(region.clone()),
        _ => None,
    };
    bound.memory().iter().map(host).collect::<Option<_>>().context("host memory was asked for")
}
