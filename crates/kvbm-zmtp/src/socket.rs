//! Socket types, and which of them may connect to which.

/// The socket types that this crate speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SocketType {
    /// Sends messages to those who subscribed.
    Pub,
    /// Subscribes.
    Sub,
    /// Answers any number of DEALER and REQ sockets.
    Router,
    /// Asks a ROUTER.
    Dealer,
}

impl SocketType {
    /// The name in READY.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Pub => "PUB",
            Self::Sub => "SUB",
            Self::Router => "ROUTER",
            Self::Dealer => "DEALER",
        }
    }

    /// Names of the types that the peer may have.
    pub(crate) const fn partners(self) -> &'static [&'static str] {
        match self {
            Self::Pub => &["SUB", "XSUB"],
            Self::Sub => &["PUB", "XPUB"],
            Self::Router => &["DEALER", "REQ"],
            Self::Dealer => &["ROUTER"],
        }
    }
}
