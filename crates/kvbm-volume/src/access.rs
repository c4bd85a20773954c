//! Opens files and folders of a directory volume: follows no link, uses nothing of another user.

use std::fs::{self, DirBuilder, File, Metadata, OpenOptions, Permissions};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

use kvbm_plan::{FileAccess, FileOwner};

/// Bits of a root directory whose objects its group shares: set-group-id, and the group may write.
const SHARED: u32 = 0o2020;

/// Who may use the objects, by the mode of the root directory, and whose objects this process uses.
///
/// The operator who creates the root chooses: with mode 2770 its group reads and writes the
/// objects, with any other mode their owner alone.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Access {
    access: FileAccess,
    ours: FileOwner,
}

impl Access {
    /// The access below `root`.
    pub(crate) fn of_root(root: &Path) -> io::Result<Self> {
        let found = fs::metadata(root)?;
        if !found.is_dir() {
            return Err(ErrorKind::NotADirectory.into());
        }
        let is_shared = found.mode() & SHARED == SHARED;
        let access = if is_shared { FileAccess::GroupWrite } else { FileAccess::Owner };
        // The user of this process, without a system call that needs unsafe code.
        let uid = fs::metadata("/proc/self").map_or(found.uid(), |this| this.uid());
        Ok(Self { access, ours: FileOwner { uid, gid: found.gid(), mode: access.file_mode() } })
    }

    /// Finds out whether files can be created in `folder`, and who owns them then: network file
    /// systems map users. A full file system tells nothing of either.
    pub(crate) fn try_out(&mut self, folder: &Path) -> io::Result<()> {
        let trial = folder.join(format!("{:016x}-trial", RandomState::new().build_hasher().finish()));
        let created = self.create_new(&trial).and_then(|file| {
            let found = file.metadata();
            fs::remove_file(&trial)?;
            found
        });
        match created {
            Ok(found) => {
                self.ours.uid = found.uid();
                Ok(())
            }
            Err(error) if matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded) => Ok(()),
            Err(error) => {
                let text = format!("cannot write in {}: {error}", folder.display());
                Err(io::Error::new(error.kind(), text))
            }
        }
    }

    /// Creates a file.
    pub(crate) fn create_new(&self, path: &Path) -> io::Result<File> {
        let mode = self.access.file_mode();
        let file = OpenOptions::new().write(true).create_new(true).mode(mode).open(path)?;
        if self.access != FileAccess::Owner {
            // The umask may have taken the group's bits.
            file.set_permissions(Permissions::from_mode(mode))?;
        }
        Ok(file)
    }

    /// Opens an object to read it.
    pub(crate) fn open(&self, path: &Path) -> io::Result<File> {
        // Without `O_NONBLOCK`, the open of a pipe that somebody put there waits for a writer.
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
        let opened = OpenOptions::new().read(true).custom_flags(flags).open(path);
        let file = opened.map_err(|error| {
            if error.raw_os_error() == Some(libc::ELOOP) { refused(path, "a symbolic link") } else { error }
        })?;
        let found = file.metadata()?;
        if !found.is_file() {
            return Err(refused(path, "not a regular file"));
        }
        self.check_owner(path, &found)?;
        Ok(file)
    }

    /// Creates `folder` and the folders missing above it.
    pub(crate) fn create_dirs(&self, folder: &Path) -> io::Result<()> {
        let is_missing = |folder: &&Path| folder.symlink_metadata().is_err();
        let missing: Vec<&Path> = folder.ancestors().take_while(is_missing).collect();
        let mode = self.access.dir_mode();
        DirBuilder::new().recursive(true).mode(mode).create(folder)?;
        if self.access != FileAccess::Owner {
            for created in missing {
                let kept = fs::metadata(created)?.mode() & 0o7000;
                fs::set_permissions(created, Permissions::from_mode(kept | mode))?;
            }
        }
        Ok(())
    }

    /// Refuses a folder that is a link or that another user owns.
    pub(crate) fn check_dir(&self, folder: &Path) -> io::Result<()> {
        let found = fs::symlink_metadata(folder)?;
        if !found.is_dir() {
            return Err(refused(folder, "not a directory"));
        }
        self.check_owner(folder, &found)
    }

    fn check_owner(&self, path: &Path, found: &Metadata) -> io::Result<()> {
        let owner = FileOwner { uid: found.uid(), gid: found.gid(), mode: found.mode() & 0o7777 };
        match self.access.refusal(path, owner, self.ours) {
            None => Ok(()),
            Some(refusal) => Err(io::Error::new(ErrorKind::PermissionDenied, refusal)),
        }
    }
}

fn refused(path: &Path, what: &str) -> io::Error {
    let text = format!("{} is {what}: remove it, or choose another directory", path.display());
    io::Error::new(ErrorKind::PermissionDenied, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Mutation that makes it fail: it is enough that the folder is there.
    #[cfg(target_os = "linux")]
    #[test]
    fn a_folder_where_nobody_can_create_files_is_refused() {
        let folder = Path::new("/proc/self/task");
        let refused = Access::of_root(folder).unwrap().try_out(folder).unwrap_err();
        assert!(refused.to_string().contains("cannot write in /proc/self/task"), "{refused}");
    }
}
