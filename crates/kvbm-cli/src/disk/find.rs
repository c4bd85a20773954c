//! Where the directories of G3 are, and which files in them are ours.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use kvbm_disk::medium::DirMedium;

/// `disk.dir`, its namespaces, their ranks.
const DEPTH: usize = 2;
/// The files of an engine, by `docs/formats.md`.
const JOURNAL: &str = "journal.kvbm";
const SLOTS: &str = "slots.kvbm";
const STRIPE: &str = "stripe.kvbm";
/// In the order in which they go: what says that there are blocks is gone for good before the blocks, and the lock goes last.
const FILES: [&str; 7] =
    [JOURNAL, SLOTS, "journal.kvbm.tmp", "probe.tmp", "taking-over.kvbm", STRIPE, "LOCK"];

/// The directories of an engine, the one with the journal first.
pub(super) type Set = Vec<PathBuf>;

/// What an engine has in its directory, or the first of them.
pub(super) const IN_USE: &[&str] = &[JOURNAL, STRIPE];
/// The same, and what is left where an emptying was interrupted.
pub(super) const LEFT: &[&str] = &[JOURNAL, STRIPE, SLOTS];

/// Those of `dirs`, and of the same folder in each, of which the first has one of the files `known_by`.
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

/// Removes the files of the engine that nobody has open, and folders that are empty then; how many bytes.
pub(super) fn clear(dir: &Path) -> Result<u64> {
    let lock = DirMedium::lock(dir)?;
    let mut bytes = 0;
    for name in FILES {
        let path = dir.join(name);
        if let Ok(file) = fs::metadata(&path) {
            bytes += file.len();
            fs::remove_file(&path).with_context(|| format!("cannot remove {}", path.display()))?;
        }
        if name == JOURNAL {
            fs::File::open(dir)
                .and_then(|dir| dir.sync_all())
                .with_context(|| format!("cannot make the removal of {} lasting", path.display()))?;
        }
    }
    drop(lock);
    // A folder with something else in it stays, and so does one that a manager needs again at once.
    for folder in [Some(dir), dir.parent()].into_iter().flatten() {
        let ours = folder.file_name().and_then(|name| name.to_str());
        if ours.is_some_and(|name| name.starts_with("rank-") || name.starts_with("ns-")) {
            let _stays = fs::remove_dir(folder);
        }
    }
    Ok(bytes)
}
