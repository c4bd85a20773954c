//! What must hold of any bytes that a client sends: a part of the fuzz target `request`.

use super::connection::Connection;
use super::limits::HttpLimits;
use super::request::{HttpRequest, read};
use std::io::{self, Read, Write};
use std::time::Instant;

/// A client that has sent all its bytes, which arrive a few at a time.
struct Sent<'a> {
    bytes: &'a [u8],
    at_once: usize,
}

impl Read for Sent<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let most = into.len().min(self.at_once);
        self.bytes.read(&mut into[..most])
    }
}

impl Write for Sent<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Connection for Sent<'_> {
    fn set_deadline(&mut self, _deadline: Instant) {}

    fn finish(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Reads a request under `limits`. It is the same however its bytes are divided among packets, and
/// what is none gets an answer that says why.
pub(crate) fn request(bytes: &[u8], limits: &HttpLimits) -> Option<HttpRequest> {
    let received = |at_once| read(&mut Sent { bytes, at_once }, limits, &|_: &HttpRequest| Ok(())).ok();
    let (whole, divided) = (received(usize::MAX), received(3));
    assert_eq!(whole, divided);
    match whole? {
        Ok(request) => {
            assert!(request.body.len() <= limits.body_bytes);
            Some(request)
        }
        Err(answer) => {
            assert!(answer.status >= 400 && answer.body.len() > r#"{"error":""}"#.len());
            None
        }
    }
}
