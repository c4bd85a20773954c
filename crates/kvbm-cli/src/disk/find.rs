//! Where the directories of G3 are, and which files in them are ours.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use kvbm_disk::medium::DirMedium;

/// `disk.dir`, its namespaces, their ranks.
const DEPTH: usize = 2;
/// The files of an engine, by `docs/formats.md`. The lock goes last.
const JOURNAL: &str = "journal.kvbm";
const STRIPE: &str = "stripe.kvbm";
const FILES: [&str; 7] =
    ["slots.kvbm", "journal.kvbm.tmp", "probe.tmp", "taking-over.kvbm", JOURNAL, STRIPE, "LOCK"];

/// The directories of an engine, the one with the journal first.
pub(super) type Set = Vec<PathBuf>;

/// Those of `dirs`, and of the same folder in each, of which the first has a journal.
pub(super) fn directories(dirs: &[PathBuf]) -> Result<Vec<Set>> {
    let Some((dir, others)) = dirs.split_first() else { return Ok(Vec::new()) };
    let mut found = Vec::new();
    look(dir, DEPTH, &mut found)
        .with_context(|| format!("cannot read {}; name what disk.dir names", dir.display()))?;
    found.sort();
    let set = |first: PathBuf| {
        let folder = first.strip_prefix(dir).unwrap_or(Path::new("")).to_owned();
        std::iter::once(first).chain(others.iter().map(|other| other.join(&folder))).collect()
    };
    Ok(found.into_iter().map(set).collect())
}

fn look(dir: &Path, depth: usize, found: &mut Vec<PathBuf>) -> io::Result<()> {
    if dir.join(JOURNAL).is_file() || dir.join(STRIPE).is_file() {
        found.push(dir.to_owned());
    }
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        if depth > 0 && entry.file_type()?.is_dir() {
            look(&entry.path(), depth - 1, found)?;
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
