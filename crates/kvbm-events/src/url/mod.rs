//! Where events are published and read, as one line of text.
//!
//! ```text
//! nats://[USER:PASSWORD@|TOKEN@]HOST:PORT[?subject=..&tls=..&ca=FILE&creds=FILE&stream=NAME..]
//! jetstream+nats://HOST:PORT[?stream=NAME&storage=file|memory&max_bytes=N&max_age=SECONDS&from=new|start..]
//! zmq+tcp://HOST:PORT[,HOST:PORT..][?replay=PORT|ADDRESS&topic=..&from=new|start&insecure=true&format=kvbm|vllm&rank=N..]
//! zmq+ipc://PATH[?replay=ipc://PATH..]
//! ```
//! `tls://` and `jetstream+tls://` are the same with TLS. A publisher over `ZeroMQ` binds its one
//! address, subscribers connect to any number of them. A parameter that a scheme does not have is
//! an error.

#[cfg(feature = "nats")]
mod nats;
mod parts;
#[cfg(feature = "zmq")]
mod zmq;

use crate::{EventTransport, TransportError};
use parts::Parts;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

/// Which end of a transport is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventRole {
    /// Publishes.
    Publisher,
    /// Subscribes.
    Subscriber,
}

/// What travels in the messages of a transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PayloadFormat {
    /// Our batches ([`wire`](crate::wire)).
    Kvbm,
    /// What engines publish ([`vllm`](crate::vllm)), for routers that follow engines.
    Vllm,
}

/// In whose name a publisher speaks as engines do ([`PayloadFormat::Vllm`]).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublisherIdentity {
    /// The engine's data-parallel rank.
    pub rank: u32,
    /// Kind of its cache group, as vLLM calls it.
    pub kind: String,
}

/// A URL that names no transport.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UrlError {
    /// Not of the form of a URL.
    #[error("event URL {url}: {reason}; write it like nats://127.0.0.1:4222")]
    Malformed {
        /// The URL, without what is secret.
        url: String,
        /// What is wrong.
        reason: String,
    },
    /// No transport is called so.
    #[error("event URL: there is no transport '{scheme}'; known are {}", known())]
    Scheme {
        /// As it was written.
        scheme: String,
    },
    /// This build has no such transport.
    #[error(
        "event URL: transport '{scheme}' was left out of this build: build kvbm with --features {feature}"
    )]
    NotBuilt {
        /// As it was written.
        scheme: String,
        /// What brings it.
        feature: &'static str,
    },
    /// The transport has no such parameter.
    #[error("event URL: '{scheme}' has no parameter '{name}'; it has {}", known.join(", "))]
    Parameter {
        /// As it was written.
        scheme: String,
        /// As it was written.
        name: String,
        /// What there is.
        known: &'static [&'static str],
    },
    /// A parameter's value makes no sense.
    #[error("event URL: {name}={value}: expected {expected}")]
    Value {
        /// The parameter.
        name: &'static str,
        /// As it was written.
        value: String,
        /// What would do.
        expected: &'static str,
    },
}

/// A transport that cannot be opened.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    /// The URL.
    #[error(transparent)]
    Url(#[from] UrlError),
    /// The other side.
    #[error(transparent)]
    Transport(#[from] TransportError),
}

/// Every scheme, with the feature that brings it.
const KNOWN: &[(&str, &str)] = &[
    ("nats", "nats"),
    ("tls", "nats"),
    ("jetstream+nats", "nats"),
    ("jetstream+tls", "nats"),
    ("zmq+tcp", "zmq"),
    ("zmq+ipc", "zmq"),
];

fn known() -> String {
    KNOWN.iter().map(|(scheme, _)| *scheme).collect::<Vec<_>>().join(", ")
}

/// Where events are published and read; see the module's text. It shows without user and password.
#[derive(Clone, PartialEq, Eq)]
pub struct EventUrl {
    parts: Parts,
}

impl FromStr for EventUrl {
    type Err = UrlError;

    fn from_str(text: &str) -> Result<Self, UrlError> {
        let url = Self { parts: Parts::parse(text.trim())? };
        url.check()?;
        Ok(url)
    }
}

impl EventUrl {
    /// What stands before `://`.
    pub fn scheme(&self) -> &str {
        &self.parts.scheme
    }

    /// What the payloads are.
    pub fn format(&self) -> PayloadFormat {
        let vllm = self.parts.query.iter().any(|(name, value)| name == "format" && value == "vllm");
        if vllm { PayloadFormat::Vllm } else { PayloadFormat::Kvbm }
    }

    /// In whose name a publisher speaks, where it speaks as engines do.
    pub fn speaker(&self) -> Option<PublisherIdentity> {
        match self.format() {
            #[cfg(feature = "zmq")]
            // It was read before.
            PayloadFormat::Vllm => zmq::speaker(&self.parts).ok(),
            _ => None,
        }
    }

    /// Whether a publisher opens sockets of its own rather than connect to a server: what fails
    /// then will fail again.
    pub fn binds(&self) -> bool {
        self.scheme().starts_with("zmq+")
    }

    /// Everything but the network.
    fn check(&self) -> Result<(), UrlError> {
        match self.transport()? {
            #[cfg(feature = "nats")]
            Transport::Nats => nats::config(&self.parts).map(drop),
            #[cfg(feature = "zmq")]
            Transport::Zmq => zmq::config(&self.parts).map(drop),
        }
    }

    fn transport(&self) -> Result<Transport, UrlError> {
        match self.scheme() {
            #[cfg(feature = "nats")]
            "nats" | "tls" | "jetstream+nats" | "jetstream+tls" => Ok(Transport::Nats),
            #[cfg(feature = "zmq")]
            "zmq+tcp" | "zmq+ipc" => Ok(Transport::Zmq),
            other => {
                let feature = KNOWN.iter().find(|(known, _)| *known == other).map(|(_, feature)| *feature);
                let scheme = other.to_owned();
                Err(match feature {
                    Some(feature) => UrlError::NotBuilt { scheme, feature },
                    None => UrlError::Scheme { scheme },
                })
            }
        }
    }

    /// The subscribing end with the topics and numbers of messages, as who reads
    /// [engines](PayloadFormat::Vllm) needs them: their payloads have no numbers of their own. Only
    /// of `ZeroMQ`.
    ///
    /// # Errors
    /// [`OpenError::Url`] for another scheme.
    #[cfg(feature = "zmq")]
    pub fn open_messages(&self, timeout: Duration) -> Result<crate::zmq::ZmqTransport, OpenError> {
        if !self.binds() {
            return Err(
                parts::malformed(&self.parts.shown(), "engines publish over zmq+tcp or zmq+ipc").into()
            );
        }
        let (config, addresses) = self.zmq(EventRole::Subscriber, timeout)?;
        Ok(crate::zmq::ZmqTransport::connect(config, &addresses)?)
    }

    #[cfg(feature = "zmq")]
    fn zmq(
        &self,
        role: EventRole,
        timeout: Duration,
    ) -> Result<(crate::zmq::ZmqConfig, Vec<crate::zmq::ZmqAddress>), UrlError> {
        let (mut config, addresses) = zmq::config(&self.parts)?;
        config.connect_timeout = timeout;
        let own = ["rank", "kind"].into_iter().find(|name| self.parts.get(name).is_some());
        if let Some(name) = own.filter(|_| role == EventRole::Subscriber) {
            return Err(parts::malformed(
                &self.parts.shown(),
                &format!("{name} is for publishers: leave it out"),
            ));
        }
        if role == EventRole::Subscriber
            && self.format() == PayloadFormat::Vllm
            && self.parts.get("topic").is_none()
        {
            // Every engine has a topic of its own choice.
            config.topic.clear();
        }
        Ok((config, addresses))
    }

    /// Opens one end, within `timeout`.
    ///
    /// # Errors
    /// [`OpenError::Transport`] with [`TransportError::Unavailable`] where the other side cannot be
    /// reached: worth another attempt.
    pub fn open(&self, role: EventRole, timeout: Duration) -> Result<Arc<dyn EventTransport>, OpenError> {
        // Both ends of a NATS connection are alike.
        let _ = (role, timeout);
        match self.transport()? {
            #[cfg(feature = "nats")]
            Transport::Nats => {
                let config =
                    crate::nats::NatsConfig { connect_timeout: timeout, ..nats::config(&self.parts)? };
                Ok(Arc::new(crate::nats::NatsTransport::connect(config)?))
            }
            #[cfg(feature = "zmq")]
            Transport::Zmq => {
                let (config, addresses) = self.zmq(role, timeout)?;
                let transport = match (role, addresses.as_slice()) {
                    (EventRole::Subscriber, addresses) => {
                        crate::zmq::ZmqTransport::connect(config, addresses)?
                    }
                    (EventRole::Publisher, [address]) => crate::zmq::ZmqTransport::bind(config, address)?,
                    (EventRole::Publisher, _) => {
                        let reason = "a publisher has one address";
                        return Err(parts::malformed(&self.parts.shown(), reason).into());
                    }
                };
                Ok(Arc::new(transport))
            }
        }
    }
}

/// A bucket in which nodes find each other: `nats://HOST:PORT[?bucket=NAME&tls=true&creds=FILE..]`,
/// with the parameters of an [`EventUrl`] that say who we are. It shows without user and password.
#[derive(Clone, PartialEq, Eq)]
pub struct BucketUrl {
    parts: Parts,
}

impl FromStr for BucketUrl {
    type Err = UrlError;

    fn from_str(text: &str) -> Result<Self, UrlError> {
        let url = Self { parts: Parts::parse(text.trim())? };
        if !matches!(url.parts.scheme.as_str(), "nats" | "tls") {
            return Err(parts::malformed(&url.to_string(), "nodes find each other over nats:// or tls://"));
        }
        #[cfg(feature = "nats")]
        nats::bucket(&url.parts, Duration::ZERO)?;
        #[cfg(not(feature = "nats"))]
        return Err(UrlError::NotBuilt { scheme: url.parts.scheme, feature: "nats" });
        #[cfg(feature = "nats")]
        Ok(url)
    }
}

impl BucketUrl {
    /// Whether the server is on this machine, or the URL says that strangers may announce
    /// themselves (`insecure=true`).
    pub fn is_closed_to_strangers(&self) -> bool {
        let host = self.parts.place.rsplit_once(':').map_or(self.parts.place.as_str(), |(host, _)| host);
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let is_local =
            host == "localhost" || host.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback());
        let allows = |value: &str| matches!(value, "true" | "1" | "yes");
        is_local || self.parts.query.iter().any(|(name, value)| name == "insecure" && allows(value))
    }
}

#[cfg(feature = "nats")]
impl BucketUrl {
    /// Opens it within `timeout`. Its values live for `lease` where nobody renews them.
    ///
    /// # Errors
    /// [`OpenError::Transport`]: the server, and what it refuses.
    pub fn open(&self, lease: Duration, timeout: Duration) -> Result<crate::nats::NatsBucket, OpenError> {
        let mut config = nats::bucket(&self.parts, lease)?;
        config.server.connect_timeout = timeout;
        Ok(crate::nats::NatsBucket::open(config)?)
    }
}

impl fmt::Display for BucketUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.parts.shown())
    }
}

impl fmt::Debug for BucketUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("BucketUrl").field(&self.parts.shown()).finish()
    }
}

/// What a scheme stands for, of what this build has.
#[derive(Clone, Copy)]
enum Transport {
    #[cfg(feature = "nats")]
    Nats,
    #[cfg(feature = "zmq")]
    Zmq,
}

impl fmt::Display for EventUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.parts.shown())
    }
}

impl fmt::Debug for EventUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("EventUrl").field(&self.parts.shown()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(url: &str) -> String {
        url.parse::<EventUrl>().unwrap_err().to_string()
    }

    #[test]
    fn what_is_no_url_is_reported() {
        assert!(error("127.0.0.1:4222").contains("it has no scheme"), "{}", error("127.0.0.1:4222"));
        assert!(error("kafka://host:1").contains("known are nats"));
        #[cfg(not(feature = "nats"))]
        assert!(error("nats://host:4222").contains("--features nats"));
        #[cfg(not(feature = "zmq"))]
        assert!(error("zmq+tcp://host:4222").contains("--features zmq"));
    }
}
