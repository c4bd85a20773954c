//! The stream under a line: a Unix socket, or TLS over TCP.

use crate::timed::Timeouts;
use crate::tls_stream::TlsStream;
use rustix::fd::{AsFd, BorrowedFd};
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// See the module.
pub(crate) enum Stream {
    Unix(UnixStream),
    Tls(Box<TlsStream>),
}

impl Stream {
    /// What was read from the socket and not taken yet: none where the socket has to be read.
    pub(crate) fn read_waiting(&self, bytes: &mut [u8]) -> io::Result<Option<usize>> {
        match self {
            Self::Unix(_) => Ok(None),
            Self::Tls(stream) => stream.read_waiting(bytes),
        }
    }

    /// One thread at a time writes.
    pub(crate) fn write_all(&self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Self::Unix(stream) => (&mut &*stream).write_all(bytes),
            Self::Tls(stream) => stream.write_all(bytes),
        }
    }

    /// The socket, where bytes go there as they are.
    pub(crate) fn as_plain(&self) -> Option<&UnixStream> {
        match self {
            Self::Unix(stream) => Some(stream),
            Self::Tls(_) => None,
        }
    }

    /// Ends reads and writes, also those under way.
    pub(crate) fn shut(&self) {
        // A socket that is closed already is as good.
        let _closed = match self {
            Self::Unix(stream) => stream.shutdown(Shutdown::Both),
            Self::Tls(stream) => stream.socket().shutdown(Shutdown::Both),
        };
    }
}

impl From<UnixStream> for Stream {
    fn from(stream: UnixStream) -> Self {
        Self::Unix(stream)
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Unix(stream) => stream.as_fd(),
            Self::Tls(stream) => stream.socket().as_fd(),
        }
    }
}

impl Timeouts for Stream {
    fn set_read_timeout(&self, time: Option<Duration>) -> io::Result<()> {
        match self {
            Self::Unix(stream) => stream.set_read_timeout(time),
            Self::Tls(stream) => stream.socket().set_read_timeout(time),
        }
    }

    fn set_write_timeout(&self, time: Option<Duration>) -> io::Result<()> {
        match self {
            Self::Unix(stream) => stream.set_write_timeout(time),
            Self::Tls(stream) => stream.socket().set_write_timeout(time),
        }
    }

    fn read(&self, bytes: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Unix(stream) => (&mut &*stream).read(bytes),
            Self::Tls(stream) => stream.read(bytes),
        }
    }

    fn write(&self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Unix(stream) => (&mut &*stream).write(bytes),
            Self::Tls(stream) => stream.write_all(bytes).map(|()| bytes.len()),
        }
    }
}
