//! Our sockets with those of the crate `zeromq`, both ways.
//! `kvbm-events/tests/integration/libzmq.rs` does the same with libzmq.

#![allow(clippy::unwrap_used, reason = "helpers of tests may panic like tests")]

mod support;

use bytes::Bytes;
use kvbm_zmtp::{Handshake, Received, SocketType, ZmtpEndpoint, accept, connect, handshake};
use std::sync::Arc;
use support::{LIMIT, anywhere, pause, run, soon};
use tokio::sync::mpsc;
use zeromq::{Socket, SocketRecv, SocketSend, ZmqMessage};

fn frames(message: ZmqMessage) -> Vec<Vec<u8>> {
    message.into_vec().into_iter().map(|frame| frame.to_vec()).collect()
}

/// A message of these frames, at least one.
fn message(frames: &[&[u8]]) -> ZmqMessage {
    let mut message = ZmqMessage::from(Bytes::copy_from_slice(frames[0]));
    frames[1..].iter().for_each(|frame| message.push_back(Bytes::copy_from_slice(frame)));
    message
}

/// A message of three frames as events have: short, eight bytes, long.
fn event(sequence: u64) -> [Vec<u8>; 3] {
    let payload = (0..100_000u64).map(|n| (n * 7 + sequence) as u8).collect();
    [b"kv-events".to_vec(), sequence.to_be_bytes().to_vec(), payload]
}

/// Accepts connections of a socket of ours and echoes what it receives, each message with `reply`
/// in front of its last frame. A PUB socket sends events from the first subscription on.
async fn serve(socket: SocketType, received: mpsc::UnboundedSender<Received>) -> ZmtpEndpoint {
    let listener = anywhere().listen(soon()).await.unwrap();
    let endpoint = listener.endpoint();
    let received = Arc::new(received);
    let serve = move |halves| {
        let received = Arc::clone(&received);
        async move {
            let Handshake { mut reader, mut writer, .. } =
                handshake(socket, &[], halves, LIMIT).await.unwrap();
            while let Ok(next) = reader.next().await {
                match &next {
                    Received::Subscribe(_) => {
                        for sequence in 0..20 {
                            let event = event(sequence);
                            writer.message(&event.each_ref().map(Vec::as_slice)).await.unwrap();
                        }
                    }
                    Received::Message(frames) => {
                        let mut reply: Vec<&[u8]> = frames.iter().map(Vec::as_slice).collect();
                        reply.insert(reply.len() - 1, b"reply");
                        writer.message(&reply).await.unwrap();
                    }
                    _ => {}
                }
                let _ = received.send(next);
            }
        }
    };
    tokio::spawn(accept(listener, 4, || {}, serve));
    endpoint
}

#[test]
fn its_sub_follows_our_pub() {
    run(async {
        let (sender, mut received) = mpsc::unbounded_channel();
        let endpoint = serve(SocketType::Pub, sender).await;
        let mut sub = zeromq::SubSocket::new();
        sub.connect(&endpoint.to_string()).await.unwrap();
        sub.subscribe("kv-").await.unwrap();
        for sequence in 0..20 {
            assert_eq!(frames(sub.recv().await.unwrap()), event(sequence));
        }
        assert_eq!(received.recv().await, Some(Received::Subscribe(b"kv-".to_vec())));
        sub.unsubscribe("kv-").await.unwrap();
        assert_eq!(received.recv().await, Some(Received::Cancel(b"kv-".to_vec())));
    });
}

#[test]
fn our_sub_follows_its_pub() {
    run(async {
        let mut publisher = zeromq::PubSocket::new();
        let endpoint = publisher.bind("tcp://127.0.0.1:0").await.unwrap().to_string();
        let ours =
            connect(&endpoint.parse().unwrap(), SocketType::Sub, &[("X-Any", b"1")], LIMIT).await.unwrap();
        let Handshake { mut reader, mut writer, .. } = ours;
        writer.subscribe(b"kv-").await.unwrap();
        let sending = async {
            // Its PUB does not say when it has a subscription.
            loop {
                for sequence in 0..20 {
                    publisher.send(message(&[b"other", b"topic"])).await.unwrap();
                    let event = event(sequence);
                    let event: Vec<&[u8]> = event.iter().map(Vec::as_slice).collect();
                    publisher.send(message(&event)).await.unwrap();
                    pause().await;
                }
            }
        };
        let receiving = async {
            let Ok(Received::Message(first)) = reader.next().await else { panic!("no message") };
            let first = u64::from_be_bytes(first[1].as_slice().try_into().unwrap());
            for sequence in first + 1..first + 10 {
                assert_eq!(
                    reader.next().await.unwrap(),
                    Received::Message(event(sequence % 20).to_vec()),
                    "messages of one topic, in their order"
                );
            }
        };
        tokio::select! {
            () = sending => {}
            () = receiving => {}
        }
    });
}

#[test]
fn its_req_and_its_dealer_ask_our_router() {
    run(async {
        let (sender, mut received) = mpsc::unbounded_channel();
        let endpoint = serve(SocketType::Router, sender).await.to_string();
        let mut req = zeromq::ReqSocket::new();
        req.connect(&endpoint).await.unwrap();
        req.send(message(&[b"question"])).await.unwrap();
        assert_eq!(frames(req.recv().await.unwrap()), [&b"reply"[..], b"question"]);
        assert_eq!(received.recv().await, Some(Received::Message(vec![Vec::new(), b"question".to_vec()])));
        let mut dealer = zeromq::DealerSocket::new();
        dealer.connect(&endpoint).await.unwrap();
        for number in 0..3u8 {
            dealer.send(message(&[b"", &[number]])).await.unwrap();
            assert_eq!(frames(dealer.recv().await.unwrap()), [&b""[..], b"reply", &[number]]);
        }
    });
}

#[test]
fn our_dealer_asks_its_router() {
    run(async {
        let mut router = zeromq::RouterSocket::new();
        let endpoint = router.bind("tcp://127.0.0.1:0").await.unwrap().to_string();
        let asking = async {
            let ours = connect(&endpoint.parse().unwrap(), SocketType::Dealer, &[], LIMIT).await.unwrap();
            let Handshake { mut reader, mut writer, .. } = ours;
            writer.message(&[b"", b"question", &vec![7; 100_000]]).await.unwrap();
            reader.next().await.unwrap()
        };
        let answering = async {
            let question = frames(router.recv().await.unwrap());
            assert_eq!(question[1..], [Vec::new(), b"question".to_vec(), vec![7; 100_000]]);
            router.send(message(&[&question[0], b"", b"answer"])).await.unwrap();
        };
        let (answer, ()) = tokio::join!(asking, answering);
        assert_eq!(answer, Received::Message(vec![Vec::new(), b"answer".to_vec()]));
    });
}
