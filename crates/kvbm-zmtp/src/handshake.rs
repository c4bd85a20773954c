//! Greeting and READY: what both peers say before the first message.

use crate::frame::{COMMAND, MAX_COMMAND_BYTES, ZmtpReader, ZmtpWriter, split_command};
use crate::{SocketType, ZmtpError};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};

/// A connection after its handshake.
#[derive(Debug)]
pub struct Handshake<R, W> {
    /// Reads what the peer sends.
    pub reader: ZmtpReader<R>,
    /// Writes to the peer.
    pub writer: ZmtpWriter<W>,
    /// What the peer said of itself.
    pub peer: PeerInfo,
}

/// What a peer said of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerInfo {
    /// It answers heartbeats (ZMTP 3.1).
    pub heartbeats: bool,
    /// The body of its READY.
    properties: Vec<u8>,
}

impl PeerInfo {
    /// The value of a property of its READY; names are compared without case.
    pub fn property(&self, name: &str) -> Option<&[u8]> {
        // The handshake has parsed it once.
        find_property(&self.properties, name.as_bytes()).ok().flatten()
    }
}

/// Greets the peer and exchanges READY within `limit`. `properties` are sent in READY beside the
/// socket type, names of at most 255 bytes; names of an application begin with `X-`.
///
/// # Errors
/// The peer is none of ZMTP 3.x, has a socket type that does not fit, or takes too long.
pub async fn handshake<R: AsyncRead + Unpin, W: AsyncWrite + Unpin>(
    socket: SocketType,
    properties: &[(&str, &[u8])],
    (read, write): (R, W),
    limit: Duration,
) -> Result<Handshake<R, W>, ZmtpError> {
    let exchanged = tokio::time::timeout(limit, exchange(socket, properties, (read, write))).await;
    exchanged.unwrap_or(Err(ZmtpError::Timeout("the handshake")))
}

/// The same without a time limit.
pub(crate) async fn exchange<R: AsyncRead + Unpin, W: AsyncWrite + Unpin>(
    socket: SocketType,
    properties: &[(&str, &[u8])],
    (read, write): (R, W),
) -> Result<Handshake<R, W>, ZmtpError> {
    let (mut reader, mut writer) = (ZmtpReader::new(socket, read), ZmtpWriter::new(write));
    writer.write_all(&greeting()).await?;
    let mut greeting = [0; 64];
    reader.read_exact(&mut greeting).await?;
    let heartbeats = check_greeting(&greeting)?;
    let named = [("Socket-Type", socket.name().as_bytes()), ("Identity", b"")];
    let mut ready = Vec::new();
    named.iter().chain(properties).for_each(|(name, value)| write_property(&mut ready, name, value));
    writer.command("READY", &ready).await?;
    let (flags, command) = reader.frame(MAX_COMMAND_BYTES).await?;
    if flags & COMMAND == 0 {
        return Err(ZmtpError::Protocol("no READY after the greeting"));
    }
    let properties = match split_command(&command)? {
        (b"READY", body) => body.to_vec(),
        (b"ERROR", body) => return Err(ZmtpError::Refused(String::from_utf8_lossy(body).into_owned())),
        _ => return Err(ZmtpError::Protocol("no READY after the greeting")),
    };
    let partner = find_property(&properties, b"socket-type")?.unwrap_or_default();
    if !socket.partners().iter().any(|name| name.as_bytes() == partner) {
        return Err(ZmtpError::SocketType(String::from_utf8_lossy(partner).into_owned()));
    }
    Ok(Handshake { reader, writer, peer: PeerInfo { heartbeats, properties } })
}

/// Signature, version 3.1, mechanism NULL.
pub(crate) const fn greeting() -> [u8; 64] {
    let mut greeting = [0; 64];
    (greeting[0], greeting[8], greeting[9]) = (0xFF, 1, 0x7F);
    (greeting[10], greeting[11]) = (3, 1);
    (greeting[12], greeting[13], greeting[14], greeting[15]) = (b'N', b'U', b'L', b'L');
    greeting
}

/// Whether the peer knows heartbeats.
fn check_greeting(greeting: &[u8; 64]) -> Result<bool, ZmtpError> {
    if greeting[0] != 0xFF || greeting[9] & 1 == 0 {
        return Err(ZmtpError::Protocol("no greeting of ZMTP"));
    }
    if greeting[10] < 3 {
        return Err(ZmtpError::Version(greeting[10]));
    }
    let mechanism = greeting[12..32].split(|byte| *byte == 0).next().unwrap_or_default();
    if mechanism != b"NULL" {
        return Err(ZmtpError::Mechanism(String::from_utf8_lossy(mechanism).into_owned()));
    }
    Ok(greeting[10] > 3 || greeting[11] >= 1)
}

fn write_property(out: &mut Vec<u8>, name: &str, value: &[u8]) {
    out.push(name.len() as u8);
    out.extend_from_slice(name.as_bytes());
    out.extend_from_slice(&(value.len() as u32).to_be_bytes());
    out.extend_from_slice(value);
}

/// A property of READY. The last one of a name counts.
fn find_property<'a>(mut body: &'a [u8], wanted: &[u8]) -> Result<Option<&'a [u8]>, ZmtpError> {
    let mut found = None;
    while !body.is_empty() {
        let split = split_command(body).ok().and_then(|(name, rest)| {
            let (len, rest) = rest.split_first_chunk::<4>()?;
            let (value, rest) = rest.split_at_checked(u32::from_be_bytes(*len) as usize)?;
            Some((name, value, rest))
        });
        let Some((name, value, rest)) = split else {
            return Err(ZmtpError::Protocol("a property that is cut off"));
        };
        if name.eq_ignore_ascii_case(wanted) {
            found = Some(value);
        }
        body = rest;
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn properties_are_found_or_cut_off() {
        let body = b"\x0bSocket-Type\0\0\0\x03SUB\x08Identity\0\0\0\0";
        assert_eq!(find_property(body, b"socket-type").unwrap(), Some(&b"SUB"[..]));
        assert_eq!(find_property(body, b"resource").unwrap(), None);
        for len in 1..body.len() {
            let cut = find_property(&body[..len], b"socket-type");
            assert!(cut.is_err() || len == 19, "{len}: {cut:?}");
        }
    }

    #[test]
    fn a_peer_that_says_nothing_exceeds_the_time_limit() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let (ours, _peer) = tokio::io::duplex(1024);
        let limit = Duration::from_millis(10);
        let ended =
            runtime.block_on(async { handshake(SocketType::Pub, &[], tokio::io::split(ours), limit).await });
        assert!(matches!(ended, Err(ZmtpError::Timeout("the handshake"))));
    }
}
