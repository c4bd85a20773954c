//! The process at the other end of a Unix socket, as the kernel knows it.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, OwnedFd};
use rustix::net::sockopt::socket_peercred;
use rustix::process::{PidfdFlags, geteuid, pidfd_open};
use std::io;
use std::time::Duration;

/// A process, by credentials that the kernel noted when it connected or listened.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) pid: i32,
    uid: u32,
    /// Readable when the process has ended. Absent where the kernel has no pidfd or the process is
    /// gone already.
    pidfd: Option<OwnedFd>,
}

/// What became of the process at the other end of a line that ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProcessState {
    /// It has ended: it writes to no memory any more.
    Ended,
    /// It may still run.
    MayRun,
}

/// Fails where the process at the other end of a Unix socket belongs to another user than this one.
///
/// # Errors
/// [`io::ErrorKind::PermissionDenied`] names both users; the system's.
pub fn expect_same_user(socket: impl AsFd) -> io::Result<()> {
    Peer::of(socket)?.expect_same_user()
}

/// What happened first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ready {
    /// The socket can be read.
    Socket,
    /// The process has ended, and nothing is left to read.
    Gone,
    /// Neither, until the time was over.
    Nothing,
}

impl Peer {
    pub(crate) fn of(socket: impl AsFd) -> io::Result<Self> {
        let credentials = socket_peercred(socket)?;
        let pidfd = pidfd_open(credentials.pid, PidfdFlags::empty()).ok();
        Ok(Self { pid: credentials.pid.as_raw_nonzero().get(), uid: credentials.uid.as_raw(), pidfd })
    }

    /// Fails where the process belongs to another user than this one.
    pub(crate) fn expect_same_user(&self) -> io::Result<()> {
        let own = geteuid().as_raw();
        if self.uid == own {
            return Ok(());
        }
        Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            format!("process {} belongs to user {}, this one to user {own}: refused", self.pid, self.uid),
        ))
    }

    /// Whether the process has ended; waits for that, `time` at most.
    pub(crate) fn state(&self, time: Duration) -> ProcessState {
        let Some(pidfd) = &self.pidfd else { return ProcessState::MayRun };
        let mut fds = [PollFd::new(pidfd, PollFlags::IN)];
        let time = Timespec { tv_sec: 0, tv_nsec: time.subsec_nanos().into() };
        match poll(&mut fds, Some(&time)) {
            Ok(1..) => ProcessState::Ended,
            _ => ProcessState::MayRun,
        }
    }

    /// Waits until `socket` can be read or the process has ended, `time` at most.
    pub(crate) fn wait(&self, socket: impl AsFd, time: Duration) -> io::Result<Ready> {
        let mut fds = vec![PollFd::new(&socket, PollFlags::IN)];
        fds.extend(self.pidfd.as_ref().map(|pidfd| PollFd::new(pidfd, PollFlags::IN)));
        let seconds = i64::try_from(time.as_secs()).unwrap_or(i64::MAX);
        let time = Timespec { tv_sec: seconds, tv_nsec: i64::from(time.subsec_nanos()) };
        match poll(&mut fds, Some(&time)) {
            Ok(0) | Err(rustix::io::Errno::INTR) => Ok(Ready::Nothing),
            Ok(_) if !fds[0].revents().is_empty() => Ok(Ready::Socket),
            Ok(_) => Ok(Ready::Gone),
            Err(error) => Err(error.into()),
        }
    }
}
