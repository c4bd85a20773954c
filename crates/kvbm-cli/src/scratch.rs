//! Folders that go away with the command that made them.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

/// Folders of killed commands with this process id that are stepped over.
const MAX_ATTEMPTS: u32 = 1000;

/// A folder that is removed when dropped.
#[derive(Debug)]
pub struct Scratch(PathBuf);

impl Scratch {
    /// A new folder of `parent`, named after `what` it is for. Process ids come again, and a
    /// command that was killed leaves its folder.
    pub fn create(parent: &Path, what: &str) -> Result<Self> {
        let name = |attempt| parent.join(format!("kvbm-{what}-{}-{attempt}", std::process::id()));
        for dir in (0..MAX_ATTEMPTS).map(name) {
            match std::fs::create_dir(&dir) {
                Ok(()) => return Ok(Self(dir)),
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                Err(error) => {
                    return Err(error).with_context(|| {
                        format!("cannot create {}: name a directory with --dir, or set TMPDIR", dir.display())
                    });
                }
            }
        }
        bail!("{} is full of kvbm-{what} folders: remove those of commands that ended", parent.display())
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // Nothing is lost if it stays: it carries our name, in a folder for temporary things.
        let _left = std::fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_that_a_killed_command_left_is_stepped_over() {
        let parent = tempfile::tempdir().unwrap();
        let [first, second] = [0; 2].map(|_: u8| Scratch::create(parent.path(), "test").unwrap());
        assert_ne!(first.0, second.0);
        assert!(first.0.is_dir() && second.0.is_dir());
        drop((first, second));
        assert_eq!(std::fs::read_dir(parent.path()).unwrap().count(), 0);
        let error = Scratch::create(&parent.path().join("none"), "test").err().unwrap();
        assert!(format!("{error:#}").contains("--dir"), "{error:#}");
    }
}
