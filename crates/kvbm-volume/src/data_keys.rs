//! The data keys of a deployment on one volume: random, one for each namespace, wrapped with the
//! operator's key in objects beside the blocks.
//!
//! Nodes that share the volume share its keys. A key is on the volume before the first block that
//! it encrypts. Where two nodes make one at the same time both stay, and all nodes use the one of
//! the smaller id; each node can read what either of them wrote. A node looks for keys that others
//! made, or destroyed, every [`REFRESH`], and whenever it finds a block with a key that it lacks.
//!
//! No lock is held during a call of the volume.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use kvbm_keys::{DataKey, KeyId, OperatorKey};
use kvbm_plan::simulation::{Planted, planted};
use kvbm_plan::{NamespaceId, NamespaceTag, clock, deadline_after};
use parking_lot::Mutex;

use crate::key_locks::KeyLocks;
use crate::key_object::{self, KEY_OBJECT_BYTES, KeyName, WrappedKey};
use crate::{BlobKey, BlobScope, DestroyedKey, Volume, VolumeError, VolumeExt, VolumeKeysError};

/// How long another node's changes may go unnoticed: a key that it destroyed is used here until
/// then.
pub const REFRESH: Duration = Duration::from_secs(30);

/// Most objects of keys of a deployment.
const MAX_KEY_OBJECTS: usize = 65_536;
/// Objects that are listed at a time.
const PAGE: usize = 1000;

/// How objects are encrypted.
#[derive(Clone, Debug)]
pub struct VolumeEncryption {
    /// The operator's key: wraps data keys.
    pub key: OperatorKey,
    /// The key before it. What it has wrapped is wrapped anew at the opening.
    pub previous: Option<OperatorKey>,
}

/// The keys of a deployment on a volume.
#[derive(Debug)]
pub(crate) struct DataKeys {
    namespace: NamespaceTag,
    encryption: VolumeEncryption,
    held: Mutex<Held>,
    /// One key of a namespace is made at a time.
    making: KeyLocks,
}

#[derive(Debug)]
struct Held {
    /// Keys that were read, or made here.
    keys: HashMap<KeyId, KnownKey>,
    /// Names of the keys of each namespace that ours has wrapped. They are read when they are
    /// needed.
    there: HashMap<NamespaceId, HashSet<KeyName>>,
    /// Keys that are there and do not open.
    damaged: HashSet<KeyId>,
    /// When somebody looked what is there, or began to.
    looked: Instant,
}

#[derive(Clone, Debug)]
pub(crate) struct KnownKey {
    label: NamespaceId,
    generation: u32,
    pub(crate) id: KeyId,
    pub(crate) key: Arc<DataKey>,
}

impl Held {
    /// Keys of a namespace that are there, and were not read.
    fn unread(&self, label: NamespaceId) -> Vec<KeyName> {
        let is_read = |id: &KeyId| self.keys.contains_key(id) || self.damaged.contains(id);
        let names = self.there.get(&label).into_iter().flatten();
        names.filter(|name| !name.data_key().is_some_and(|id| is_read(&id))).copied().collect()
    }

    /// The key for new blocks; `None` where there is none, and before all of them were read.
    fn current(&self, label: NamespaceId) -> Option<KnownKey> {
        let mut current: Option<&KnownKey> = None;
        for id in self.there.get(&label)?.iter().filter_map(KeyName::data_key) {
            let order = |known: &KnownKey| (u32::MAX - known.generation, *known.id.as_bytes());
            match self.keys.get(&id) {
                Some(known) if current.is_none_or(|current| order(known) < order(current)) => {
                    current = Some(known);
                }
                Some(_) => {}
                None if self.damaged.contains(&id) => {}
                None => return None,
            }
        }
        current.cloned()
    }
}

impl DataKeys {
    /// Looks what keys are there, and wraps with ours those that the key before it has wrapped.
    pub(crate) fn open(
        volume: &dyn Volume,
        namespace: NamespaceTag,
        encryption: VolumeEncryption,
    ) -> Result<Self, VolumeKeysError> {
        let held = Mutex::new(Held {
            keys: HashMap::new(),
            there: HashMap::new(),
            damaged: HashSet::new(),
            looked: clock::now(),
        });
        let keys = Self { namespace, encryption, held, making: KeyLocks::default() };
        let names = keys.names(volume)?;
        keys.check(volume, &names)?;
        let (ours, previous) = (&keys.encryption.key, keys.encryption.previous.as_ref());
        let operators = || {
            names.iter().filter_map(|name| if let KeyName::Operator(id) = name { Some(*id) } else { None })
        };
        if !operators().any(|id| id == ours.id()) {
            // First of all: from here on nobody takes the volume for one without keys.
            let name = KeyName::Operator(ours.id()).object(namespace);
            volume.put_one(&name, ours.id().as_bytes(), deadline(volume))?;
        }
        if let Some(previous) = previous.filter(|previous| operators().any(|id| id == previous.id())) {
            keys.wrap_anew(volume, &names, previous)?;
            // What the former key has wrapped encrypts no new blocks.
            keys.rotate(volume, None)?;
        }
        keys.look(volume, deadline(volume))?;
        Ok(keys)
    }

    fn check(&self, volume: &dyn Volume, names: &[KeyName]) -> Result<(), VolumeKeysError> {
        let (namespace, ours) = (self.namespace, self.encryption.key.id());
        let previous = self.encryption.previous.as_ref().map(OperatorKey::id);
        for name in names {
            let KeyName::Operator(found) = *name else { continue };
            if found != ours && Some(found) != previous {
                return Err(VolumeKeysError::Operator { namespace, found, ours, previous });
            }
        }
        let blocks = BlobScope { namespace, label: None };
        if names.is_empty() && !volume.list(&blocks, None, 1, deadline(volume))?.is_empty() {
            return Err(VolumeKeysError::NotEncrypted { namespace });
        }
        Ok(())
    }

    /// Puts each key of the previous operator's key beside it, wrapped with ours, then removes what
    /// that key has wrapped.
    fn wrap_anew(
        &self,
        volume: &dyn Volume,
        names: &[KeyName],
        previous: &OperatorKey,
    ) -> Result<(), VolumeKeysError> {
        let mut former = Vec::new();
        for name in names {
            let KeyName::Data { id, label, .. } = *name else { continue };
            if *name != KeyName::data(id, label, previous.id()) {
                continue;
            }
            former.push(name.object(self.namespace));
            let Some((wrapped, key)) = self.load(volume, *name, previous, deadline(volume))? else {
                continue;
            };
            let about = (wrapped.label, wrapped.generation, wrapped.created);
            let anew = WrappedKey::new(&key, &self.encryption.key, self.namespace, about);
            volume.put_one(&anew.name().object(self.namespace), &anew.encode(), deadline(volume))?;
        }
        former.push(KeyName::Operator(previous.id()).object(self.namespace));
        for object in former {
            for deleted in volume.delete(&[object], deadline(volume)) {
                deleted?;
            }
        }
        Ok(())
    }

    /// The names of all objects of keys.
    fn names(&self, volume: &dyn Volume) -> Result<Vec<KeyName>, VolumeKeysError> {
        let objects = key_objects(volume, self.namespace, || deadline(volume))?;
        if objects.len() > MAX_KEY_OBJECTS {
            return Err(VolumeKeysError::TooMany { namespace: self.namespace, most: MAX_KEY_OBJECTS });
        }
        Ok(objects.iter().filter_map(KeyName::parse).collect())
    }

    /// Reads a data key that `operator` has wrapped. `None` where it is not there or damaged.
    fn load(
        &self,
        volume: &dyn Volume,
        name: KeyName,
        operator: &OperatorKey,
        deadline: Instant,
    ) -> Result<Option<(WrappedKey, DataKey)>, VolumeError> {
        let found = volume.get_one(&name.object(self.namespace), KEY_OBJECT_BYTES, deadline);
        let bytes = match found {
            Err(error) if error.is_miss() => return Ok(None),
            found => found?,
        };
        let wrapped = WrappedKey::decode(&bytes).filter(|wrapped| wrapped.name() == name);
        Ok(wrapped.and_then(|wrapped| {
            let key = wrapped.unwrap(operator, self.namespace)?;
            Some((wrapped, key))
        }))
    }

    /// Looks what keys are there by now: of those that others made it knows the names, and no more
    /// those that others destroyed.
    fn look(&self, volume: &dyn Volume, deadline: Instant) -> Result<(), VolumeError> {
        let objects = key_objects(volume, self.namespace, || deadline)?;
        let ours = self.encryption.key.id();
        let (mut there, mut ids) = (HashMap::<_, HashSet<KeyName>>::new(), HashSet::new());
        for object in objects.iter().take(MAX_KEY_OBJECTS) {
            if let Some(name @ KeyName::Data { id, label, .. }) = KeyName::parse(object)
                && name == KeyName::data(id, label, ours)
            {
                there.entry(label).or_default().insert(name);
                ids.insert(id);
            }
        }
        let mut held = self.held.lock();
        held.keys.retain(|id, _| ids.contains(id));
        held.damaged.retain(|id| ids.contains(id));
        (held.there, held.looked) = (there, clock::now());
        Ok(())
    }

    /// Reads the keys of a namespace that are there. The one for new blocks, if there is one.
    fn read_current(
        &self,
        volume: &dyn Volume,
        label: NamespaceId,
        deadline: Instant,
    ) -> Result<Option<KnownKey>, VolumeError> {
        let unread = self.held.lock().unread(label);
        for name in unread {
            let read = self.learn(volume, name, &self.encryption.key, deadline)?;
            if let (None, KeyName::Data { id, .. }) = (read, name) {
                self.held.lock().damaged.insert(id);
            }
        }
        Ok(self.held.lock().current(label))
    }

    /// Reads a key and knows it from now on.
    fn learn(
        &self,
        volume: &dyn Volume,
        name: KeyName,
        operator: &OperatorKey,
        deadline: Instant,
    ) -> Result<Option<KnownKey>, VolumeError> {
        let Some((wrapped, key)) = self.load(volume, name, operator, deadline)? else { return Ok(None) };
        Ok(Some(self.know(&wrapped, key)))
    }

    fn know(&self, wrapped: &WrappedKey, key: DataKey) -> KnownKey {
        let WrappedKey { label, generation, id, .. } = *wrapped;
        let known = KnownKey { label, generation, id, key: Arc::new(key) };
        let mut held = self.held.lock();
        held.keys.insert(id, known.clone());
        if wrapped.operator == self.encryption.key.id() {
            held.there.entry(label).or_default().insert(wrapped.name());
        }
        known
    }

    /// Looks what is there, if it is time. What cannot be learned now is learned later.
    pub(crate) fn look_if_due(&self, volume: &dyn Volume, deadline: Instant) {
        {
            let mut held = self.held.lock();
            if clock::now().saturating_duration_since(held.looked) < REFRESH {
                return;
            }
            // One of all callers does it.
            held.looked = clock::now();
        }
        if let Err(error) = self.look(volume, deadline) {
            tracing::warn!(%error, "keys of a volume: what other nodes changed is not known");
        }
    }

    /// The key of a block that is there; `None` where it was destroyed.
    pub(crate) fn find(
        &self,
        volume: &dyn Volume,
        label: NamespaceId,
        id: KeyId,
        deadline: Instant,
    ) -> Result<Option<Arc<DataKey>>, VolumeError> {
        if let Some(known) = self.held.lock().keys.get(&id) {
            return Ok((known.label == label).then(|| Arc::clone(&known.key)));
        }
        let VolumeEncryption { key, previous } = &self.encryption;
        for operator in std::iter::once(key).chain(previous) {
            let name = KeyName::data(id, label, operator.id());
            if let Some(known) = self.learn(volume, name, operator, deadline)? {
                return Ok(Some(known.key));
            }
        }
        Ok(None)
    }

    /// The key for new blocks of a namespace; makes one where there is none.
    pub(crate) fn for_new(
        &self,
        volume: &dyn Volume,
        label: NamespaceId,
        deadline: Instant,
    ) -> Result<KnownKey, VolumeError> {
        if let Some(current) = self.held.lock().current(label) {
            return Ok(current);
        }
        let turn = self.turn(label);
        let late =
            VolumeError::DeadlineExceeded { volume: volume.descriptor().id, operation: "put", key: turn };
        let _ours = self.making.take(&turn, deadline).ok_or(late)?;
        if let Some(current) = self.read_current(volume, label, deadline)? {
            return Ok(current);
        }
        self.look(volume, deadline)?;
        if let Some(current) = self.read_current(volume, label, deadline)? {
            return Ok(current);
        }
        let made = self.make(volume, label, 1, deadline)?;
        // Another node may have made one at the same time: all use the same one.
        self.look(volume, deadline)?;
        let current = self.read_current(volume, label, deadline)?;
        Ok(current.unwrap_or(made))
    }

    /// Whose turn it is to make a key: a name that no object has.
    fn turn(&self, label: NamespaceId) -> BlobKey {
        KeyName::data(KeyId::from_bytes([0; 16]), label, self.encryption.key.id()).object(self.namespace)
    }

    fn make(
        &self,
        volume: &dyn Volume,
        label: NamespaceId,
        generation: u32,
        deadline: Instant,
    ) -> Result<KnownKey, VolumeError> {
        let random = DataKey::random();
        let (id, turn) = (volume.descriptor().id, self.turn(label));
        let key =
            random.map_err(|source| VolumeError::Io { volume: id, operation: "put", key: turn, source })?;
        let about = (label, generation, now());
        let wrapped = WrappedKey::new(&key, &self.encryption.key, self.namespace, about);
        volume.put_one(&wrapped.name().object(self.namespace), &wrapped.encode(), deadline)?;
        Ok(self.know(&wrapped, key))
    }

    /// New blocks get new keys: of one namespace, or of all that have one. Blocks that are there
    /// stay readable. How many keys were made.
    pub(crate) fn rotate(&self, volume: &dyn Volume, label: Option<NamespaceId>) -> Result<u64, VolumeError> {
        self.look(volume, deadline(volume))?;
        let all: Vec<NamespaceId> = self.held.lock().there.keys().copied().collect();
        let mut made = 0;
        for of in all.into_iter().filter(|of| label.is_none_or(|label| label == *of)) {
            let current = self.read_current(volume, of, deadline(volume))?;
            let generation = current.map_or(0, |current| current.generation).saturating_add(1);
            self.make(volume, of, generation, deadline(volume))?;
            made += 1;
        }
        Ok(made)
    }

    /// Destroys the keys of a namespace: from now on nothing that they encrypted can be read.
    pub(crate) fn destroy(
        &self,
        volume: &dyn Volume,
        label: NamespaceId,
        deadline: Instant,
    ) -> Result<Vec<DestroyedKey>, VolumeError> {
        self.drop_keys(label);
        let mut destroyed = Vec::new();
        for object in key_objects(volume, self.namespace, || deadline)? {
            let Some(KeyName::Data { id, label: of, .. }) = KeyName::parse(&object) else { continue };
            if of != label {
                continue;
            }
            if planted(Planted::KeepDataKeys) {
                continue;
            }
            for deleted in volume.delete(&[object], deadline) {
                match deleted {
                    Ok(true) => destroyed.push((id, Ok(()))),
                    // Somebody else has done it.
                    Ok(false) => {}
                    Err(error) => destroyed.push((id, Err(error))),
                }
            }
        }
        for (id, result) in &destroyed {
            let is_gone = result.is_ok();
            tracing::info!(namespace = %label, key = %id, is_gone, "a data key of a volume is destroyed");
        }
        // A key that was being made meanwhile goes at the next call.
        self.drop_keys(label);
        Ok(destroyed)
    }

    fn drop_keys(&self, label: NamespaceId) {
        let mut held = self.held.lock();
        held.keys.retain(|_, known| known.label != label);
        held.there.remove(&label);
    }
}

/// The names of a deployment's objects of keys, whoever can open them; a few more than
/// [`MAX_KEY_OBJECTS`] at most.
fn key_objects(
    volume: &dyn Volume,
    namespace: NamespaceTag,
    deadline: impl Fn() -> Instant,
) -> Result<Vec<BlobKey>, VolumeError> {
    let (scope, mut objects) = (key_object::scope(namespace), Vec::new());
    loop {
        let page = volume.list(&scope, objects.last(), PAGE, deadline())?;
        let is_last = page.len() < PAGE;
        objects.extend(page);
        if is_last || objects.len() > MAX_KEY_OBJECTS {
            return Ok(objects);
        }
    }
}

/// Whether a deployment has objects of keys, whoever can open them.
pub(crate) fn has_keys(volume: &dyn Volume, namespace: NamespaceTag) -> Result<bool, VolumeError> {
    Ok(!volume.list(&key_object::scope(namespace), None, 1, deadline(volume))?.is_empty())
}

/// Refuses a deployment's encrypted objects where none are to be read. A store that does not answer
/// says nothing of that: what is encrypted there is a miss later.
pub(crate) fn refuse_encrypted(volume: &dyn Volume, namespace: NamespaceTag) -> Result<(), VolumeKeysError> {
    let until = deadline_after(clock::now(), volume.descriptor().deadline.min(PATIENCE));
    let found = volume.list(&key_object::scope(namespace), None, PAGE, until).unwrap_or_default();
    let operator = found.iter().filter_map(KeyName::parse).find_map(|name| match name {
        KeyName::Operator(id) => Some(id),
        KeyName::Data { .. } => None,
    });
    match operator {
        Some(operator) => Err(VolumeKeysError::Encrypted { namespace, operator }),
        None => Ok(()),
    }
}

/// How long an opening without keys waits for a listing.
const PATIENCE: Duration = Duration::from_secs(2);

fn deadline(volume: &dyn Volume) -> Instant {
    deadline_after(clock::now(), volume.descriptor().deadline)
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
