//! The data keys of a directory: random, one for each namespace, wrapped with the operator's key in
//! a file beside the journal.
//!
//! A key is durable before the first block that it encrypts is written. A key that is destroyed is
//! overwritten where it lies. What it encrypted cannot be read any more, wherever copies of it are,
//! unless somebody has kept a copy of the file *and* has the operator's key.
//!
//! No lock is held during a system call: who changes the file takes it, and others wait for it.

mod file;

pub use file::{DataKeyInfo, DataKeyState};
#[cfg(any(test, feature = "fuzz"))]
pub(crate) use file::{ENTRY_BYTES, HEADER_BYTES, MAGIC};
pub(crate) use file::{Entry, KeyFile};

use crate::medium::complete::{self, contained};
use crate::medium::{BlockFile, Medium, OpenFile};
use crate::{DiskEncryption, EncryptionInfo, KeyFileError, OpenError};
use file::{MAX_BYTES, MAX_ENTRIES};
use kvbm_keys::{DataKey, KeyId, OperatorKey};
use kvbm_plan::{KeyNotice, NamespaceId, deadline_after};
use parking_lot::{Condvar, Mutex};
use std::collections::{HashMap, HashSet, VecDeque};
use std::io::{self, ErrorKind};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// The key file's name in its directory.
pub(crate) const KEY_FILE: &str = "keys.kvbm";
/// A key file that is being written.
pub(crate) const KEY_TEMP_FILE: &str = "keys.kvbm.tmp";

/// How long a change of the file waits for another one.
const FILE_DEADLINE: Duration = Duration::from_secs(10);

/// Receipts of destroyed keys that a file keeps when it is written anew.
const KEPT_RECEIPTS: usize = 1024;

/// Notices of destroyed keys that are kept until somebody asks; the oldest go first.
const KEPT_NOTICES: usize = 1024;

/// A data key with its number.
#[derive(Clone, Debug)]
pub(crate) struct NumberedKey {
    pub(crate) number: u32,
    pub(crate) key: Arc<DataKey>,
}

/// The data keys of one directory.
#[derive(Debug)]
pub(crate) struct Keyring {
    medium: Arc<dyn Medium>,
    operator: OperatorKey,
    /// What data keys are bound to, beside namespace and number: they open in no other directory.
    place: Vec<u8>,
    state: Mutex<Held>,
    /// The file was given back.
    returned: Condvar,
}

#[derive(Debug, Default)]
struct Held {
    keys: HashMap<u32, (NamespaceId, Arc<DataKey>)>,
    current: HashMap<NamespaceId, u32>,
    /// Keys to be destroyed in the file.
    doomed: HashMap<u32, Doomed>,
    /// Keys of forgotten namespaces that were destroyed, and nobody has asked about yet.
    notices: VecDeque<KeyNotice>,
    /// Keys that are forgotten here and may still lie in a file that another engine writes.
    gone: HashSet<u32>,
    /// The number of the next key.
    next: u32,
    receipts: u64,
    /// Taken while it is changed.
    file: Option<KeyFile>,
}

/// A key that is to be destroyed.
#[derive(Clone, Copy, Debug)]
struct Doomed {
    /// Blocks that went out of use with it.
    blocks: u64,
    /// Whose it is, and its name, where the namespace was forgotten.
    forgotten: Option<(NamespaceId, KeyId)>,
}

impl Keyring {
    /// Reads the key file of a directory whose journal of this namespace and geometry has records
    /// with key numbers up to `newest`; makes one if there is none. Data keys of the operator's
    /// previous key are wrapped anew, and do not encrypt new blocks.
    pub(crate) fn open(
        medium: Arc<dyn Medium>,
        encryption: &DiskEncryption,
        place: (&[u8; 16], &[u8]),
        newest: u32,
    ) -> Result<Self, OpenError> {
        let keyring = Self::empty(medium, encryption, place);
        let io = |doing: &str| {
            let doing = format!("{doing} {KEY_FILE}");
            move |source| OpenError::Io { doing, source }
        };
        keyring.wipe(KEY_TEMP_FILE).map_err(io("remove the former"))?;
        let read = read(&*keyring.medium).map_err(io("read"))?;
        let found = read.transpose().map_err(|source| keyring.refused(source))?;
        let (mut file, mut changed) = match found {
            Some(file) => (file, false),
            None => (KeyFile::new(keyring.operator.id()), true),
        };
        if file.operator != keyring.operator.id() {
            let previous = encryption.previous.as_ref();
            let Some(previous) = previous.filter(|previous| previous.id() == file.operator) else {
                let (found, ours) = (file.operator, keyring.operator.id());
                let previous = previous.map(OperatorKey::id);
                return Err(keyring.refused(KeyFileError::Operator { found, ours, previous }));
            };
            keyring.wrap_anew(&mut file, previous);
            changed = true;
        }
        changed |= drop_receipts(&mut file);
        if changed {
            keyring.replace(&mut file).map_err(io("write"))?;
        }
        let mut state = keyring.state.lock();
        state.take_from(&file, &keyring);
        state.next = state.next.max(newest.saturating_add(1));
        state.file = Some(file);
        drop(state);
        Ok(keyring)
    }

    /// Reads the key file of a directory that another engine writes, or that nobody writes. Changes
    /// nothing.
    pub(crate) fn follow(
        medium: Arc<dyn Medium>,
        encryption: &DiskEncryption,
        place: (&[u8; 16], &[u8]),
    ) -> Result<Self, OpenError> {
        let keyring = Self::empty(medium, encryption, place);
        let read = read(&*keyring.medium);
        let read = read.map_err(|source| OpenError::Io { doing: format!("read {KEY_FILE}"), source })?;
        if let Some(file) = read.transpose().map_err(|source| keyring.refused(source))? {
            let ours = keyring.operator.id();
            if file.operator != ours {
                let previous = encryption.previous.as_ref();
                let Some(previous) = previous.filter(|previous| previous.id() == file.operator) else {
                    let (found, previous) = (file.operator, previous.map(OperatorKey::id));
                    return Err(keyring.refused(KeyFileError::Operator { found, ours, previous }));
                };
                return Ok(Self { operator: previous.clone(), ..keyring }.with(file));
            }
            return Ok(keyring.with(file));
        }
        let none = KeyFile::new(keyring.operator.id());
        Ok(keyring.with(none))
    }

    fn with(self, file: KeyFile) -> Self {
        let mut state = self.state.lock();
        state.take_from(&file, &self);
        state.file = Some(file);
        drop(state);
        self
    }

    fn empty(medium: Arc<dyn Medium>, encryption: &DiskEncryption, place: (&[u8; 16], &[u8])) -> Self {
        let operator = encryption.key.clone();
        let place = [&place.0[..], place.1].concat();
        let state = Mutex::new(Held { next: 1, ..Held::default() });
        Self { medium, operator, place, state, returned: Condvar::new() }
    }

    fn refused(&self, source: KeyFileError) -> OpenError {
        OpenError::Keys { file: format!("{}/{KEY_FILE}", self.medium.location()), source }
    }

    /// The key of blocks with this number.
    pub(crate) fn key(&self, namespace: NamespaceId, number: u64) -> Option<NumberedKey> {
        let number = u32::try_from(number).ok()?;
        let state = self.state.lock();
        let (of, key) = state.keys.get(&number)?;
        (*of == namespace).then(|| NumberedKey { number, key: Arc::clone(key) })
    }

    fn current(&self, namespace: NamespaceId) -> Option<NumberedKey> {
        let state = self.state.lock();
        let number = *state.current.get(&namespace)?;
        let (_, key) = state.keys.get(&number)?;
        Some(NumberedKey { number, key: Arc::clone(key) })
    }

    /// The key for new blocks of a namespace. With `make`, a new one is made where there is none.
    pub(crate) fn for_new(&self, namespace: NamespaceId, make: bool) -> io::Result<NumberedKey> {
        if let Some(current) = self.current(namespace) {
            return Ok(current);
        }
        if !make {
            return Err(io::Error::other("the rank that writes this block has no data key for it yet"));
        }
        let mut hold = self.hold()?;
        // Another thread may have made it.
        if let Some(current) = self.current(namespace) {
            return Ok(current);
        }
        let (key, number) = (Arc::new(DataKey::random()?), self.state.lock().next);
        if number == u32::MAX {
            return Err(io::Error::other("all numbers of data keys are used up: clear the directory"));
        }
        let info = DataKeyInfo {
            number,
            id: key.id(),
            namespace,
            state: DataKeyState::Current,
            created: now(),
            destroyed: 0,
            blocks: 0,
        };
        let wrapped = self.operator.wrap(&key, &self.context(&info));
        let file = hold.file();
        let place = file.entries.len();
        if place >= MAX_ENTRIES {
            return Err(io::Error::other(format!(
                "{KEY_FILE} has {MAX_ENTRIES} keys: opening the directory again removes those without blocks"
            )));
        }
        let entry = Entry { info, wrapped };
        self.write_entries(file, &[(place, &entry)])?;
        file.entries.push(Some(entry));
        let mut state = self.state.lock();
        state.next = number.saturating_add(1);
        state.keys.insert(number, (namespace, Arc::clone(&key)));
        state.current.insert(namespace, number);
        Ok(NumberedKey { number, key })
    }

    /// Forgets the keys of a namespace. `blocks`: how many of each went out of use. From now on
    /// nothing that they encrypted can be read; [`destroy_doomed`](Self::destroy_doomed) makes it
    /// lasting.
    pub(crate) fn doom(&self, namespace: NamespaceId, blocks: &HashMap<u64, u64>) {
        let mut state = self.state.lock();
        for (number, id) in state.remove(namespace) {
            let blocks = blocks.get(&number.into()).copied().unwrap_or(0);
            state.doomed.insert(number, Doomed { blocks, forgotten: Some((namespace, id)) });
        }
    }

    /// Forgets the keys of a namespace in a file that another engine writes, which destroys them.
    pub(crate) fn forget(&self, namespace: NamespaceId) {
        let mut state = self.state.lock();
        let numbers = state.remove(namespace);
        state.gone.extend(numbers.into_iter().map(|(number, _)| number));
    }

    /// Forgets keys that no block uses.
    pub(crate) fn doom_unused(&self, used: &HashSet<u64>) {
        let mut state = self.state.lock();
        let unused: Vec<u32> =
            state.keys.keys().copied().filter(|number| !used.contains(&u64::from(*number))).collect();
        for number in unused {
            let Some((namespace, _)) = state.keys.remove(&number) else { continue };
            if state.current.get(&namespace) == Some(&number) {
                state.current.remove(&namespace);
            }
            state.doomed.insert(number, Doomed { blocks: 0, forgotten: None });
        }
    }

    /// Whether keys are forgotten that still lie in the file.
    pub(crate) fn has_doomed(&self) -> bool {
        !self.state.lock().doomed.is_empty()
    }

    /// Overwrites forgotten keys in the file. After an error they are still to be destroyed.
    pub(crate) fn destroy_doomed(&self) -> io::Result<()> {
        let doomed = self.state.lock().doomed.clone();
        if doomed.is_empty() {
            return Ok(());
        }
        let mut hold = self.hold()?;
        let (file, now) = (hold.file(), now());
        let receipts: Vec<(usize, Entry)> = file
            .known()
            .filter(|(_, entry)| entry.info.state != DataKeyState::Destroyed)
            .filter_map(|(place, entry)| {
                Some((place, entry.destroyed(now, doomed.get(&entry.info.number)?.blocks)))
            })
            .collect();
        let written: Vec<_> = receipts.iter().map(|(place, entry)| (*place, entry)).collect();
        self.write_entries(file, &written)?;
        let destroyed = receipts.len() as u64;
        for (place, entry) in receipts {
            let DataKeyInfo { number, id, namespace, blocks, .. } = &entry.info;
            tracing::info!(%namespace, number, key = %id, blocks, "a data key of G3 is destroyed");
            file.entries[place] = Some(entry);
        }
        let mut state = self.state.lock();
        state.doomed.retain(|number, _| !doomed.contains_key(number));
        state.receipts += destroyed;
        let forgotten = doomed.values().filter_map(|doomed| doomed.forgotten);
        state.notices.extend(forgotten.map(|key| notice(key, true)));
        let surplus = state.notices.len().saturating_sub(KEPT_NOTICES);
        state.notices.drain(..surplus);
        Ok(())
    }

    /// Keys of forgotten namespaces: those that were destroyed since the last call, and those that
    /// are still to be.
    pub(crate) fn take_notices(&self) -> Vec<KeyNotice> {
        let mut state = self.state.lock();
        let mut notices: Vec<_> = std::mem::take(&mut state.notices).into();
        let pending = state.doomed.values().filter_map(|doomed| doomed.forgotten);
        notices.extend(pending.map(|key| notice(key, false)));
        notices
    }

    /// New blocks get new keys: of one namespace, or of all. Blocks that are there stay readable.
    /// How many keys are old from now on.
    pub(crate) fn retire(&self, namespace: Option<NamespaceId>) -> io::Result<u64> {
        let mut hold = self.hold()?;
        let file = hold.file();
        let is_meant = |entry: &Entry| {
            entry.info.state == DataKeyState::Current
                && namespace.is_none_or(|namespace| namespace == entry.info.namespace)
        };
        let old = |entry: &Entry| {
            let info = DataKeyInfo { state: DataKeyState::Old, ..entry.info.clone() };
            Entry { info, ..entry.clone() }
        };
        let retired: Vec<(usize, Entry)> = file
            .known()
            .filter(|(_, entry)| is_meant(entry))
            .map(|(place, entry)| (place, old(entry)))
            .collect();
        let written: Vec<_> = retired.iter().map(|(place, entry)| (*place, entry)).collect();
        self.write_entries(file, &written)?;
        let mut state = self.state.lock();
        for (place, entry) in &retired {
            state.current.remove(&entry.info.namespace);
            file.entries[*place] = Some(entry.clone());
        }
        Ok(retired.len() as u64)
    }

    /// Reads the file again if the engine that writes it has changed it.
    pub(crate) fn refresh(&self) -> io::Result<()> {
        let mut hold = self.hold()?;
        let medium = &self.medium;
        let known = hold.file.as_ref().map(KeyFile::encode_header);
        let header = contained(|| {
            let mut header = [0; file::HEADER_BYTES];
            let file = medium.open(KEY_FILE, OpenFile::default())?;
            complete::read_up_to(&*file, 0, &mut header).map(|_| header)
        })?;
        if known == Some(header) {
            return Ok(());
        }
        let file = contained(|| read(&**medium))?.transpose().map_err(io::Error::other)?;
        let Some(file) = file.filter(|file| file.operator == self.operator.id()) else {
            return Err(io::Error::other(format!(
                "{KEY_FILE} was written with another operator's key: give this rank the same key"
            )));
        };
        self.state.lock().take_from(&file, self);
        hold.file = Some(file);
        Ok(())
    }

    /// What the keys are.
    pub(crate) fn info(&self) -> EncryptionInfo {
        let state = self.state.lock();
        EncryptionInfo {
            operator: self.operator.id(),
            data_keys: state.keys.len() as u64,
            destroyed: state.receipts,
            pending: state.doomed.len() as u64,
        }
    }

    /// Waits for the file, and takes it.
    fn hold(&self) -> io::Result<Hold<'_>> {
        let until = deadline_after(Instant::now(), FILE_DEADLINE);
        let mut state = self.state.lock();
        self.returned.wait_while_until(&mut state, |state| state.file.is_none(), until);
        match state.file.take() {
            Some(file) => Ok(Hold { keyring: self, file: Some(file) }),
            None => Err(io::Error::new(ErrorKind::TimedOut, format!("{KEY_FILE} is being written for long"))),
        }
    }

    /// What a wrapped key is bound to.
    fn context(&self, info: &DataKeyInfo) -> Vec<u8> {
        [&info.namespace.0.to_le_bytes(), &info.number.to_le_bytes()[..], &self.place].concat()
    }

    fn unwrap(&self, entry: &Entry, operator: &OperatorKey) -> Option<DataKey> {
        let key = operator.unwrap(&entry.wrapped, &self.context(&entry.info))?;
        (key.id() == entry.info.id).then_some(key)
    }

    /// Wraps all keys with ours that `previous` has wrapped. None of them encrypts new blocks.
    fn wrap_anew(&self, file: &mut KeyFile, previous: &OperatorKey) {
        file.operator = self.operator.id();
        for place in &mut file.entries {
            let Some(entry) = place.as_mut().filter(|entry| entry.info.state != DataKeyState::Destroyed)
            else {
                continue;
            };
            if let Some(key) = self.unwrap(entry, previous) {
                entry.info.state = DataKeyState::Old;
                entry.wrapped = self.operator.wrap(&key, &self.context(&entry.info));
            } else {
                *place = None;
            }
        }
    }

    /// Writes entries to their places. After an error it is unknown which of them are there.
    fn write_entries(&self, file: &mut KeyFile, entries: &[(usize, &Entry)]) -> io::Result<()> {
        if entries.is_empty() {
            return Ok(());
        }
        file.changes += 1;
        let header = file.encode_header();
        contained(|| {
            let file = self.medium.open(KEY_FILE, OpenFile::default())?;
            for (place, entry) in entries {
                complete::write_all(&*file, KeyFile::offset(*place), &entry.encode())?;
            }
            complete::write_all(&*file, 0, &header)?;
            file.sync_data()
        })
    }

    /// Puts a new file in the place of the former, and overwrites that.
    fn replace(&self, file: &mut KeyFile) -> io::Result<()> {
        file.changes += 1;
        let bytes = file.encode();
        contained(|| {
            let how = OpenFile { create: true, truncate: true, direct: false };
            let new = self.medium.open(KEY_TEMP_FILE, how)?;
            complete::write_all(&*new, 0, &bytes)?;
            new.sync_data()?;
            let former = existing(&*self.medium, KEY_FILE)?;
            self.medium.rename(KEY_TEMP_FILE, KEY_FILE)?;
            self.medium.sync_dir()?;
            former.map_or(Ok(()), |former| overwrite(&*former))
        })
    }

    /// Overwrites and removes a file, if it is there.
    fn wipe(&self, name: &str) -> io::Result<()> {
        contained(|| {
            let Some(file) = existing(&*self.medium, name)? else { return Ok(()) };
            overwrite(&*file)?;
            self.medium.remove(name)?;
            self.medium.sync_dir()
        })
    }
}

impl Held {
    /// Takes the keys of a namespace out; their numbers and names.
    fn remove(&mut self, namespace: NamespaceId) -> Vec<(u32, KeyId)> {
        self.current.remove(&namespace);
        let gone = self.keys.extract_if(|_, (of, _)| *of == namespace);
        gone.map(|(number, (_, key))| (number, key.id())).collect()
    }

    /// Takes the keys of a file, but those that are forgotten.
    fn take_from(&mut self, file: &KeyFile, keyring: &Keyring) {
        (self.keys, self.current, self.receipts) = Default::default();
        for (_, entry) in file.known() {
            let DataKeyInfo { number, namespace, state, .. } = entry.info;
            self.next = self.next.max(number.saturating_add(1));
            if state == DataKeyState::Destroyed {
                self.receipts += 1;
                self.gone.remove(&number);
                continue;
            }
            if self.gone.contains(&number) {
                continue;
            }
            let Some(key) = keyring.unwrap(entry, &keyring.operator) else { continue };
            self.keys.insert(number, (namespace, Arc::new(key)));
            if state == DataKeyState::Current {
                self.current.insert(namespace, number);
            }
        }
    }
}

/// The file, taken. It goes back at the end.
struct Hold<'a> {
    keyring: &'a Keyring,
    file: Option<KeyFile>,
}

impl Hold<'_> {
    fn file(&mut self) -> &mut KeyFile {
        let Self { keyring, file } = self;
        file.get_or_insert_with(|| KeyFile::new(keyring.operator.id()))
    }
}

impl Drop for Hold<'_> {
    fn drop(&mut self) {
        self.keyring.state.lock().file = self.file.take();
        self.keyring.returned.notify_all();
    }
}

/// Removes the oldest receipts, where there are many, and what is damaged. Whether there were any.
fn drop_receipts(file: &mut KeyFile) -> bool {
    let is_receipt = |entry: &Entry| entry.info.state == DataKeyState::Destroyed;
    let receipts = file.known().filter(|(_, entry)| is_receipt(entry)).count();
    let (mut surplus, before) = (receipts.saturating_sub(KEPT_RECEIPTS), file.entries.len());
    if surplus < KEPT_RECEIPTS && file.entries.iter().all(Option::is_some) {
        return false;
    }
    file.entries.retain(|entry| {
        let goes = entry.as_ref().is_none_or(|entry| surplus > 0 && is_receipt(entry));
        surplus -= usize::from(goes && entry.is_some());
        !goes
    });
    file.entries.len() < before
}

/// What the key file of a directory says; `None` where there is none.
pub(crate) fn read(medium: &dyn Medium) -> io::Result<Option<Result<KeyFile, KeyFileError>>> {
    existing(medium, KEY_FILE)?.map(|file| read_file(&*file)).transpose()
}

/// What an open key file says.
pub(crate) fn read_file(file: &dyn BlockFile) -> io::Result<Result<KeyFile, KeyFileError>> {
    let mut bytes = vec![0; file.len()?.min(MAX_BYTES + 1) as usize];
    let found = complete::read_up_to(file, 0, &mut bytes)?;
    Ok(KeyFile::decode(&bytes[..found]))
}

fn existing(medium: &dyn Medium, name: &str) -> io::Result<Option<Arc<dyn BlockFile>>> {
    match medium.open(name, OpenFile::default()) {
        Ok(file) => Ok(Some(file)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Writes zeros over a file.
fn overwrite(file: &dyn BlockFile) -> io::Result<()> {
    let zeros = vec![0; file.len()?.min(MAX_BYTES) as usize];
    complete::write_all(file, 0, &zeros)?;
    file.sync_data()
}

fn notice((namespace, id): (NamespaceId, KeyId), is_destroyed: bool) -> KeyNotice {
    KeyNotice { namespace, id: *id.as_bytes(), is_destroyed }
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
