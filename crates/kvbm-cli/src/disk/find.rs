//! Where the directories of G3 are, and which files in them are ours.

use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use kvbm_disk::FileAccess;
use kvbm_disk::medium::DirMedium;

/// `disk.dir`, its namespaces, their ranks.
const DEPTH: usize = 2;
/// The files of an engine, by `docs/formats.md`.
const JOURNAL: &str = "journal.kvbm";
const SLOTS: &str = "slots.kvbm";
const STRIPE: &str = "stripe.kvbm";
const KEYS: [&str; 2] = ["keys.kvbm", "keys.kvbm.tmp"];
/// In the order in which they go. What says that there are blocks is gone for good before the
/// blocks. What a later clearing finds the directory by goes after them, and the lock goes last.
const FILES: [&str; 10] = [
    JOURNAL,
    KEYS[0],
    KEYS[1],
    "journal.kvbm.tmp",
    "stripe.kvbm.tmp",
    "probe.tmp",
    "taking-over.kvbm",
    SLOTS,
    STRIPE,
    "LOCK",
];

/// The directories of an engine, the one with the journal first.
pub(super) type Set = Vec<PathBuf>;

/// What an engine has in its directory, or the first of them.
pub(super) const IN_USE: &[&str] = &[JOURNAL, STRIPE];
/// The same, and what is left where an emptying was interrupted.
pub(super) const LEFT: &[&str] = &[JOURNAL, STRIPE, SLOTS];

/// Those of `dirs`, and of the same folder in each, of which the first has one of the files
/// `known_by`.
pub(super) fn directories(dirs: &[PathBuf], known_by: &[&str]) -> Result<Vec<Set>> {
    let Some((dir, others)) = dirs.split_first() else { return Ok(Vec::new()) };
    let mut found = Vec::new();
    look(dir, DEPTH, known_by, &mut found)
        .with_context(|| format!("cannot read {}; name what disk.dir names", dir.display()))?;
    found.sort();
    let set = |first: PathBuf| {
        let folder = first.strip_prefix(dir).unwrap_or(Path::new("")).to_owned();
        std::iter::once(first).chain(others.iter().map(|other| other.join(&folder))).collect()
    };
    Ok(found.into_iter().map(set).collect())
}

fn look(dir: &Path, depth: usize, known_by: &[&str], found: &mut Vec<PathBuf>) -> io::Result<()> {
    if known_by.iter().any(|name| dir.join(name).is_file()) {
        found.push(dir.to_owned());
    }
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        if depth > 0 && entry.file_type()?.is_dir() {
            look(&entry.path(), depth - 1, known_by, found)?;
        }
    }
    Ok(())
}

/// Those of a set that are there: the folder of one that was emptied before is gone. An error names
/// one that is missed.
pub(super) fn present(set: &[PathBuf]) -> Result<Set> {
    let holds = |dir: &PathBuf, name: &str| dir.join(name).is_file();
    let is_whole = set.first().is_some_and(|first| holds(first, JOURNAL) && holds(first, STRIPE));
    if let Some(missing) = set.iter().find(|dir| is_whole && !dir.is_dir()) {
        bail!(
            "{} is not there, and {} has blocks that lie in both: is its device mounted? To clear the others without it, leave it out",
            missing.display(),
            set[0].display()
        );
    }
    Ok(set.iter().filter(|dir| dir.is_dir()).cloned().collect())
}

/// Removes the files of an engine that nobody has open, and folders that are empty then; how many
/// bytes.
///
/// Wherever it is interrupted, an opening finds an empty disk and a clearing finds what is left.
/// The journal goes before any block. The other directories are found by the first, which keeps its
/// mark until they are empty.
pub(super) fn clear(set: &[PathBuf]) -> Result<u64> {
    let locks = DirMedium::lock_all(set, FileAccess::Owner)?;
    let Some((first, others)) = set.split_first() else { return Ok(0) };
    let mut bytes = remove(first, &[JOURNAL])?;
    for dir in others {
        bytes += remove(dir, &FILES)?;
    }
    bytes += remove(first, &FILES)?;
    drop(locks);
    // A folder with something else in it stays, and so does one that a manager needs again at once.
    for folder in set.iter().flat_map(|dir| [Some(dir.as_path()), dir.parent()]).flatten() {
        let ours = folder.file_name().and_then(|name| name.to_str());
        if ours.is_some_and(|name| name.starts_with("rank-") || name.starts_with("ns-")) {
            let _stays = fs::remove_dir(folder);
        }
    }
    Ok(bytes)
}

/// Keys that can be read no more are worth more than files that are gone.
fn overwrite(path: &Path) -> io::Result<()> {
    let mut file = fs::OpenOptions::new().write(true).custom_flags(libc::O_NOFOLLOW).open(path)?;
    io::copy(&mut io::repeat(0).take(file.metadata()?.len()), &mut file)?;
    file.sync_data()
}

/// Removes those of `files` that are there, in their order; how many bytes. The journal is gone for
/// good before the next one goes, and all are before this returns.
fn remove(dir: &Path, files: &[&str]) -> Result<u64> {
    let sync = || {
        fs::File::open(dir)
            .and_then(|dir| dir.sync_all())
            .with_context(|| format!("cannot make removals from {} lasting", dir.display()))
    };
    let mut bytes = 0;
    for name in files {
        let path = dir.join(name);
        match fs::metadata(&path) {
            Ok(file) => {
                bytes += file.len();
                if KEYS.contains(name) {
                    overwrite(&path).with_context(|| format!("cannot overwrite {}", path.display()))?;
                }
                fs::remove_file(&path).with_context(|| format!("cannot remove {}", path.display()))?;
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            // It may be there: nothing behind it goes before it.
            Err(error) => {
                return Err(error).with_context(|| format!("cannot look at {} to remove it", path.display()));
            }
        }
        if *name == JOURNAL {
            sync()?;
        }
    }
    sync()?;
    Ok(bytes)
}
