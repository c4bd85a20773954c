//! The mark that blocks of another deployment are still to move in: a start that finds it begins
//! again.

use rustix::fs::OFlags;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Its file, in the folder of our rank 0.
const MARK_FILE: &str = "taking-over.kvbm";
/// Its text, for a person who opens the file. No program reads it.
const TEXT: &[u8] =
    b"blocks of another number of ranks are still to move in here: the next start begins again\n";

/// The mark of our ranks.
pub(super) struct Mark {
    folder: PathBuf,
}

impl Mark {
    /// The mark in the folder of rank 0.
    pub(super) fn in_folder(folder: &Path) -> Self {
        Self { folder: folder.to_owned() }
    }

    pub(super) fn is_set(&self) -> bool {
        self.file().try_exists().unwrap_or(false)
    }

    /// Sets it, lasting, before there is a journal. Without it an interrupted start is not
    /// repeated, and nothing else is worse.
    pub(super) fn set(&self) {
        self.done("set", self.write());
    }

    /// Clears it once blocks have moved in and are durable.
    pub(super) fn clear(&self) {
        let removed = match fs::remove_file(self.file()) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            other => other.and_then(|()| sync(&self.folder)),
        };
        self.done("clear", removed);
    }

    fn file(&self) -> PathBuf {
        self.folder.join(MARK_FILE)
    }

    fn write(&self) -> io::Result<()> {
        // The folder will hold KV.
        DirBuilder::new().recursive(true).mode(0o700).create(&self.folder)?;
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(true).mode(0o600);
        let mut file = options.custom_flags(OFlags::NOFOLLOW.bits().cast_signed()).open(self.file())?;
        file.write_all(TEXT)?;
        file.sync_all()?;
        // The file's entry, and that of the folder, which may be new.
        self.folder.ancestors().take(2).try_for_each(sync)
    }

    fn done(&self, what: &str, result: io::Result<()>) {
        if let Err(error) = result {
            let file = self.file();
            tracing::warn!(target: "kvbm", file = %file.display(), %error, "G3: cannot {what} the mark of blocks that move in");
        }
    }
}

fn sync(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_mark_lasts_until_it_is_cleared() {
        let dir = tempfile::tempdir().expect("a directory");
        let folder = dir.path().join("rank-0-of-2");
        let mark = Mark::in_folder(&folder);
        mark.clear();
        assert!(!mark.is_set());
        mark.set();
        mark.set();
        assert!(Mark::in_folder(&folder).is_set());
        assert_eq!(fs::metadata(mark.file()).expect("a file").permissions().mode() & 0o777, 0o600);
        mark.clear();
        assert!(!mark.is_set() && folder.is_dir());
    }

    #[test]
    fn a_link_in_the_place_of_the_mark_is_not_followed() {
        let dir = tempfile::tempdir().expect("a directory");
        let other = dir.path().join("other");
        fs::write(&other, "somebody's").expect("a file");
        let mark = Mark::in_folder(dir.path());
        std::os::unix::fs::symlink(&other, mark.file()).expect("a link");
        assert!(mark.write().is_err());
        assert_eq!(fs::read(&other).expect("a file"), b"somebody's");
    }
}
