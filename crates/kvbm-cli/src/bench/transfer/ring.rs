//! The limit of disk paths: a bare loop on the engine's own slot file, in slots that the engine
//! does not use.
//!
//! It moves [`DEPTH`] single blocks at a time. Large blocks leave nothing above it; small ones do,
//! because the engine joins neighbours to requests of up to 4 MiB. With checksums it computes those
//! of all blocks, as the engine does: what the engine's processor time is compared with.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use io_uring::{IoUring, opcode, squeue, types};
use kvbm::device::HostRegion;
use kvbm::storage::{HugePages, SystemStorage};
use kvbm_disk::ContentCrc;

use super::fixture::{Disk, Order};
use super::load_generator::{Sample, Watch};

/// Blocks at the disk at a time.
pub(super) const DEPTH: usize = 32;
/// Most bytes of one registered buffer.
const REGISTERED: u64 = 1 << 30;
/// Marks the completion of a sync.
const SYNC: u64 = u64::MAX;

/// Which way the bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    Read,
    Write,
}

/// Whether the loop computes checksums of the blocks that it moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Checksums {
    No,
    Yes,
}

/// How the loop talks to the system.
enum Loop {
    /// A ring; whether its memory is registered.
    Ring(Box<Mutex<IoUring>>, bool),
    /// Calls on as many threads as the queue is deep, and why there is no ring.
    Calls(String),
}

/// A slot file, memory, and a loop between them.
pub(super) struct BareDisk {
    file: File,
    direct: bool,
    how: Loop,
    memory: HostRegion,
    block_bytes: u64,
    /// Where each block lies in the file.
    offsets: Vec<u64>,
    sync_interval: Duration,
}

impl BareDisk {
    /// A loop over the slots of fixture `number`, which must be unused, in this order. They are
    /// written once.
    pub(super) fn open(disk: &Disk, number: u32, order: Order) -> Result<Self> {
        let shape = disk.shape;
        let (file, direct) = open_slots(disk)?;
        let memory = SystemStorage::new(shape.set_bytes(), 4096, HugePages::Try)?.region().clone();
        // SAFETY: the memory is new, nobody else has a part of it yet.
        unsafe { memory.fill(0, memory.len(), 0x5A) }?;
        let stride = disk.engine.info().slot_stride;
        let slots = order.slots(number, shape.slots).into_iter();
        let offsets = slots.map(|slot| u64::from(slot) * stride).collect();
        let how = match ring(&file, &memory) {
            Ok((ring, registered)) => Loop::Ring(Box::new(Mutex::new(ring)), registered),
            Err(error) => Loop::Calls(error.to_string()),
        };
        let block_bytes = shape.block_bytes;
        let bare =
            Self { file, direct, how, memory, block_bytes, offsets, sync_interval: disk.commit_interval };
        bare.run(Way::Write, Checksums::No, Duration::ZERO)?;
        Ok(bare)
    }

    /// What the loop is, for people.
    pub(super) fn describe(&self) -> String {
        let direct = if self.direct { "direct" } else { "buffered (no O_DIRECT here)" };
        match &self.how {
            Loop::Ring(_, true) => format!("io_uring, {direct}, registered buffers, depth {DEPTH}"),
            Loop::Ring(_, false) => {
                format!("io_uring, {direct}, memlock limit too low to register buffers, depth {DEPTH}")
            }
            Loop::Calls(why) => format!("pread and pwrite, {direct}, {DEPTH} threads (no io_uring: {why})"),
        }
    }

    /// Reads or writes blocks, in turn, for `time` and until each was moved; what was written is
    /// durable at the end.
    pub(super) fn run(&self, way: Way, sums: Checksums, time: Duration) -> Result<Sample> {
        let watch = Watch::start();
        let moved = match &self.how {
            Loop::Ring(ring, registered) => match ring.lock() {
                Ok(mut ring) => self.run_ring(&mut ring, *registered, (way, sums), time, &watch),
                Err(_) => Err(io::Error::other("an earlier measurement panicked")),
            },
            Loop::Calls(_) => self.run_calls((way, sums), time, &watch),
        };
        let moved =
            moved.with_context(|| format!("the bare loop on the slot file failed ({})", self.describe()))?;
        if way == Way::Write {
            self.file.sync_data()?;
        }
        Ok(watch.stop(moved))
    }

    fn goes_on(&self, next: u64, time: Duration, watch: &Watch) -> bool {
        next < self.offsets.len() as u64 || watch.elapsed() < time
    }

    /// Memory and place in the file of the block that comes after `count` others.
    fn block(&self, count: u64) -> io::Result<(u64, *mut u8, u64)> {
        let index = count % self.offsets.len() as u64;
        let at = index * self.block_bytes;
        let start = self.memory.ptr_at(at, self.block_bytes).map_err(io::Error::other)?;
        Ok((at, start, self.offsets[index as usize]))
    }

    /// Computes the checksum of the block that comes after `count` others, which no request is at.
    fn sum(&self, count: u64, sums: Checksums) -> io::Result<()> {
        if sums == Checksums::Yes {
            let (_, start, _) = self.block(count)?;
            let mut crc = ContentCrc::new();
            // SAFETY: `block` checked the range; the kernel has completed the last request of this
            // block or not got the next.
            crc.update(unsafe { std::slice::from_raw_parts(start, self.block_bytes as usize) });
            std::hint::black_box(crc.finish());
        }
        Ok(())
    }

    fn entry(&self, count: u64, registered: bool, way: Way) -> io::Result<squeue::Entry> {
        let (at, start, offset) = self.block(count)?;
        let len = u32::try_from(self.block_bytes).map_err(io::Error::other)?;
        let file = types::Fixed(0);
        // A block that crosses from one registered buffer into the next is in neither.
        let buffer = (at / REGISTERED == (at + self.block_bytes - 1) / REGISTERED && registered)
            .then_some((at / REGISTERED) as u16);
        let entry = match (way, buffer) {
            (Way::Read, Some(buffer)) => {
                opcode::ReadFixed::new(file, start, len, buffer).offset(offset).build()
            }
            (Way::Write, Some(buffer)) => {
                opcode::WriteFixed::new(file, start, len, buffer).offset(offset).build()
            }
            (Way::Read, None) => opcode::Read::new(file, start, len).offset(offset).build(),
            (Way::Write, None) => opcode::Write::new(file, start, len).offset(offset).build(),
        };
        Ok(entry.user_data(count))
    }

    fn run_ring(
        &self,
        ring: &mut IoUring,
        registered: bool,
        (way, sums): (Way, Checksums),
        time: Duration,
        watch: &Watch,
    ) -> io::Result<u64> {
        let (mut next, mut flying, mut bytes) = (0, 0, 0);
        let (mut syncing, mut synced) = (false, Instant::now());
        let mut failed = None;
        loop {
            while failed.is_none() && flying < DEPTH && self.goes_on(next, time, watch) {
                if way == Way::Write {
                    self.sum(next, sums)?;
                }
                push(ring, &self.entry(next, registered, way)?)?;
                next += 1;
                flying += 1;
            }
            if way == Way::Write && !syncing && flying > 0 && synced.elapsed() >= self.sync_interval {
                let sync = opcode::Fsync::new(types::Fixed(0)).flags(types::FsyncFlags::DATASYNC).build();
                push(ring, &sync.user_data(SYNC))?;
                syncing = true;
            }
            if flying == 0 && !syncing {
                return failed.map_or(Ok(bytes), Err);
            }
            self.wait(ring)?;
            for completion in ring.completion() {
                let result = completion.result();
                let expected = if completion.user_data() == SYNC {
                    (syncing, synced) = (false, Instant::now());
                    0
                } else {
                    flying -= 1;
                    if way == Way::Read {
                        self.sum(completion.user_data(), sums)?;
                    }
                    self.block_bytes
                };
                match u64::try_from(result) {
                    Ok(moved) if moved == expected => bytes += moved,
                    Ok(moved) => {
                        failed = Some(io::Error::other(format!("{moved} bytes moved of {expected}")));
                    }
                    Err(_) => failed = Some(io::Error::from_raw_os_error(-result)),
                }
            }
        }
    }

    /// Submits what was pushed and waits for a completion.
    fn wait(&self, ring: &IoUring) -> io::Result<()> {
        loop {
            match ring.submit_and_wait(1) {
                Ok(_) => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    // The kernel may still be at the memory: it is never given back.
                    std::mem::forget(self.memory.clone());
                    return Err(error);
                }
            }
        }
    }

    fn run_calls(&self, (way, sums): (Way, Checksums), time: Duration, watch: &Watch) -> io::Result<u64> {
        let (next, over) = (AtomicU64::new(0), AtomicBool::new(false));
        let worker = || -> io::Result<u64> {
            let mut bytes = 0;
            loop {
                let count = next.fetch_add(1, Relaxed);
                if !self.goes_on(count, time, watch) {
                    return Ok(bytes);
                }
                if way == Way::Write {
                    self.sum(count, sums)?;
                }
                self.call(count, way)?;
                if way == Way::Read {
                    self.sum(count, sums)?;
                }
                bytes += self.block_bytes;
            }
        };
        std::thread::scope(|scope| {
            let syncer = scope.spawn(|| -> io::Result<()> {
                while way == Way::Write && !over.load(Relaxed) {
                    std::thread::sleep(self.sync_interval);
                    self.file.sync_data()?;
                }
                Ok(())
            });
            let workers: Vec<_> = (0..DEPTH).map(|_| scope.spawn(worker)).collect();
            let join = |worker: std::thread::ScopedJoinHandle<'_, io::Result<u64>>| {
                worker.join().unwrap_or_else(|_| Err(io::Error::other("a thread of the loop panicked")))
            };
            let moved = workers.into_iter().map(join).try_fold(0, |sum, moved| Ok(sum + moved?));
            over.store(true, Relaxed);
            syncer.join().unwrap_or_else(|_| Err(io::Error::other("the syncing thread panicked")))?;
            moved
        })
    }

    /// One block by one system call.
    fn call(&self, count: u64, way: Way) -> io::Result<()> {
        let (_, start, offset) = self.block(count)?;
        let (fd, len) = (self.file.as_raw_fd(), self.block_bytes as usize);
        let offset = libc::off_t::try_from(offset).map_err(io::Error::other)?;
        let moved = match way {
            // SAFETY: `block` checked the range of the memory; the other threads are at other
            // blocks.
            Way::Read => unsafe { libc::pread(fd, start.cast(), len, offset) },
            // SAFETY: as above.
            Way::Write => unsafe { libc::pwrite(fd, start.cast(), len, offset) },
        };
        match usize::try_from(moved) {
            Ok(moved) if moved == len => Ok(()),
            Ok(moved) => Err(io::Error::other(format!("{moved} bytes moved of {len}"))),
            Err(_) => Err(io::Error::last_os_error()),
        }
    }
}

fn push(ring: &mut IoUring, entry: &squeue::Entry) -> io::Result<()> {
    // SAFETY: the entry's memory belongs to the `BareDisk`, which waits for every completion before
    // it lets go of it.
    unsafe { ring.submission().push(entry) }.map_err(io::Error::other)
}

/// A ring with the file registered, and the memory where the system allows that.
fn ring(file: &File, memory: &HostRegion) -> io::Result<(IoUring, bool)> {
    let entries = (2 * DEPTH) as u32;
    let ring = IoUring::builder().setup_single_issuer().setup_defer_taskrun().build(entries);
    let ring = ring.or_else(|_| IoUring::new(entries))?;
    ring.submitter().register_files(&[file.as_raw_fd()])?;
    let mut buffers = Vec::new();
    for at in (0..memory.len()).step_by(REGISTERED as usize) {
        let len = REGISTERED.min(memory.len() - at);
        let start = memory.ptr_at(at, len).map_err(io::Error::other)?;
        buffers.push(libc::iovec { iov_base: start.cast(), iov_len: len as usize });
    }
    // SAFETY: the memory stays allocated as long as the ring is used: `BareDisk` holds both.
    let registered = unsafe { ring.submitter().register_buffers(&buffers) }.is_ok();
    Ok((ring, registered))
}

/// The engine's slot file, directly if possible.
fn open_slots(disk: &Disk) -> Result<(File, bool)> {
    let mut slots: Vec<PathBuf> = Vec::new();
    for entry in std::fs::read_dir(&disk.dir)? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with("slots") {
            slots.push(entry.path());
        }
    }
    let [path] = &slots[..] else {
        bail!("{} has {} slot files, one was expected", disk.dir.display(), slots.len())
    };
    let open = |flags| OpenOptions::new().read(true).write(true).custom_flags(flags).open(path);
    match open(libc::O_DIRECT) {
        Ok(file) => Ok((file, true)),
        Err(_) => Ok((open(0).with_context(|| format!("cannot open {}", path.display()))?, false)),
    }
}
