//! Folders whose names survive a crash.

use std::collections::HashSet;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use parking_lot::Mutex;

use crate::access::Access;

/// Folders that are remembered. Beyond that number all are forgotten, which only costs syncs.
const MOST: usize = 1 << 16;

/// Folders below a root whose names this process has made durable.
///
/// An existing folder may not be durable: another writer may just have created it, or may have
/// failed to sync it.
#[derive(Debug)]
pub(crate) struct DurableFolders {
    root: PathBuf,
    access: Access,
    durable: Mutex<HashSet<PathBuf>>,
}

impl DurableFolders {
    pub(crate) fn below(root: PathBuf, access: Access) -> Self {
        Self { root, access, durable: Mutex::default() }
    }

    /// Creates `folder`, which lies below the root, unless it is there. Makes its name durable, and
    /// the names of the folders above it. Refuses links and folders of other users.
    pub(crate) fn ensure(&self, folder: &Path) -> io::Result<()> {
        self.ensure_by(folder, |parent| File::open(parent)?.sync_all())
    }

    fn ensure_by(&self, folder: &Path, mut sync: impl FnMut(&Path) -> io::Result<()>) -> io::Result<()> {
        let is_there = folder.is_dir();
        if is_there && self.durable.lock().contains(folder) {
            return Ok(());
        }
        if !is_there {
            self.access.create_dirs(folder)?;
        }
        for parent in folder.ancestors().skip(1).take_while(|parent| parent.starts_with(&self.root)) {
            sync(parent)?;
        }
        for ours in folder.ancestors().take_while(|ours| ours.starts_with(&self.root) && *ours != self.root) {
            self.access.check_dir(ours)?;
        }
        let mut durable = self.durable.lock();
        if durable.len() >= MOST {
            durable.clear();
        }
        durable.insert(folder.to_owned());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// Mutation that makes it fail: a folder that is there counts as durable.
    #[test]
    fn names_of_folders_are_synced_whoever_created_them_until_that_went_well() {
        let root = tempfile::tempdir().unwrap();
        let (above, folder) = (root.path().join("a"), root.path().join("a/b"));
        // Another writer's.
        fs::create_dir_all(&folder).unwrap();
        let folders = DurableFolders::below(root.path().to_owned(), Access::of_root(root.path()).unwrap());
        let mut synced = Vec::new();
        let mut ensure = |fails: bool| {
            synced.clear();
            let done = folders.ensure_by(&folder, |parent| {
                synced.push(parent.to_owned());
                if fails && parent == root.path() { Err(io::ErrorKind::Other.into()) } else { Ok(()) }
            });
            (done.is_ok(), synced.clone())
        };
        let both = vec![above.clone(), root.path().to_owned()];
        assert_eq!(ensure(true), (false, both.clone()));
        assert_eq!(ensure(false), (true, both.clone()));
        assert_eq!(ensure(false), (true, vec![]));
        // Somebody removed it.
        fs::remove_dir_all(&above).unwrap();
        assert_eq!(ensure(false), (true, both));
        assert!(folder.is_dir());
    }
}
