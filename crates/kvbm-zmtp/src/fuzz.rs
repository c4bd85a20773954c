//! What must hold of any bytes that a peer sends: the body of the fuzz target `zmtp`
//! (`cargo xtask fuzz`). It panics where something does not hold.

use crate::frame::{MAX_MESSAGE_BYTES, MAX_PING_CONTEXT, Received, ZmtpReader, ZmtpWriter};
use crate::handshake::{exchange, greeting};
use crate::{SocketType, ZmtpError};
use std::pin::pin;
use std::task::{Context, Poll, Waker};

const SOCKETS: [SocketType; 4] = [SocketType::Pub, SocketType::Sub, SocketType::Router, SocketType::Dealer];
const GREETING: [u8; 64] = greeting();
/// A property that any peer may send.
const PROPERTY: &str = "Identity";

/// Each input ends with a handshake or a named error. A property of READY arrives unchanged.
/// Messages are bounded, and what we write is read as the same message. The first byte of the
/// input chooses our socket type; the greeting may be left out.
pub fn zmtp(input: &[u8]) {
    let Some((&first, sent)) = input.split_first() else { return };
    let socket = SOCKETS[usize::from(first) % SOCKETS.len()];
    let greets = sent.first() == Some(&GREETING[0]);
    let bytes = if greets { sent.to_vec() } else { [&GREETING[..], sent].concat() };
    let mut ours = Vec::new();
    match now(exchange(socket, &[], (bytes.as_slice(), &mut ours))) {
        Ok(mut handshake) => {
            if let Some(value) = handshake.peer.property(PROPERTY).filter(|value| value.len() <= 255) {
                check_property(socket, value);
            }
            check_messages(&mut handshake.reader);
        }
        Err(error) => check_error(&error),
    }
}

/// A property that a peer sends is decoded unchanged.
fn check_property(socket: SocketType, value: &[u8]) {
    let partner = match socket {
        SocketType::Pub => SocketType::Sub,
        SocketType::Sub => SocketType::Pub,
        SocketType::Router => SocketType::Dealer,
        SocketType::Dealer => SocketType::Router,
    };
    let (mut sent, mut answered) = (Vec::new(), Vec::new());
    // After the greeting the peer has sent its complete READY command.
    let cut = now(exchange(partner, &[(PROPERTY, value)], (GREETING.as_slice(), &mut sent)));
    assert!(matches!(cut, Err(ZmtpError::Io(_))));
    let read = now(exchange(socket, &[], (sent.as_slice(), &mut answered)));
    assert!(matches!(read, Ok(read) if read.peer.heartbeats && read.peer.property(PROPERTY) == Some(value)));
}

fn check_messages(reader: &mut ZmtpReader<&[u8]>) {
    loop {
        match now(reader.next()) {
            Ok(Received::Message(frames)) => check_round_trip(&frames),
            Ok(Received::Ping(context)) => assert!(context.len() <= MAX_PING_CONTEXT),
            Ok(Received::Subscribe(_) | Received::Cancel(_) | Received::Pong) => {}
            Err(error) => return check_error(&error),
        }
    }
}

fn check_round_trip(frames: &[Vec<u8>]) {
    assert!(!frames.is_empty() && frames.iter().map(Vec::len).sum::<usize>() <= MAX_MESSAGE_BYTES);
    let mut written = Vec::new();
    let all: Vec<&[u8]> = frames.iter().map(Vec::as_slice).collect();
    assert!(now(ZmtpWriter::new(&mut written).message(&all)).is_ok());
    let again = now(ZmtpReader::new(SocketType::Sub, written.as_slice()).next());
    assert!(matches!(again, Ok(Received::Message(again)) if again == frames));
}

fn check_error(error: &ZmtpError) {
    assert!(!error.to_string().is_empty());
}

/// The value of a future that never waits.
fn now<T>(future: impl Future<Output = T>) -> T {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(value) => value,
        Poll::Pending => panic!("a future waited for bytes that were there"),
    }
}

#[cfg(test)]
#[path = "../../../fuzz/src/corpus.rs"]
mod corpus;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_corpus_holds() {
        assert!(corpus::run("zmtp", &[], zmtp) > 0);
    }
}
