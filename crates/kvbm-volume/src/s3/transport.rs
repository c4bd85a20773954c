//! The seam to what moves the bodies of objects in place of the client of the store.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use object_store::aws::AwsCredential;

/// Objects from this length on have their bodies moved by a transport. Below it, a request of its
/// own for what the transport cannot say would take longer than it saves; and what is short may be
/// keys, which are written under a condition.
pub(super) const LEAST_BYTES: u64 = 64 << 10;
/// Between two looks at a transfer; longer for one that takes long.
const FIRST_PAUSE: Duration = Duration::from_micros(200);
const LONGEST_PAUSE: Duration = Duration::from_millis(5);

/// Moves whole objects between memory and a bucket, in place of the S3 client. Everything else
/// stays the client's: whether an object is there, its length, its name in a list, its end. What
/// the transport fails to move, or brings damaged, the client moves.
pub trait ObjectTransport: fmt::Debug + Send + Sync {
    /// Starts to write an object, over what is there.
    ///
    /// # Errors
    /// Why it cannot be started.
    fn start_put(&self, location: &str, object: &[u8]) -> io::Result<Box<dyn ObjectMove>>;

    /// Starts to read the first `bytes` bytes of an object.
    ///
    /// # Errors
    /// As [`start_put`](Self::start_put).
    fn start_get(&self, location: &str, bytes: u64) -> io::Result<Box<dyn ObjectMove>>;
}

/// An object on its way. It owns its memory; dropping it does not wait.
pub trait ObjectMove: Send {
    /// `None` while it runs. Then what was read; nothing of a put.
    fn poll(&mut self) -> Option<io::Result<Vec<u8>>>;
}

/// The bucket that a transport is opened for.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct TransportStore {
    /// The bucket.
    pub bucket: String,
    /// Where the store is; `None` for that of AWS.
    pub endpoint: Option<String>,
    /// Its region, where the URI names one.
    pub region: Option<String>,
    /// Id, secret and token; `None`: those of the variables `AWS_...`, or of the machine.
    pub credentials: Option<(String, String, Option<String>)>,
    /// Objects on their way at a time.
    pub concurrency: usize,
}

/// Without secrets.
impl fmt::Debug for TransportStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { bucket, endpoint, region, concurrency, .. } = self;
        f.debug_struct("TransportStore")
            .field("bucket", bucket)
            .field("endpoint", endpoint)
            .field("region", region)
            .field("concurrency", concurrency)
            .finish_non_exhaustive()
    }
}

/// Opens a transport to a bucket.
pub type OpenTransport = dyn Fn(&TransportStore) -> io::Result<Arc<dyn ObjectTransport>> + Send + Sync;

impl TransportStore {
    pub(super) fn new(uri: &super::S3Uri, credential: Option<&AwsCredential>) -> Self {
        let parts = |credential: &AwsCredential| {
            (credential.key_id.clone(), credential.secret_key.clone(), credential.token.clone())
        };
        Self {
            bucket: uri.bucket.clone(),
            endpoint: uri.endpoint.clone(),
            region: uri.region.clone(),
            credentials: credential.map(parts),
            concurrency: uri.concurrency,
        }
    }
}

/// A transport, and whether it has failed.
#[derive(Debug)]
pub(super) struct Transport {
    pub(super) moves: Arc<dyn ObjectTransport>,
    has_failed: AtomicBool,
}

impl Transport {
    pub(super) fn new(moves: Arc<dyn ObjectTransport>) -> Self {
        Self { moves, has_failed: AtomicBool::new(false) }
    }

    /// Waits for the end of a transfer; `None` where it failed. Who stops to wait leaves it to
    /// itself.
    pub(super) async fn moved(&self, started: io::Result<Box<dyn ObjectMove>>) -> Option<Vec<u8>> {
        let mut transfer = match started {
            Ok(transfer) => transfer,
            Err(error) => return self.failed(&error),
        };
        let mut pause = FIRST_PAUSE;
        loop {
            match transfer.poll() {
                Some(Ok(bytes)) => return Some(bytes),
                Some(Err(error)) => return self.failed(&error),
                None => {}
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// Says so: loudly once.
    fn failed(&self, error: &dyn fmt::Display) -> Option<Vec<u8>> {
        self.note_failure(error);
        None
    }

    /// Takes note of a failure, whose object the client moves.
    pub(super) fn note_failure(&self, error: &dyn fmt::Display) {
        if self.has_failed.swap(true, Ordering::Relaxed) {
            tracing::debug!(%error, "an object was moved by the S3 client after the transport failed");
        } else {
            tracing::warn!(%error, "the transport of a volume failed: the S3 client moved the object, as it will others; the next failures are logged as debug");
        }
    }
}
