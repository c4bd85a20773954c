//! The process at the other end: of a Unix socket as the kernel knows it, else its address.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, OwnedFd};
use rustix::net::sockopt::socket_peercred;
use rustix::process::{PidfdFlags, geteuid, pidfd_open};
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

/// Who is at the other end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerId {
    /// A process of this machine.
    Process(i32),
    /// A process that connected over TCP, or listens there.
    Address(SocketAddr),
}

impl fmt::Display for PeerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Process(pid) => write!(f, "process {pid}"),
            Self::Address(address) => write!(f, "{address}"),
        }
    }
}

/// A process, by credentials that the kernel noted when it connected or listened.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) id: PeerId,
    /// Absent where the process may be on another machine.
    uid: Option<u32>,
    /// Readable when the process has ended. Absent where the kernel has no pidfd, the process is
    /// gone already, or may be on another machine.
    pidfd: Option<OwnedFd>,
}

/// Whether the process at the other end of a closed line has ended.
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
        let id = PeerId::Process(credentials.pid.as_raw_nonzero().get());
        Ok(Self { id, uid: Some(credentials.uid.as_raw()), pidfd })
    }

    /// A process that has shown a certificate.
    pub(crate) fn elsewhere(address: SocketAddr) -> Self {
        Self { id: PeerId::Address(address), uid: None, pidfd: None }
    }

    /// Whether only the line can say that the process is gone.
    pub(crate) fn is_elsewhere(&self) -> bool {
        matches!(self.id, PeerId::Address(_))
    }

    /// Its number on this machine; 0 of a process elsewhere, which attaches to no daemon.
    pub(crate) fn pid(&self) -> i32 {
        match self.id {
            PeerId::Process(pid) => pid,
            PeerId::Address(_) => 0,
        }
    }

    /// Fails where the process belongs to another user than this one.
    pub(crate) fn expect_same_user(&self) -> io::Result<()> {
        let own = geteuid().as_raw();
        let theirs = match self.uid {
            Some(uid) if uid == own => return Ok(()),
            Some(uid) => format!("user {uid}"),
            None => "an unknown user".to_owned(),
        };
        let text = format!("{} belongs to {theirs}, this one to user {own}: refused", self.id);
        Err(io::Error::new(io::ErrorKind::PermissionDenied, text))
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
