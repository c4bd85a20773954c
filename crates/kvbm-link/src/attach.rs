//! How a process attaches to a node daemon: it offers, the daemon welcomes or refuses it.

use crate::descriptors::{receive, send};
use crate::frame::{FrameKind, MAX_HANDSHAKE, frame, read_frame};
use crate::timed::Timed;
use rustix::fd::{AsFd, OwnedFd};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::io::{self, Write};

/// Begins every offer: another program's bytes are found at once.
const MAGIC: [u8; 8] = *b"KVBMNODE";
/// Versions of this protocol that this build speaks, the first and the last.
const PROTOCOLS: [u16; 2] = [5, 5];
/// Longest terms of a process that attaches, in bytes.
pub const MAX_TERMS: usize = 2000;
/// Most characters of a refusal.
const MAX_SHOWN: usize = 900;

/// A process that is not attached.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AttachError {
    /// The socket failed, or the other end did not answer in time.
    #[error("attach: {0}")]
    Io(#[from] io::Error),
    /// What came is no message of this protocol.
    #[error("attach: {0}; is another program at this socket?")]
    Malformed(String),
    /// The daemon refuses the process.
    #[error("the daemon refuses: {0}")]
    Refused(String),
}

#[derive(Serialize, Deserialize)]
struct Offer {
    magic: [u8; 8],
    protocols: [u16; 2],
    build: String,
    terms: Vec<u8>,
}

#[derive(Serialize, Deserialize)]
struct Answer {
    magic: [u8; 8],
    protocol: u16,
    build: String,
}

fn encode(body: &impl Serialize) -> Result<Vec<u8>, AttachError> {
    rmp_serde::to_vec(body).map_err(|error| AttachError::Malformed(error.to_string()))
}

fn decode<T: DeserializeOwned>(body: &[u8]) -> Result<T, AttachError> {
    rmp_serde::from_slice(body).map_err(|error| AttachError::Malformed(error.to_string()))
}

fn build() -> String {
    env!("CARGO_PKG_VERSION").to_owned()
}

/// The attaching process's part: what the daemon answers, and the descriptors that came with it.
pub(crate) fn offer(line: &mut Timed<'_>, terms: &[u8]) -> Result<(Vec<u8>, Vec<OwnedFd>), AttachError> {
    if terms.len() > MAX_TERMS {
        let bytes = terms.len();
        return Err(AttachError::Malformed(format!(
            "terms of {bytes} bytes, at most {MAX_TERMS} are allowed"
        )));
    }
    let offer = encode(&Offer { magic: MAGIC, protocols: PROTOCOLS, build: build(), terms: terms.to_vec() })?;
    debug_assert!(offer.len() <= MAX_HANDSHAKE, "a byte takes two at most");
    line.write_all(&frame(FrameKind::Handshake, &offer))?;
    let mut files = Vec::new();
    let mut line = receive(line, &mut files);
    match read_frame(&mut line)? {
        (FrameKind::Handshake, body) => {
            let answer: Answer = decode(&body)?;
            if answer.magic != MAGIC {
                return Err(AttachError::Malformed("the answer does not begin as ours".into()));
            }
        }
        (FrameKind::Refusal, body) => return Err(AttachError::Refused(decode(&body)?)),
        (kind, _) => {
            return Err(AttachError::Malformed(format!("a frame of kind {kind:?} came as the answer")));
        }
    }
    match read_frame(&mut line)? {
        (FrameKind::Body, welcome) => Ok((welcome, files)),
        (kind, _) => {
            Err(AttachError::Malformed(format!("a frame of kind {kind:?} came in place of a welcome")))
        }
    }
}

/// The daemon's part: reads the offer of a process. Its terms, or why the versions do not fit.
pub(crate) fn read_offer(line: &mut Timed<'_>) -> Result<Result<Vec<u8>, String>, AttachError> {
    match read_frame(line)? {
        (FrameKind::Handshake, body) => decode_offer(&body),
        _ => Err(AttachError::Malformed("no offer came first".into())),
    }
}

/// The same of the body of its frame.
pub(crate) fn decode_offer(body: &[u8]) -> Result<Result<Vec<u8>, String>, AttachError> {
    let offer: Offer = decode(body)?;
    if offer.magic != MAGIC {
        return Err(AttachError::Malformed("the offer does not begin as ours".into()));
    }
    let [first, last] = offer.protocols;
    if PROTOCOLS[1] < first || last < PROTOCOLS[0] {
        return Ok(Err(format!(
            "protocol {first} to {last} (kvbm {}) there, {} to {} (kvbm {}) here: run the same version",
            offer.build,
            PROTOCOLS[0],
            PROTOCOLS[1],
            build()
        )));
    }
    if offer.terms.len() > MAX_TERMS {
        return Err(AttachError::Malformed(format!("terms of {} bytes", offer.terms.len())));
    }
    Ok(Ok(offer.terms))
}

/// The daemon attaches the process.
pub(crate) fn welcome(line: &mut Timed<'_>, welcome: &[u8], files: &[impl AsFd]) -> Result<(), AttachError> {
    let answer = Answer { magic: MAGIC, protocol: PROTOCOLS[1], build: build() };
    line.write_all(&frame(FrameKind::Handshake, &encode(&answer)?))?;
    send(line, &frame(FrameKind::Body, welcome), files)?;
    Ok(())
}

/// The daemon refuses the process.
pub(crate) fn refuse(line: &mut Timed<'_>, reason: &str) -> Result<(), AttachError> {
    let shown: String = reason.chars().take(MAX_SHOWN).collect();
    Ok(line.write_all(&frame(FrameKind::Refusal, &encode(&shown)?))?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    const TIME: Duration = Duration::from_secs(5);

    #[test]
    fn descriptors_come_with_the_welcome() {
        let (near, far) = UnixStream::pair().unwrap();
        let file = tempfile::tempfile().unwrap();
        file.set_len(77).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut line = Timed::new(&far, TIME);
                assert_eq!(read_offer(&mut line).unwrap().unwrap(), b"terms");
                welcome(&mut line, &vec![5; 100_000], &[&file]).unwrap();
            });
            let (welcome, files) = offer(&mut Timed::new(&near, TIME), b"terms").unwrap();
            assert_eq!((welcome, files.len()), (vec![5; 100_000], 1));
            let file = std::fs::File::from(files.into_iter().next().unwrap());
            assert_eq!(file.metadata().unwrap().len(), 77);
        });
    }

    #[test]
    fn a_refusal_says_why() {
        let (near, far) = UnixStream::pair().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut line = Timed::new(&far, TIME);
                read_offer(&mut line).unwrap().unwrap();
                refuse(&mut line, &"\u{10348}".repeat(5000)).unwrap();
            });
            let error = offer(&mut Timed::new(&near, TIME), &[0xff; MAX_TERMS]).unwrap_err();
            assert!(error.to_string().starts_with("the daemon refuses: \u{10348}"), "{error}");
        });
        assert!(offer(&mut Timed::new(&near, TIME), &[0; MAX_TERMS + 1]).is_err());
    }

    #[test]
    fn another_version_and_another_program_are_distinguished() {
        // The second knew one cache group, the third no replicas, the fourth no sessions that
        // resume.
        for [first, last] in [[7, 9], [2, 2], [3, 3], [4, 4]] {
            let protocols = [first, last];
            let strange = Offer { magic: MAGIC, protocols, build: "9".into(), terms: vec![0xff; 1536] };
            let reason = decode_offer(&encode(&strange).unwrap()).unwrap().unwrap_err();
            let there = format!("protocol {first} to {last} (kvbm 9) there, 5 to 5 (kvbm ");
            assert!(reason.starts_with(&there), "{reason}");
        }
        let strange =
            Offer { magic: *b"KVBMLINK", protocols: PROTOCOLS, build: "9".into(), terms: Vec::new() };
        assert!(decode_offer(&encode(&strange).unwrap()).is_err());
        assert!(decode_offer(b"GET / HTTP/1.1").is_err());
    }
}
