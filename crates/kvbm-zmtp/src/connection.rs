//! Opening connections, and accepting a bounded number of them.

use crate::{
    EndpointListener, Handshake, SocketReader, SocketType, SocketWriter, ZmtpEndpoint, ZmtpError, handshake,
};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;

/// A connection over TCP or ipc after its handshake.
pub type ConnectedPeer = Handshake<SocketReader, SocketWriter>;

/// Pause after a failed accept.
const ACCEPT_PAUSE: Duration = Duration::from_millis(10);

/// Connects to `endpoint` and shakes hands, all within `limit`.
///
/// # Errors
/// No socket listens there, or the [`handshake`] failed.
pub async fn connect(
    endpoint: &ZmtpEndpoint,
    socket: SocketType,
    properties: &[(&str, &[u8])],
    limit: Duration,
) -> Result<ConnectedPeer, ZmtpError> {
    let connected = tokio::time::timeout(limit, async {
        handshake(socket, properties, endpoint.connect().await?, limit).await
    });
    connected.await.unwrap_or(Err(ZmtpError::Timeout("connecting")))
}

/// Accepts connections until the future is dropped, and runs `serve` of each one on a task of its
/// own. At most `max_connections` are served at a time; a further one is closed at once, and
/// `refuse` is called.
pub async fn accept<F: Future<Output = ()> + Send + 'static>(
    listener: EndpointListener,
    max_connections: usize,
    refuse: impl Fn(),
    serve: impl Fn((SocketReader, SocketWriter)) -> F,
) {
    let permits = Arc::new(Semaphore::new(max_connections.min(Semaphore::MAX_PERMITS)));
    loop {
        match listener.accept().await {
            Ok(halves) => {
                let Ok(permit) = Arc::clone(&permits).try_acquire_owned() else {
                    refuse();
                    continue;
                };
                let serving = serve(halves);
                tokio::spawn(async move {
                    serving.await;
                    drop(permit);
                });
            }
            // The connection ended while it waited, or too many files are open: try again.
            Err(_) => tokio::time::sleep(ACCEPT_PAUSE).await,
        }
    }
}
