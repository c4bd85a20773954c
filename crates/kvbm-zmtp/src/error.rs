//! What can be wrong with a peer or the connection to it.

/// Why a connection ended. Close it; another connection to the same peer may succeed.
#[derive(Debug, thiserror::Error)]
pub enum ZmtpError {
    /// The connection itself.
    #[error("{0}")]
    Io(#[from] std::io::Error),
    /// The peer violates the protocol or exceeds a limit.
    #[error("the peer violates ZMTP: {0}")]
    Protocol(&'static str),
    /// Something took too long.
    #[error("time limit exceeded: {0}")]
    Timeout(&'static str),
    /// An old peer.
    #[error("the peer speaks ZMTP {0}.x, expected 3.x: update its ZeroMQ library (libzmq 4 speaks 3.x)")]
    Version(u8),
    /// The peer requires another security mechanism.
    #[error("the peer requires the mechanism {0:?}, expected NULL: switch off its security")]
    Mechanism(String),
    /// The peer's socket type does not fit ours.
    #[error("the peer has a socket of type {0:?}, which does not fit: check the address")]
    SocketType(String),
    /// The peer sent ERROR.
    #[error("the peer refused the connection: {0:?}")]
    Refused(String),
}
