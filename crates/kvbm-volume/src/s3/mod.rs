//! A volume in a bucket of an S3-compatible store.

mod runtime;
mod uri;

use std::future::Future;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use futures_util::future::{join_all, try_join_all};
use futures_util::{StreamExt, TryStreamExt};
use object_store::aws::{AmazonS3, AmazonS3Builder};
use object_store::path::Path;
use object_store::{
    BackoffConfig, ClientOptions, Error, ObjectStore, ObjectStoreExt, PutPayload, RetryConfig,
};
use tokio::sync::Semaphore;

use crate::object::{Header, MAX_ALIGNMENT, MAX_PIECES, open as open_object};
use crate::quota::Quota;
use crate::volume::in_time;
use crate::{
    BlobKey, BlobScope, Corruption, GetRequest, PutRequest, RegistryError, Volume, VolumeDescriptor,
    VolumeError,
};
use runtime::Runtime;
use uri::S3Uri;

/// Times that a request is sent again, within its deadline.
const MAX_RETRIES: usize = 2;
/// Longest wait between two of them.
const MAX_BACKOFF: Duration = Duration::from_millis(500);
/// Longest time to connect.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// Objects in a bucket: `s3://BUCKET/PREFIX?endpoint=http://HOST:PORT`.
///
/// Credentials come from the environment, as the AWS tools have them (`AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, profiles of
/// instances), never from the URI, which stands in logs. Options of the URI: `endpoint` (of a store that is not AWS; only one that
/// begins with `http://` is spoken to without TLS), `region`, `anonymous=true` (requests are not signed), `concurrency` (requests at a
/// time, 32), `part_bytes` (larger objects go up in parts, 16 MiB).
///
/// A put replaces the object: a damaged one is healed by the next put, which a conditional put would refuse. Its bytes are
/// gathered once, since a request outlives its caller when that gives up.
#[derive(Debug)]
pub struct S3Volume {
    descriptor: VolumeDescriptor,
    store: Arc<AmazonS3>,
    prefix: String,
    part_bytes: usize,
    /// Bounds the requests of all callers together.
    permits: Arc<Semaphore>,
    quota: Quota,
    runtime: Runtime,
}

impl S3Volume {
    /// Makes a client of the store; with a capacity, the objects are counted first. The bucket must exist.
    pub fn open(descriptor: VolumeDescriptor) -> Result<Self, RegistryError> {
        descriptor.validate()?;
        let opened = Self::connect(&descriptor);
        opened.map_err(|source| RegistryError::Open { id: descriptor.id, uri: descriptor.uri, source })
    }

    fn connect(descriptor: &VolumeDescriptor) -> io::Result<Self> {
        let uri = S3Uri::parse(&descriptor.uri)?;
        let store = client(&uri, descriptor.deadline).map_err(io::Error::other)?;
        let volume = Self {
            descriptor: descriptor.clone(),
            store: Arc::new(store),
            prefix: uri.prefix,
            part_bytes: uri.part_bytes,
            permits: Arc::new(Semaphore::new(uri.concurrency)),
            quota: Quota::new(0),
            runtime: Runtime::start(&format!("kvbm-s3-{}", descriptor.id))?,
        };
        if descriptor.capacity_bytes.is_some() {
            let used = volume.count_bytes()?;
            return Ok(Self { quota: Quota::new(used), ..volume });
        }
        Ok(volume)
    }

    /// Bytes of all objects below the prefix.
    fn count_bytes(&self) -> io::Result<u64> {
        let store = Arc::clone(&self.store);
        let prefix = (!self.prefix.is_empty()).then(|| Path::from(self.prefix.as_str()));
        let count = async move {
            let sizes = store.list(prefix.as_ref()).map_ok(|object| object.size);
            sizes.try_fold(0_u64, |sum, size| async move { Ok(sum.saturating_add(size)) }).await
        };
        // Counting takes a request for each thousand objects.
        let deadline = Instant::now() + 12 * self.descriptor.deadline;
        let late = || io::Error::new(io::ErrorKind::TimedOut, "its objects could not be counted in time");
        let counted =
            self.runtime.run(deadline, async move { tokio::time::timeout_at(deadline.into(), count).await });
        counted.and_then(Result::ok).ok_or_else(late)?.map_err(io::Error::other)
    }

    fn path(&self, key: &BlobKey) -> Path {
        match self.prefix.as_str() {
            "" => Path::from(key.object_path()),
            prefix => Path::from(format!("{prefix}/{}", key.object_path())),
        }
    }

    /// Runs one future per key, as many at a time as there are permits, and each until the deadline.
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
        if Instant::now() >= deadline {
            return keys.into_iter().map(|key| Err(expired(key))).collect();
        }
        let permits = Arc::clone(&self.permits);
        let one = move |(key, request): (BlobKey, F)| {
            let permits = Arc::clone(&permits);
            async move {
                let permitted = async {
                    // The semaphore is never closed.
                    let _permit = permits.acquire().await;
                    request.await
                };
                match tokio::time::timeout_at(deadline.into(), permitted).await {
                    Ok(result) => result.map_err(|error| store_error(volume, operation, key, error)),
                    Err(_elapsed) => Err(expired(key)),
                }
            }
        };
        let all = join_all(work.into_iter().map(one));
        let results = self.runtime.run(deadline, all);
        results.unwrap_or_else(|| keys.into_iter().map(|key| Err(expired(key))).collect())
    }

    /// Room for the object of a request, in place of one whose length is `replaced`. Its header, and the bytes that become free.
    fn reserve(
        &self,
        request: &PutRequest<'_>,
        replaced: Option<Result<Option<u64>, VolumeError>>,
    ) -> Result<(Header, u64), VolumeError> {
        let header = Header::new(self.descriptor.id, request, self.descriptor.alignment)?;
        let replaced = replaced.transpose()?.flatten().unwrap_or(0);
        self.quota.reserve(&self.descriptor, header.object_length(), replaced)?;
        Ok((header, replaced))
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

fn client(uri: &S3Uri, deadline: Duration) -> Result<AmazonS3, Error> {
    let backoff =
        BackoffConfig { init_backoff: Duration::from_millis(50), max_backoff: MAX_BACKOFF, base: 2.0 };
    let retry = RetryConfig { backoff, max_retries: MAX_RETRIES, retry_timeout: deadline };
    let options = ClientOptions::new()
        .with_timeout(deadline)
        .with_connect_timeout(CONNECT_TIMEOUT.min(deadline))
        .with_allow_http(uri.endpoint.as_ref().is_some_and(|endpoint| endpoint.starts_with("http://")));
    let mut builder = AmazonS3Builder::from_env()
        .with_client_options(options)
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
    builder.build()
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
    error: Error,
) -> VolumeError {
    match error {
        Error::NotFound { .. } if operation == "get" => VolumeError::NotFound { volume, key },
        error => VolumeError::Io { volume, operation, key, source: io::Error::other(error) },
    }
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

/// Uploads an object, a large one in parts. It appears whole or not at all.
async fn upload(store: &AmazonS3, path: &Path, object: Bytes, part_bytes: usize) -> Result<(), Error> {
    if object.len() <= part_bytes {
        return store.put(path, PutPayload::from_bytes(object)).await.map(drop);
    }
    let mut upload = store.put_multipart(path).await?;
    let starts = (0..object.len()).step_by(part_bytes);
    let parts: Vec<_> = starts
        .map(|start| object.slice(start..object.len().min(start + part_bytes)))
        .map(|part| upload.put_part(PutPayload::from_bytes(part)))
        .collect();
    let result = match try_join_all(parts).await {
        Ok(_) => upload.complete().await.map(drop),
        Err(error) => Err(error),
    };
    if result.is_err() {
        // Parts that stay are the store's to expire; the upload's error is the one to report.
        let _ = upload.abort().await;
    }
    result
}

/// Downloads an object of at most `most` bytes: `Err` with its length where it is longer.
async fn download(store: &AmazonS3, path: &Path, most: u64) -> Result<Result<Vec<u8>, u64>, Error> {
    let found = store.get(path).await?;
    let length = found.meta.size;
    if length > most {
        return Ok(Err(length));
    }
    let mut object = Vec::with_capacity(length as usize);
    let mut parts = found.into_stream();
    while let Some(part) = parts.next().await {
        let part = part?;
        // A server that sends more than it said must not fill our memory.
        if (object.len() + part.len()) as u64 > most {
            return Ok(Err((object.len() + part.len()) as u64));
        }
        object.extend_from_slice(&part);
    }
    Ok(Ok(object))
}

impl Volume for S3Volume {
    fn descriptor(&self) -> &VolumeDescriptor {
        &self.descriptor
    }

    fn get(&self, requests: &mut [GetRequest<'_>], deadline: Instant) -> Vec<Result<(), VolumeError>> {
        let volume = self.descriptor.id;
        let fetch = |request: &GetRequest<'_>| {
            let payload: u64 = request.pieces.iter().map(|piece| piece.len() as u64).sum();
            let header = u64::from(MAX_ALIGNMENT.max(2 * 8 * MAX_PIECES));
            let most = payload.saturating_add(header);
            let (store, path) = (Arc::clone(&self.store), self.path(&request.key));
            (request.key, async move { download(&store, &path, most).await })
        };
        let objects = self.each("get", deadline, requests.iter().map(fetch).collect());
        let opened = requests.iter_mut().zip(objects).map(|(request, object)| match object? {
            Ok(object) => open_object(volume, &object, request),
            Err(actual) => {
                let expected = request.pieces.iter().map(|piece| piece.len() as u64).sum();
                let reason = Corruption::Length { expected, actual };
                Err(VolumeError::Corrupt { volume, key: request.key, reason })
            }
        });
        opened.collect()
    }

    fn put(&self, requests: &[PutRequest<'_>], deadline: Instant) -> Vec<Result<(), VolumeError>> {
        let limited = self.descriptor.capacity_bytes.is_some();
        let keys: Vec<BlobKey> = requests.iter().map(|request| request.key).collect();
        let replaced = if limited { self.lengths(&keys, deadline) } else { Vec::new() };
        let mut replaced = replaced.into_iter();
        let mut work = Vec::with_capacity(requests.len());
        // For each request its error, or what it takes and frees.
        let mut reserved = Vec::with_capacity(requests.len());
        for request in requests {
            reserved.push(self.reserve(request, replaced.next()).map(|(header, replaced)| {
                let object = gather(&header, &request.pieces);
                let (store, path, part_bytes) =
                    (Arc::clone(&self.store), self.path(&request.key), self.part_bytes);
                work.push((request.key, async move { upload(&store, &path, object, part_bytes).await }));
                (header.object_length(), replaced)
            }));
        }
        let mut uploaded = self.each("put", deadline, work).into_iter();
        let settle = |reserved: Result<(u64, u64), VolumeError>| {
            let (needed, replaced) = reserved?;
            // One result for each upload.
            let result = uploaded.next().unwrap_or(Ok(()));
            // After a failure the object may have landed; the count is right again after the next opening.
            self.quota.release(if result.is_ok() { replaced } else { needed });
            result
        };
        reserved.into_iter().map(settle).collect()
    }

    fn exists(&self, keys: &[BlobKey], deadline: Instant) -> Vec<Result<bool, VolumeError>> {
        let lengths = self.lengths(keys, deadline);
        lengths.into_iter().map(|length| length.map(|length| length.is_some())).collect()
    }

    fn delete(&self, keys: &[BlobKey], deadline: Instant) -> Vec<Result<bool, VolumeError>> {
        let delete = |key: &BlobKey| {
            let (store, path) = (Arc::clone(&self.store), self.path(key));
            let request = async move {
                // S3 does not tell whether a deleted object was there.
                let Some(object) = present(store.head(&path).await)? else { return Ok(None) };
                present(store.delete(&path).await).map(|deleted| deleted.map(|()| object.size))
            };
            (*key, request)
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
        let settle = |result: Result<Option<u64>, VolumeError>| {
            let length = result?;
            self.quota.release(length.unwrap_or(0));
            Ok(length.is_some())
        };
        results.into_iter().map(settle).collect()
    }

    fn list(
        &self,
        scope: &BlobScope,
        after: Option<&BlobKey>,
        max: usize,
        deadline: Instant,
    ) -> Result<Vec<BlobKey>, VolumeError> {
        in_time(self.descriptor.id, scope, deadline)?;
        let prefix = Path::from(format!("{}/{}", self.prefix, scope.prefix()));
        let offset = after.map_or_else(|| prefix.clone(), |key| self.path(key));
        let (store, ours) =
            (Arc::clone(&self.store), self.prefix.len() + usize::from(!self.prefix.is_empty()));
        let list = async move {
            let objects = store.list_with_offset(Some(&prefix), &offset);
            let keys = objects.try_filter_map(|object| async move {
                let path = object.location.as_ref();
                Ok(path.get(ours..).and_then(BlobKey::parse))
            });
            keys.take(max).try_collect::<Vec<BlobKey>>().await
        };
        let late = || io::Error::new(io::ErrorKind::TimedOut, "the deadline passed; give more time");
        let listed =
            self.runtime.run(deadline, async move { tokio::time::timeout_at(deadline.into(), list).await });
        let listed = listed.and_then(Result::ok).ok_or_else(late);
        let listed = listed.and_then(|keys| keys.map_err(io::Error::other));
        listed.map_err(|source| VolumeError::List { volume: self.descriptor.id, scope: *scope, source })
    }

    fn used_bytes(&self) -> Option<u64> {
        self.descriptor.capacity_bytes.map(|_| self.quota.used())
    }
}
