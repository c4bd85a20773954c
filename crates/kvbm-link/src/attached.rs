//! The end of a process that attaches to a node daemon.

use crate::attach::{self, AttachError};
use crate::connection::{Connection, LineTimes};
use crate::daemon::{AttachedSendError, AttachedSender};
use crate::frame::MAX_BODY;
use crate::peer::Peer;
use crate::queue::Lane;
use crate::timed::Timed;
use rustix::fd::OwnedFd;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

/// Bytes that wait for the daemon.
const QUEUE_BYTES: usize = 4 * MAX_BODY;

/// A process that the daemon has welcomed.
pub struct Welcomed {
    /// What it was told.
    pub welcome: Vec<u8>,
    /// What came with that.
    pub files: Vec<OwnedFd>,
    connection: Arc<Connection>,
}

/// The line to a node daemon. Dropping it ends the line.
pub struct DaemonLine {
    connection: Arc<Connection>,
    reader: Option<JoinHandle<()>>,
}

impl Welcomed {
    /// Attaches to the daemon that listens at `path`. Waits for its answer, for as long as `times`
    /// allows a handshake.
    ///
    /// # Errors
    /// [`AttachError`]: nobody listens there, or the daemon refuses and says why.
    pub fn attach(path: &Path, terms: &[u8], times: LineTimes) -> Result<Self, AttachError> {
        let stream = UnixStream::connect(path)?;
        let peer = Peer::of(&stream)?;
        peer.expect_same_user()?;
        let (welcome, files) = attach::offer(&mut Timed::new(&stream, times.handshake), terms)?;
        let connection = Arc::new(Connection::new(stream, peer, times, QUEUE_BYTES)?);
        Ok(Self { welcome, files, connection })
    }

    /// Sends to the daemon, from the start of the line on.
    pub fn sender(&self) -> AttachedSender {
        AttachedSender(Arc::clone(&self.connection))
    }

    /// Starts the line: what the daemon sends goes to `on_bytes`; `on_end` is called once, when the
    /// line has ended, with why. Both are called on the line's thread.
    ///
    /// # Errors
    /// The system refuses a thread.
    pub fn start(
        self,
        mut on_bytes: impl FnMut(&[u8]) + Send + 'static,
        on_end: impl FnOnce(String) + Send + 'static,
    ) -> io::Result<DaemonLine> {
        let connection = self.connection;
        let line = Arc::clone(&connection);
        let run = move || {
            let ended = std::thread::scope(|scope| {
                let writer = std::thread::Builder::new().name("kvbm-daemon-send".into());
                if let Err(error) = writer.spawn_scoped(scope, || line.write()) {
                    line.close();
                    return error;
                }
                line.read(|bytes| on_bytes(&bytes))
            });
            on_end(ended.to_string());
        };
        let reader = std::thread::Builder::new().name("kvbm-daemon-line".into()).spawn(run)?;
        Ok(DaemonLine { connection, reader: Some(reader) })
    }
}

impl DaemonLine {
    /// Sends bytes to the daemon, or queues them; never waits.
    ///
    /// # Errors
    /// [`AttachedSendError`]: they do not reach it.
    pub fn send(&self, lane: Lane, bytes: &[u8]) -> Result<(), AttachedSendError> {
        AttachedSender(Arc::clone(&self.connection)).send(lane, bytes)
    }

    /// The daemon's process.
    pub fn pid(&self) -> i32 {
        self.connection.peer.pid()
    }

    /// For how long the daemon has sent nothing.
    pub fn silence(&self) -> Duration {
        self.connection.silence()
    }
}

impl Drop for DaemonLine {
    fn drop(&mut self) {
        self.connection.close();
        let reader = self.reader.take().filter(|reader| reader.thread().id() != std::thread::current().id());
        if let Some(reader) = reader {
            // What panicked has said so.
            let _ = reader.join();
        }
    }
}
