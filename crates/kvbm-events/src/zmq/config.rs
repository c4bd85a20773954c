//! Addresses and options of a transport, and the messages that it receives.

use super::NAME;
use crate::{InProcessConfig, Payload, TransportError};
use kvbm_zmtp::ZmtpEndpoint;
use std::time::Duration;

/// The two sockets of a publisher, as `tcp://HOST:PORT` or `ipc://PATH`. To bind, the port may be
/// `*` for any free one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ZmqAddress {
    /// Its PUB socket.
    pub events: String,
    /// Its ROUTER socket, which repeats messages; without it every loss is a gap.
    pub replay: Option<String>,
}

impl ZmqAddress {
    /// A publisher without replay.
    pub fn new(events: impl Into<String>) -> Self {
        Self { events: events.into(), replay: None }
    }

    /// The same with a replay socket.
    #[must_use]
    pub fn with_replay(self, replay: impl Into<String>) -> Self {
        Self { replay: Some(replay.into()), ..self }
    }
}

/// Options of a transport beyond its addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ZmqConfig {
    /// Topic of the messages; a subscriber takes every topic that begins with it.
    pub topic: String,
    /// Limits of the publisher's queue for each subscriber, which drops the oldest messages, and of
    /// the subscriber's own queue, which stops reading while it is full.
    pub queue: InProcessConfig,
    /// Limits of the messages that a publisher keeps for replays.
    pub history: InProcessConfig,
    /// Most connections to each of a publisher's sockets.
    pub max_peers: usize,
    /// Permit addresses that other machines can reach. `ZeroMQ` authenticates nobody.
    pub insecure: bool,
    /// Time limit of binding and subscribing. A publisher whose address is in use retries as long.
    pub connect_timeout: Duration,
    /// Ask for everything that a publisher still has rather than begin with its next message.
    pub from_start: bool,
}

impl Default for ZmqConfig {
    /// Topic `kv-events`; queues of the default size; 10,000 messages or 64 MiB of history; 64
    /// peers; 5 s.
    fn default() -> Self {
        Self {
            topic: "kv-events".into(),
            queue: InProcessConfig::default(),
            history: InProcessConfig { queue_batches: 10_000, queue_bytes: 64 << 20 },
            max_peers: 64,
            insecure: false,
            connect_timeout: Duration::from_secs(5),
            from_start: false,
        }
    }
}

/// A message of a publisher.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ZmqMessage {
    /// Index of the publisher's address.
    pub publisher: u32,
    /// Its topic.
    pub topic: Vec<u8>,
    /// The publisher's life, counted from the first one that was received. Sequence numbers of
    /// different lives are unrelated. A new life also begins where nothing proves that it is the
    /// old one. That is so over a new connection to a publisher that does not identify its lives
    /// (an engine), when a replay cannot repeat its last message for comparison.
    pub life: u64,
    /// Its number, from 0 since the publisher's start.
    pub sequence: u64,
    /// An encoded batch.
    pub payload: Payload,
}

impl From<ZmqMessage> for Payload {
    fn from(message: ZmqMessage) -> Self {
        message.payload
    }
}

/// Parses an address; without `insecure`, only one of this machine.
pub(super) fn parse(text: &str, insecure: bool) -> Result<ZmtpEndpoint, TransportError> {
    let endpoint: ZmtpEndpoint = text.parse().map_err(|error| config_error(format!("{error}")))?;
    if insecure || endpoint.is_local() {
        return Ok(endpoint);
    }
    Err(config_error(format!(
        "other machines can reach {text}, and ZeroMQ authenticates nobody and encrypts nothing: use NATS between \
         machines, like nats://HOST:4222?tls=true&creds=FILE, or an address of this machine, or set `insecure`"
    )))
}

/// The address at which this machine reaches a socket bound to `endpoint`.
pub(super) fn reachable(endpoint: &ZmtpEndpoint) -> ZmtpEndpoint {
    match endpoint {
        ZmtpEndpoint::Tcp { host, port } if host == "*" || host == "0.0.0.0" => {
            ZmtpEndpoint::Tcp { host: "127.0.0.1".into(), port: *port }
        }
        other => other.clone(),
    }
}

pub(super) fn config_error(reason: String) -> TransportError {
    TransportError::Config { transport: NAME, reason }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_address_is_named() {
        let error = parse("udp://host:1", true).unwrap_err().to_string();
        assert!(error.contains("udp://host:1") && error.contains("tcp://HOST:PORT"), "{error}");
    }

    #[test]
    fn addresses_of_other_machines_need_insecure() {
        for remote in ["tcp://*:5557", "tcp://0.0.0.0:5557", "tcp://10.0.0.1:5557", "tcp://host.example:5557"]
        {
            let error = parse(remote, false).unwrap_err().to_string();
            assert!(
                error.contains(remote) && error.contains("insecure") && error.contains("nats://"),
                "{error}"
            );
            assert!(parse(remote, true).is_ok());
        }
    }
}
