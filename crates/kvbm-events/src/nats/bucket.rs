//! Named values that live as long as who keeps them: a key-value bucket of `JetStream`. Nodes find
//! each other there.

use super::connection::within;
use super::denied::Denied;
use super::{CLOSE_LIMIT, NatsConfig, login, stream, unavailable};
use crate::deadline;
use crate::{Payload, TransportError};
use async_nats::Client;
use async_nats::connection::State;
use async_nats::datetime::DateTime;
use async_nats::jetstream::kv::{self, Entry, Operation, Store, Watch};
use async_nats::jetstream::stream::StorageType;
use async_nats::jetstream::{self, Context};
use bytes::Bytes;
use crossbeam_channel::{Sender, bounded};
use futures_util::StreamExt;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::{Notify, mpsc};

const NAME: &str = "nats-bucket";
/// Values that are followed; further ones are left out.
const MAX_VALUES: usize = 4096;
/// Their bytes, all together.
const MAX_BYTES: usize = 256 << 20;
/// Bytes that the server reserves for a bucket that is made here.
const BUCKET_BYTES: i64 = 64 << 20;
/// A value is put so many times in a lease.
const RENEWALS: u32 = 3;
/// Pause before a bucket that cannot be followed is tried again.
const RETRY: Duration = Duration::from_millis(200);
/// How long the values that are there may be silent before the server is asked whether there are
/// any.
const AGAIN: Duration = Duration::from_millis(500);
/// Time for one request of the background.
const REQUEST: Duration = Duration::from_secs(5);
/// Calls that may wait for the thread at a time.
const COMMANDS: usize = 16;

/// Which bucket, and for how long its values live.
#[derive(Clone, PartialEq, Eq)]
pub struct BucketConfig {
    /// The server and who we are. Subject, queue and stream are not used.
    pub server: NatsConfig,
    /// Name of the bucket: letters, digits, `-` and `_`. One that is not there is made, in the
    /// server's memory; one that is there is used as it is.
    pub name: String,
    /// How long a value lives that nobody renews.
    pub lease: Duration,
}

/// A bucket whose values this process follows, and some of which it keeps. One connection and one
/// thread. While the server is away the values stay as they were.
pub struct NatsBucket {
    /// The thread ends when this goes.
    commands: Option<mpsc::Sender<Command>>,
    values: Arc<Mutex<Values>>,
    patience: Duration,
    ended: crossbeam_channel::Receiver<()>,
}

enum Command {
    Keep { key: String, value: Bytes, deadline: Instant, answer: Sender<Result<(), TransportError>> },
    Remove { key: String, deadline: Instant, answer: Sender<Result<(), TransportError>> },
}

/// What is known of the bucket.
#[derive(Default)]
struct Values {
    found: BTreeMap<String, Value>,
    bytes: usize,
    /// Those that this process keeps.
    ours: BTreeMap<String, Kept>,
    /// Why the last renewal failed, until one succeeds.
    trouble: Option<String>,
    /// When the bucket was made, by the server's clock.
    made: Option<DateTime>,
    /// Since when the server has told of every change. Only then age says something.
    followed: Option<Instant>,
}

struct Value {
    value: Payload,
    seen: Instant,
}

struct Kept {
    value: Bytes,
    /// Whether it came back since it was put: what comes before is older.
    is_there: bool,
}

impl NatsBucket {
    /// Connects, makes the bucket if it is not there, and reads it.
    ///
    /// # Errors
    /// [`TransportError`] names the server and what it refuses.
    pub fn open(config: BucketConfig) -> Result<Self, TransportError> {
        let patience = config.server.connect_timeout;
        let values = Arc::new(Mutex::new(Values::default()));
        let (commands, inbox) = mpsc::channel(COMMANDS);
        let (ready, opened) = bounded(1);
        let (end, ended) = bounded(0);
        let of_thread = Arc::clone(&values);
        std::thread::Builder::new()
            .name("kvbm-bucket".into())
            .spawn(move || run(config, of_thread, inbox, &ready, end))
            .map_err(|error| unavailable(NAME, format!("no thread for the connection: {error}")))?;
        match opened.recv_timeout(patience.saturating_mul(2)) {
            Ok(opened) => opened.map(|()| Self { commands: Some(commands), values, patience, ended }),
            Err(_) => Err(unavailable(NAME, format!("not connected within {patience:?}"))),
        }
    }

    /// Puts a value, in place of the one before, and renews it until it is removed or this is
    /// dropped, or another process puts one. The last writer keeps the key. While the server is
    /// away it is an error, and the value is put when it is back.
    ///
    /// # Errors
    /// [`TransportError::Refused`]: longer than the server takes. [`TransportError::Unavailable`].
    pub fn keep(&self, key: &str, value: &[u8]) -> Result<(), TransportError> {
        let (key, value) = (key.to_owned(), Bytes::copy_from_slice(value));
        self.call(|deadline, answer| Command::Keep { key, value, deadline, answer })
    }

    /// Removes a value. One that is not there is no error.
    ///
    /// # Errors
    /// [`TransportError::Unavailable`]: it goes when its lease ends.
    pub fn remove(&self, key: &str) -> Result<(), TransportError> {
        let key = key.to_owned();
        self.call(|deadline, answer| Command::Remove { key, deadline, answer })
    }

    /// Every value that is there, by its key.
    pub fn values(&self) -> Vec<(String, Payload)> {
        let values = self.values.lock();
        values.found.iter().map(|(key, found)| (key.clone(), Arc::clone(&found.value))).collect()
    }

    /// Why a value of ours could not be renewed, while that is so.
    pub fn trouble(&self) -> Option<String> {
        self.values.lock().trouble.clone()
    }

    fn call(
        &self,
        command: impl FnOnce(Instant, Sender<Result<(), TransportError>>) -> Command,
    ) -> Result<(), TransportError> {
        let closed = TransportError::Closed { transport: NAME };
        let (answer, answered) = bounded(1);
        let deadline = deadline::after(self.patience);
        let Some(commands) = &self.commands else { return Err(closed) };
        match commands.try_send(command(deadline, answer)) {
            Ok(()) => {}
            Err(mpsc::error::TrySendError::Full(_)) => {
                return Err(unavailable(NAME, format!("{COMMANDS} calls wait already")));
            }
            Err(mpsc::error::TrySendError::Closed(_)) => return Err(closed),
        }
        let waited = answered.recv_deadline(deadline + Duration::from_millis(50));
        waited.map_err(|_| unavailable(NAME, format!("no answer within {:?}", self.patience)))?
    }
}

impl Drop for NatsBucket {
    fn drop(&mut self) {
        drop(self.commands.take());
        // The thread has nothing to finish.
        let _ = self.ended.recv_timeout(CLOSE_LIMIT);
    }
}

fn run(
    config: BucketConfig,
    values: Arc<Mutex<Values>>,
    mut inbox: mpsc::Receiver<Command>,
    ready: &Sender<Result<(), TransportError>>,
    end: Sender<()>,
) {
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            // The caller has its own deadline.
            let _ = ready.try_send(Err(unavailable(NAME, format!("no runtime: {error}"))));
            return;
        }
    };
    runtime.block_on(async {
        match Bucket::open(config, values).await {
            Ok((bucket, watch)) => {
                let bucket = Arc::new(bucket);
                tokio::spawn(Arc::clone(&bucket).follow(watch));
                tokio::spawn(Arc::clone(&bucket).renew());
                let _ = ready.try_send(Ok(()));
                while let Some(command) = inbox.recv().await {
                    bucket.carry_out(command).await;
                }
            }
            Err(error) => {
                let _ = ready.try_send(Err(error));
            }
        }
    });
    drop(end);
}

/// The thread's side.
struct Bucket {
    client: Client,
    context: Context,
    denied: Arc<Denied>,
    name: String,
    lease: Duration,
    values: Arc<Mutex<Values>>,
    /// Whether the changes of the bucket are read.
    is_watched: AtomicBool,
    /// Connections that were made until the changes were asked for last.
    connects: AtomicU64,
    /// Has the bucket watched anew.
    broken: Notify,
}

impl Bucket {
    async fn open(config: BucketConfig, values: Arc<Mutex<Values>>) -> Result<(Self, Watch), TransportError> {
        let BucketConfig { server, name, lease } = config;
        let deadline = deadline::after(server.connect_timeout);
        let denied = Arc::new(Denied::default());
        let client = login::connect(&server, deadline, &denied).await?;
        let context = jetstream::new(client.clone());
        let (is_watched, connects, broken) = (AtomicBool::new(true), AtomicU64::new(0), Notify::new());
        let bucket = Self { client, context, denied, name, lease, values, is_watched, connects, broken };
        let watch = bucket.watch(deadline).await?;
        Ok((bucket, watch))
    }

    /// The bucket, made if it is not there.
    async fn store(&self, deadline: Instant) -> Result<Store, TransportError> {
        let what = format!("opening bucket {}", self.name);
        let opening = Box::pin(async {
            if let Ok(store) = self.context.get_key_value(&self.name).await {
                return Ok(store);
            }
            let wanted = kv::Config {
                bucket: self.name.clone(),
                description: "nodes of kvbm".to_owned(),
                history: 1,
                max_age: self.lease,
                max_bytes: BUCKET_BYTES,
                // What is lost with the server is put again.
                storage: StorageType::Memory,
                ..kv::Config::default()
            };
            self.context.create_key_value(wanted).await
        });
        self.denied.unless(NAME, stream::API, within(NAME, deadline, &what, opening)).await
    }

    /// Reads what is there, and what changes from then on.
    async fn watch(&self, deadline: Instant) -> Result<Watch, TransportError> {
        self.connects.store(self.connects_now(), Ordering::Relaxed);
        let store = self.store(deadline).await?;
        let what = format!("reading bucket {}", self.name);
        let status = within(NAME, deadline, &what, store.status()).await?;
        let opening = Box::pin(store.watch_with_history(">"));
        let watching = within(NAME, deadline, &what, opening);
        let mut watch = self.denied.unless(NAME, stream::API, watching).await?;
        let begun = Instant::now();
        let mut is_current = status.values() == 0;
        while !is_current {
            match tokio::time::timeout(AGAIN, watch.next()).await {
                Ok(Some(Ok(entry))) => {
                    is_current = entry.seen_current;
                    self.take(entry);
                }
                Ok(Some(Err(error))) => return Err(unavailable(NAME, format!("{what}: {error}"))),
                Ok(None) => return Err(unavailable(NAME, format!("{what}: it ended"))),
                Err(_) if Instant::now() >= deadline => {
                    return Err(unavailable(NAME, format!("{what} took too long")));
                }
                // The last values may have expired since.
                Err(_) => is_current = within(NAME, deadline, &what, store.status()).await?.values() == 0,
            }
        }
        let mut values = self.values.lock();
        if values.made.replace(status.info.created) == Some(status.info.created) {
            // What was not there again is gone.
            values.retain(|value| value.seen >= begun);
        } else {
            // A server that has lost the bucket: who lives puts its values again in a while.
            values.followed = None;
        }
        drop(values);
        Ok(watch)
    }

    fn take(&self, entry: Entry) {
        let mut values = self.values.lock();
        values.remove(&entry.key);
        if entry.operation == Operation::Put {
            values.compare_own(&entry.key, &entry.value);
        }
        let has_room =
            values.found.len() < MAX_VALUES && values.bytes.saturating_add(entry.value.len()) <= MAX_BYTES;
        if entry.operation == Operation::Put && has_room {
            values.bytes += entry.value.len();
            let value = Value { value: Payload::from(&*entry.value), seen: Instant::now() };
            values.found.insert(entry.key, value);
        }
    }

    async fn follow(self: Arc<Self>, first: Watch) {
        let mut next = Some(first);
        loop {
            let watch = if let Some(watch) = next.take() {
                Ok(watch)
            } else {
                let watch = self.watch(deadline::after(REQUEST)).await;
                // The server may have lost them.
                self.put_ours().await;
                watch
            };
            if let Ok(mut watch) = watch {
                self.is_watched.store(true, Ordering::Relaxed);
                let changes = Box::pin(async {
                    while let Some(Ok(entry)) = watch.next().await {
                        self.take(entry);
                    }
                });
                let broken = Box::pin(self.broken.notified());
                let ended = futures_util::future::select(broken, Box::pin(self.connected_again()));
                futures_util::future::select(changes, ended).await;
            }
            self.is_watched.store(false, Ordering::Relaxed);
            tokio::time::sleep(RETRY).await;
        }
    }

    fn connects_now(&self) -> u64 {
        self.client.statistics().connects.load(Ordering::Relaxed)
    }

    /// Waits until there is another connection than that over which the changes were asked for. A
    /// server that has started again does not tell of them, and the client takes long to find out.
    async fn connected_again(&self) {
        while self.connects_now() <= self.connects.load(Ordering::Relaxed).max(1) {
            tokio::time::sleep(RETRY).await;
        }
    }

    /// Puts our values again and again, and drops those of others that nobody puts any more.
    async fn renew(self: Arc<Self>) {
        loop {
            tokio::time::sleep(self.lease / RENEWALS).await;
            self.put_ours().await;
            self.expire();
        }
    }

    async fn put_ours(&self) {
        let ours: Vec<_> = {
            let values = self.values.lock();
            values.ours.iter().map(|(key, kept)| (key.clone(), kept.value.clone())).collect()
        };
        let mut trouble = None;
        for (key, value) in ours {
            // One that fails is put the next time.
            let put = self.put(&key, value, deadline::after(REQUEST)).await;
            trouble = trouble.or(put.err().map(|error| error.to_string()));
        }
        self.values.lock().trouble = trouble;
    }

    fn expire(&self) {
        let is_followed =
            self.client.connection_state() == State::Connected && self.is_watched.load(Ordering::Relaxed);
        let mut values = self.values.lock();
        values.followed = if is_followed { values.followed.or_else(|| Some(Instant::now())) } else { None };
        if values.followed.is_none_or(|since| since.elapsed() <= self.lease) {
            return;
        }
        let is_late = |key| values.found.get(key).is_none_or(|found| found.seen.elapsed() > self.lease);
        if values.ours.keys().any(is_late) {
            // Our own values do not come back: changes are not told of.
            values.followed = None;
            self.broken.notify_one();
        } else {
            let lease = self.lease;
            values.retain(|value| value.seen.elapsed() <= lease);
        }
    }

    async fn carry_out(&self, command: Command) {
        match command {
            Command::Keep { key, value, deadline, answer } => {
                let _ = answer.try_send(self.keep(key, value, deadline).await);
            }
            Command::Remove { key, deadline, answer } => {
                let _ = answer.try_send(self.remove(&key, deadline).await);
            }
        }
    }

    async fn keep(&self, key: String, value: Bytes, deadline: Instant) -> Result<(), TransportError> {
        let most = self.client.max_payload();
        if value.len() > most {
            let reason = format!("{} bytes exceed the server's max_payload of {most}: raise it", value.len());
            return Err(TransportError::Refused { transport: NAME, reason });
        }
        self.values.lock().ours.insert(key.clone(), Kept { value: value.clone(), is_there: false });
        self.put(&key, value, deadline).await
    }

    async fn put(&self, key: &str, value: Bytes, deadline: Instant) -> Result<(), TransportError> {
        let store = self.store(deadline).await?;
        let what = format!("putting {key}");
        let putting = within(NAME, deadline, &what, Box::pin(store.put(key, value)));
        self.denied.unless(NAME, &self.subject(key), putting).await.map(drop)
    }

    async fn remove(&self, key: &str, deadline: Instant) -> Result<(), TransportError> {
        self.values.lock().ours.remove(key);
        let store = self.store(deadline).await?;
        let what = format!("removing {key}");
        let removing = within(NAME, deadline, &what, Box::pin(store.delete(key)));
        self.denied.unless(NAME, &self.subject(key), removing).await
    }

    fn subject(&self, key: &str) -> String {
        format!("$KV.{}.{key}", self.name)
    }
}

impl Values {
    /// A value was put under this key: ours has come back, or another process has the key now.
    fn compare_own(&mut self, key: &str, value: &Bytes) {
        let Some(kept) = self.ours.get_mut(key) else { return };
        if kept.value == *value {
            kept.is_there = true;
        } else if kept.is_there {
            // Two that renew would replace each other for ever.
            self.ours.remove(key);
        }
    }

    fn remove(&mut self, key: &str) {
        if let Some(gone) = self.found.remove(key) {
            self.bytes -= gone.value.len();
        }
    }

    fn retain(&mut self, keep: impl Fn(&Value) -> bool) {
        self.found.retain(|_, value| keep(value));
        self.bytes = self.found.values().map(|value| value.value.len()).sum();
    }
}
