//! A stream of which each read and write ends at a deadline.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// Reads and writes that a shared stream can do, each with a time limit.
pub(crate) trait Timeouts {
    fn set_read_timeout(&self, time: Option<Duration>) -> io::Result<()>;
    fn set_write_timeout(&self, time: Option<Duration>) -> io::Result<()>;
    /// `Interrupted` where something came and is not whole yet.
    fn read(&self, bytes: &mut [u8]) -> io::Result<usize>;
    fn write(&self, bytes: &[u8]) -> io::Result<usize>;
}

/// See the module.
pub(crate) struct Timed<'a, S: Timeouts = UnixStream> {
    stream: &'a S,
    until: Instant,
}

impl<'a, S: Timeouts> Timed<'a, S> {
    pub(crate) fn new(stream: &'a S, time: Duration) -> Self {
        Self::until(stream, kvbm_plan::deadline_after(Instant::now(), time))
    }

    pub(crate) fn until(stream: &'a S, until: Instant) -> Self {
        Self { stream, until }
    }

    fn left(&self) -> io::Result<Option<Duration>> {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(Some(left)) }
    }

    /// The stream, of which the next read ends at the deadline.
    pub(crate) fn for_read(&self) -> io::Result<&'a S> {
        self.stream.set_read_timeout(self.left()?)?;
        Ok(self.stream)
    }

    /// The stream, of which the next write ends at the deadline.
    pub(crate) fn for_write(&self) -> io::Result<&'a S> {
        self.stream.set_write_timeout(self.left()?)?;
        Ok(self.stream)
    }
}

impl<S: Timeouts> Read for Timed<'_, S> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.for_read()?.read(bytes)
    }
}

impl<S: Timeouts> Write for Timed<'_, S> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.for_write()?.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<S: Timeouts> Drop for Timed<'_, S> {
    fn drop(&mut self) {
        // The established line waits by poll; a socket that fails here fails there too.
        let _ = self.stream.set_read_timeout(None);
        let _ = self.stream.set_write_timeout(None);
    }
}

macro_rules! as_the_system_does {
    ($socket:ty) => {
        impl Timeouts for $socket {
            fn set_read_timeout(&self, time: Option<Duration>) -> io::Result<()> {
                <$socket>::set_read_timeout(self, time)
            }

            fn set_write_timeout(&self, time: Option<Duration>) -> io::Result<()> {
                <$socket>::set_write_timeout(self, time)
            }

            fn read(&self, bytes: &mut [u8]) -> io::Result<usize> {
                Read::read(&mut &*self, bytes)
            }

            fn write(&self, bytes: &[u8]) -> io::Result<usize> {
                Write::write(&mut &*self, bytes)
            }
        }
    };
}

as_the_system_does!(UnixStream);
as_the_system_does!(TcpStream);
