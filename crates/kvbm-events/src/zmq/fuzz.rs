//! Whatever the other end of a connection says.

use super::subscribe::read;
use super::zmtp::{Fault, Incoming, MAX_MESSAGE, Reader, Socket, Writer, shake_hands};
use std::pin::pin;
use std::task::{Context, Poll, Waker};

const SOCKETS: [Socket; 4] = [Socket::Pub, Socket::Sub, Socket::Router, Socket::Dealer];
/// How ZMTP 3.1 begins.
const GREETING: [u8; 64] = {
    let mut greeting = [0; 64];
    (greeting[0], greeting[9], greeting[10], greeting[11]) = (0xFF, 0x7F, 3, 1);
    (greeting[12], greeting[13], greeting[14], greeting[15]) = (b'N', b'U', b'L', b'L');
    greeting
};

/// A peer is believed or its fault has a name; what it says of its life reaches us unchanged; each of its messages is bounded, and written
/// by us it is read as the same. The first byte of the input says which of our sockets it reaches; the greeting may be left out.
pub fn zmtp(input: &[u8]) {
    let Some((&first, said)) = input.split_first() else { return };
    let socket = SOCKETS[usize::from(first) % SOCKETS.len()];
    let greets = said.first() == Some(&GREETING[0]);
    let bytes = if greets { said.to_vec() } else { [&GREETING, said].concat() };
    let mut reader = Reader::new(bytes.as_slice());
    let mut ours = Vec::new();
    match now(shake_hands(socket, b"", &mut reader, &mut Writer::new(&mut ours))) {
        Ok(peer) => {
            if let Some(life) = peer.life.filter(|life| (1..=255).contains(&life.len())) {
                is_told(socket, &life);
            }
            listens(&mut reader);
        }
        Err(fault) => has_a_name(&fault),
    }
}

/// A peer with that life tells it.
fn is_told(socket: Socket, life: &[u8]) {
    let partner = match socket {
        Socket::Pub => Socket::Sub,
        Socket::Sub => Socket::Pub,
        Socket::Router => Socket::Dealer,
        Socket::Dealer => Socket::Router,
    };
    let (mut told, mut answered) = (Vec::new(), Vec::new());
    // Whoever hears a greeting and nothing else has told all.
    let mut silence = Reader::new(GREETING.as_slice());
    let cut = now(shake_hands(partner, life, &mut silence, &mut Writer::new(&mut told)));
    assert!(matches!(cut, Err(Fault::Io(_))));
    let mut reader = Reader::new(told.as_slice());
    let peer = now(shake_hands(socket, b"", &mut reader, &mut Writer::new(&mut answered)));
    assert!(matches!(peer, Ok(peer) if peer.beats && peer.life.as_deref() == Some(life)));
}

fn listens(reader: &mut Reader<&[u8]>) {
    loop {
        match now(reader.next()) {
            Ok(Incoming::Message(frames)) => is_written_and_read_again(&frames),
            Ok(Incoming::Ping(context)) => assert!(context.len() <= 16),
            Ok(Incoming::Subscribe(_) | Incoming::Cancel(_) | Incoming::Pong) => {}
            Err(fault) => return has_a_name(&fault),
        }
    }
}

fn is_written_and_read_again(frames: &[Vec<u8>]) {
    assert!(!frames.is_empty() && frames.iter().map(Vec::len).sum::<usize>() <= MAX_MESSAGE);
    let mut written = Vec::new();
    let all: Vec<&[u8]> = frames.iter().map(Vec::as_slice).collect();
    assert!(now(Writer::new(&mut written).message(&all)).is_ok());
    let again = now(Reader::new(written.as_slice()).next());
    assert!(matches!(again, Ok(Incoming::Message(again)) if again == frames));
    if let Some((topic, number, payload)) = read(frames.to_vec()) {
        assert_eq!([&topic[..], &number.to_be_bytes(), &payload], all[..]);
    }
}

fn has_a_name(fault: &Fault) {
    assert!(!fault.to_string().is_empty());
}

/// What a future comes to that waits for nobody.
fn now<T>(future: impl Future<Output = T>) -> T {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(value) => value,
        Poll::Pending => panic!("bytes that are there were waited for"),
    }
}
