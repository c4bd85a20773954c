//! Directories that are still there after a power loss.

use std::io;
use std::path::Path;

/// Creates `dir`, and what is missing above it. A new name lasts once the directory that it stands in is synced, which `sync` does: what is
/// in `dir` may be as durable as it likes, without its name nobody finds it.
pub(super) fn create_dir(dir: &Path, sync: &mut dyn FnMut(&Path) -> io::Result<()>) -> io::Result<()> {
    let is_missing = |dir: &&Path| !dir.as_os_str().is_empty() && !dir.is_dir();
    let missing: Vec<&Path> = dir.ancestors().take_while(is_missing).collect();
    std::fs::create_dir_all(dir)?;
    // From above, so that what is made lasting stands in what is.
    for made in missing.into_iter().rev() {
        match made.parent() {
            Some(above) if above.as_os_str().is_empty() => sync(Path::new("."))?,
            Some(above) => sync(above)?,
            None => {}
        }
    }
    Ok(())
}

/// Makes the names in `dir` last.
pub(super) fn sync_dir(dir: &Path) -> io::Result<()> {
    std::fs::File::open(dir)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    /// Mutation that makes it fail: only `dir` itself is synced.
    #[test]
    fn every_directory_with_a_new_one_in_it_is_synced_from_above() {
        let there = tempfile::tempdir().unwrap();
        let synced_for = |dir: &Path| {
            let mut synced: Vec<PathBuf> = Vec::new();
            let mut sync = |dir: &Path| {
                synced.push(dir.to_owned());
                sync_dir(dir)
            };
            create_dir(dir, &mut sync).map(|()| synced)
        };
        let (above, dir) = (there.path().join("a"), there.path().join("a/b"));
        assert_eq!(synced_for(&dir).unwrap(), [there.path(), &*above]);
        assert!(dir.is_dir());
        assert!(synced_for(&dir).unwrap().is_empty(), "nothing is new");
        let file = dir.join("file");
        std::fs::write(&file, "").unwrap();
        assert!(synced_for(&file).is_err() && synced_for(&file.join("below")).is_err());
    }
}
