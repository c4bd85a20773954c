//! What a server and its clients may use.

use std::time::Duration;

/// What a server does not exceed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HttpLimits {
    /// Time that a client may take: to send its request and to read the answer. What happens
    /// between does not count.
    pub client_time: Duration,
    /// Bytes of a request before its body.
    pub head_bytes: usize,
    /// Bytes of a body.
    pub body_bytes: usize,
    /// Connections at a time, each with a thread. One more takes the place of a client whose
    /// request is not there yet; where all are answered, it gets 503.
    pub connections: usize,
}

impl Default for HttpLimits {
    /// 5 s, 16 KiB, 4 MiB, 32 connections.
    fn default() -> Self {
        Self {
            client_time: Duration::from_secs(5),
            head_bytes: 16 << 10,
            body_bytes: 4 << 20,
            connections: 32,
        }
    }
}
