//! Frames, messages and commands (sections "Framing" and "Commands" of the RFC).

use crate::{SocketType, ZmtpError};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader};

/// Most bytes of a message, all of its frames together.
pub const MAX_MESSAGE_BYTES: usize = 20 << 20;
/// Most frames of a message.
pub const MAX_FRAMES: usize = 8;
/// Most bytes of a command, and of a subscription in the form of a message.
pub const MAX_COMMAND_BYTES: usize = 4096;
/// Most bytes of a PING's context.
pub const MAX_PING_CONTEXT: usize = 16;
/// Bytes that are reserved for a frame before any of them has arrived.
const FIRST_RESERVE: usize = 64 << 10;
/// Bytes of a read buffer.
const READ_BUFFER: usize = 16 << 10;
/// A frame of at most this length is copied, so that short frames share a write.
const COPIED_FRAME: usize = 1024;

const MORE: u8 = 1;
const LONG: u8 = 2;
pub(crate) const COMMAND: u8 = 4;

/// What a peer sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Received {
    /// The frames of a message, at least one.
    Message(Vec<Vec<u8>>),
    /// The peer wants the topics that begin with this prefix. Only a PUB socket receives it, in
    /// both forms: as a command (ZMTP 3.1) and as a message (before).
    Subscribe(Vec<u8>),
    /// The opposite; see [`Subscribe`](Self::Subscribe).
    Cancel(Vec<u8>),
    /// Answer it with a PONG that carries these bytes.
    Ping(Vec<u8>),
    /// The answer to a PING.
    Pong,
}

/// The reading half of a connection.
#[derive(Debug)]
pub struct ZmtpReader<R> {
    inner: BufReader<R>,
    socket: SocketType,
    max_message_bytes: usize,
}

impl<R: AsyncRead + Unpin> ZmtpReader<R> {
    /// `socket` is the type of our socket.
    pub(crate) fn new(socket: SocketType, inner: R) -> Self {
        let inner = BufReader::with_capacity(READ_BUFFER, inner);
        // A PUB socket receives subscriptions only: a byte and a prefix.
        let max_message_bytes = match socket {
            SocketType::Pub => MAX_COMMAND_BYTES,
            _ => MAX_MESSAGE_BYTES,
        };
        Self { inner, socket, max_message_bytes }
    }

    /// Lowers the limit of a message's bytes, all frames together.
    #[must_use]
    pub fn with_max_message_bytes(self, bytes: usize) -> Self {
        Self { max_message_bytes: self.max_message_bytes.min(bytes), ..self }
    }

    pub(crate) async fn read_exact(&mut self, bytes: &mut [u8]) -> Result<(), ZmtpError> {
        self.inner.read_exact(bytes).await?;
        Ok(())
    }

    /// The next message or command; unknown commands are skipped. The future must not be dropped
    /// before it ends, unless the connection ends with it.
    ///
    /// # Errors
    /// The peer violates the protocol or is gone.
    pub async fn next(&mut self) -> Result<Received, ZmtpError> {
        loop {
            if let Some(received) = self.next_known().await? {
                return Ok(received);
            }
        }
    }

    async fn next_known(&mut self) -> Result<Option<Received>, ZmtpError> {
        let mut frames = Vec::new();
        let mut room = self.max_message_bytes;
        loop {
            let (flags, body) = self.frame(room).await?;
            if flags & COMMAND != 0 {
                // Between the frames of a message there are none.
                if !frames.is_empty() || flags & MORE != 0 {
                    return Err(ZmtpError::Protocol("a command inside a message"));
                }
                return parse_command(&body);
            }
            room -= body.len();
            frames.push(body);
            if flags & MORE == 0 {
                break;
            }
            if frames.len() == MAX_FRAMES {
                return Err(ZmtpError::Protocol("too many frames"));
            }
        }
        if self.socket == SocketType::Pub {
            Ok(subscription(&frames))
        } else {
            Ok(Some(Received::Message(frames)))
        }
    }

    /// Flags and body of one frame. A message's frame has at most `room` bytes.
    pub(crate) async fn frame(&mut self, room: usize) -> Result<(u8, Vec<u8>), ZmtpError> {
        let flags = self.inner.read_u8().await?;
        if flags & !(MORE | LONG | COMMAND) != 0 {
            return Err(ZmtpError::Protocol("a frame with unknown flags"));
        }
        let len = if flags & LONG == 0 {
            u64::from(self.inner.read_u8().await?)
        } else {
            self.inner.read_u64().await?
        };
        let most = if flags & COMMAND == 0 { room } else { MAX_COMMAND_BYTES };
        let len = usize::try_from(len).ok().filter(|len| *len <= most);
        let len = len.ok_or(ZmtpError::Protocol("a frame that is too long"))?;
        let mut body = Vec::with_capacity(len.min(FIRST_RESERVE));
        while body.len() < len {
            // At most twice what has arrived: an announced length alone costs little memory.
            let step = (len - body.len()).min(body.len().max(FIRST_RESERVE));
            body.reserve(step);
            let mut part = (&mut self.inner).take(step as u64);
            if part.read_buf(&mut body).await? == 0 {
                return Err(std::io::Error::from(std::io::ErrorKind::UnexpectedEof).into());
            }
        }
        Ok((flags, body))
    }
}

/// A subscription in the form of a message: a byte that says whether, then the prefix. Other
/// messages to a PUB socket have no meaning.
fn subscription(frames: &[Vec<u8>]) -> Option<Received> {
    match frames.first()?.split_first()? {
        (1, prefix) => Some(Received::Subscribe(prefix.to_vec())),
        (0, prefix) => Some(Received::Cancel(prefix.to_vec())),
        _ => None,
    }
}

/// Name and body of a command.
pub(crate) fn split_command(command: &[u8]) -> Result<(&[u8], &[u8]), ZmtpError> {
    let split = command.split_first().and_then(|(len, rest)| rest.split_at_checked(usize::from(*len)));
    split.ok_or(ZmtpError::Protocol("a command without its name"))
}

fn parse_command(bytes: &[u8]) -> Result<Option<Received>, ZmtpError> {
    let (name, body) = split_command(bytes)?;
    Ok(match name {
        b"SUBSCRIBE" => Some(Received::Subscribe(body.to_vec())),
        b"CANCEL" => Some(Received::Cancel(body.to_vec())),
        b"PING" => {
            // Two bytes of time, then the context.
            let context = body.get(2..).ok_or(ZmtpError::Protocol("a PING without its time"))?;
            Some(Received::Ping(context[..context.len().min(MAX_PING_CONTEXT)].to_vec()))
        }
        b"PONG" => Some(Received::Pong),
        b"ERROR" => return Err(ZmtpError::Refused(String::from_utf8_lossy(body).into_owned())),
        _ => None,
    })
}

/// The writing half of a connection.
#[derive(Debug)]
pub struct ZmtpWriter<W> {
    inner: W,
    /// Bytes that the next write starts with.
    head: Vec<u8>,
}

impl<W: AsyncWrite + Unpin> ZmtpWriter<W> {
    pub(crate) fn new(inner: W) -> Self {
        Self { inner, head: Vec::new() }
    }

    pub(crate) async fn write_all(&mut self, bytes: &[u8]) -> Result<(), ZmtpError> {
        self.inner.write_all(bytes).await?;
        Ok(())
    }

    /// Writes a message of at least one frame. Short frames share a write. If the future is dropped
    /// before it ends, the connection is unusable.
    ///
    /// # Errors
    /// The peer is gone.
    pub async fn message(&mut self, frames: &[&[u8]]) -> Result<(), ZmtpError> {
        self.head.clear();
        for (at, frame) in frames.iter().enumerate() {
            let more = if at + 1 < frames.len() { MORE } else { 0 };
            write_head(&mut self.head, more, frame.len());
            if frame.len() <= COPIED_FRAME {
                self.head.extend_from_slice(frame);
            } else {
                self.inner.write_all(&self.head).await?;
                self.inner.write_all(frame).await?;
                self.head.clear();
            }
        }
        self.inner.write_all(&self.head).await?;
        Ok(())
    }

    /// Subscribes to topics that begin with `prefix`, in the form that all versions read.
    ///
    /// # Errors
    /// The peer is gone.
    pub async fn subscribe(&mut self, prefix: &[u8]) -> Result<(), ZmtpError> {
        self.message(&[&[&[1], prefix].concat()]).await
    }

    /// Sends a heartbeat; only to a peer that knows them. libzmq closes the connection if nothing
    /// follows within `promise`, rounded down to tenths of a second; zero promises nothing.
    ///
    /// # Errors
    /// The peer is gone.
    pub async fn ping(&mut self, promise: Duration) -> Result<(), ZmtpError> {
        let tenths = u16::try_from(promise.as_millis() / 100).unwrap_or(u16::MAX);
        self.command("PING", &tenths.to_be_bytes()).await
    }

    /// Answers a PING that carried `context`.
    ///
    /// # Errors
    /// The peer is gone.
    pub async fn pong(&mut self, context: &[u8]) -> Result<(), ZmtpError> {
        self.command("PONG", context).await
    }

    pub(crate) async fn command(&mut self, name: &str, body: &[u8]) -> Result<(), ZmtpError> {
        self.head.clear();
        write_head(&mut self.head, COMMAND, 1 + name.len() + body.len());
        self.head.push(name.len() as u8);
        self.head.extend_from_slice(name.as_bytes());
        self.head.extend_from_slice(body);
        self.inner.write_all(&self.head).await?;
        Ok(())
    }
}

fn write_head(out: &mut Vec<u8>, flags: u8, len: usize) {
    if let Ok(short) = u8::try_from(len) {
        out.extend_from_slice(&[flags, short]);
    } else {
        out.push(flags | LONG);
        out.extend_from_slice(&(len as u64).to_be_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run<T>(future: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
    }

    fn reader(bytes: &[u8]) -> ZmtpReader<&[u8]> {
        ZmtpReader::new(SocketType::Sub, bytes)
    }

    async fn read(bytes: &[u8]) -> Result<Received, ZmtpError> {
        reader(bytes).next().await
    }

    #[test]
    fn frames_are_read_as_they_were_written() {
        run(async {
            let long: Vec<u8> = (0..300_000u32).map(|n| n as u8).collect();
            let frames: [&[u8]; 4] = [b"topic", b"", &long, &[7; 255]];
            let mut bytes = Vec::new();
            ZmtpWriter::new(&mut bytes).message(&frames).await.unwrap();
            ZmtpWriter::new(&mut bytes).command("PING", &[0, 9, b'x']).await.unwrap();
            // The RFC's own form: more + short, then the length in one byte.
            assert_eq!(bytes[..9], [1, 5, b't', b'o', b'p', b'i', b'c', 1, 0]);
            let mut reader = reader(&bytes);
            let wanted = Received::Message(frames.iter().map(|frame| frame.to_vec()).collect());
            assert_eq!(reader.next().await.unwrap(), wanted);
            assert_eq!(reader.next().await.unwrap(), Received::Ping(b"x".to_vec()));
            assert!(matches!(reader.next().await, Err(ZmtpError::Io(_))), "the end");
        });
    }

    #[test]
    fn a_ping_says_its_promise_in_tenths_of_a_second() {
        run(async {
            let mut bytes = Vec::new();
            ZmtpWriter::new(&mut bytes).ping(Duration::from_millis(5_050)).await.unwrap();
            assert_eq!(bytes, b"\x04\x07\x04PING\x00\x32");
            bytes.clear();
            ZmtpWriter::new(&mut bytes).ping(Duration::MAX).await.unwrap();
            assert_eq!(bytes, b"\x04\x07\x04PING\xff\xff");
        });
    }

    /// Mutation that makes it fail: `frame` without its limit.
    #[test]
    fn invariant_5_hostile_frames_are_errors_and_cost_no_memory() {
        run(async {
            let mut lie = vec![LONG];
            lie.extend_from_slice(&(1u64 << 62).to_be_bytes());
            assert!(matches!(read(&lie).await, Err(ZmtpError::Protocol("a frame that is too long"))));
            let mut cut = vec![LONG];
            cut.extend_from_slice(&(MAX_MESSAGE_BYTES as u64).to_be_bytes());
            cut.extend_from_slice(b"little");
            assert!(matches!(read(&cut).await, Err(ZmtpError::Io(_))));
            assert!(matches!(read(&[8, 0]).await, Err(ZmtpError::Protocol("a frame with unknown flags"))));
            assert!(matches!(read(&[1, 0].repeat(9)).await, Err(ZmtpError::Protocol("too many frames"))));
            assert!(matches!(
                read(&[1, 0, 4, 1, 0]).await,
                Err(ZmtpError::Protocol("a command inside a message"))
            ));
            for command in [&[4, 0][..], &[4, 2, 9, b'P'], &[4, 6, 4, b'P', b'I', b'N', b'G', 0]] {
                assert!(matches!(read(command).await, Err(ZmtpError::Protocol(_))), "{command:?}");
            }
            // Any bytes at all: an answer, no panic.
            for seed in 0..2_000u32 {
                let bytes: Vec<u8> =
                    (0..40).map(|n| (seed.wrapping_mul(2_654_435_761) >> (n % 24)) as u8 ^ n).collect();
                let mut reader = reader(&bytes);
                while reader.next().await.is_ok() {}
            }
        });
    }

    /// Mutation that makes it fail: `ZmtpReader::new` with one limit for all sockets.
    #[test]
    fn invariant_5_a_publisher_reads_subscriptions_of_both_forms_and_no_long_ones() {
        run(async {
            let mut bytes = Vec::new();
            let mut writer = ZmtpWriter::new(&mut bytes);
            writer.subscribe(b"old").await.unwrap();
            writer.message(&[b"\x00old"]).await.unwrap();
            writer.message(&[b"neither"]).await.unwrap();
            writer.command("SUBSCRIBE", b"new").await.unwrap();
            writer.command("CANCEL", b"new").await.unwrap();
            writer.subscribe(&[b'x'; MAX_COMMAND_BYTES]).await.unwrap();
            let mut reader = ZmtpReader::new(SocketType::Pub, bytes.as_slice());
            for wanted in [
                Received::Subscribe(b"old".to_vec()),
                Received::Cancel(b"old".to_vec()),
                Received::Subscribe(b"new".to_vec()),
                Received::Cancel(b"new".to_vec()),
            ] {
                assert_eq!(reader.next().await.unwrap(), wanted);
            }
            let long = reader.next().await;
            assert!(matches!(long, Err(ZmtpError::Protocol("a frame that is too long"))), "{long:?}");
        });
    }

    #[test]
    fn a_lower_limit_of_a_message_holds() {
        run(async {
            let mut bytes = Vec::new();
            ZmtpWriter::new(&mut bytes).message(&[b"1234", b"567"]).await.unwrap();
            for (limit, fits) in [(7, true), (6, false)] {
                let mut reader = reader(&bytes).with_max_message_bytes(limit);
                assert_eq!(reader.next().await.is_ok(), fits, "{limit}");
            }
        });
    }
}
