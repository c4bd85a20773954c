//! A connection with one deadline.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// A connection with one deadline for everything that is read and written. A socket's timeout
/// counts for one call, so a peer that reads one byte at a time could hold a thread for ever.
#[derive(Debug)]
pub struct DeadlineStream {
    stream: Stream,
    pub(super) deadline: Instant,
}

#[derive(Debug)]
enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl From<TcpStream> for DeadlineStream {
    fn from(stream: TcpStream) -> Self {
        Self { stream: Stream::Tcp(stream), deadline: Instant::now() }
    }
}

impl From<UnixStream> for DeadlineStream {
    fn from(stream: UnixStream) -> Self {
        Self { stream: Stream::Unix(stream), deadline: Instant::now() }
    }
}

impl DeadlineStream {
    /// Every call fails with [`io::ErrorKind::TimedOut`], or `WouldBlock`, after `deadline`.
    /// Without one every call fails.
    #[must_use]
    pub fn until(mut self, deadline: Instant) -> Self {
        self.deadline = deadline;
        self
    }

    /// A descriptor of the connection, to close it by.
    pub(super) fn socket(&self) -> io::Result<OwnedFd> {
        match &self.stream {
            Stream::Tcp(stream) => stream.try_clone().map(OwnedFd::from),
            Stream::Unix(stream) => stream.try_clone().map(OwnedFd::from),
        }
    }

    /// Nothing more is written: the peer reads the end.
    pub(super) fn end_writing(&self) -> io::Result<()> {
        match &self.stream {
            Stream::Tcp(stream) => stream.shutdown(Shutdown::Write),
            Stream::Unix(stream) => stream.shutdown(Shutdown::Write),
        }
    }

    pub(super) fn set_nonblocking(&self, nonblocking: bool) -> io::Result<()> {
        match &self.stream {
            Stream::Tcp(stream) => stream.set_nonblocking(nonblocking),
            Stream::Unix(stream) => stream.set_nonblocking(nonblocking),
        }
    }

    /// Writes what the system takes without a wait.
    pub(super) fn write_at_once(&self, bytes: &[u8]) -> io::Result<usize> {
        self.set_nonblocking(true)?;
        match &self.stream {
            Stream::Tcp(stream) => (&*stream).write(bytes),
            Stream::Unix(stream) => (&*stream).write(bytes),
        }
    }

    /// The first byte that waits to be read, which stays; none where the peer has ended.
    #[cfg(feature = "tls")]
    pub(super) fn first_byte(&self) -> io::Result<Option<u8>> {
        let left = Some(self.time_left()?);
        let mut byte = [0];
        let Stream::Tcp(stream) = &self.stream else { return Err(io::ErrorKind::Unsupported.into()) };
        stream.set_read_timeout(left)?;
        Ok((stream.peek(&mut byte)? == 1).then_some(byte[0]))
    }

    /// Time until the deadline; an error once it has passed.
    fn time_left(&self) -> io::Result<Duration> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
    }
}

impl Read for DeadlineStream {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = Some(self.time_left()?);
        match &mut self.stream {
            Stream::Tcp(stream) => stream.set_read_timeout(left).and_then(|()| stream.read(buffer)),
            Stream::Unix(stream) => stream.set_read_timeout(left).and_then(|()| stream.read(buffer)),
        }
    }
}

impl Write for DeadlineStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let left = Some(self.time_left()?);
        match &mut self.stream {
            Stream::Tcp(stream) => stream.set_write_timeout(left).and_then(|()| stream.write(bytes)),
            Stream::Unix(stream) => stream.set_write_timeout(left).and_then(|()| stream.write(bytes)),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match &mut self.stream {
            Stream::Tcp(stream) => stream.flush(),
            Stream::Unix(stream) => stream.flush(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{Ipv4Addr, TcpListener};

    #[test]
    fn a_client_that_reads_slowly_ends_at_the_deadline() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let stream = listener.accept().unwrap().0;
        let deadline = Instant::now() + Duration::from_millis(300);
        // The client reads enough to let each write make progress, and far less than the answer.
        let reader = std::thread::spawn(move || {
            let mut chunk = vec![0; 64 << 10];
            while client.read(&mut chunk).is_ok_and(|n| n > 0) {
                std::thread::sleep(Duration::from_millis(10));
            }
        });
        let mut stream = DeadlineStream::from(stream).until(deadline);
        let error = stream.write_all(&vec![0; 256 << 20]).unwrap_err();
        assert!(matches!(error.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock), "{error}");
        assert!(Instant::now() >= deadline);
        drop(stream);
        reader.join().unwrap();
    }
}
