//! The line between a leader and a worker in another process, and between a node daemon and the
//! processes that attach to it.
//!
//! **Knows:** Unix sockets, TLS over TCP, frames, handshakes, heartbeats and queues.
//! **Must never know:** what a plan means, which blocks exist, or how bytes move. Commands and
//! messages are bytes here.
//!
//! The worker listens ([`WorkerListener`]) at a socket or over TCP ([`WorkerAddress`]), and serves
//! one leader at a time ([`Service`]). The leader connects ([`LeaderLine`]), in either order of
//! birth, and connects again when the worker was started again.
//!
//! ```text
//! leader                                             worker
//! LeaderLine::send(lane, command) -> SendQueue ----> Session::command(command)
//! sink(message) <------------------- SendQueue <---- MessageSender::send(message)
//!                  heartbeats both ways
//! ```
//!
//! A node daemon listens too ([`AttachListener`]), and serves many processes
//! ([`AttachService`]). They attach ([`Welcomed::attach`]), get file descriptors with the welcome,
//! and attach again where the daemon was started again.
//!
//! # Frames
//! `length: u32 little-endian | kind: u8 | body`, where `length` counts kind and body. Bodies of a
//! handshake are MessagePack.
//! [`docs/formats.md`](https://github.com/kvbm/kvbm/blob/main/docs/formats.md) describes them.
//!
//! # Bounds
//! A frame has at most [`kvbm_plan::wire::MAX_BYTES`] bytes, a handshake 4 KiB and two seconds,
//! that of TLS included. 32 strangers wait in a handshake at a time: whoever comes beyond takes the
//! place of one of them, picked at random. Queues are bounded in bytes; a frame goes to a Unix
//! socket at once where none waits. A process of another user is refused, over TCP whoever has no
//! certificate of the authority. One leader is served at a time; a second one is
//! refused with the first one's pid or address.
//!
//! # The other end's death
//! The kernel says when a process of this machine ends. A line over TCP ends when it is closed or
//! nothing was heard for [`LineTimes::lost_after`], at both ends. It says nothing of the process:
//! [`ProcessState::MayRun`]. The worker's session ends then, and its writes with it, before a
//! leader is served again.
//!
//! # A worker that is about to end
//! It says so ([`WorkerListener::leave`]) and waits. The leader saves what only the worker holds,
//! and dismisses it ([`LeaderLine::dismiss`]).
//!
//! # Modules
//! A module uses only modules in rows below its own, and only those in its third column.
//!
//! | module | what it is | uses |
//! |---|---|---|
//! | `leader` | the leader's end: connects, and connects again | `connection`, `listener`, `handshake`, `address`, `peer`, `queue`, `timed`, `frame` |
//! | `attached` | the end of a process that attaches to a daemon | `daemon`, `attach`, `connection`, `peer`, `queue`, `timed`, `frame` |
//! | `daemon` | a node daemon's end: serves many processes | `worker`, `attach`, `connection`, `peer`, `queue`, `socket_file`, `timed`, `frame` |
//! | `worker` | the worker's end: listens, serves one leader at a time | `pending`, `connection`, `listener`, `handshake`, `address`, `peer`, `timed`, `frame` |
//! | `connection` | reader and writer of an established line | `handshake`, `frame`, `shutdown`, `peer`, `queue`, `stream`, `timed` |
//! | `fuzz` | what must hold of any bytes that the other end sends | `attach`, `handshake`, `frame` |
//! | `attach` | how a process attaches to a daemon | `descriptors`, `timed`, `frame` |
//! | `descriptors` | file descriptors beside the bytes of a socket | `timed` |
//! | `listener` | who may enter, and how to get there | `address`, `peer`, `socket_file`, `stream`, `tls_stream` |
//! | `stream` | a Unix socket, or TLS over TCP | `tls_stream`, `timed` |
//! | `tls_stream` | TLS 1.3 over TCP | `address`, `tls_config`, `timed`, `pem` |
//! | `address` | where a worker listens | `pem` |
//! | `tls_config` | certificates from files, also renewed ones | `private_file`, `pem` |
//! | `handshake` | what both ends must agree on | `frame`, `pem` |
//! | `pem` | PEM files, and what is wrong with them | - |
//! | `private_file` | files with a secret | - |
//! | `timed` | a stream with a deadline | - |
//! | `queue` | frames that wait to be sent, in two lanes | - |
//! | `peer` | the process at the other end | - |
//! | `pending` | connections whose peer has not shown yet that it belongs here | - |
//! | `socket_file` | a socket: private, and no other's | - |
//! | `shutdown` | the end of a worker that its leader knows of | - |
//! | `frame` | lengths and kinds on the wire | - |
#![forbid(unsafe_code)]

mod address;
mod attach;
mod attached;
mod connection;
mod daemon;
mod descriptors;
mod frame;
#[cfg(any(test, feature = "fuzz"))]
#[doc(hidden)]
pub mod fuzz;
mod handshake;
mod leader;
mod listener;
mod peer;
mod pem;
mod pending;
pub mod private_file;
mod queue;
mod shutdown;
mod socket_file;
mod stream;
mod timed;
#[cfg(feature = "tls")]
mod tls_config;
#[cfg_attr(not(feature = "tls"), path = "tls_stream/absent.rs")]
mod tls_stream;
mod worker;

pub use address::{TlsFiles, WorkerAddress, WorkerAddressError};
pub use attach::{AttachError, MAX_TERMS};
pub use attached::{DaemonLine, Welcomed};
pub use connection::LineTimes;
pub use daemon::{
    AttachListener, AttachService, AttachedSendError, AttachedSender, AttachedSession, Attachment,
};
pub use handshake::{HandshakeError, LeaderTerms, SharedSetting, WorkerTerms};
pub use leader::{LeaderLine, LineSendError, LineStatus, WorkerNotice};
pub use peer::{PeerId, ProcessState, expect_same_user};
pub use pem::{PemFile, TlsError};
pub use pending::{ConnectionPermit, PendingConnections};
pub use queue::Lane;
pub use socket_file::SocketFile;
#[cfg(feature = "tls")]
pub use tls_config::{TlsServer, tls_client_config};
pub use worker::{BindError, LeaderInfo, MessageSender, Service, Session, WorkerListener};
