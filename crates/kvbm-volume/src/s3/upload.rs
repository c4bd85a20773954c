//! From an object in memory to one in the bucket.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::failure::{Refusal, explained};
use super::transport::Transport;
use bytes::Bytes;
use futures_util::future::try_join_all;
use object_store::aws::AmazonS3;
use object_store::path::Path;
use object_store::{Error, GetOptions, MultipartUpload, ObjectStore, ObjectStoreExt, PutMode, PutPayload};
use parking_lot::Mutex;

/// So often in a row a store may refuse the condition and take the same object without it, until it
/// is left away.
const PATIENCE: u32 = 3;
/// How long it is left away: what answered may have been a proxy, and stores are renewed.
const RECHECK: Duration = Duration::from_secs(600);

/// How long the parts of an upload that was given up are tried to be removed.
const ABORTING: Duration = Duration::from_secs(30);

/// Whether a store knows `If-None-Match`.
#[derive(Debug, Default)]
pub(super) struct Conditional(Mutex<Refusals>);

#[derive(Debug, Default)]
struct Refusals {
    in_a_row: u32,
    last: Option<Instant>,
}

impl Conditional {
    fn is_worth_it(&self, now: Instant) -> bool {
        let refusals = self.0.lock();
        refusals.in_a_row < PATIENCE || refusals.last.is_none_or(|last| now >= last + RECHECK)
    }

    fn understood(&self) {
        *self.0.lock() = Refusals::default();
    }

    fn refused(&self, now: Instant) {
        let mut refusals = self.0.lock();
        refusals.in_a_row = refusals.in_a_row.saturating_add(1);
        refusals.last = Some(now);
    }
}

/// Codes of an answer 400 that is about the request itself or the moment, whatever its condition
/// was.
const OTHER_FAULTS: [&str; 16] = [
    "AuthorizationHeaderMalformed",
    "BadDigest",
    "EntityTooLarge",
    "ExpiredToken",
    "IncompleteBody",
    "InvalidBucketName",
    "InvalidDigest",
    "InvalidRequest",
    "InvalidToken",
    "KeyTooLongError",
    "MissingSecurityHeader",
    "RequestTimeTooSkewed",
    "RequestTimeout",
    "TokenRefreshRequired",
    "XAmzContentChecksumMismatch",
    "XAmzContentSHA256Mismatch",
];

/// Whether a store says that it does not know what it was asked for (501, or 400 without a code
/// that says something else). That it is down, busy or forbids it says nothing of that.
pub(super) fn is_unknown_to_store(error: &Error) -> bool {
    if matches!(error, Error::NotImplemented { .. }) {
        return true;
    }
    Refusal::of(error).is_some_and(|refusal| match refusal.status() {
        400 => refusal.code().is_none_or(|code| !OTHER_FAULTS.contains(&code)),
        status => status == 501,
    })
}

/// An object to be written.
#[derive(Debug)]
pub(super) struct Upload {
    pub(super) path: Path,
    /// Header and payload.
    pub(super) object: Bytes,
    /// Bytes before the payload: they name the content by its checksums.
    pub(super) head_bytes: usize,
    /// Larger objects go up in parts of this size.
    pub(super) part_bytes: usize,
    /// What moves it, if not the client. It knows neither conditions nor parts.
    pub(super) transport: Option<Arc<Transport>>,
    /// Whatever is there is replaced: it was found to be damaged.
    pub(super) replace: bool,
}

/// What became of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Uploaded {
    /// It was written.
    Written,
    /// The same one was there.
    AlreadyThere,
}

impl Upload {
    /// Writes it, unless the same one is there; another one is replaced. It appears whole or not at
    /// all.
    pub(super) async fn run(self, store: &AmazonS3, conditional: &Conditional) -> Result<Uploaded, Error> {
        if let Some(transport) = &self.transport {
            if !self.replace && self.is_there(store).await {
                return Ok(Uploaded::AlreadyThere);
            }
            let started = transport.moves.start_put(self.path.as_ref(), &self.object);
            if transport.moved(started).await.is_some() {
                return Ok(Uploaded::Written);
            }
            // The client says why, or does it.
        }
        if self.object.len() > self.part_bytes {
            // Parts cannot be sent under a condition, so it is asked for before.
            if !self.replace && self.is_there(store).await {
                return Ok(Uploaded::AlreadyThere);
            }
            return self.in_parts(store).await;
        }
        let mut refused = false;
        if !self.replace && conditional.is_worth_it(Instant::now()) {
            let create = store.put_opts(&self.path, self.payload(), PutMode::Create.into());
            match create.await {
                Ok(_) => {
                    conditional.understood();
                    return Ok(Uploaded::Written);
                }
                Err(Error::AlreadyExists { .. }) => {
                    conditional.understood();
                    if self.is_there(store).await {
                        return Ok(Uploaded::AlreadyThere);
                    }
                }
                // What follows tells whether it is the condition that the store does not like.
                // Where it only failed, once more may help.
                Err(error) => refused = is_unknown_to_store(&error),
            }
        }
        store.put(&self.path, self.payload()).await?;
        if refused {
            conditional.refused(Instant::now());
        }
        Ok(Uploaded::Written)
    }

    fn payload(&self) -> PutPayload {
        PutPayload::from_bytes(self.object.clone())
    }

    /// Whether an object of the same length with the same header is there. Where that cannot be
    /// learned it is not.
    async fn is_there(&self, store: &AmazonS3) -> bool {
        let head = GetOptions::new().with_range(Some(0..self.head_bytes as u64));
        let Ok(found) = store.get_opts(&self.path, head).await else { return false };
        if found.meta.size != self.object.len() as u64 || found.range.end != self.head_bytes as u64 {
            return false;
        }
        found.bytes().await.is_ok_and(|bytes| bytes == self.object[..self.head_bytes])
    }

    async fn in_parts(self, store: &AmazonS3) -> Result<Uploaded, Error> {
        let Self { path, object, part_bytes, .. } = self;
        let mut upload = store.put_multipart(&path).await?;
        let starts = (0..object.len()).step_by(part_bytes);
        let parts: Vec<_> = starts
            .map(|start| object.slice(start..object.len().min(start + part_bytes)))
            .map(|part| upload.put_part(PutPayload::from_bytes(part)))
            .collect();
        let unfinished = Unfinished { path, upload: Some(upload) };
        try_join_all(parts).await?;
        unfinished.complete().await?;
        Ok(Uploaded::Written)
    }
}

/// An upload in parts, aborted where it is dropped before its end: because a part failed, or
/// because its time was over. What stays where that fails too, or where the volume is closed first,
/// is the store's to expire.
struct Unfinished {
    path: Path,
    upload: Option<Box<dyn MultipartUpload>>,
}

impl Unfinished {
    async fn complete(mut self) -> Result<(), Error> {
        if let Some(upload) = &mut self.upload {
            upload.complete().await?;
        }
        self.upload = None;
        Ok(())
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        let Some(upload) = self.upload.take() else { return };
        // Outside of the runtime there is nobody left to do it.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(abort(std::mem::take(&mut self.path), upload));
        }
    }
}

/// Has the store remove the parts. Nobody waits for it, so a failure is logged.
async fn abort(path: Path, mut upload: Box<dyn MultipartUpload>) {
    let error = match tokio::time::timeout(ABORTING, upload.abort()).await {
        Ok(Ok(())) => return,
        Ok(Err(error)) => explained(&error).to_string(),
        Err(_) => format!("no answer within {ABORTING:?}"),
    };
    tracing::warn!(
        target: "kvbm", %path, error,
        "an upload in parts that was given up could not be aborted: its parts take room until a rule of the bucket removes them"
    );
}

#[cfg(test)]
mod tests {
    use super::super::log_capture::captured_lines;
    use super::*;
    use std::future::Future;
    use std::pin::Pin;

    #[test]
    fn conditions_are_left_away_for_a_while() {
        let (conditional, now) = (Conditional::default(), Instant::now());
        for _ in 0..PATIENCE {
            assert!(conditional.is_worth_it(now));
            conditional.refused(now);
        }
        assert!(!conditional.is_worth_it(now));
        assert!(conditional.is_worth_it(now + RECHECK), "the store may have learned it");
        conditional.refused(now + RECHECK);
        assert!(!conditional.is_worth_it(now + RECHECK), "one tries, not three");
        conditional.understood();
        assert!(conditional.is_worth_it(now));
    }

    #[test]
    fn only_an_answer_that_may_be_about_the_condition_counts_as_one() {
        let answered = |status: &str, body: &str| {
            let text = format!("Server returned non-2xx status code: {status}: {body}");
            is_unknown_to_store(&Error::Generic { store: "S3", source: std::io::Error::other(text).into() })
        };
        let code = |code: &str| format!("<?xml version=\"1.0\"?><Error><Code>{code}</Code></Error>");
        for (status, body, unknown) in [
            ("501 Not Implemented", "", true),
            ("501 Not Implemented", &*code("NotImplemented"), true),
            ("400 Bad Request", "", true),
            ("400 Bad Request", &*code("InvalidArgument"), true),
            ("400 Bad Request", &*code("RequestTimeout"), false),
            ("400 Bad Request", &*code("ExpiredToken"), false),
            ("400 Bad Request", &*code("InvalidRequest"), false),
            ("403 Forbidden", "", false),
            ("503 Service Unavailable", "", false),
        ] {
            assert_eq!(answered(status, body), unknown, "{status} {body}");
        }
    }

    /// An upload that the store does not abort.
    #[derive(Debug)]
    struct Stuck;

    impl MultipartUpload for Stuck {
        fn put_part(&mut self, _: PutPayload) -> object_store::UploadPart {
            Box::pin(async { Ok(()) })
        }

        fn complete<'a, 'b>(&'a mut self) -> Answer<'b, object_store::PutResult>
        where
            'a: 'b,
            Self: 'b,
        {
            Box::pin(async {
                Err(Error::NotImplemented { operation: String::new(), implementer: String::new() })
            })
        }

        fn abort<'a, 'b>(&'a mut self) -> Answer<'b, ()>
        where
            'a: 'b,
            Self: 'b,
        {
            let source = std::io::Error::other("it stays").into();
            Box::pin(async { Err(Error::Generic { store: "S3", source }) })
        }
    }

    type Answer<'a, T> = Pin<Box<dyn Future<Output = Result<T, Error>> + Send + 'a>>;

    /// Mutation that makes it fail: `abort` does not look at what came of it.
    #[test]
    fn an_upload_that_could_not_be_aborted_is_reported() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let lines = captured_lines(|| {
            runtime.block_on(async {
                drop(Unfinished { path: Path::from("kv/object"), upload: Some(Box::new(Stuck)) });
                tokio::task::yield_now().await;
            });
        });
        assert_eq!(lines.len(), 1, "{lines:?}");
        assert!(lines[0].contains("kv/object") && lines[0].contains("it stays"), "{lines:?}");
    }
}
