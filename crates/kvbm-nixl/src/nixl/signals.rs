//! Keeps the process's signal handlers: UCX installs its own while it starts, for SIGHUP too, and a
//! library must not change what a signal does to the program.

use std::mem::MaybeUninit;

/// Signals that UCX handles.
const SIGNALS: [i32; 6] =
    [libc::SIGHUP, libc::SIGILL, libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGUSR1];

/// What the signals did when this was made; dropping it puts that back.
pub(super) struct KeptHandlers {
    handlers: Vec<(i32, libc::sigaction)>,
}

impl KeptHandlers {
    pub(super) fn new() -> Self {
        let handlers = SIGNALS.into_iter().filter_map(|signal| Some((signal, current(signal)?)));
        Self { handlers: handlers.collect() }
    }
}

impl Drop for KeptHandlers {
    fn drop(&mut self) {
        for (signal, handler) in &self.handlers {
            // SAFETY: the handler is what the kernel gave for this signal; no old one is asked for.
            unsafe { libc::sigaction(*signal, handler, std::ptr::null_mut()) };
        }
    }
}

/// What a signal does now.
fn current(signal: i32) -> Option<libc::sigaction> {
    let mut handler = MaybeUninit::uninit();
    // SAFETY: a null new handler changes nothing; the old one is written to `handler`.
    let status = unsafe { libc::sigaction(signal, std::ptr::null(), handler.as_mut_ptr()) };
    // SAFETY: the call succeeded, so it has written the handler.
    (status == 0).then(|| unsafe { handler.assume_init() })
}
