//! The engine's medium over `turmoil-fs`, a file system that is simulated by others, whose power
//! fails when it is told to.
//!
//! turmoil-fs keeps what was written apart from what was synced. At a crash it forgets what was
//! not, except for a random number of blocks at the beginning of each write, each write by itself
//! (torn, and in another order than they came); creations, renames and removals are forgotten until
//! the directory was synced. While it runs it may sync behind our back, read less than asked, fail
//! a call, flip a bit.

use crate::support::Random;
use kvbm_disk::medium::{BlockFile, Medium, OpenFile};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use turmoil_fs::shim::std::fs::{self, File, OpenOptions};
use turmoil_fs::{Fs, FsConfig, FsContext, FsEnterGuard};

/// Where an open file lies now; nowhere once it was removed or replaced. turmoil-fs knows an open
/// file by the path that it was opened at, so the path is kept up to date here.
type Place = Arc<Mutex<Option<PathBuf>>>;

/// How a machine misbehaves while it runs.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct FaultRates {
    /// Probability that a call fails.
    pub(crate) io_error: f64,
    /// Probability that a read comes with a bit flipped.
    pub(crate) corruption: f64,
    /// Probability that a read moves less than asked.
    pub(crate) short_read: f64,
}

/// A machine with one directory. It outlives its power failures.
pub(crate) struct Machine {
    fs: Fs,
    direct: bool,
    ring: bool,
    power: Mutex<Power>,
    places: Mutex<BTreeMap<String, Place>>,
    /// Removed, and the directory not synced since.
    removed: Mutex<BTreeSet<String>>,
}

struct Power {
    /// Grows with every failure: what was opened before is of no use afterwards.
    boot: u64,
    /// Changes of the medium until the power fails, if it does.
    calls_left: Option<u64>,
    random: Random,
}

impl Machine {
    /// Blocks of a torn write, spontaneous syncs, `O_DIRECT` and the ring are drawn from `seed`.
    pub(crate) fn new(seed: u64) -> Arc<Self> {
        let mut random = Random(seed);
        let mut config = FsConfig::default();
        if random.below(8) > 0 {
            config.block_size([512, 4096][random.below(2) as usize]);
        }
        config.sync_probability(random.below(4) as f64 / 10.0);
        config.direct_io_alignment([512, 4096][random.below(2) as usize]);
        let fs = Fs::builder().config(config).seed(random.next()).build();
        let (direct, ring) = (random.below(2) == 0, random.below(2) == 0);
        let power = Mutex::new(Power { boot: 0, calls_left: None, random });
        Arc::new(Self { fs, direct, ring, power, places: Mutex::default(), removed: Mutex::default() })
    }

    /// What an engine opens.
    pub(crate) fn medium(self: &Arc<Self>) -> Arc<dyn Medium> {
        Arc::new(Turmoil { machine: Arc::clone(self), boot: self.power.lock().boot })
    }

    /// From here on things go wrong this often.
    pub(crate) fn set_fault_rates(&self, rates: FaultRates) {
        let _inside = self.fs.enter();
        FsContext::current(|context| {
            context.fs.io_error_probability = rates.io_error;
            context.fs.corruption_probability = rates.corruption;
            context.fs.short_read_probability = rates.short_read;
        });
    }

    /// The power fails at the `calls`-th change of the medium from here on, just before it happened
    /// or just after; or stays.
    pub(crate) fn fail_after(&self, calls: Option<u64>) {
        self.power.lock().calls_left = calls;
    }

    /// The number of power failures.
    pub(crate) fn failures(&self) -> u64 {
        self.power.lock().boot
    }

    /// The power fails now.
    pub(crate) fn fail(&self) {
        self.crash(&mut self.power.lock());
    }

    fn crash(&self, power: &mut Power) {
        self.fs.crash();
        self.places.lock().clear();
        self.removed.lock().clear();
        power.boot += 1;
        power.calls_left = None;
    }

    /// Does `call` for a handle of boot `boot`.
    fn read<T>(&self, boot: u64, call: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        let power = self.power.lock();
        let _inside = self.enter(&power, boot)?;
        call()
    }

    /// Does `call`, which changes something, unless this is where the power fails.
    fn change<T>(&self, boot: u64, call: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        let mut power = self.power.lock();
        let _inside = self.enter(&power, boot)?;
        let fails = power.calls_left == Some(0);
        power.calls_left = power.calls_left.map(|left| left.saturating_sub(1));
        if !fails {
            return call();
        }
        if power.random.below(2) == 0 {
            // It happened, and nobody was told.
            let _untold = call();
        }
        self.crash(&mut power);
        Err(is_off())
    }

    fn sync_dir(&self) -> io::Result<()> {
        fs::sync_dir("/")?;
        self.removed.lock().clear();
        Ok(())
    }

    fn enter(&self, power: &Power, boot: u64) -> io::Result<FsEnterGuard> {
        if power.boot == boot { Ok(self.fs.enter()) } else { Err(is_off()) }
    }
}

fn is_off() -> io::Error {
    io::Error::new(ErrorKind::NotConnected, "simulated: the power failed")
}

/// The machine between two power failures.
struct Turmoil {
    machine: Arc<Machine>,
    boot: u64,
}

impl fmt::Debug for Turmoil {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Turmoil").field("boot", &self.boot).finish_non_exhaustive()
    }
}

fn path(name: &str) -> PathBuf {
    PathBuf::from("/").join(name)
}

impl Medium for Turmoil {
    fn location(&self) -> String {
        "turmoil-fs".to_owned()
    }

    fn open(&self, name: &str, how: OpenFile) -> io::Result<Arc<dyn BlockFile>> {
        if how.direct && !self.machine.direct {
            return Err(io::Error::new(ErrorKind::InvalidInput, "simulated: no direct I/O"));
        }
        let open = || {
            if self.machine.removed.lock().contains(name) {
                // It takes a new file for the removed one of that name, whose removal lasts with
                // the next sync: so it lasts before.
                self.machine.sync_dir()?;
            }
            let mut options = OpenOptions::new();
            options.read(true).write(true).create(how.create).truncate(how.truncate).open(path(name))
        };
        if how.create || how.truncate {
            self.machine.change(self.boot, open)?;
        } else {
            self.machine.read(self.boot, open)?;
        }
        let mut places = self.machine.places.lock();
        let fresh = || Arc::new(Mutex::new(Some(path(name))));
        let place = Arc::clone(places.entry(name.to_owned()).or_insert_with(fresh));
        let (machine, boot) = (Arc::clone(&self.machine), self.boot);
        Ok(Arc::new(TurmoilFile { machine, boot, place, direct: how.direct }))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.machine.change(self.boot, || fs::rename(path(from), path(to)))?;
        let mut places = self.machine.places.lock();
        let moved = places.remove(from);
        if let Some(moved) = &moved {
            *moved.lock() = Some(path(to));
        }
        if let Some(replaced) = moved.and_then(|moved| places.insert(to.to_owned(), moved)) {
            *replaced.lock() = None;
        }
        Ok(())
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        self.machine.change(self.boot, || fs::remove_file(path(name)))?;
        self.machine.removed.lock().insert(name.to_owned());
        if let Some(removed) = self.machine.places.lock().remove(name) {
            *removed.lock() = None;
        }
        Ok(())
    }

    fn sync_dir(&self) -> io::Result<()> {
        self.machine.change(self.boot, || self.machine.sync_dir())
    }
}

struct TurmoilFile {
    machine: Arc<Machine>,
    boot: u64,
    place: Place,
    direct: bool,
}

impl fmt::Debug for TurmoilFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TurmoilFile").field("place", &self.place).finish_non_exhaustive()
    }
}

impl TurmoilFile {
    fn file(&self) -> io::Result<File> {
        let place = self.place.lock().clone();
        let place =
            place.ok_or_else(|| io::Error::new(ErrorKind::NotFound, "simulated: an unlinked file"))?;
        OpenOptions::new().read(true).write(true).direct_io(self.direct).open(place)
    }
}

/// Moves the buffers one by one until one moves less than its length. What went before an error
/// counts.
fn moved<T>(
    buffers: impl Iterator<Item = T>,
    len: impl Fn(&T) -> usize,
    mut call: impl FnMut(T, usize) -> io::Result<usize>,
) -> io::Result<usize> {
    let mut all = 0;
    for buffer in buffers {
        let wanted = len(&buffer);
        match call(buffer, all) {
            Ok(now) if now == wanted => all += now,
            Ok(now) => return Ok(all + now),
            Err(error) if all == 0 => return Err(error),
            Err(_) => return Ok(all),
        }
    }
    Ok(all)
}

impl BlockFile for TurmoilFile {
    fn len(&self) -> io::Result<u64> {
        self.machine.read(self.boot, || Ok(self.file()?.metadata()?.len()))
    }

    fn read_at(&self, offset: u64, buffers: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        self.machine.read(self.boot, || {
            let file = self.file()?;
            moved(buffers.iter_mut(), |one| one.len(), |one, done| file.read_at(one, offset + done as u64))
        })
    }

    fn write_at(&self, offset: u64, buffers: &[IoSlice<'_>]) -> io::Result<usize> {
        self.machine.change(self.boot, || {
            let file = self.file()?;
            moved(buffers.iter(), |one| one.len(), |one, done| file.write_at(one, offset + done as u64))
        })
    }

    fn set_len(&self, bytes: u64) -> io::Result<()> {
        self.machine.change(self.boot, || self.file()?.set_len(bytes))
    }

    fn reserve(&self, bytes: u64) -> io::Result<bool> {
        self.set_len(bytes).map(|()| false)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.machine.change(self.boot, || self.file()?.sync_data())
    }

    fn emulates_ring(&self) -> bool {
        self.machine.ring
    }
}
