//! Who may connect to a real nats-server, and to whom we talk: users, tokens, keys, JWTs,
//! certificates. `KVBM_NATS_SERVER` names the server's program; without it these tests say so and
//! pass. `cargo xtask test --only test` fetches one.

#![cfg(all(feature = "nats", feature = "zmq"))]

use crate::support::{NatsServer, PATIENCE};
use kvbm_events::url::EventRole;
use kvbm_events::{EventTransport, EventUrl, Payload};
use nkeys::KeyPair;
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// How large a stream may be: no larger than the server's storage.
const KEPT: &str = "max_bytes=1000000";

/// Longest wait for a connection: what is wrong is said before that.
const CONNECTING: Duration = Duration::from_secs(30);

fn open(url: &str) -> Result<Arc<dyn EventTransport>, String> {
    let url: EventUrl = url.parse().unwrap();
    url.open(EventRole::Publisher, CONNECTING).map_err(|error| error.to_string())
}

/// Opens both ends and sends something through.
fn carries(url: &str) {
    let receiver: Result<Arc<dyn EventTransport>, String> = open(url);
    let (sender, transport) = (open(url).unwrap(), receiver.unwrap());
    let mut receiver = transport.subscribe().unwrap();
    let sent = Payload::from(vec![9; 200_000]);
    sender.publish(&sent, PATIENCE).unwrap();
    assert_eq!(receiver.recv(PATIENCE).unwrap(), Some(sent), "{url}");
}

/// The error names the place and the way out and tells no secret; nothing hangs.
fn refused(url: &str, parts: &[&str]) {
    let start = Instant::now();
    let error = open(url).err().unwrap_or_else(|| panic!("{url} is refused"));
    assert!(start.elapsed() < 2 * CONNECTING, "{:?}", start.elapsed());
    let place = url.split("://").nth(1).unwrap().split(['?']).next().unwrap().rsplit('@').next().unwrap();
    let parts = parts.iter().copied().chain([place, "connecting to"]);
    for part in parts {
        assert!(error.contains(part), "{part:?} is missing: {error}");
    }
    for secret in ["sesame", "secret", "SUA", "NONSENSE"] {
        assert!(!error.contains(secret), "{error}");
    }
}

#[test]
fn users_and_tokens_are_checked() {
    let Some(server) = NatsServer::start(&["--user", "kv", "--pass", "secret:@"]) else { return };
    let at = format!("127.0.0.1:{}", server.port());
    carries(&format!("nats://kv:secret%3A%40@{at}"));
    carries(&format!("jetstream+nats://kv:secret%3A%40@{at}?stream=users&{KEPT}"));
    refused(
        &format!("nats://{at}"),
        &["authorization violation", "the server requires credentials", "creds=FILE"],
    );
    refused(
        &format!("nats://kv:sesame@{at}"),
        &["authorization violation", "check what stands before the host"],
    );

    let server = NatsServer::start(&["--auth", "open sesame"]).unwrap();
    let at = format!("127.0.0.1:{}", server.port());
    carries(&format!("nats://open%20sesame@{at}"));
    refused(
        &format!("nats://sesame@{at}"),
        &["authorization violation", "check what stands before the host"],
    );
}

/// What NATS signs with a key of its own kind: `header.claims.signature`, each in base64 for URLs.
fn jwt(by: &KeyPair, of: &str, name: &str, nats: &Value) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let mut claims =
        json!({ "jti": name, "iat": now, "iss": by.public_key(), "name": name, "sub": of, "nats": nats });
    if name == "expired" {
        claims["exp"] = json!(now - 60);
    }
    let header = json!({ "typ": "JWT", "alg": "ed25519-nkey" });
    let signed =
        format!("{}.{}", base64(header.to_string().as_bytes()), base64(claims.to_string().as_bytes()));
    let signature = by.sign(signed.as_bytes()).unwrap();
    format!("{signed}.{}", base64(&signature))
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    let mut text = String::new();
    for chunk in bytes.chunks(3) {
        let number =
            chunk.iter().fold(0u32, |number, byte| number << 8 | u32::from(*byte)) << (8 * (3 - chunk.len()));
        let digit = |place: usize| char::from(DIGITS[(number >> (18 - 6 * place)) as usize & 63]);
        text.extend((0..=chunk.len()).map(digit));
    }
    text
}

fn account(operator: &KeyPair, name: &str, account: &KeyPair) -> String {
    let limits = json!({
        "subs": -1, "data": -1, "payload": -1, "imports": -1, "exports": -1, "wildcards": true, "conn": -1, "leaf": -1,
        "mem_storage": if name == "system" { 0 } else { -1 }, "disk_storage": if name == "system" { 0 } else { -1 },
        "streams": if name == "system" { 0 } else { -1 }, "consumer": if name == "system" { 0 } else { -1 },
    });
    jwt(operator, &account.public_key(), name, &json!({ "type": "account", "version": 2, "limits": limits }))
}

/// A `.creds` file of a user of `account`.
fn creds(folder: &Path, account: &KeyPair, name: &str) -> String {
    let user = KeyPair::new_user();
    let nats =
        json!({ "type": "user", "version": 2, "subs": -1, "data": -1, "payload": -1, "pub": {}, "sub": {} });
    let jwt = jwt(account, &user.public_key(), name, &nats);
    let seed = user.seed().unwrap();
    let text = format!(
        "-----BEGIN NATS USER JWT-----\n{jwt}\n------END NATS USER JWT------\n\n\
         -----BEGIN USER NKEY SEED-----\n{seed}\n------END USER NKEY SEED------\n"
    );
    let file = folder.join(format!("{name}.creds"));
    std::fs::write(&file, text).unwrap();
    file.display().to_string()
}

/// A server whose users are told by JWTs: an operator signs accounts, accounts sign users.
#[test]
fn jwts_of_a_credentials_file_are_checked() {
    let folder = tempfile::tempdir().unwrap();
    let (operator, system, events) =
        (KeyPair::new_operator(), KeyPair::new_account(), KeyPair::new_account());
    let own = json!({ "type": "operator", "version": 2, "system_account": system.public_key() });
    let config = format!(
        "operator: {}\nsystem_account: {}\nresolver: MEMORY\nresolver_preload: {{\n  {}: {}\n  {}: {}\n}}\n",
        jwt(&operator, &operator.public_key(), "operator", &own),
        system.public_key(),
        system.public_key(),
        account(&operator, "system", &system),
        events.public_key(),
        account(&operator, "events", &events),
    );
    let Some(server) = NatsServer::configured(&config) else { return };
    let at = format!("127.0.0.1:{}", server.port());
    let known = creds(folder.path(), &events, "known");
    carries(&format!("nats://{at}?creds={known}"));
    carries(&format!("jetstream+nats://{at}?creds={known}&{KEPT}"));

    let violation = ["authorization violation", "the server rejects this key", "expired"];
    // An account that no operator has signed.
    let stranger = creds(folder.path(), &KeyPair::new_account(), "stranger");
    refused(&format!("nats://{at}?creds={stranger}"), &violation);
    let expired = creds(folder.path(), &events, "expired");
    refused(&format!("nats://{at}?creds={expired}"), &violation);
    // One's JWT with another's key.
    let (jwt, key) = (std::fs::read_to_string(&known).unwrap(), std::fs::read_to_string(&stranger).unwrap());
    let at_key = |text: &str| text.find("-----BEGIN USER NKEY SEED").unwrap();
    let mixed = folder.path().join("mixed.creds");
    std::fs::write(&mixed, format!("{}{}", &jwt[..at_key(&jwt)], &key[at_key(&key)..])).unwrap();
    refused(&format!("nats://{at}?creds={}", mixed.display()), &violation);
    std::fs::write(&mixed, "not what it should be").unwrap();
    refused(&format!("nats://{at}?creds={}", mixed.display()), &["mixed.creds is no credentials file"]);
    refused(
        &format!("nats://{at}?creds=/nowhere/kvbm.creds"),
        &["cannot read credentials /nowhere/kvbm.creds"],
    );
    refused(&format!("nats://{at}"), &["the server requires credentials"]);
}

#[test]
fn keys_that_the_server_knows_are_checked() {
    let folder = tempfile::tempdir().unwrap();
    let (known, stranger) = (KeyPair::new_user(), KeyPair::new_user());
    let users = format!("authorization: {{ users: [ {{ nkey: {} }} ] }}", known.public_key());
    let Some(server) = NatsServer::configured(&users) else { return };
    let at = format!("127.0.0.1:{}", server.port());
    let file = folder.path().join("user.nk");
    let write = |text: &str| std::fs::write(&file, text).unwrap();
    write(&format!("# for events\n{}\n", known.seed().unwrap()));
    let url = format!("nats://{at}?nkey={}", file.display());
    carries(&url);
    write(&stranger.seed().unwrap());
    refused(&url, &["authorization violation", "the server rejects this key"]);
    write("SUNONSENSE");
    refused(&url, &["the server rejects this key"]);
    write(&known.public_key());
    refused(&url, &["user.nk holds no user's seed"]);
}

/// Certificates of an authority of our own for this machine and for a client, and another
/// authority's, made by `openssl`; `None` where there is none.
fn certificates(folder: &Path) -> Option<()> {
    let openssl = |line: &str| {
        let command =
            std::process::Command::new("openssl").args(line.split(' ')).current_dir(folder).output();
        command.is_ok_and(|output| output.status.success()).then_some(())
    };
    std::fs::write(folder.join("names"), "subjectAltName=IP:127.0.0.1,DNS:localhost").unwrap();
    std::fs::write(folder.join("elsewhere"), "subjectAltName=DNS:elsewhere.example").unwrap();
    for authority in ["ca", "other"] {
        openssl(&format!(
            "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN={authority} -keyout {authority}.key -out {authority}.pem"
        ))?;
    }
    for (name, names) in [("server", "names"), ("wrong", "elsewhere"), ("client", "names")] {
        openssl(&format!("req -newkey rsa:2048 -nodes -subj /CN={name} -keyout {name}.key -out {name}.csr"))?;
        openssl(&format!(
            "x509 -req -in {name}.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile {names} -out {name}.pem"
        ))?;
    }
    Some(())
}

#[test]
fn tls_carries_events_and_strangers_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let Some(()) = certificates(folder.path()) else {
        println!("skipped: there is no openssl to make certificates with");
        return;
    };
    let file = |name: &str| folder.path().join(name).display().to_string();
    let start = |name: &str, more: &[&str]| {
        let (cert, key) = (file(&format!("{name}.pem")), file(&format!("{name}.key")));
        let arguments = [&["--tls", "--tlscert", cert.as_str(), "--tlskey", key.as_str()][..], more].concat();
        NatsServer::start(&arguments)
    };
    let Some(server) = start("server", &[]) else { return };
    let (at, ca) = (format!("localhost:{}", server.port()), file("ca.pem"));
    carries(&format!("tls://{at}?ca={ca}"));
    carries(&format!("jetstream+tls://{at}?ca={ca}&stream=tls&{KEPT}"));
    // A server that wants TLS gets it, whatever the scheme says.
    carries(&format!("nats://127.0.0.1:{}?ca={ca}", server.port()));
    let authority = ["invalid peer certificate", "name its authority's certificates with ca=FILE"];
    refused(&format!("tls://{at}"), &authority);
    refused(&format!("tls://{at}?ca={}", file("other.pem")), &authority);
    refused(
        &format!("tls://{at}?ca={}", file("nowhere.pem")),
        &["cannot read the authority's certificates", "nowhere.pem"],
    );

    let wrong = start("wrong", &[]).unwrap();
    let name = ["not valid for name", "valid for this host's name"];
    refused(&format!("tls://localhost:{}?ca={ca}", wrong.port()), &name);

    let plain = NatsServer::start(&[]).unwrap();
    refused(&format!("tls://localhost:{}?ca={ca}", plain.port()), &["TLS"]);

    // A server that asks for the client's certificate too.
    let strict = start("server", &["--tlsverify", "--tlscacert", &ca]).unwrap();
    let at = format!("localhost:{}", strict.port());
    carries(&format!("tls://{at}?ca={ca}&cert={}&key={}", file("client.pem"), file("client.key")));
    refused(&format!("tls://{at}?ca={ca}"), &["cert=FILE&key=FILE"]);
    let foreign = format!("tls://{at}?ca={ca}&cert={}&key={}", file("other.pem"), file("other.key"));
    refused(&foreign, &["certificate"]);
}

/// A server that accepts and says nothing.
#[test]
fn a_server_that_says_nothing_is_given_up_in_time() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("nats://127.0.0.1:{}", listener.local_addr().unwrap().port());
    let start = Instant::now();
    let error = url
        .parse::<EventUrl>()
        .unwrap()
        .open(EventRole::Subscriber, Duration::from_millis(300))
        .err()
        .unwrap();
    assert!(start.elapsed() < CONNECTING, "{:?}", start.elapsed());
    assert!(error.to_string().contains(&url), "{error}");
}
