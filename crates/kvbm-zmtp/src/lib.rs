//! The `ZeroMQ` wire protocol ZMTP 3.x over TCP and ipc, with the NULL mechanism.
//!
//! **Knows:** greeting, handshake, frames, commands, subscriptions and addresses, as
//! <https://rfc.zeromq.org/spec/37/> defines them, for the socket types PUB, SUB, ROUTER and
//! DEALER.
//!
//! **Must never know:** what a message means, any crate of this project, queues of outgoing
//! messages, reconnection, authentication, and which runtime or thread its futures run on. Tokio's
//! I/O and timers must be enabled there.
//!
//! # Bounds
//!
//! What a peer sends is untrusted. Each quantity that a peer chooses has a limit here:
//!
//! | what | limit |
//! |---|---|
//! | bytes of one message, all frames together | [`MAX_MESSAGE_BYTES`]; of a subscription, [`MAX_COMMAND_BYTES`] |
//! | frames of one message | [`MAX_FRAMES`] |
//! | bytes of one command, and of a peer's metadata | [`MAX_COMMAND_BYTES`] |
//! | bytes reserved for a frame before its bytes arrive | 64 KiB, then twice what has arrived |
//! | a peer's subscriptions | [`Subscriptions::MAX_COUNT`] and [`Subscriptions::MAX_BYTES`] |
//! | time of connecting and of the handshake | an argument of [`connect`] and [`handshake`] |
//! | connections of a listener | an argument of [`accept`] |
//!
//! A peer that exceeds a limit gets an error, and its connection ends.
//!
//! # Modules
//!
//! | module | what it is | uses |
//! |---|---|---|
//! | `fuzz` | what must hold of any bytes that a peer sends | `frame`, `handshake`, `socket`, `error` |
//! | `connection` | opens and accepts connections | `endpoint`, `handshake`, `socket`, `error` |
//! | `handshake` | greeting and READY | `frame`, `socket`, `error` |
//! | `frame` | reads and writes frames, messages and commands | `socket`, `error` |
//! | `subscription` | the subscriptions of one peer | `error` |
//! | `endpoint` | addresses, and sockets bound to them | `-` |
//! | `socket` | socket types and which of them may connect | `-` |
//! | `error` | what can be wrong with a peer | `-` |

#![forbid(unsafe_code)]

mod connection;
mod endpoint;
mod error;
mod frame;
#[cfg(any(test, feature = "fuzz"))]
#[doc(hidden)]
pub mod fuzz;
mod handshake;
mod socket;
mod subscription;

pub use connection::{ConnectedPeer, accept, connect};
pub use endpoint::{EndpointError, EndpointListener, SocketReader, SocketWriter, ZmtpEndpoint};
pub use error::ZmtpError;
pub use frame::{
    MAX_COMMAND_BYTES, MAX_FRAMES, MAX_MESSAGE_BYTES, MAX_PING_CONTEXT, Received, ZmtpReader, ZmtpWriter,
};
pub use handshake::{Handshake, PeerInfo, handshake};
pub use socket::SocketType;
pub use subscription::Subscriptions;
