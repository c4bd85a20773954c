//! A connection, in the clear or over TLS.

use super::stream::DeadlineStream;
use std::io::{self, Read, Write};
use std::time::Instant;

/// The first byte of a client that speaks TLS.
pub(super) const TLS_HANDSHAKE: u8 = 0x16;

/// What a request is read from and an answer is written to.
pub trait Connection: Read + Write + Send {
    /// Every call fails after `deadline`.
    fn set_deadline(&mut self, deadline: Instant);

    /// Says that nothing more is written: the peer reads the end.
    ///
    /// # Errors
    /// Those of the socket.
    fn finish(&mut self) -> io::Result<()>;
}

impl Connection for DeadlineStream {
    fn set_deadline(&mut self, deadline: Instant) {
        self.deadline = deadline;
    }

    fn finish(&mut self) -> io::Result<()> {
        self.end_writing()
    }
}
