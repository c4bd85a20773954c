//! Bodies of objects for a store that takes connections and does not answer.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use kvbm_nixl::{BackendOptions, NixlObjects, NixlOptions, ObjectError};

/// Late transfers at most, as docs/operate.md says.
const MAX_LATE: usize = 32;
/// Most time until a refusal has arrived.
const PATIENCE: Duration = Duration::from_secs(120);

/// The kernel takes connections of a listener that accepts none.
fn silent_store() -> TcpListener {
    TcpListener::bind("127.0.0.1:0").expect("a port of loopback")
}

/// From now on all requests are refused, which NIXL's client does not try again.
fn refuse_all(store: TcpListener) {
    std::thread::spawn(move || {
        for client in store.incoming().flatten() {
            std::thread::spawn(move || refuse(client));
        }
    });
}

fn refuse(mut client: TcpStream) {
    let (mut head, mut byte) = (Vec::new(), [0]);
    while !head.ends_with(b"\r\n\r\n") && client.read_exact(&mut byte).is_ok() {
        head.push(byte[0]);
    }
    // A client that went away needs no answer.
    let _ = client.write_all(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
}

fn objects_at(store: &TcpListener, name: &str) -> NixlObjects {
    let address = store.local_addr().expect("the address of a listener");
    let parameters = [
        ("bucket", "late".to_owned()),
        ("endpoint_override", format!("http://{address}")),
        ("scheme", "http".to_owned()),
        ("region", "us-east-1".to_owned()),
        ("access_key", "id".to_owned()),
        ("secret_key", "secret".to_owned()),
    ];
    let parameters = parameters.map(|(name, value)| (name.to_owned(), value)).to_vec();
    let mut options = NixlOptions::new(name);
    (options.objects, options.peers) = (true, false);
    options.backends.push(BackendOptions { name: "OBJ".to_owned(), parameters });
    NixlObjects::new(&options).expect("an agent with the back end OBJ")
}

#[test]
fn late_transfers_are_bounded_and_make_room_at_their_end() {
    let store = silent_store();
    let objects = objects_at(&store, "late-objects");
    for number in 0..MAX_LATE {
        drop(objects.write(&format!("block-{number}"), &[1; 4096]).expect("a transfer that starts"));
    }
    let refused = objects.write("one-more", &[1; 4096]).expect_err("one too many");
    assert_eq!(refused, ObjectError::Behind { left: MAX_LATE });
    assert!(refused.to_string().contains("32 transfers"), "{refused}");

    refuse_all(store);
    let began = Instant::now();
    let mut started = loop {
        match objects.read("block-0", 4096) {
            Ok(transfer) => break transfer,
            Err(ObjectError::Behind { .. }) => std::thread::sleep(Duration::from_millis(50)),
            Err(error) => panic!("{error}"),
        }
        assert!(began.elapsed() < PATIENCE, "no transfer has ended");
    };
    let failed = started.wait(Instant::now() + PATIENCE).expect_err("the store refuses it");
    assert!(matches!(failed, ObjectError::Agent(_)), "{failed}");
}

#[test]
fn an_agent_ends_in_time_although_a_transfer_is_late() {
    let store = silent_store();
    let objects = objects_at(&store, "late-at-the-end");
    drop(objects.write("block", &[1; 4096]).expect("a transfer that starts"));
    let began = Instant::now();
    drop(objects);
    assert!(began.elapsed() < Duration::from_secs(20), "the end waited {:?}", began.elapsed());
}
