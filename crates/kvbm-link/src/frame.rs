//! Lengths and kinds on the wire.

use kvbm_plan::wire;
use std::io::{self, Read};
use std::time::Duration;

/// Largest body of a handshake in bytes.
pub(crate) const MAX_HANDSHAKE: usize = 4096;
/// Largest body of a command or message in bytes.
pub(crate) const MAX_BODY: usize = wire::MAX_BYTES;
/// Bytes before a body.
pub(crate) const HEADER: usize = 5;

/// What a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FrameKind {
    /// The leader's offer, or the worker's answer.
    Handshake,
    /// The worker refuses the offer.
    Refusal,
    /// A command or a message.
    Body,
    /// Proof of life; no body.
    Heartbeat,
    /// The worker is about to end, and waits for so long ([`leaving`]).
    Leaving,
    /// The leader has saved what it wants of a worker that is about to end; no body.
    Dismissed,
}

const KINDS: [(u8, FrameKind); 6] = [
    (1, FrameKind::Handshake),
    (2, FrameKind::Refusal),
    (3, FrameKind::Body),
    (4, FrameKind::Heartbeat),
    (5, FrameKind::Leaving),
    (6, FrameKind::Dismissed),
];

/// Bytes of the body of a [`FrameKind::Leaving`].
const PATIENCE_BYTES: usize = 4;

impl FrameKind {
    fn code(self) -> u8 {
        KINDS.iter().find(|(_, kind)| *kind == self).map_or(0, |(code, _)| *code)
    }

    fn from_code(code: u8) -> Option<Self> {
        KINDS.iter().find(|(known, _)| *known == code).map(|(_, kind)| *kind)
    }

    /// Most bytes of the body.
    fn max_body(self) -> usize {
        match self {
            Self::Handshake | Self::Refusal => MAX_HANDSHAKE,
            Self::Body => MAX_BODY,
            Self::Heartbeat | Self::Dismissed => 0,
            Self::Leaving => PATIENCE_BYTES,
        }
    }
}

/// The bytes of a frame, whose body must be within the bound of its kind.
pub(crate) fn frame(kind: FrameKind, body: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEADER + body.len());
    bytes.extend_from_slice(&(body.len() as u32 + 1).to_le_bytes());
    bytes.push(kind.code());
    bytes.extend_from_slice(body);
    bytes
}

/// The frame of a worker that is about to end: it waits for so long until the leader has saved.
pub(crate) fn leaving(patience: Duration) -> Vec<u8> {
    let milliseconds = u32::try_from(patience.as_millis()).unwrap_or(u32::MAX);
    frame(FrameKind::Leaving, &milliseconds.to_le_bytes())
}

/// How long the worker waits.
pub(crate) fn announced_wait(body: &[u8]) -> io::Result<Duration> {
    let bytes: [u8; PATIENCE_BYTES] = body.try_into().map_err(|_| {
        let what = format!("the time that a worker waits has {} bytes: 4 are needed", body.len());
        io::Error::new(io::ErrorKind::InvalidData, what)
    })?;
    Ok(Duration::from_millis(u32::from_le_bytes(bytes).into()))
}

/// Kind and length of the body that follows this header.
pub(crate) fn parse_header(header: [u8; HEADER]) -> io::Result<(FrameKind, usize)> {
    let [a, b, c, d, code] = header;
    let length = u32::from_le_bytes([a, b, c, d]) as usize;
    let wrong = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
    let kind = FrameKind::from_code(code).ok_or_else(|| wrong(format!("frame of unknown kind {code}")))?;
    match length.checked_sub(1) {
        Some(body) if body <= kind.max_body() => Ok((kind, body)),
        _ => Err(wrong(format!(
            "frame of {length} bytes and kind {code}: at most {} are allowed",
            kind.max_body() + 1
        ))),
    }
}

/// Reads one frame. Memory for the body is taken as its bytes arrive.
pub(crate) fn read_frame(from: &mut impl Read) -> io::Result<(FrameKind, Vec<u8>)> {
    let mut header = [0; HEADER];
    from.read_exact(&mut header)?;
    let (kind, length) = parse_header(header)?;
    let mut body = Vec::new();
    from.take(length as u64).read_to_end(&mut body)?;
    if body.len() < length {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok((kind, body))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_round_trip() {
        for (kind, body) in [
            (FrameKind::Handshake, &b"offer"[..]),
            (FrameKind::Refusal, b""),
            (FrameKind::Body, &vec![7; 100_000]),
            (FrameKind::Heartbeat, b""),
            (FrameKind::Leaving, &[1, 2, 3, 4]),
            (FrameKind::Dismissed, b""),
        ] {
            let bytes = frame(kind, body);
            let (found, read) = read_frame(&mut &bytes[..]).unwrap();
            assert_eq!((found, read.as_slice()), (kind, body));
            for cut in [0, 1, HEADER - 1, bytes.len() - 1] {
                assert!(read_frame(&mut &bytes[..cut]).is_err(), "{kind:?} cut at {cut}");
            }
        }
    }

    #[test]
    fn a_length_beyond_its_kind_is_refused_unread() {
        let header = |length: u32, code: u8| {
            let [a, b, c, d] = length.to_le_bytes();
            parse_header([a, b, c, d, code])
        };
        for (length, code) in [
            (0, 3),
            (MAX_HANDSHAKE as u32 + 2, 1),
            (MAX_BODY as u32 + 2, 3),
            (2, 4),
            (6, 5),
            (2, 6),
            (u32::MAX, 3),
        ] {
            assert!(header(length, code).is_err(), "{length} bytes of kind {code}");
        }
        assert!(header(1, 9).unwrap_err().to_string().contains("unknown kind 9"));
        assert_eq!(header(MAX_BODY as u32 + 1, 3).unwrap(), (FrameKind::Body, MAX_BODY));
    }

    #[test]
    fn the_patience_of_a_worker_round_trips() {
        for (given, found) in [(0, 0), (4000, 4000), (u64::MAX, u64::from(u32::MAX))] {
            let bytes = leaving(Duration::from_millis(given));
            let (kind, body) = read_frame(&mut &bytes[..]).unwrap();
            assert_eq!(
                (kind, announced_wait(&body).unwrap()),
                (FrameKind::Leaving, Duration::from_millis(found))
            );
        }
        for short in [&[][..], &[1, 2, 3]] {
            assert!(announced_wait(short).unwrap_err().to_string().contains("4 are needed"));
        }
    }
}
