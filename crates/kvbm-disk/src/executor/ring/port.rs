//! The seam between the driver and what moves bytes.

use crate::IoMemory;
use libc::iovec;
use std::io;

/// Which operation of the driver a request belongs to.
pub(super) type Ticket = u16;

/// A slot file, and an offset in it.
pub(super) type FileOffset = (usize, u64);

/// A request that is over: how many bytes it moved.
pub(super) type Completed = (Ticket, io::Result<usize>);

/// Moves bytes between memory and the slot files, many requests at a time. Used from one thread.
///
/// Dropping a port waits until no request is under way: the kernel must not write memory that is
/// gone.
pub(super) trait Port {
    /// Takes a request over some memory runs, from the first of `runs` on, and says for how many
    /// bytes. It starts at the latest with the next call of [`Port::submit`], [`Port::poll`] or
    /// [`Port::wait`]. At most `depth` requests are under way, one per ticket.
    ///
    /// # Safety
    /// Until the completion of `ticket` is returned, `runs` stays where it is, and its memory is
    /// valid. For a write it can be read. For a read it can be written, and nobody else writes it.
    unsafe fn start(&mut self, ticket: Ticket, write: bool, at: FileOffset, runs: &[iovec]) -> u64;

    /// Whether two runs of memory, the second of which starts where the first ends, may be named as
    /// one.
    fn joins(&self, run: &iovec, next: &iovec) -> bool;

    /// Lets the hardware begin with what was started.
    fn submit(&mut self);

    /// Adds what is over to `into`, without waiting.
    fn poll(&mut self, into: &mut Vec<Completed>);

    /// Like [`Port::poll`]; waits until something is over or the wake event rings.
    fn wait(&mut self, into: &mut Vec<Completed>);

    /// Makes memory known that many requests will use. Keeps its owner until the port is dropped.
    /// Returns how many bytes are known now, and why not all of them.
    fn register(&mut self, memory: IoMemory) -> (u64, Option<String>);

    /// The reason why requests use system calls from now on; returned once.
    fn changed_way(&mut self) -> Option<String> {
        None
    }
}
