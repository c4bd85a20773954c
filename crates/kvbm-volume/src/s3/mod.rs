//! A volume in a bucket of an S3-compatible store.

mod credentials;
mod failure;
#[cfg(test)]
mod log_capture;
mod rate_limit;
mod runtime;
mod transport;
mod upload;
mod uri;

use std::collections::HashSet;
use std::future::Future;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use futures_util::future::join_all;
use futures_util::{StreamExt, TryStreamExt};
use kvbm_plan::{deadline_after, shown_uri};
use object_store::aws::{AmazonS3, AmazonS3Builder};
use object_store::path::Path;
use object_store::{
    BackoffConfig, ClientOptions, Error, ObjectMeta, ObjectStore, ObjectStoreExt, PutMode, PutPayload,
    RetryConfig,
};
use parking_lot::Mutex;
use tokio::sync::Semaphore;

use crate::object::{Header, MAX_ALIGNMENT, MAX_HEADER_BYTES, open_of_length};
use crate::quota::{Quota, Turns};
use crate::volume::{check, in_time};
use crate::{
    BlobKey, BlobScope, GetRequest, PutRequest, RegistryError, StoreFacts, Volume, VolumeDescriptor,
    VolumeError,
};
use failure::{Refusal, explained};
use rate_limit::{Courteous, until};
use runtime::Runtime;
use transport::{LEAST_BYTES, Transport};
pub use transport::{ObjectMove, ObjectTransport, OpenTransport, TransportStore};
use upload::{Conditional, Upload, Uploaded, is_unknown_to_store};
use uri::S3Uri;

/// Times that a request is sent again, within its deadline.
const MAX_RETRIES: usize = 2;
/// Longest wait between two of them.
const MAX_BACKOFF: Duration = Duration::from_millis(500);
/// Objects that are remembered as damaged.
const MAX_DAMAGED: usize = 4096;
/// How long a volume's opening waits for whether there is such a bucket.
const BUCKET_PATIENCE: Duration = Duration::from_secs(2);
/// Longest time to connect.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// Objects in a bucket: `s3://BUCKET/PREFIX?endpoint=http://HOST:PORT`.
///
/// Credentials come from the variables `AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY`. Where these
/// are not set, they come from the machine, as clouds give it some. The option `credentials` names
/// another place. `env:PREFIX` means variables with another prefix than `AWS`. `file:PATH` means a
/// file as the AWS tools have it: its first section, read again when it has changed. No file is
/// looked for where nothing names one. They never stand in the URI, which is shown in logs. Its
/// other options are `endpoint` (of a store that is not AWS; only one that begins with `http://` is
/// spoken to without TLS), `region` and `anonymous=true` (requests are not signed). `concurrency`
/// is the number of objects, and of requests, at a time (32). Objects larger than `part_bytes` go
/// up in parts of it (16 MiB). A store that asks with `Retry-After` to be left alone is not asked
/// until then, for a minute at most; who cannot wait for that fails at once.
///
/// A put writes under the condition that there is no such object (`If-None-Match`), so of two
/// writers one writes. Where there is one, its header is read: the same one stays, another one is
/// replaced, and so is one that a read found to be damaged. A store that does not know the
/// condition is written to without it, and an object that goes up in parts is looked for before.
/// The bytes are gathered once, since a request outlives its caller when that gives up.
///
/// With the option `transport=nixl` an [`ObjectTransport`] moves the bodies of objects of 64 KiB or
/// more. It writes without a condition, so an object is looked for before. Its length is asked for
/// before it is read. All else stays with the client.
#[derive(Debug)]
pub struct S3Volume {
    descriptor: VolumeDescriptor,
    store: Arc<AmazonS3>,
    /// What the locations of all objects begin with, in the store's spelling.
    prefix: Path,
    part_bytes: usize,
    conditional: Arc<Conditional>,
    /// Objects that a read found damaged, until they are written again.
    damaged: Mutex<HashSet<BlobKey>>,
    /// Bounds the objects that are on their way for all callers together: those that come take more
    /// time than their requests.
    permits: Arc<Semaphore>,
    /// What moves large objects, if not the client.
    transport: Option<Arc<Transport>>,
    quota: Arc<Quota>,
    /// Held from the look at an object until its change is counted.
    turns: Arc<Turns<tokio::sync::Mutex<()>>>,
    runtime: Runtime,
}

impl S3Volume {
    /// Makes a client of the store; with a capacity, the objects are counted first. A store that
    /// does not answer may come later, unless they are to be counted.
    ///
    /// # Errors
    /// [`RegistryError::Open`]: a URI or options that make no sense, or a bucket that is not there.
    /// With a capacity also a store whose objects cannot be counted within twelve of the
    /// descriptor's deadlines. [`RegistryError::Descriptor`]: a field with a value that cannot be.
    pub fn open(descriptor: VolumeDescriptor) -> Result<Self, RegistryError> {
        Self::open_with(descriptor, &|_| Err(no_transport()))
    }

    /// The same; `open` opens the transport where the URI asks for it.
    ///
    /// # Errors
    /// As [`open`](Self::open), and [`RegistryError::Open`] where the transport cannot be opened.
    pub fn open_with(descriptor: VolumeDescriptor, open: &OpenTransport) -> Result<Self, RegistryError> {
        check(&descriptor)?;
        let (id, uri) = (descriptor.id, shown_uri(&descriptor.uri));
        Self::connect(descriptor, open).map_err(|source| RegistryError::Open { id, uri, source })
    }

    fn connect(descriptor: VolumeDescriptor, open: &OpenTransport) -> io::Result<Self> {
        let uri = S3Uri::parse(&descriptor.uri)?;
        let store = client(&uri, descriptor.deadline)?;
        let transport = if uri.transport { Some(open(&uri.transport_store()?)?) } else { None };
        let transport = transport.map(|moves| Arc::new(Transport::new(moves)));
        let volume = Self {
            transport,
            store: Arc::new(store),
            prefix: Path::from(uri.prefix),
            part_bytes: uri.part_bytes,
            conditional: Arc::default(),
            damaged: Mutex::default(),
            permits: Arc::new(Semaphore::new(uri.concurrency)),
            quota: Arc::default(),
            turns: Arc::default(),
            runtime: Runtime::start(&format!("kvbm-s3-{}", descriptor.id))?,
            descriptor,
        };
        if volume.descriptor.capacity_bytes.is_some() {
            let quota = Arc::new(volume.count_objects()?);
            return Ok(Self { quota, ..volume });
        }
        volume.find_bucket()?;
        Ok(volume)
    }

    /// Fails where the store says that there is no such bucket. Whatever else comes of the question
    /// says nothing of that: a store may be there later.
    fn find_bucket(&self) -> io::Result<()> {
        let patience = BUCKET_PATIENCE.min(self.descriptor.deadline);
        let deadline = deadline_after(Instant::now(), patience);
        let (store, nobodys) = (Arc::clone(&self.store), self.below(".kvbm-nobodys"));
        let ask = async move { until(deadline, store.get(&nobodys)).await };
        match self.runtime.run(deadline, ask) {
            Some(Ok(Err(error))) if Refusal::of(&error).is_some_and(|refusal| refusal.lacks_bucket()) => {
                Err(explained(&error))
            }
            _ => Ok(()),
        }
    }

    /// Counts all objects below the prefix.
    fn count_objects(&self) -> io::Result<Quota> {
        let (store, ours) = (Arc::clone(&self.store), self.ours());
        let prefix = self.prefix.clone();
        let count = async move {
            let add = |mut quota: Quota, object: ObjectMeta| async move {
                quota.found(object.location.as_ref().get(ours..).unwrap_or_default(), object.size);
                Ok(quota)
            };
            store.list(Some(&prefix)).try_fold(Quota::default(), add).await
        };
        // Counting takes a request for each thousand objects.
        let deadline = deadline_after(Instant::now(), self.descriptor.deadline.saturating_mul(12));
        let late = || io::Error::new(io::ErrorKind::TimedOut, "its objects could not be counted in time");
        let counted = self.runtime.run(deadline, until(deadline, count));
        counted.and_then(Result::ok).ok_or_else(late)?.map_err(|error| explained(&error))
    }

    /// Where the path of an object begins in its location.
    fn ours(&self) -> usize {
        let prefix = self.prefix.as_ref().len();
        prefix + usize::from(prefix > 0)
    }

    fn path(&self, key: &BlobKey) -> Path {
        self.below(&key.object_path())
    }

    /// The location of what has this path in the volume.
    fn below(&self, path: &str) -> Path {
        let path = Path::from(path);
        self.prefix.parts().chain(path.parts()).collect()
    }

    /// Runs one future per key, as many at a time as there are permits, and each until the
    /// deadline.
    fn each<T, F>(
        &self,
        operation: &'static str,
        deadline: Instant,
        work: Vec<(BlobKey, F)>,
    ) -> Vec<Result<T, VolumeError>>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, Error>> + Send + 'static,
    {
        let volume = self.descriptor.id;
        let keys: Vec<BlobKey> = work.iter().map(|(key, _)| *key).collect();
        let expired = move |key| VolumeError::DeadlineExceeded { volume, operation, key };
        let unanswered = move |key| VolumeError::Io { volume, operation, key, source: silence() };
        if Instant::now() >= deadline {
            return keys.into_iter().map(|key| Err(expired(key))).collect();
        }
        let permits = Arc::clone(&self.permits);
        let one = move |(key, request): (BlobKey, F)| {
            let permits = Arc::clone(&permits);
            async move {
                // It is never closed.
                let permit = tokio::time::timeout_at(deadline.into(), permits.acquire()).await;
                let _permit = permit.map_err(|_elapsed| expired(key))?;
                match until(deadline, request).await {
                    Ok(result) => result.map_err(|error| store_error(volume, operation, key, &error)),
                    Err(_elapsed) => Err(unanswered(key)),
                }
            }
        };
        let all = join_all(work.into_iter().map(one));
        let results = self.runtime.run(deadline, all);
        results.unwrap_or_else(|| keys.into_iter().map(|key| Err(unanswered(key))).collect())
    }

    /// Writes an object, counted before it is there: what it replaces, and where it does not arrive
    /// it, counts no more. `Err` within where there is no room.
    fn write(
        &self,
        request: &PutRequest<'_>,
        header: &Header,
    ) -> impl Future<Output = Result<Result<Uploaded, VolumeError>, Error>> + Send + use<> {
        let upload = self.upload(request, header);
        let (key, needed, descriptor) = (request.key, header.object_length(), self.descriptor.clone());
        let (store, conditional) = (Arc::clone(&self.store), Arc::clone(&self.conditional));
        let (quota, turns) = (Arc::clone(&self.quota), Arc::clone(&self.turns));
        async move {
            let _turn = turns.of(&key).lock().await;
            let limited = descriptor.capacity_bytes.is_some();
            let found = if limited { present(store.head(&upload.path).await)? } else { None };
            let replaced = found.map_or(0, |object| object.size);
            let room = match Quota::take(&quota, &descriptor, key, needed, replaced) {
                Ok(room) => room,
                Err(full) => return Ok(Err(full)),
            };
            let uploaded = upload.run(&store, &conditional).await?;
            // The same one may have been there, or may be ours, of a request whose answer was lost:
            // it counts once.
            room.keep(replaced);
            Ok(Ok(uploaded))
        }
    }

    fn upload(&self, request: &PutRequest<'_>, header: &Header) -> Upload {
        Upload {
            path: self.path(&request.key),
            object: gather(header, &request.pieces),
            head_bytes: header.payload_offset as usize,
            part_bytes: self.part_bytes,
            transport: self.transport_for(request.pieces.iter().map(|piece| piece.len() as u64).sum()),
            replace: self.damaged.lock().contains(&request.key),
        }
    }

    /// Reads one object without a transport.
    fn get_by_client(&self, request: &mut GetRequest<'_>, deadline: Instant) -> Result<(), VolumeError> {
        let payload: u64 = request.pieces.iter().map(|piece| piece.len() as u64).sum();
        let most = payload.saturating_add(u64::from(MAX_ALIGNMENT));
        let (store, path) = (Arc::clone(&self.store), self.path(&request.key));
        let work = vec![(request.key, async move { download(&store, &path, most).await })];
        let late =
            VolumeError::DeadlineExceeded { volume: self.descriptor.id, operation: "get", key: request.key };
        let Fetched { bytes, length, .. } = self.each("get", deadline, work).pop().unwrap_or(Err(late))?;
        open_of_length(self.descriptor.id, &bytes, length, request)
    }

    /// What moves an object whose payload has so many bytes, if not the client. Those of keys are
    /// short, and are written under a condition.
    fn transport_for(&self, bytes: u64) -> Option<Arc<Transport>> {
        self.transport.clone().filter(|_| bytes >= LEAST_BYTES)
    }

    /// The next put replaces it, even where its header is sound.
    fn note_damaged(&self, key: BlobKey) {
        let mut damaged = self.damaged.lock();
        if damaged.len() >= MAX_DAMAGED {
            // Whoever found them deletes them, so that they are written again in any case.
            damaged.clear();
        }
        damaged.insert(key);
    }

    /// Whether the store refuses to write where there is something, by trying it; `None` where that
    /// could not be learned.
    async fn tries_conditions(store: &AmazonS3, path: &Path) -> Option<bool> {
        let put = || store.put_opts(path, PutPayload::from_static(b"probe"), PutMode::Create.into());
        match put().await {
            Ok(_) => match put().await {
                Ok(_) => Some(false),
                Err(Error::AlreadyExists { .. }) => Some(true),
                Err(_) => None,
            },
            Err(error) => is_unknown_to_store(&error).then_some(false),
        }
    }

    /// The length of each object that is there; 0 for the others.
    fn lengths(&self, keys: &[BlobKey], deadline: Instant) -> Vec<Result<Option<u64>, VolumeError>> {
        let head = |key: &BlobKey| {
            let (store, path) = (Arc::clone(&self.store), self.path(key));
            (*key, async move { present(store.head(&path).await.map(|object| object.size)) })
        };
        self.each("exists", deadline, keys.iter().map(head).collect())
    }
}

fn client(uri: &S3Uri, deadline: Duration) -> io::Result<AmazonS3> {
    let backoff =
        BackoffConfig { init_backoff: Duration::from_millis(50), max_backoff: MAX_BACKOFF, base: 2.0 };
    let retry = RetryConfig { backoff, max_retries: MAX_RETRIES, retry_timeout: deadline };
    let options = ClientOptions::new()
        .with_timeout(deadline)
        .with_connect_timeout(CONNECT_TIMEOUT.min(deadline))
        .with_allow_http(uri.endpoint.as_ref().is_some_and(|endpoint| endpoint.starts_with("http://")));
    // The HTTP client brings no provider of its own. An installed one stays.
    let _installed = rustls::crypto::ring::default_provider().install_default();
    let mut builder = AmazonS3Builder::from_env()
        .with_client_options(options)
        .with_http_connector(Courteous { concurrency: uri.concurrency })
        .with_retry(retry)
        .with_bucket_name(&uri.bucket)
        .with_disable_bulk_delete(true)
        .with_skip_signature(uri.anonymous);
    if let Some(endpoint) = &uri.endpoint {
        builder = builder.with_endpoint(endpoint);
    }
    if let Some(region) = &uri.region {
        builder = builder.with_region(region);
    }
    if let Some(credentials) = &uri.credentials {
        builder = builder.with_credentials(credentials.provider()?);
    }
    builder.build().map_err(|error| explained(&error))
}

/// `None` where there is no such object.
fn present<T>(result: Result<T, Error>) -> Result<Option<T>, Error> {
    match result {
        Ok(found) => Ok(Some(found)),
        Err(Error::NotFound { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

fn store_error(
    volume: kvbm_plan::VolumeId,
    operation: &'static str,
    key: BlobKey,
    error: &Error,
) -> VolumeError {
    let lacks_bucket = || Refusal::of(error).is_some_and(|refusal| refusal.lacks_bucket());
    if matches!(error, Error::NotFound { .. }) && operation == "get" && !lacks_bucket() {
        return VolumeError::NotFound { volume, key };
    }
    VolumeError::Io { volume, operation, key, source: explained(error) }
}

/// A store that was asked and has not answered: what it was asked for it may do yet.
fn silence() -> io::Error {
    let text = "the store has not answered in time: check that it runs and is near, or give more time";
    io::Error::new(io::ErrorKind::TimedOut, text)
}

/// An object in one piece.
fn gather(header: &Header, pieces: &[&[u8]]) -> Bytes {
    let mut object = BytesMut::with_capacity(header.object_length() as usize);
    object.extend_from_slice(&header.encode());
    for piece in pieces {
        object.extend_from_slice(piece);
    }
    object.freeze()
}

/// An object as far as it was fetched, and the length that its store gives it.
struct Fetched {
    bytes: Vec<u8>,
    length: u64,
    /// What moved it, if not the client.
    by: Option<Arc<Transport>>,
}

/// Downloads an object, of one that is longer than `most` bytes only what may be its header.
async fn download(store: &AmazonS3, path: &Path, most: u64) -> Result<Fetched, Error> {
    let found = store.get(path).await?;
    let length = found.meta.size;
    let wanted = if length > most { MAX_HEADER_BYTES } else { length as usize };
    let mut bytes = Vec::with_capacity(wanted);
    let mut parts = found.into_stream();
    // A server that sends more than it said must not fill our memory.
    while bytes.len() < wanted
        && let Some(part) = parts.next().await
    {
        let part = match part {
            // What came says enough of one that is too long in any case.
            Err(_) if length > most => break,
            part => part?,
        };
        bytes.extend_from_slice(&part[..part.len().min(wanted - bytes.len())]);
    }
    Ok(Fetched { bytes, length, by: None })
}

/// The same by a transport, which cannot say how long an object is, nor that there is none.
async fn download_by(
    transport: Option<Arc<Transport>>,
    store: &AmazonS3,
    path: &Path,
    most: u64,
) -> Result<Fetched, Error> {
    let Some(transport) = transport else { return download(store, path, most).await };
    let length = store.head(path).await?.size;
    if length > most || length < LEAST_BYTES {
        return download(store, path, most).await;
    }
    match transport.moved(transport.moves.start_get(path.as_ref(), length)).await {
        Some(bytes) if bytes.len() as u64 == length => Ok(Fetched { bytes, length, by: Some(transport) }),
        // The client says why, or does it.
        _ => download(store, path, most).await,
    }
}

/// Where nobody has given one.
fn no_transport() -> io::Error {
    let text = "option transport=nixl: this program has no NIXL for volumes; leave it out, or build with the features nixl and s3";
    io::Error::new(io::ErrorKind::Unsupported, text)
}

impl Volume for S3Volume {
    fn descriptor(&self) -> &VolumeDescriptor {
        &self.descriptor
    }

    fn get(&self, requests: &mut [GetRequest<'_>], deadline: Instant) -> Vec<Result<(), VolumeError>> {
        let volume = self.descriptor.id;
        let fetch = |request: &GetRequest<'_>| {
            let payload: u64 = request.pieces.iter().map(|piece| piece.len() as u64).sum();
            let most = payload.saturating_add(u64::from(MAX_ALIGNMENT));
            let (store, path) = (Arc::clone(&self.store), self.path(&request.key));
            let transport = self.transport_for(payload);
            (request.key, async move { download_by(transport, &store, &path, most).await })
        };
        let objects = self.each("get", deadline, requests.iter().map(fetch).collect());
        let opened = requests.iter_mut().zip(objects).map(|(request, object)| {
            let Fetched { bytes, length, by } = object?;
            let mut opened = open_of_length(volume, &bytes, length, request);
            if let (Err(error), Some(transport)) = (&opened, by)
                && error.is_corrupt()
            {
                // The object may have been replaced since its length was asked for, or the
                // transport may be wrong: only the client's word makes an object damaged.
                transport.note_failure(error);
                opened = self.get_by_client(request, deadline);
            }
            if opened.as_ref().is_err_and(VolumeError::is_corrupt) {
                self.note_damaged(request.key);
            }
            opened
        });
        opened.collect()
    }

    fn put(&self, requests: &[PutRequest<'_>], deadline: Instant) -> Vec<Result<(), VolumeError>> {
        // For each request its error, or nothing where there is an upload.
        let mut results = Vec::with_capacity(requests.len());
        let mut work = Vec::with_capacity(requests.len());
        for request in requests {
            let header = Header::new(self.descriptor.id, request, self.descriptor.alignment);
            results.push(header.map(|header| work.push((request.key, self.write(request, &header)))));
        }
        let mut written = self.each("put", deadline, work).into_iter();
        let settle = |(request, result): (&PutRequest<'_>, Result<(), VolumeError>)| {
            result?;
            // One result for each upload.
            let uploaded = written.next().unwrap_or(Ok(Ok(Uploaded::AlreadyThere)))??;
            if uploaded == Uploaded::Written {
                self.damaged.lock().remove(&request.key);
            }
            Ok(())
        };
        requests.iter().zip(results).map(settle).collect()
    }

    fn exists(&self, keys: &[BlobKey], deadline: Instant) -> Vec<Result<bool, VolumeError>> {
        let lengths = self.lengths(keys, deadline);
        lengths.into_iter().map(|length| length.map(|length| length.is_some())).collect()
    }

    fn delete(&self, keys: &[BlobKey], deadline: Instant) -> Vec<Result<bool, VolumeError>> {
        let delete = |key: &BlobKey| {
            let (store, path, key) = (Arc::clone(&self.store), self.path(key), *key);
            let (quota, turns) = (Arc::clone(&self.quota), Arc::clone(&self.turns));
            let request = async move {
                let _turn = turns.of(&key).lock().await;
                // S3 does not tell whether a deleted object was there.
                let Some(object) = present(store.head(&path).await)? else { return Ok(false) };
                let deleted = present(store.delete(&path).await)?.is_some();
                if deleted {
                    quota.release(&key, object.size);
                }
                Ok(deleted)
            };
            (key, request)
        };
        // One after the other where a key comes twice: the second finds nothing.
        let mut results = Vec::with_capacity(keys.len());
        let mut rest = keys;
        while !rest.is_empty() {
            let distinct = (1..rest.len()).find(|&at| rest[..at].contains(&rest[at])).unwrap_or(rest.len());
            let (now, later) = rest.split_at(distinct);
            results.extend(self.each("delete", deadline, now.iter().map(delete).collect()));
            rest = later;
        }
        results
    }

    fn list(
        &self,
        scope: &BlobScope,
        after: Option<&BlobKey>,
        max: usize,
        deadline: Instant,
    ) -> Result<Vec<BlobKey>, VolumeError> {
        in_time(self.descriptor.id, scope, deadline)?;
        let prefix = self.below(&scope.prefix());
        let offset = after.map_or_else(|| prefix.clone(), |key| self.path(key));
        let (store, ours) = (Arc::clone(&self.store), self.ours());
        let list = async move {
            let objects = store.list_with_offset(Some(&prefix), &offset);
            let keys = objects.try_filter_map(|object| async move {
                let path = object.location.as_ref();
                Ok(path.get(ours..).and_then(BlobKey::parse))
            });
            keys.take(max).try_collect::<Vec<BlobKey>>().await
        };
        let listed = self.runtime.run(deadline, until(deadline, list));
        let listed = listed.and_then(Result::ok).ok_or_else(silence);
        let listed = listed.and_then(|keys| keys.map_err(|error| explained(&error)));
        listed.map_err(|source| VolumeError::List { volume: self.descriptor.id, scope: *scope, source })
    }

    fn used_bytes(&self) -> Option<u64> {
        self.descriptor.capacity_bytes.map(|_| self.quota.used())
    }

    fn facts(&self, deadline: Instant) -> StoreFacts {
        let name = format!(".kvbm-probe-{:016x}", RandomState::new().build_hasher().finish());
        let (store, path, cleaning) = (Arc::clone(&self.store), self.below(&name), self.descriptor.deadline);
        let try_and_clean = async move {
            let tried = until(deadline, Self::tries_conditions(&store, &path)).await;
            // Also what a put left that was late. What stays where this fails has no name of ours.
            let _ = tokio::time::timeout(cleaning, store.delete(&path)).await;
            tried.ok().flatten()
        };
        let tried = self.runtime.run(deadline_after(deadline, cleaning), try_and_clean);
        StoreFacts { folder: None, conditional_puts: tried.flatten() }
    }
}
