//! The limit of copies between memories: the same fragments, by the faster of two kernels, on as
//! many threads as help.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use kvbm::device::{HostRegion, StreamingCopy, copy_streaming};
use kvbm::layout::{CopyPlan, Selection};
use kvbm::plan::Path;
use kvbm::storage::{BoundLayout, HugePages, RegionBytes, SystemAllocator};

use kvbm_disk::ContentCrc;

use super::fixture::Fixture;
use super::load_generator::{Sample, Watch};

/// No memory needs more to be busy.
const MAX_THREADS: usize = 8;

/// What copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kernel {
    /// `memcpy` of the C library.
    Memcpy,
    /// The kernel of the emulated device, past the caches.
    Streaming,
}

const KERNELS: [Kernel; 2] = [Kernel::Memcpy, Kernel::Streaming];

/// One fragment of a block: where it lies in the memory that stands for G1, and in that which
/// stands for G2.
struct Copy {
    g1: *mut u8,
    g2: *mut u8,
    len: usize,
}

// SAFETY: the addresses lie in memory that `Copies` holds and that belongs to no thread.
unsafe impl Sync for Copy {}

/// The fragments of all blocks of a fixture, in host memory laid out like its G1 and G2.
pub(super) struct Copies {
    /// Block by block.
    list: Vec<Copy>,
    per_block: usize,
    bytes: u64,
    _memory: [BoundLayout; 2],
}

impl Copies {
    pub(super) fn new(fixture: &Fixture) -> Result<Self> {
        // The pages that the worker's memories have.
        let memory =
            [(&fixture.g1, HugePages::No), (&fixture.g2, HugePages::Try)].map(|(tier, huge_pages)| {
                BoundLayout::allocate(Arc::clone(tier.layout()), &SystemAllocator { huge_pages })
            });
        let [g1, g2] = memory;
        let memory = [g1?, g2?];
        let [from, to] = [host_regions(&memory[0])?, host_regions(&memory[1])?];
        let selection = Selection::all();
        let plan = CopyPlan::between(memory[0].layout().as_ref(), memory[1].layout().as_ref(), &selection)?;
        let mut copies = Vec::new();
        for block in 0..fixture.shape.slots {
            let [src, dst, _] = fixture.slots_of(block);
            for run in plan.runs(src.0, dst.0)? {
                let g1 = from[run.src_region as usize].ptr_at(run.src_offset, run.len)?;
                let g2 = to[run.dst_region as usize].ptr_at(run.dst_offset, run.len)?;
                copies.push(Copy { g1, g2, len: usize::try_from(run.len)? });
            }
        }
        for region in from.iter().chain(&to) {
            // Pages that were never written are all the same one.
            // SAFETY: the memory is new, the copies that use it have not begun.
            unsafe { region.fill(0, region.len(), 1) }?;
        }
        let per_block = copies.len() / fixture.shape.slots as usize;
        Ok(Self { list: copies, per_block, bytes: fixture.shape.set_bytes(), _memory: memory })
    }

    /// Copies all fragments with each kernel on each number of threads, again and again, together
    /// for `time`. What was fastest.
    pub(super) fn run(&self, path: Path, time: Duration) -> Sample {
        let most = std::thread::available_parallelism().map_or(1, usize::from).min(MAX_THREADS);
        let ways = KERNELS.into_iter().flat_map(|kernel| (1..=most).map(move |threads| (kernel, threads)));
        let each = time / (KERNELS.len() * most) as u32;
        let samples = ways
            .map(|(kernel, threads)| self.run_on(threads, each, |copies| run_copies(copies, kernel, path)));
        samples.max_by(|a, b| a.gb_per_s().total_cmp(&b.gb_per_s())).unwrap_or_default()
    }

    /// Copies all fragments on one thread and computes the checksum of what it copies, as the
    /// engine does, for `time`.
    pub(super) fn run_with_checksums(&self, path: Path, time: Duration) -> Sample {
        self.run_on(1, time, |copies| {
            for block in copies.chunks(self.per_block) {
                let mut crc = ContentCrc::new();
                for copy in block {
                    let (from, _) = copy.ends(path);
                    // SAFETY: the range lies in memory that `Copies` holds; no other thread writes
                    // there, since there is one.
                    crc.update(unsafe { std::slice::from_raw_parts(from, copy.len) });
                }
                run_copies(block, Kernel::Streaming, path);
                std::hint::black_box(crc.finish());
            }
        })
    }

    fn run_on(&self, threads: usize, time: Duration, copies: impl Fn(&[Copy]) + Sync) -> Sample {
        let share = self.list.len().div_ceil(threads).next_multiple_of(self.per_block);
        let (mut bytes, copies) = (0, &copies);
        let watch = Watch::start();
        while bytes == 0 || watch.elapsed() < time {
            std::thread::scope(|scope| {
                for part in self.list.chunks(share) {
                    scope.spawn(move || copies(part));
                }
            });
            bytes += self.bytes;
        }
        watch.stop(bytes)
    }
}

impl Copy {
    /// Where it reads and where it writes.
    fn ends(&self, path: Path) -> (*const u8, *mut u8) {
        if path == Path::G1_G2 { (self.g1, self.g2) } else { (self.g2, self.g1) }
    }
}

fn run_copies(copies: &[Copy], kernel: Kernel, path: Path) {
    match kernel {
        Kernel::Memcpy => {
            for copy in copies {
                let (from, to) = copy.ends(path);
                // SAFETY: both ranges were checked to lie in memory that `Copies` holds; they are
                // of two allocations, and no two copies have bytes in common, so threads work on
                // different ones.
                unsafe { from.copy_to_nonoverlapping(to, copy.len) };
            }
        }
        Kernel::Streaming => {
            let streaming = |copy: &Copy| {
                let (from, to) = copy.ends(path);
                StreamingCopy { from, to, len: copy.len }
            };
            let list: Vec<_> = copies.iter().map(streaming).collect();
            // SAFETY: as above.
            unsafe { copy_streaming(&list) };
        }
    }
}

fn host_regions(bound: &BoundLayout) -> Result<Vec<HostRegion>> {
    let host = |bytes: &RegionBytes| match bytes {
        RegionBytes::Host(region) => Some(region.clone()),
        _ => None,
    };
    bound.memory().iter().map(host).collect::<Option<_>>().context("host memory was asked for")
}
