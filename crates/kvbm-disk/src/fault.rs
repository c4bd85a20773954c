//! A simulated medium in memory with injected faults, for tests of this crate and of its users.
//!
//! | fault | how |
//! |---|---|
//! | the device returns an error (EIO, ENOSPC, EINTR) | [`SimMedium::inject`] with [`DiskFault::Error`] |
//! | short reads and writes | [`DiskFault::Short`] |
//! | a write or read lands elsewhere | [`DiskFault::Misdirect`] |
//! | a write that says it happened and did not | [`DiskFault::Lose`] |
//! | a device that does not answer | [`SimMedium::hold`], [`SimMedium::hold_syncs`] |
//! | a sync that fails, and takes with it what was not synced | [`DiskFault::Error`] of [`Call::Sync`] |
//! | damaged, swapped, stale or cut bytes | [`SimMedium::edit`], [`SimMedium::flip`] |
//! | a full disk | [`SimMedium::set_capacity`] |
//! | the end of a process, which leaves the page cache as it is | [`SimMedium::restart`] |
//! | power loss: unsynced writes lost or torn, unsynced renames lost | [`SimMedium::crash`] |
//! | no `O_DIRECT`, or its alignment rules | [`SimMedium::set_direct`] |
//! | a ring instead of threads | [`SimMedium::set_ring`] |
//! | a file system that reserves no space | [`SimMedium::set_reserves`] |
//!
//! The engine must survive all of them: no panic, no wrong byte reported as good, nothing that was
//! durable lost.

use crate::medium::{BlockFile, Medium, OpenFile};
use parking_lot::{Condvar, Mutex};
use std::collections::BTreeMap;
use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The slot file's name.
pub const SLOT_FILE: &str = crate::stripes::SLOT_FILE;
/// The journal's name.
pub const JOURNAL_FILE: &str = crate::journal::JOURNAL_FILE;
/// The key file's name.
pub const KEY_FILE: &str = crate::keyring::KEY_FILE;
/// The name of a snapshot before it replaces the journal.
pub const JOURNAL_TEMP_FILE: &str = crate::journal::JOURNAL_TEMP_FILE;

/// Memory, lengths and offsets of simulated direct I/O must be multiples of this many bytes.
const DIRECT_ALIGNMENT: usize = 512;

/// What is persisted or lost as a whole by [`SimMedium::crash`], in bytes.
const SECTOR: usize = 512;

/// An operation of a medium.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// [`BlockFile::read_at`].
    Read,
    /// [`BlockFile::write_at`].
    Write,
    /// [`BlockFile::sync_data`].
    Sync,
    /// [`Medium::rename`], of the file renamed.
    Rename,
}

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskFault {
    /// The call fails and does nothing. A sync that fails drops what was not synced, as kernels do.
    /// That can be read as long as the page cache has it, and neither a crash nor another sync
    /// finds it.
    Error(ErrorKind),
    /// The call moves at most this many bytes.
    Short(usize),
    /// The bytes go to or come from an offset this much further on.
    Misdirect(u64),
    /// The call succeeds and does nothing.
    Lose,
    /// The medium's code panics.
    Panic,
}

#[derive(Clone, Copy, Debug)]
struct Injection {
    file: &'static str,
    call: Call,
    skip: u64,
    times: u64,
    fault: DiskFault,
}

#[derive(Clone, Debug)]
enum Change {
    Write(u64, Vec<u8>),
    SetLen(u64),
}

#[derive(Clone, Debug, Default)]
struct Image {
    now: Vec<u8>,
    synced: Vec<u8>,
    unsynced: Vec<Change>,
}

impl Image {
    fn change(&mut self, change: Change) {
        apply(&mut self.now, &change);
        self.unsynced.push(change);
    }
}

fn apply(bytes: &mut Vec<u8>, change: &Change) {
    match change {
        Change::Write(offset, data) => {
            let end = *offset as usize + data.len();
            bytes.resize(bytes.len().max(end), 0);
            bytes[*offset as usize..end].copy_from_slice(data);
        }
        Change::SetLen(len) => bytes.resize(*len as usize, 0),
    }
}

#[derive(Debug, Default)]
struct MediumState {
    names: BTreeMap<String, usize>,
    synced_names: BTreeMap<String, usize>,
    files: Vec<Image>,
    injections: Vec<Injection>,
    direct: bool,
    ring: bool,
    /// Space of files is not reserved.
    unreserved: bool,
    capacity: Option<u64>,
    /// Calls that wait.
    held: Vec<Call>,
    waiting: usize,
}

impl MediumState {
    fn fault(&mut self, file: &str, call: Call) -> Option<DiskFault> {
        let injection = self
            .injections
            .iter_mut()
            .find(|injection| injection.file == file && injection.call == call && injection.times > 0)?;
        if injection.skip > 0 {
            injection.skip -= 1;
            return None;
        }
        injection.times -= 1;
        Some(injection.fault)
    }

    /// Whether the file may have `len` bytes beside all others that have a name.
    fn has_room(&self, file: usize, len: u64) -> bool {
        let others = self.names.values().filter(|index| **index != file);
        let used: u64 = others.map(|index| self.files[*index].now.len() as u64).sum();
        self.capacity.is_none_or(|capacity| used + len <= capacity)
    }
}

#[derive(Debug, Default)]
struct Sim {
    state: Mutex<MediumState>,
    changed: Condvar,
}

/// The medium. Clones are handles to the same one.
#[derive(Clone, Debug, Default)]
pub struct SimMedium(Arc<Sim>);

impl SimMedium {
    /// An empty directory without faults and without `O_DIRECT`.
    pub fn new() -> Self {
        Self::default()
    }

    /// Plans a fault: after `skip` calls of this kind on this file, the next `times` of them.
    pub fn inject(&self, file: &'static str, call: Call, skip: u64, times: u64, fault: DiskFault) {
        self.0.state.lock().injections.push(Injection { file, call, skip, times, fault });
    }

    /// Ends all planned faults.
    pub fn heal(&self) {
        self.0.state.lock().injections.clear();
    }

    /// Whether files may be opened for direct I/O, which then insists on multiples of 512 bytes.
    pub fn set_direct(&self, direct: bool) {
        self.0.state.lock().direct = direct;
    }

    /// Whether the engine may run its ring over this medium, emulated. Needs
    /// [`SimMedium::set_direct`] too.
    pub fn set_ring(&self, ring: bool) {
        self.0.state.lock().ring = ring;
    }

    /// Whether the space of files can be reserved, as it can until this is called.
    pub fn set_reserves(&self, reserves: bool) {
        self.0.state.lock().unreserved = !reserves;
    }

    /// Bytes of all files together from which on the disk is full.
    pub fn set_capacity(&self, bytes: Option<u64>) {
        self.0.state.lock().capacity = bytes;
    }

    /// Reads and writes of the slot file wait until [`SimMedium::let_go`].
    pub fn hold(&self) {
        self.0.state.lock().held.extend([Call::Read, Call::Write]);
    }

    /// Syncs of the slot file wait until [`SimMedium::let_go`].
    pub fn hold_syncs(&self) {
        self.0.state.lock().held.push(Call::Sync);
    }

    /// Lets syncs that wait go on, and nothing else.
    pub fn let_go_of_syncs(&self) {
        self.0.state.lock().held.retain(|call| *call != Call::Sync);
        self.0.changed.notify_all();
    }

    /// Lets what waits go on.
    pub fn let_go(&self) {
        self.0.state.lock().held.clear();
        self.0.changed.notify_all();
    }

    /// Whether `calls` calls waited at the same time within `patience`.
    pub fn wait_for_held(&self, calls: usize, patience: Duration) -> bool {
        let until = kvbm_plan::deadline_after(Instant::now(), patience);
        let mut state = self.0.state.lock();
        self.0.changed.wait_while_until(&mut state, |state| state.waiting < calls, until);
        state.waiting >= calls
    }

    /// A file's bytes as they would be read now; empty if there is no such file.
    pub fn bytes(&self, file: &str) -> Vec<u8> {
        let state = self.0.state.lock();
        state.names.get(file).map(|&index| state.files[index].now.clone()).unwrap_or_default()
    }

    /// Changes a file's bytes behind everybody's back, lastingly. Creates it if absent.
    pub fn edit(&self, file: &str, edit: impl FnOnce(&mut Vec<u8>)) {
        let mut state = self.0.state.lock();
        let index = file_index(&mut state, file);
        state.synced_names.insert(file.to_owned(), index);
        let image = &mut state.files[index];
        edit(&mut image.now);
        image.synced.clone_from(&image.now);
        image.unsynced.clear();
    }

    /// One bit of a file is another one from now on, in the page cache and on the disk. `false` if
    /// the file has no such byte.
    pub fn flip(&self, file: &str, byte: u64, bit: u8) -> bool {
        let mut state = self.0.state.lock();
        let Some(&index) = state.names.get(file) else { return false };
        let image = &mut state.files[index];
        let flip = |bytes: &mut [u8], at: u64| {
            usize::try_from(at)
                .ok()
                .and_then(|at| bytes.get_mut(at))
                .map(|byte| *byte ^= 1 << (bit % 8))
                .is_some()
        };
        flip(&mut image.synced, byte);
        for change in &mut image.unsynced {
            if let Change::Write(offset, data) = change
                && let Some(at) = byte.checked_sub(*offset)
            {
                flip(data, at);
            }
        }
        flip(&mut image.now, byte)
    }

    /// Bytes of all files together.
    pub fn used(&self) -> u64 {
        let state = self.0.state.lock();
        state.names.values().map(|&index| state.files[index].now.len() as u64).sum()
    }

    /// What another process finds after the end of this one: all of it, without its faults. The
    /// files of this medium go on as they were.
    #[must_use]
    pub fn restart(&self) -> Self {
        let state = self.0.state.lock();
        let after = MediumState {
            names: state.names.clone(),
            synced_names: state.synced_names.clone(),
            files: state.files.clone(),
            direct: state.direct,
            ring: state.ring,
            unreserved: state.unreserved,
            capacity: state.capacity,
            ..MediumState::default()
        };
        Self(Arc::new(Sim { state: Mutex::new(after), changed: Condvar::new() }))
    }

    /// What is found after the power failed now: synced bytes, and of what was not synced a random
    /// part, sector by sector. The files of this medium go on as they were.
    #[must_use]
    pub fn crash(&self, seed: u64) -> Self {
        let mut random = SplitMix(seed);
        let state = self.0.state.lock();
        let survive = |image: &Image, random: &mut SplitMix| {
            let mut bytes = image.synced.clone();
            for change in &image.unsynced {
                match change {
                    Change::SetLen(_) if random.coin() => apply(&mut bytes, change),
                    Change::SetLen(_) => {}
                    Change::Write(offset, data) => write_some_sectors(&mut bytes, *offset, data, random),
                }
            }
            Image { now: bytes.clone(), synced: bytes, unsynced: Vec::new() }
        };
        let files = state.files.iter().map(|image| survive(image, &mut random)).collect();
        let names = if random.coin() { &state.names } else { &state.synced_names };
        let after = MediumState {
            names: names.clone(),
            synced_names: names.clone(),
            files,
            direct: state.direct,
            ring: state.ring,
            unreserved: state.unreserved,
            capacity: state.capacity,
            ..MediumState::default()
        };
        Self(Arc::new(Sim { state: Mutex::new(after), changed: Condvar::new() }))
    }
}

/// Applies a random subset of the sectors that a write touches.
fn write_some_sectors(bytes: &mut Vec<u8>, offset: u64, data: &[u8], random: &mut SplitMix) {
    let mut at = 0;
    while at < data.len() {
        let to_boundary = SECTOR - (offset as usize + at) % SECTOR;
        let end = data.len().min(at + to_boundary);
        if random.coin() {
            apply(bytes, &Change::Write(offset + at as u64, data[at..end].to_vec()));
        }
        at = end;
    }
}

/// The generator of Steele, Lea and Flood (2014).
struct SplitMix(u64);

impl SplitMix {
    fn coin(&mut self) -> bool {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ (z >> 31)) & 1 == 1
    }
}

fn file_index(state: &mut MediumState, name: &str) -> usize {
    let fresh = state.files.len();
    let index = *state.names.entry(name.to_owned()).or_insert(fresh);
    if index == fresh {
        state.files.push(Image::default());
    }
    index
}

fn not_found(name: &str) -> io::Error {
    io::Error::new(ErrorKind::NotFound, format!("no file {name}"))
}

impl Medium for SimMedium {
    fn location(&self) -> String {
        "simulated medium".to_owned()
    }

    fn open(&self, name: &str, how: OpenFile) -> io::Result<Arc<dyn BlockFile>> {
        let mut state = self.0.state.lock();
        if how.direct && !state.direct {
            return Err(io::Error::new(ErrorKind::InvalidInput, "simulated: no direct I/O"));
        }
        if !how.create && !state.names.contains_key(name) {
            return Err(not_found(name));
        }
        if how.truncate {
            // A new file under the name: what the old one held stays there if this is never synced.
            state.names.remove(name);
        }
        let index = file_index(&mut state, name);
        Ok(Arc::new(SimFile { sim: Arc::clone(&self.0), index, name: name.to_owned(), direct: how.direct }))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        let mut state = self.0.state.lock();
        match state.fault(from, Call::Rename) {
            Some(DiskFault::Error(kind)) => return Err(kind.into()),
            Some(DiskFault::Lose) => return Ok(()),
            Some(DiskFault::Panic) => panic!("simulated panic"),
            Some(DiskFault::Short(_) | DiskFault::Misdirect(_)) | None => {}
        }
        let index = state.names.remove(from).ok_or_else(|| not_found(from))?;
        state.names.insert(to.to_owned(), index);
        Ok(())
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.0.state.lock().names.remove(name).map(drop).ok_or_else(|| not_found(name))
    }

    fn sync_dir(&self) -> io::Result<()> {
        let mut state = self.0.state.lock();
        state.synced_names = state.names.clone();
        Ok(())
    }
}

#[derive(Debug)]
struct SimFile {
    sim: Arc<Sim>,
    index: usize,
    name: String,
    direct: bool,
}

impl SimFile {
    /// Waits if calls are held, then takes the fault that is due.
    fn enter(&self, state: &mut parking_lot::MutexGuard<'_, MediumState>, call: Call) -> Option<DiskFault> {
        // The name that the file has now: a snapshot becomes the journal.
        let named = state.names.iter().find(|(_, index)| **index == self.index);
        let name = named.map_or_else(|| self.name.clone(), |(name, _)| name.clone());
        if name == SLOT_FILE {
            state.waiting += 1;
            self.sim.changed.notify_all();
            self.sim.changed.wait_while(state, |state| state.held.contains(&call));
            state.waiting -= 1;
        }
        let fault = state.fault(&name, call);
        assert!(fault != Some(DiskFault::Panic), "simulated panic");
        fault
    }

    fn check_direct(&self, offset: u64, buffers: impl Iterator<Item = (usize, usize)>) -> io::Result<()> {
        let off = |value: usize| !value.is_multiple_of(DIRECT_ALIGNMENT);
        let mut buffers = buffers;
        if self.direct && (off(offset as usize) || buffers.any(|(at, len)| off(at) || off(len))) {
            return Err(io::Error::new(ErrorKind::InvalidInput, "simulated: not aligned for direct I/O"));
        }
        Ok(())
    }
}

impl BlockFile for SimFile {
    fn len(&self) -> io::Result<u64> {
        Ok(self.sim.state.lock().files[self.index].now.len() as u64)
    }

    fn read_at(&self, offset: u64, buffers: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        self.check_direct(offset, buffers.iter().map(|buffer| (buffer.as_ptr().addr(), buffer.len())))?;
        let mut state = self.sim.state.lock();
        let (mut offset, mut limit) = (offset, usize::MAX);
        match self.enter(&mut state, Call::Read) {
            Some(DiskFault::Error(kind)) => return Err(kind.into()),
            Some(DiskFault::Short(bytes)) => limit = bytes,
            Some(DiskFault::Misdirect(by)) => offset += by,
            Some(DiskFault::Lose) => return Ok(buffers.iter().map(|buffer| buffer.len()).sum()),
            Some(DiskFault::Panic) | None => {}
        }
        let file = &state.files[self.index].now;
        let mut source = file.get(offset as usize..).unwrap_or_default();
        source = &source[..source.len().min(limit)];
        let mut moved = 0;
        for buffer in buffers {
            let (now, later) = source.split_at(source.len().min(buffer.len()));
            buffer[..now.len()].copy_from_slice(now);
            moved += now.len();
            source = later;
        }
        Ok(moved)
    }

    fn write_at(&self, offset: u64, buffers: &[IoSlice<'_>]) -> io::Result<usize> {
        self.check_direct(offset, buffers.iter().map(|buffer| (buffer.as_ptr().addr(), buffer.len())))?;
        let mut state = self.sim.state.lock();
        let mut bytes: Vec<u8> = buffers.iter().flat_map(|buffer| buffer.iter().copied()).collect();
        let mut offset = offset;
        match self.enter(&mut state, Call::Write) {
            Some(DiskFault::Error(kind)) => return Err(kind.into()),
            Some(DiskFault::Short(limit)) => bytes.truncate(limit),
            Some(DiskFault::Misdirect(by)) => offset += by,
            Some(DiskFault::Lose) => return Ok(bytes.len()),
            Some(DiskFault::Panic) | None => {}
        }
        let end = offset + bytes.len() as u64;
        let grows = end > state.files[self.index].now.len() as u64;
        if grows && !state.has_room(self.index, end) {
            return Err(ErrorKind::StorageFull.into());
        }
        let moved = bytes.len();
        state.files[self.index].change(Change::Write(offset, bytes));
        Ok(moved)
    }

    fn set_len(&self, bytes: u64) -> io::Result<()> {
        self.sim.state.lock().files[self.index].change(Change::SetLen(bytes));
        Ok(())
    }

    fn reserve(&self, bytes: u64) -> io::Result<bool> {
        let mut state = self.sim.state.lock();
        if !state.has_room(self.index, bytes) {
            return Err(ErrorKind::StorageFull.into());
        }
        state.files[self.index].change(Change::SetLen(bytes));
        Ok(!state.unreserved)
    }

    fn emulates_ring(&self) -> bool {
        self.sim.state.lock().ring
    }

    fn sync_data(&self) -> io::Result<()> {
        let mut state = self.sim.state.lock();
        match self.enter(&mut state, Call::Sync) {
            Some(DiskFault::Error(kind)) => {
                state.files[self.index].unsynced.clear();
                return Err(kind.into());
            }
            Some(DiskFault::Lose) => return Ok(()),
            Some(DiskFault::Short(_) | DiskFault::Misdirect(_) | DiskFault::Panic) | None => {}
        }
        let image = &mut state.files[self.index];
        for change in std::mem::take(&mut image.unsynced) {
            apply(&mut image.synced, &change);
        }
        Ok(())
    }

    fn drop_cache(&self) {
        let image = &mut self.sim.state.lock().files[self.index];
        if image.unsynced.is_empty() {
            image.now.clone_from(&image.synced);
        }
    }
}
