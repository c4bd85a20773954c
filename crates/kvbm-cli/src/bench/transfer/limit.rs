//! The limit of copies between memories: memcpy of the same fragments.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use kvbm::device::HostRegion;
use kvbm::layout::{CopyPlan, Selection};
use kvbm::plan::Path;
use kvbm::storage::{BoundLayout, HugePages, RegionBytes, SystemAllocator};

use super::bed::Bed;
use super::pump::{Sample, Watch};

/// No memory needs more to be busy.
const MAX_THREADS: usize = 8;

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
    _memory: [BoundLayout; 2],
}

impl Copies {
    pub(super) fn new(bed: &Bed) -> Result<Self> {
        // The pages that the worker's memories have.
        let memory = [(&bed.g1, HugePages::No), (&bed.g2, HugePages::Try)].map(|(tier, huge_pages)| {
            BoundLayout::allocate(Arc::clone(tier.layout()), &SystemAllocator { huge_pages })
        });
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
        Ok(Self { list: copies, per_block, bytes: bed.shape.set_bytes(), _memory: memory })
    }

    /// Copies all fragments on one thread, again and again, for `time`.
    pub(super) fn run(&self, path: Path, time: Duration) -> Sample {
        self.run_on(1, path, time)
    }

    /// Bytes (10^9) per second on the number of threads that copies most.
    pub(super) fn on_all_cores(&self, path: Path) -> f64 {
        let most = std::thread::available_parallelism().map_or(1, usize::from).min(MAX_THREADS);
        let rate = |threads| self.run_on(threads, path, Duration::ZERO).gb_per_s();
        (1..=most).flat_map(|threads| [rate(threads), rate(threads), rate(threads)]).fold(0.0, f64::max)
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
