//! The blob store that all ranks share. Each rank has objects of its own.
//!
//! Volumes are the real ones: the worker's side of them, registry, encryption, compression, objects
//! with header and checksums, listing, quota. Only the threads are not there. Under them lies one
//! [`MemoryVolume`](kvbm_volume::MemoryVolume), whose writes fail, land later, or find no room.
//! What volumes say is compared with a naive model ([`expected`]).

mod expected;
mod medium;

use super::Bytes;
use crate::random::Random;
use expected::{Entry, Expected, Key, key};
use kvbm_keys::OperatorKey;
use kvbm_plan::{
    BlockIdentity, Failure, FailureKind, KeyNotice, NamespaceId, NamespaceTag, Rank, SequenceHash,
    VolumeAnswer, VolumeId, VolumeRequest, clock, deadline_after,
};
use kvbm_transfer::stepped::SteppedVolumes;
use kvbm_transfer::{VolumeGroup, VolumeTier};
use kvbm_volume::{
    BlobKey, BlobScope, BlobSlice, ObjectSeal, Volume, VolumeCompression, VolumeEncryption, VolumeRegistry,
    VolumeTerms,
};
pub(crate) use medium::Fault;
use medium::{Change, LateWrite, Medium, holds_key};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// KV heads of the model.
pub(crate) const HEADS: u32 = 6;
/// Layers of the model.
pub(crate) const LAYERS: u32 = 2;
/// Elements of a head.
pub(crate) const HEAD_DIM: u32 = 8;
/// Bytes of a head in a block of 16 tokens: keys and values of all layers, two bytes an element.
const HEAD_BYTES: usize = 2 * 2 * (LAYERS * HEAD_DIM * crate::prompts::PAGE) as usize;

/// Objects of a page of a listing.
const PAGE: usize = 5;

/// The deployment's namespace.
const TAG: NamespaceTag = NamespaceTag::from_bytes([7; 16]);

/// What the leader calls the volume: the number that a configuration has without being told.
const VOLUME: VolumeId = VolumeId(0);

/// The key of the operator of all ranks.
const OPERATOR: &[u8] = b"the key of all simulated ranks..";

/// How objects lie in the store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Terms {
    /// Blocks that the volume may hold; 0 for no limit.
    pub(crate) blocks: u32,
    pub(crate) encrypts: bool,
    pub(crate) compression: VolumeCompression,
}

/// A late write, with what the model needs.
pub(crate) struct Landing {
    identity: BlockIdentity,
    rank: Rank,
    bytes: Bytes,
    asked: u64,
    writes: Vec<LateWrite>,
    key_losses: u64,
    is_stale: bool,
}

impl Landing {
    pub(crate) fn identity(&self) -> &BlockIdentity {
        &self.identity
    }

    pub(crate) fn asked(&self) -> u64 {
        self.asked
    }
}

/// A worker's volumes.
struct Worker {
    volumes: SteppedVolumes,
    /// The same volumes for the simulator's own reads, which change nothing.
    auditor: SteppedVolumes,
    registry: Arc<VolumeRegistry>,
}

/// What is written, for the model.
#[derive(Clone, Copy)]
struct Write<'a> {
    identity: &'a BlockIdentity,
    rank: Rank,
    bytes: Bytes,
    asked: u64,
    may_lack_key: bool,
}

/// See the module.
pub(crate) struct Store {
    ranks: usize,
    terms: Terms,
    /// There from the first opening on.
    medium: Arc<Mutex<Option<Arc<Medium>>>>,
    workers: Vec<Option<Worker>>,
    expected: Expected,
    /// Names of data keys are random: the leader hears a number in place of each.
    key_names: BTreeMap<[u8; 16], u128>,
    /// Until then it refuses writes for want of room.
    pub(crate) full_until: Option<Instant>,
    /// The first rule that it broke.
    broken: Option<String>,
}

impl Store {
    pub(crate) fn new(ranks: usize, terms: Terms) -> Self {
        Self {
            ranks,
            terms,
            medium: Arc::default(),
            workers: (0..ranks).map(|_| None).collect(),
            expected: Expected::default(),
            key_names: BTreeMap::new(),
            full_until: None,
            broken: None,
        }
    }

    /// The first rule that it broke.
    pub(crate) fn take_broken(&mut self) -> Option<String> {
        self.broken.take()
    }

    fn breaks(&mut self, what: String) {
        self.broken.get_or_insert(what);
    }

    /// KV heads of a rank.
    fn heads(&self) -> u32 {
        HEADS / self.ranks as u32
    }

    fn slice(&self, rank: Rank) -> BlobSlice {
        let heads = self.heads();
        let first_head = u32::from(rank.0) * heads;
        BlobSlice { first_layer: 0, num_layers: LAYERS, first_head, num_heads: heads }
    }

    /// The object of a rank's part of a block.
    fn object(&self, identity: &BlockIdentity, rank: Rank) -> BlobKey {
        BlobKey::of(TAG, identity, self.slice(rank))
    }

    fn key_of(&self, object: &BlobKey) -> Key {
        let rank = Rank((object.slice.first_head / self.heads()) as u16);
        (object.label, object.group, object.hash, rank)
    }

    /// What a rank's part of a block is: its name over and over, and the rank in each byte.
    fn content(&self, bytes: Bytes, rank: Rank) -> Vec<u8> {
        let name = bytes.map(|byte| byte ^ rank.0 as u8);
        name.repeat(self.heads() as usize * HEAD_BYTES / name.len())
    }

    /// The worker of a rank starts. It knows no volume until the leader names one.
    pub(crate) fn start(&mut self, rank: usize) {
        self.workers[rank] = None;
        match self.worker(Rank(rank as u16)) {
            Ok(worker) => {
                self.workers[rank] = Some(worker);
                self.expected.reopen(Rank(rank as u16));
            }
            Err(what) => self.breaks(what),
        }
    }

    /// The worker of a rank ends.
    pub(crate) fn stop(&mut self, rank: usize) {
        self.workers[rank] = None;
    }

    fn worker(&self, rank: Rank) -> Result<Worker, String> {
        let medium = Arc::clone(&self.medium);
        let registry = VolumeRegistry::new().with_scheme(
            "memory",
            Box::new(move |descriptor| {
                let mut medium = medium.lock();
                if let Some(medium) = &*medium {
                    return Ok(Arc::clone(medium) as Arc<dyn Volume>);
                }
                let opened = Arc::new(Medium::open(descriptor)?);
                *medium = Some(Arc::clone(&opened));
                Ok(opened)
            }),
        );
        let key = OperatorKey::parse(OPERATOR).map_err(|error| error.to_string())?;
        let encryption = self.terms.encrypts.then_some(VolumeEncryption { key, previous: None });
        let compression = self.terms.compression;
        let terms = VolumeTerms { namespace: TAG, encryption, compression, lossy: None };
        let registry = Arc::new(registry.for_deployment(terms).map_err(|error| error.to_string())?);
        let volumes = || {
            let tier = VolumeTier {
                registry: Arc::clone(&registry),
                groups: vec![VolumeGroup { slice: self.slice(rank), heads: HEADS }],
                writes: true,
                share: (u32::from(rank.0), self.ranks as u32),
                seal: ObjectSeal::default(),
                threads: 1,
            };
            SteppedVolumes::new(tier, TAG, HEAD_BYTES, PAGE)
        };
        Ok(Worker { volumes: volumes(), auditor: volumes(), registry: Arc::clone(&registry) })
    }

    /// Whether the worker of a rank lives and has the volume open.
    fn is_open(&self, rank: Rank) -> bool {
        let worker = self.workers.get(rank.index()).and_then(Option::as_ref);
        worker.is_some_and(|worker| worker.registry.get(VOLUME).is_ok())
    }

    /// A rank whose worker has not opened the volume.
    pub(crate) fn closed(&self) -> Option<usize> {
        (0..self.ranks).find(|rank| !self.is_open(Rank(*rank as u16)))
    }

    fn medium(&self) -> Option<Arc<Medium>> {
        self.medium.lock().clone()
    }

    /// A worker writes its part of a block.
    ///
    /// # Errors
    /// What it reports; and a write that lands later.
    pub(crate) fn put(
        &mut self,
        rank: usize,
        identity: &BlockIdentity,
        bytes: Bytes,
        asked: u64,
        fault: Option<Fault>,
    ) -> Result<(), (FailureKind, Option<Landing>)> {
        let name = Rank(rank as u16);
        let (Some(medium), Some(worker)) = (self.medium(), &self.workers[rank]) else {
            return Err((FailureKind::Unsupported, None));
        };
        let is_stale = self.terms.encrypts && self.expected.is_stale(name, identity.namespace);
        medium.set_fault(fault);
        let put = worker.volumes.put(VOLUME, identity, &self.content(bytes, name));
        medium.set_fault(None);
        self.reconcile(Some(Write { identity, rank: name, bytes, asked, may_lack_key: is_stale }), |_| false);
        if put.is_ok() {
            match self.expected.get_mut(&key(identity, name)) {
                // The worker has forgotten what was damaged there.
                Some(entry) => entry.replaces_damaged = false,
                None => self.breaks(format!("{} was put, and nothing was written", identity.hash)),
            }
        }
        let writes = medium.take_late();
        let landing = (!writes.is_empty()).then(|| {
            let key_losses = self.expected.key_losses(identity.namespace);
            Landing { identity: *identity, rank: name, bytes, asked, writes, key_losses, is_stale }
        });
        put.map_err(|failure| (failure.kind, landing))
    }

    /// A write that had failed lands.
    pub(crate) fn land(&mut self, landing: &Landing) {
        let Landing { ref identity, rank, bytes, asked, ref writes, key_losses, is_stale } = *landing;
        let Some(medium) = self.medium() else { return };
        for write in writes {
            medium.land(write, later());
        }
        let is_of_lost_key = self.expected.key_losses(identity.namespace) != key_losses;
        let may_lack_key = self.terms.encrypts && (is_stale || is_of_lost_key);
        self.reconcile(Some(Write { identity, rank, bytes, asked, may_lack_key }), |_| false);
    }

    /// What a worker reads.
    pub(crate) fn get(&mut self, rank: usize, identity: &BlockIdentity) -> Result<Bytes, FailureKind> {
        let name = Rank(rank as u16);
        let Some(worker) = &self.workers[rank] else { return Err(FailureKind::Unsupported) };
        let read = worker.volumes.get(VOLUME, identity).map_err(|failure| failure.kind);
        if read == Err(FailureKind::Unsupported) {
            return Err(FailureKind::Unsupported);
        }
        self.judge(&key(identity, name), read.as_deref().map_err(|kind| *kind));
        read?;
        // The model says which bytes these are.
        let entry = self.expected.get(&key(identity, name)).ok_or(FailureKind::Missing)?;
        Ok(entry.bytes)
    }

    fn judge(&mut self, key: &Key, read: Result<&[u8], FailureKind>) {
        let judged = self.expected.judge(key, read, |bytes| self.content(bytes, key.3));
        if let Err(what) = judged {
            self.breaks(what);
        }
    }

    /// What a worker answers to the leader. Some call of the store fails on the way where
    /// `fails_after` says so.
    pub(crate) fn ask(
        &mut self,
        rank: usize,
        volume: VolumeId,
        request: &VolumeRequest,
        fails_after: Option<usize>,
    ) -> (VolumeAnswer, Vec<KeyNotice>) {
        let name = Rank(rank as u16);
        let copy = self.copy_before(request, name);
        let Some(worker) = &self.workers[rank] else {
            return (VolumeAnswer::Failed(simulated(FailureKind::Unsupported)), Vec::new());
        };
        let medium = self.medium();
        medium.iter().for_each(|medium| medium.fail_after(fails_after));
        let (answer, mut notices) = worker.volumes.answer(volume, request);
        medium.iter().for_each(|medium| medium.fail_after(None));
        let may_go = |(key, entry): (&Key, &Entry)| {
            let is_named = |blocks: &[BlockIdentity]| blocks.iter().any(|one| self::key(one, name) == *key);
            key.3 == name
                && match request {
                    VolumeRequest::Discard(blocks) => is_named(blocks),
                    VolumeRequest::DiscardDamaged(blocks) => is_named(blocks) && entry.may_count_as_damaged(),
                    VolumeRequest::Purge(label) => label.is_none_or(|label| label == key.0),
                    _ => false,
                }
        };
        let removed = self.reconcile(None, may_go);
        if let (VolumeRequest::Purge(Some(label)), true) = (request, self.terms.encrypts) {
            self.expected.lose_keys(*label, Some(name), self.ranks);
        }
        match &answer {
            Ok(answer) => {
                if let Err(what) = self.judge_answer(name, request, answer, removed) {
                    self.breaks(what);
                }
                self.try_copy(name, copy);
            }
            Err(_) => self.expected.touch_all(),
        }
        for notice in &mut notices {
            let next = self.key_names.len() as u128 + 1;
            notice.id = self.key_names.entry(notice.id).or_insert(next).to_le_bytes();
        }
        (answer.unwrap_or_else(|failure| VolumeAnswer::Failed(simulated(failure.kind))), notices)
    }

    /// What is wrong with an answer. `removed`: objects that are gone since.
    fn judge_answer(
        &self,
        rank: Rank,
        request: &VolumeRequest,
        answer: &VolumeAnswer,
        removed: u64,
    ) -> Result<(), String> {
        let has = |identity: &BlockIdentity| self.expected.get(&key(identity, rank)).is_some();
        let left = match (request, answer) {
            (VolumeRequest::Probe(blocks), VolumeAnswer::Present(present)) => {
                let expected: Vec<bool> = blocks.iter().map(has).collect();
                if expected != *present {
                    return Err(format!("rank {rank} finds {present:?} of {expected:?} in the store"));
                }
                return Ok(());
            }
            (VolumeRequest::List(after), VolumeAnswer::Listed(listed)) => {
                let expected: Vec<_> = self.expected.behind(*after, rank).take(listed.len().max(1)).collect();
                if expected != *listed {
                    return Err(format!("rank {rank} lists {listed:?} of {expected:?}"));
                }
                return Ok(());
            }
            (VolumeRequest::Discard(blocks), VolumeAnswer::Removed(_)) => {
                blocks.iter().find(|block| has(block)).map(|block| block.hash)
            }
            (VolumeRequest::Purge(label), VolumeAnswer::Removed(_)) => {
                let is_left = |key: &Key| key.3 == rank && label.is_none_or(|label| label == key.0);
                self.expected.iter().find(|(key, _)| is_left(key)).map(|(key, _)| key.2)
            }
            _ => None,
        };
        if let Some(hash) = left {
            return Err(format!("{hash} was removed by rank {rank}, and is still there"));
        }
        match answer {
            VolumeAnswer::Removed(count) if *count != removed => {
                Err(format!("rank {rank} removed {removed} objects, and says {count}"))
            }
            _ => Ok(()),
        }
    }

    /// The model follows what happened to objects. What is gone that `may_go` does not name should
    /// not be; nor should be what was written beside `write`. How many are gone.
    fn reconcile(&mut self, write: Option<Write<'_>>, may_go: impl Fn((&Key, &Entry)) -> bool) -> u64 {
        let Some(medium) = self.medium() else { return 0 };
        let (changes, mut removed) = (medium.take_changes(), 0);
        if changes.is_empty() {
            return 0;
        }
        let capacity = medium.descriptor().capacity_bytes.unwrap_or(u64::MAX);
        for change in changes {
            match change {
                Change::Put(object, _) | Change::NoRoom(object, _) | Change::Deleted(object)
                    if holds_key(&object) => {}
                Change::Put(object, stored) => match write {
                    Some(Write { identity, rank, bytes, asked, may_lack_key })
                        if object == self.object(identity, rank) =>
                    {
                        let key = key(identity, rank);
                        let replaces_damaged =
                            self.expected.get(&key).is_some_and(Entry::may_count_as_damaged);
                        let (identity, is_damaged) = (*identity, false);
                        let entry = Entry {
                            identity,
                            bytes,
                            asked,
                            stored,
                            is_damaged,
                            may_lack_key,
                            replaces_damaged,
                        };
                        self.expected.put(key, entry);
                    }
                    _ => self.breaks(format!("{object} was written, and nobody asked for it")),
                },
                Change::NoRoom(object, needed) => {
                    let replaced = self.expected.get(&self.key_of(&object)).map_or(0, |entry| entry.stored);
                    if self.expected.used() + needed - replaced <= capacity {
                        self.breaks(format!("{object} was refused for want of room, and there is some"));
                    }
                }
                Change::Deleted(object) => {
                    removed += 1;
                    let key = self.key_of(&object);
                    if !self.expected.get(&key).is_some_and(|entry| may_go((&key, entry))) {
                        self.breaks(format!("{object} was removed, and nobody asked for that"));
                    }
                    self.expected.remove(&key);
                }
            }
        }
        let (used, counted) = (self.expected.used(), medium.used_bytes());
        if counted != Some(used) {
            self.breaks(format!("objects take {used} bytes, and the volume says {counted:?}"));
        }
        if used > capacity {
            self.breaks(format!("objects take {used} bytes of a capacity of {capacity}"));
        }
        removed
    }

    /// Somebody copies an object of a namespace before its keys are destroyed.
    fn copy_before(&self, request: &VolumeRequest, rank: Rank) -> Option<(BlockIdentity, Vec<u8>)> {
        let VolumeRequest::Purge(Some(label)) = request else { return None };
        let own = |(key, entry): &(&Key, &Entry)| key.0 == *label && key.3 == rank && !entry.is_damaged;
        let (_, entry) = self.expected.iter().filter(|_| self.terms.encrypts).find(own)?;
        let bytes = self.medium()?.copy(&self.object(&entry.identity, rank))?;
        Some((entry.identity, bytes))
    }

    /// Who has destroyed the keys of a namespace cannot read a copy of its objects any more.
    fn try_copy(&mut self, rank: Rank, copy: Option<(BlockIdentity, Vec<u8>)>) {
        let (Some((identity, bytes)), Some(medium)) = (copy, self.medium()) else { return };
        let object = self.object(&identity, rank);
        if !medium.restore(object, &bytes, later()) {
            return;
        }
        let worker = self.workers.get(rank.index()).and_then(Option::as_ref);
        let read = worker.map(|worker| worker.auditor.get(VOLUME, &identity));
        medium.drop_restored(object, later());
        if matches!(read, Some(Ok(_))) {
            self.breaks(format!("{} was forgotten, and a copy of its object is read", identity.hash));
        }
    }

    /// After something was done to objects: they read back as the model says.
    pub(crate) fn check(&mut self) {
        if !self.expected.is_touched() {
            return;
        }
        let open: Vec<bool> = (0..self.ranks).map(|rank| self.is_open(Rank(rank as u16))).collect();
        let touched = self.expected.take_touched(|rank| open[rank.index()]);
        for key in touched {
            let Some(worker) = &self.workers[key.3.index()] else { continue };
            let (namespace, group, hash, _) = key;
            let identity = BlockIdentity { namespace, group, hash, parent: None, position: 0 };
            let read = worker.auditor.get(VOLUME, &identity).map_err(|failure| failure.kind);
            self.judge(&key, read.as_deref().map_err(|kind| *kind));
        }
    }

    /// The store has what the model has, and nothing else; all of it is compared again.
    pub(crate) fn audit(&mut self) {
        let Some(medium) = self.medium() else { return };
        let all = BlobScope { namespace: TAG, label: None };
        match medium.list(&all, None, usize::MAX, later()) {
            Ok(listed) => {
                let mut found: Vec<Key> =
                    listed.iter().filter(|key| !holds_key(key)).map(|key| self.key_of(key)).collect();
                found.sort_unstable();
                if !found.iter().eq(self.expected.iter().map(|(key, _)| key)) {
                    let expected = self.expected.len();
                    self.breaks(format!("the store lists {} objects; it should be {expected}", found.len()));
                }
            }
            Err(error) => self.breaks(format!("the store does not list: {error}")),
        }
        self.expected.touch_all();
        self.check();
    }

    /// Something in the store is damaged: bits of an object flip, it is swapped with another one,
    /// or a data key is lost.
    pub(crate) fn rot(&mut self, random: &mut Random) -> Option<String> {
        let (medium, count) = (self.medium()?, self.expected.len());
        if count == 0 {
            return None;
        }
        let at = random.below(count);
        let (key, entry) = self.expected.iter().nth(at).map(|(key, entry)| (*key, *entry))?;
        if entry.is_damaged {
            // Two flips may undo each other.
            return None;
        }
        let object = self.object(&entry.identity, key.3);
        let what = match random.below(8) {
            0 if self.terms.encrypts => return self.lose_key(&medium, key.0),
            0..3 => {
                let other = self.expected.iter().nth(random.below(count)).map(|(key, entry)| (*key, *entry));
                let (other, entry) = other.filter(|(other, entry)| *other != key && !entry.is_damaged)?;
                let bytes = medium.copy(&self.object(&entry.identity, other.3))?;
                // A change of length is no fault that a memory volume can count.
                let is_as_long = medium.copy(&object)?.len() == bytes.len();
                if !is_as_long {
                    return None;
                }
                medium.tamper(&object, |object| object.copy_from_slice(&bytes));
                format!("{} of rank {} is swapped with {} of rank {}", key.2, key.3, other.2, other.3)
            }
            _ => {
                let bit = random.next() as usize;
                medium.tamper(&object, |object| {
                    let bit = bit % (8 * object.len().max(1));
                    if let Some(byte) = object.get_mut(bit / 8) {
                        *byte ^= 1 << (bit % 8);
                    }
                });
                format!("a bit of {} of rank {} flips", key.2, key.3)
            }
        };
        if let Some(entry) = self.expected.get_mut(&key) {
            entry.is_damaged = true;
        }
        Some(what)
    }

    /// Bits flip in the data keys of a namespace.
    fn lose_key(&mut self, medium: &Medium, namespace: NamespaceId) -> Option<String> {
        let keys = BlobScope { namespace: TAG, label: Some(NamespaceId(u32::MAX)) };
        let listed = medium.list(&keys, None, usize::MAX, later()).ok()?;
        for object in listed.iter().filter(|key| holds_key(key) && key.slice.first_layer == namespace.0) {
            medium.tamper(object, |bytes| {
                if let Some(last) = bytes.last_mut() {
                    *last ^= 1;
                }
            });
        }
        self.expected.lose_keys(namespace, None, self.ranks);
        Some(format!("the data keys of {namespace:?} are damaged"))
    }

    /// What is there of a namespace.
    pub(crate) fn of(&self, namespace: NamespaceId) -> impl Iterator<Item = (SequenceHash, Rank, &Entry)> {
        let own = self.expected.iter().filter(move |(key, _)| key.0 == namespace);
        own.map(|(key, entry)| (key.2, key.3, entry))
    }
}

/// Time enough for a call of the store.
fn later() -> Instant {
    deadline_after(clock::now(), Duration::from_secs(5))
}

fn simulated(kind: FailureKind) -> Failure {
    Failure::new(kind, "simulated")
}
