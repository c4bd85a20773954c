//! Directories whose names survive power loss.

use super::access;
use kvbm_plan::FileAccess;
use std::io;
use std::path::Path;

/// Creates `dir` and the directories missing above it, with the mode of `access`.
///
/// A new name is durable once `sync` has synced the directory that contains it. A directory that
/// this process may write but not read cannot be synced: there the file system alone decides.
pub(super) fn create_dir(
    dir: &Path,
    access: FileAccess,
    sync: &mut dyn FnMut(&Path) -> io::Result<()>,
) -> io::Result<()> {
    let is_missing = |dir: &&Path| !dir.as_os_str().is_empty() && !dir.is_dir();
    let missing: Vec<&Path> = dir.ancestors().take_while(is_missing).collect();
    access::create_dirs(dir, &missing, access)?;
    // From above, so that what is made lasting stands in what is.
    for above in missing.into_iter().rev().filter_map(Path::parent) {
        let above = if above.as_os_str().is_empty() { Path::new(".") } else { above };
        match sync(above) {
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {}
            done => done?,
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
            create_dir(dir, FileAccess::Owner, &mut sync).map(|()| synced)
        };
        let (above, dir) = (there.path().join("a"), there.path().join("a/b"));
        assert_eq!(synced_for(&dir).unwrap(), [there.path(), &*above]);
        assert!(dir.is_dir());
        assert!(synced_for(&dir).unwrap().is_empty(), "nothing is new");
        let file = dir.join("file");
        std::fs::write(&file, "").unwrap();
        assert!(synced_for(&file).is_err() && synced_for(&file.join("below")).is_err());
    }

    #[test]
    fn a_directory_that_may_be_written_and_not_read_is_no_reason_to_fail() {
        let there = tempfile::tempdir().unwrap();
        let dir = there.path().join("a/b");
        create_dir(&dir, FileAccess::Owner, &mut |_| Err(io::ErrorKind::PermissionDenied.into())).unwrap();
        assert!(dir.is_dir());
        let failing =
            create_dir(&dir.join("c"), FileAccess::Owner, &mut |_| Err(io::ErrorKind::StorageFull.into()));
        assert_eq!(failing.unwrap_err().kind(), io::ErrorKind::StorageFull);
    }
}
