//! Wakes the ring's thread: an eventfd, which a ring can wait for beside its operations.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;

/// A counter of the kernel that can be waited for. Clones are the same wake event.
#[derive(Clone, Debug)]
pub(in crate::executor) struct WakeEvent(Arc<OwnedFd>);

impl WakeEvent {
    pub(super) fn new() -> io::Result<Self> {
        // SAFETY: a system call without memory.
        let fd = unsafe { libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor is new and nobody else's.
        Ok(Self(Arc::new(unsafe { OwnedFd::from_raw_fd(fd) })))
    }

    pub(super) fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    /// Wakes who waits, or the next one that will.
    pub(in crate::executor) fn ring(&self) {
        let one = 1_u64.to_ne_bytes();
        // A full counter has woken the thread already.
        // SAFETY: eight bytes that live through the call.
        let _written = unsafe { libc::write(self.fd(), one.as_ptr().cast(), one.len()) };
    }

    /// Silences the wake event.
    pub(super) fn reset(&self) {
        let mut count = [0_u8; 8];
        // SAFETY: eight bytes that live through the call; the descriptor never blocks.
        let _read = unsafe { libc::read(self.fd(), count.as_mut_ptr().cast(), count.len()) };
    }

    /// Waits for the wake event, or until there is something to read from `other`, and silences the
    /// wake event.
    pub(super) fn wait(&self, other: Option<RawFd>) {
        // A number below zero stands for no descriptor.
        let both = [self.fd(), other.unwrap_or(-1)];
        let mut polls = both.map(|fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 });
        // SAFETY: two structures that live through the call.
        let _ready = unsafe { libc::poll(polls.as_mut_ptr(), 2, -1) };
        self.reset();
    }
}
