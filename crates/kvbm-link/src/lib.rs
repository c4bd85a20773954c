//! The line between a leader and a worker in another process, and between a node daemon and the
//! processes that attach to it.
//!
//! **Knows:** Unix sockets, frames, handshakes, heartbeats and queues.
//! **Must never know:** what a plan means, which blocks exist, or how bytes move. Commands and
//! messages are bytes here.
//!
//! The worker listens ([`WorkerListener`]) and serves one leader at a time ([`Service`]). The
//! leader connects ([`LeaderLine`]), in either order of birth, and connects again when the worker
//! was started again.
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
//! A frame has at most [`kvbm_plan::wire::MAX_BYTES`] bytes, a handshake 4 KiB and two seconds.
//! Queues are bounded in bytes; a frame goes to the socket at once where none waits. A process of
//! another user is refused. One leader is served at a time; a second one is refused with the first
//! one's pid.
//!
//! # Modules
//! A module uses only modules in rows below its own, and only those in its third column.
//!
//! | module | what it is | uses |
//! |---|---|---|
//! | `leader` | the leader's end: connects, and connects again | `connection`, `handshake`, `peer`, `queue`, `frame` |
//! | `attached` | the end of a process that attaches to a daemon | `daemon`, `attach`, `connection`, `handshake`, `peer`, `queue`, `frame` |
//! | `daemon` | a node daemon's end: serves many processes | `worker`, `attach`, `connection`, `handshake`, `peer`, `queue`, `socket_file`, `frame` |
//! | `worker` | the worker's end: listens, serves one leader at a time | `connection`, `handshake`, `peer`, `queue`, `socket_file`, `frame` |
//! | `connection` | reader and writer of an established line | `handshake`, `frame`, `peer`, `queue` |
//! | `fuzz` | what must hold of any bytes that the other end sends | `attach`, `handshake`, `frame` |
//! | `attach` | how a process attaches to a daemon | `descriptors`, `handshake`, `frame` |
//! | `descriptors` | file descriptors beside the bytes of a socket | `handshake` |
//! | `handshake` | what both ends must agree on | `frame` |
//! | `queue` | frames that wait to be sent, in two lanes | - |
//! | `peer` | the process at the other end | - |
//! | `socket_file` | a socket: private, and no other's | - |
//! | `frame` | lengths and kinds on the wire | - |
#![forbid(unsafe_code)]

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
mod peer;
mod queue;
mod socket_file;
mod worker;

pub use attach::AttachError;
pub use attached::{DaemonLine, Welcomed};
pub use connection::LineTimes;
pub use daemon::{
    AttachListener, AttachService, AttachedSendError, AttachedSender, AttachedSession, Attachment,
};
pub use handshake::{HandshakeError, LeaderTerms, SharedSetting, WorkerTerms};
pub use leader::{LeaderLine, LineSendError, LineStatus};
pub use peer::{ProcessState, expect_same_user};
pub use queue::Lane;
pub use socket_file::SocketFile;
pub use worker::{BindError, LeaderInfo, MessageSender, Service, Session, WorkerListener};
