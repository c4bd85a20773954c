//! The seam to what moves bytes between memory and slot files in the place of system calls.

use crate::IoMemory;
use std::fmt::Debug;
use std::io;
use std::os::fd::OwnedFd;

/// Moves bytes between memory and the slot files of an engine, in the place of system calls
/// ([`EngineMode::Custom`](crate::EngineMode::Custom)).
///
/// It moves bytes and nothing else. What a slot holds, checksums, encryption, syncs, the journal
/// and deadlines stay the engine's.
pub trait SlotIo: Debug + Send + Sync {
    /// One word for messages and status.
    fn name(&self) -> &'static str;

    /// What it works with, for people.
    fn describe(&self) -> String;

    /// Whether it may report a write as whole that found no room for all its bytes. An engine needs
    /// a file system that reserves the space of slot files then.
    fn hides_short_writes(&self) -> bool {
        false
    }

    /// Prepares to move bytes of `files`, the slot files in the order of their directories. An
    /// engine opens a lane in each of its threads.
    ///
    /// # Errors
    /// What is missing, and the way out.
    fn open_lane(&self, files: Vec<OwnedFd>) -> io::Result<Box<dyn SlotIoLane>>;

    /// Makes memory known that many requests of all lanes will use.
    ///
    /// # Errors
    /// Why it is not known. Its blocks go through a buffer of the engine then.
    fn register(&self, memory: IoMemory) -> io::Result<()>;
}

/// What one thread of an engine moves bytes through, one request after the other.
pub trait SlotIoLane {
    /// Makes memory known to this lane alone: the buffer of its thread.
    ///
    /// # Errors
    /// Why it is not known. Blocks that need the buffer fail then.
    fn register(&mut self, memory: IoMemory) -> io::Result<()>;

    /// Whether a request may name this run of memory: `len` bytes from `start` on.
    fn knows(&mut self, start: *mut u8, len: usize) -> bool;

    /// Moves the bytes of a request, and says how many: the first so many of its runs.
    ///
    /// It returns when nothing reads or writes the memory any more, after an error too. A request
    /// that hangs keeps its thread, as a system call does.
    ///
    /// # Errors
    /// Why not all bytes were moved. Then none counts.
    ///
    /// # Safety
    /// Until the call returns, the memory of the runs is valid. For a write it can be read. For a
    /// read it can be written, and nobody else reads or writes it.
    unsafe fn transfer(&mut self, request: &SlotIoRequest<'_>) -> io::Result<u64>;
}

/// What to move. Its runs are known to the lane; where the files are opened for direct I/O,
/// addresses, lengths and the offset are aligned for that.
#[derive(Clone, Copy, Debug)]
pub struct SlotIoRequest<'a> {
    /// From memory to the file.
    pub write: bool,
    /// The slot file, counted from 0.
    pub file: usize,
    /// Where the bytes lie in it.
    pub offset: u64,
    /// Runs of memory, in the order of the bytes: start, and length in bytes.
    pub runs: &'a [(*mut u8, usize)],
}
