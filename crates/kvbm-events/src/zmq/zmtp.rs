//! ZMTP 3.1 (<https://rfc.zeromq.org/spec/37/>): greeting, handshake and frames, with the NULL mechanism.
//!
//! What a peer sends is untrusted: frames are bounded in number and bytes before anything is read, and memory grows with
//! what has really come.

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader};

/// Most bytes of a message, all of its frames together.
pub(super) const MAX_MESSAGE: usize = 20 << 20;
/// Most frames of a message; the longest that anybody here sends has five.
const MAX_FRAMES: usize = 8;
/// Most bytes of a command or a subscription.
const MAX_COMMAND: usize = 4096;
/// Bytes that are reserved on the word of a peer alone.
const TRUST: usize = 64 << 10;

const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// What is wrong with a peer or the connection to it.
#[derive(Debug, thiserror::Error)]
pub(super) enum Fault {
    #[error("{0}")]
    Io(#[from] std::io::Error),
    #[error("the peer breaks the protocol: {0}")]
    Protocol(&'static str),
    #[error("the peer speaks ZMTP {0}.x, not 3.x")]
    Version(u8),
    #[error("the peer wants the mechanism {0:?}; only NULL is spoken here")]
    Mechanism(String),
    #[error("the peer's socket is a {0:?}")]
    SocketType(String),
    #[error("the peer said {0:?}")]
    Refused(String),
}

/// Kinds of sockets that are spoken here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Socket {
    Pub,
    Sub,
    Router,
    Dealer,
}

impl Socket {
    const fn name(self) -> &'static str {
        match self {
            Self::Pub => "PUB",
            Self::Sub => "SUB",
            Self::Router => "ROUTER",
            Self::Dealer => "DEALER",
        }
    }

    /// Kinds that the other end may be.
    const fn partners(self) -> &'static [&'static str] {
        match self {
            Self::Pub => &["SUB", "XSUB"],
            Self::Sub => &["PUB", "XPUB"],
            Self::Router => &["DEALER", "REQ"],
            Self::Dealer => &["ROUTER"],
        }
    }
}

/// What came.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Incoming {
    Message(Vec<Vec<u8>>),
    Subscribe(Vec<u8>),
    Cancel(Vec<u8>),
    /// To be answered with a PONG that carries these bytes.
    Ping(Vec<u8>),
    Pong,
}

/// The reading end of a connection.
pub(super) struct Reader<R> {
    inner: BufReader<R>,
}

/// The writing end of a connection.
pub(super) struct Writer<W> {
    inner: W,
    head: Vec<u8>,
}

/// Property of READY by which a publisher of ours tells its lives apart; others do not have it.
const LIFE: &str = "X-Kvbm-Life";

/// What a peer said of itself.
#[derive(Debug)]
pub(super) struct Peer {
    /// It knows heartbeats (ZMTP 3.1).
    pub(super) beats: bool,
    /// Its [`LIFE`].
    pub(super) life: Option<Vec<u8>>,
}

/// Greets and shakes hands.
pub(super) async fn shake_hands<R: AsyncRead + Unpin, W: AsyncWrite + Unpin>(
    socket: Socket,
    life: &[u8],
    reader: &mut Reader<R>,
    writer: &mut Writer<W>,
) -> Result<Peer, Fault> {
    let mut greeting = [0; 64];
    (greeting[0], greeting[8], greeting[9]) = (0xFF, 1, 0x7F);
    (greeting[10], greeting[11]) = (3, 1);
    greeting[12..16].copy_from_slice(b"NULL");
    writer.inner.write_all(&greeting).await?;
    reader.inner.read_exact(&mut greeting).await?;
    if greeting[0] != 0xFF || greeting[9] & 1 == 0 {
        return Err(Fault::Protocol("no greeting of ZMTP"));
    }
    if greeting[10] < 3 {
        return Err(Fault::Version(greeting[10]));
    }
    let mechanism = greeting[12..32].split(|byte| *byte == 0).next().unwrap_or_default();
    if mechanism != b"NULL" {
        return Err(Fault::Mechanism(String::from_utf8_lossy(mechanism).into_owned()));
    }
    let beats = greeting[10] > 3 || greeting[11] >= 1;
    let mut ready = Vec::new();
    let properties = [("Socket-Type", socket.name().as_bytes()), ("Identity", b""), (LIFE, life)];
    // Without a life nothing is said of it.
    for (name, value) in &properties[..if life.is_empty() { 2 } else { 3 }] {
        ready.push(name.len() as u8);
        ready.extend_from_slice(name.as_bytes());
        ready.extend_from_slice(&(value.len() as u32).to_be_bytes());
        ready.extend_from_slice(value);
    }
    writer.command("READY", &ready).await?;
    let (flags, command) = reader.frame(MAX_COMMAND).await?;
    if flags & COMMAND == 0 {
        return Err(Fault::Protocol("no READY after the greeting"));
    }
    let (name, body) = split_command(&command)?;
    match name {
        b"READY" => {}
        b"ERROR" => return Err(Fault::Refused(String::from_utf8_lossy(body).into_owned())),
        _ => return Err(Fault::Protocol("no READY after the greeting")),
    }
    let partner = property(body, b"socket-type")?.unwrap_or_default();
    if socket.partners().iter().any(|name| name.as_bytes() == partner) {
        Ok(Peer { beats, life: property(body, LIFE.as_bytes())?.map(<[u8]>::to_vec) })
    } else {
        Err(Fault::SocketType(String::from_utf8_lossy(partner).into_owned()))
    }
}

/// Name and body of a command.
fn split_command(command: &[u8]) -> Result<(&[u8], &[u8]), Fault> {
    let split = command.split_first().and_then(|(len, rest)| rest.split_at_checked(usize::from(*len)));
    split.ok_or(Fault::Protocol("a command without its name"))
}

/// A property of READY; names are compared in lower case.
fn property<'a>(mut body: &'a [u8], wanted: &[u8]) -> Result<Option<&'a [u8]>, Fault> {
    let short = Fault::Protocol("a property that is cut off");
    let mut found = None;
    while !body.is_empty() {
        let split = split_command(body).ok().and_then(|(name, rest)| {
            let (len, rest) = rest.split_first_chunk::<4>()?;
            let (value, rest) = rest.split_at_checked(u32::from_be_bytes(*len) as usize)?;
            Some((name, value, rest))
        });
        let Some((name, value, rest)) = split else { return Err(short) };
        if name.eq_ignore_ascii_case(wanted) {
            found = Some(value);
        }
        body = rest;
    }
    Ok(found)
}

impl<R: AsyncRead + Unpin> Reader<R> {
    pub(super) fn new(inner: R) -> Self {
        Self { inner: BufReader::with_capacity(16 << 10, inner) }
    }

    /// The next message or command; commands that are not known are skipped.
    pub(super) async fn next(&mut self) -> Result<Incoming, Fault> {
        let mut frames = Vec::new();
        let mut room = MAX_MESSAGE;
        loop {
            let (flags, body) = self.frame(room).await?;
            if flags & COMMAND != 0 {
                // Between the frames of a message there are none (section "Framing").
                if !frames.is_empty() || flags & MORE != 0 {
                    return Err(Fault::Protocol("a command inside a message"));
                }
                if let Some(command) = command(&body)? {
                    return Ok(command);
                }
                continue;
            }
            room -= body.len();
            frames.push(body);
            if flags & MORE == 0 {
                return Ok(Incoming::Message(frames));
            }
            if frames.len() == MAX_FRAMES {
                return Err(Fault::Protocol("too many frames"));
            }
        }
    }

    async fn frame(&mut self, room: usize) -> Result<(u8, Vec<u8>), Fault> {
        let flags = self.inner.read_u8().await?;
        if flags & !(MORE | LONG | COMMAND) != 0 {
            return Err(Fault::Protocol("a frame with unknown flags"));
        }
        let len = if flags & LONG == 0 {
            u64::from(self.inner.read_u8().await?)
        } else {
            self.inner.read_u64().await?
        };
        let most = if flags & COMMAND == 0 { room } else { MAX_COMMAND };
        let len = usize::try_from(len).ok().filter(|len| *len <= most);
        let len = len.ok_or(Fault::Protocol("a frame that is too long"))?;
        let mut body = Vec::with_capacity(len.min(TRUST));
        while body.len() < len {
            // Twice what has come, at most: a length that lies costs little.
            let step = (len - body.len()).min(body.len().max(TRUST));
            body.reserve(step);
            let mut part = (&mut self.inner).take(step as u64);
            if part.read_buf(&mut body).await? == 0 {
                return Err(std::io::Error::from(std::io::ErrorKind::UnexpectedEof).into());
            }
        }
        Ok((flags, body))
    }
}

fn command(bytes: &[u8]) -> Result<Option<Incoming>, Fault> {
    let (name, body) = split_command(bytes)?;
    Ok(match name {
        b"SUBSCRIBE" => Some(Incoming::Subscribe(body.to_vec())),
        b"CANCEL" => Some(Incoming::Cancel(body.to_vec())),
        b"PING" => {
            // Two bytes say how long the peer waits; at most 16 of context come back.
            let context = body.get(2..).ok_or(Fault::Protocol("a PING without its time"))?;
            Some(Incoming::Ping(context[..context.len().min(16)].to_vec()))
        }
        b"PONG" => Some(Incoming::Pong),
        b"ERROR" => return Err(Fault::Refused(String::from_utf8_lossy(body).into_owned())),
        _ => None,
    })
}

impl<W: AsyncWrite + Unpin> Writer<W> {
    pub(super) fn new(inner: W) -> Self {
        Self { inner, head: Vec::new() }
    }

    /// Writes a message of at least one frame. Short frames travel together.
    pub(super) async fn message(&mut self, frames: &[&[u8]]) -> Result<(), Fault> {
        self.head.clear();
        for (at, frame) in frames.iter().enumerate() {
            let more = if at + 1 < frames.len() { MORE } else { 0 };
            write_head(&mut self.head, more, frame.len());
            if frame.len() <= 1024 {
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

    pub(super) async fn command(&mut self, name: &str, body: &[u8]) -> Result<(), Fault> {
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

    async fn read(bytes: &[u8]) -> Result<Incoming, Fault> {
        Reader::new(bytes).next().await
    }

    #[test]
    fn frames_come_back_as_they_were_written() {
        run(async {
            let long: Vec<u8> = (0..300_000u32).map(|n| n as u8).collect();
            let frames: [&[u8]; 4] = [b"topic", b"", &long, &[7; 255]];
            let mut bytes = Vec::new();
            Writer::new(&mut bytes).message(&frames).await.unwrap();
            Writer::new(&mut bytes).command("PING", &[0, 9, b'x']).await.unwrap();
            // The RFC's own form: more + short, then the length in one byte.
            assert_eq!(bytes[..9], [1, 5, b't', b'o', b'p', b'i', b'c', 1, 0]);
            let mut reader = Reader::new(bytes.as_slice());
            let wanted = Incoming::Message(frames.iter().map(|frame| frame.to_vec()).collect());
            assert_eq!(reader.next().await.unwrap(), wanted);
            assert_eq!(reader.next().await.unwrap(), Incoming::Ping(b"x".to_vec()));
            assert!(matches!(reader.next().await, Err(Fault::Io(_))), "the end");
        });
    }

    /// Mutation that makes it fail: `frame` without its limit.
    #[test]
    fn invariant_5_hostile_frames_are_errors_and_cost_no_memory() {
        run(async {
            let mut lie = vec![LONG];
            lie.extend_from_slice(&(1u64 << 62).to_be_bytes());
            assert!(matches!(read(&lie).await, Err(Fault::Protocol("a frame that is too long"))));
            let mut cut = vec![LONG];
            cut.extend_from_slice(&(MAX_MESSAGE as u64).to_be_bytes());
            cut.extend_from_slice(b"little");
            assert!(matches!(read(&cut).await, Err(Fault::Io(_))));
            assert!(matches!(read(&[8, 0]).await, Err(Fault::Protocol("a frame with unknown flags"))));
            assert!(matches!(read(&[1, 0].repeat(9)).await, Err(Fault::Protocol("too many frames"))));
            assert!(matches!(
                read(&[1, 0, 4, 1, 0]).await,
                Err(Fault::Protocol("a command inside a message"))
            ));
            for command in [&[4, 0][..], &[4, 2, 9, b'P'], &[4, 6, 4, b'P', b'I', b'N', b'G', 0]] {
                assert!(matches!(read(command).await, Err(Fault::Protocol(_))), "{command:?}");
            }
            // Any bytes at all: an answer, no panic.
            for seed in 0..2_000u32 {
                let bytes: Vec<u8> =
                    (0..40).map(|n| (seed.wrapping_mul(2_654_435_761) >> (n % 24)) as u8 ^ n).collect();
                let mut reader = Reader::new(bytes.as_slice());
                while reader.next().await.is_ok() {}
            }
        });
    }

    #[test]
    fn properties_are_found_or_cut_off() {
        let body = b"\x0bSocket-Type\0\0\0\x03SUB\x08Identity\0\0\0\0";
        assert_eq!(property(body, b"socket-type").unwrap(), Some(&b"SUB"[..]));
        assert_eq!(property(body, b"resource").unwrap(), None);
        for len in 1..body.len() {
            let cut = property(&body[..len], b"socket-type");
            assert!(cut.is_err() || len == 19, "{len}: {cut:?}");
        }
    }
}
