//! Ctrl-C and SIGTERM: the first one asks a long command to stop and clean up, the second one ends
//! the process at once.

use std::sync::atomic::{AtomicBool, Ordering};

static ASKED: AtomicBool = AtomicBool::new(false);

/// From now on the first signal only sets what [`asked`] tells. A signal that the process was
/// started to ignore (as under `nohup`) stays ignored.
pub fn catch() {
    for signal in [libc::SIGINT, libc::SIGTERM] {
        let handler: extern "C" fn(libc::c_int) = on_signal;
        // SAFETY: `on_signal` has the signature of a handler and does only what is allowed in one.
        let before = unsafe { libc::signal(signal, handler as libc::sighandler_t) };
        if before == libc::SIG_IGN {
            // SAFETY: SIG_IGN is a valid disposition of both signals; it was the one before.
            unsafe { libc::signal(signal, libc::SIG_IGN) };
        }
    }
}

/// Whether the command was asked to stop.
pub fn asked() -> bool {
    ASKED.load(Ordering::Relaxed)
}

extern "C" fn on_signal(_signal: libc::c_int) {
    if ASKED.swap(true, Ordering::Relaxed) {
        // SAFETY: `_exit` may be called in a signal handler; it runs no other code of the process.
        unsafe { libc::_exit(1) };
    }
}
