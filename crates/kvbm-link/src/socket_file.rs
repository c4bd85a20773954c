//! A socket: private, and no other's.

use std::fs::{self, DirBuilder, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

/// Mode of a folder that is created for the socket.
const FOLDER_MODE: u32 = 0o700;
/// Mode of the socket.
const SOCKET_MODE: u32 = 0o600;
/// Bits that let others of the system write.
const OTHERS_WRITE: u32 = 0o022;
/// Lets only owners remove what lies in a folder.
const STICKY: u32 = 0o1000;

/// A bound Unix socket of mode 0600, in a folder in which no other user can replace it. Its file
/// goes with it.
#[derive(Debug)]
pub struct SocketFile {
    pub(crate) listener: UnixListener,
    path: PathBuf,
    /// Which file it is: another may have taken the path.
    inode: u64,
}

impl SocketFile {
    /// Binds `path`, for accepts that do not wait. The folder is created with mode 0700 where it is
    /// absent. A file of a process that is gone is replaced.
    ///
    /// # Errors
    /// The system's; others can write to the folder; another process listens there, or the file is
    /// no socket.
    pub fn bind(path: &Path) -> io::Result<Self> {
        if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            private_folder(folder)?;
        }
        remove_stale(path)?;
        let listener = UnixListener::bind(path)?;
        fs::set_permissions(path, Permissions::from_mode(SOCKET_MODE))?;
        listener.set_nonblocking(true)?;
        let inode = fs::symlink_metadata(path)?.ino();
        Ok(Self { listener, path: path.to_owned(), inode })
    }

    /// What accepts clients. Whoever accepts one asks
    /// [`expect_same_user`](crate::expect_same_user) first.
    pub fn listener(&self) -> &UnixListener {
        &self.listener
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if fs::symlink_metadata(&self.path).is_ok_and(|found| found.ino() == self.inode) {
            // What cannot be removed is replaced by the next one that binds.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Creates the folder where it is absent; refuses one in which others can replace the socket.
fn private_folder(folder: &Path) -> io::Result<()> {
    match fs::metadata(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            DirBuilder::new().recursive(true).mode(FOLDER_MODE).create(folder)
        }
        Err(error) => Err(error),
        Ok(found) => {
            let own = rustix::process::geteuid().as_raw();
            let is_sticky = found.mode() & STICKY != 0;
            let others_write = found.mode() & OTHERS_WRITE != 0 && !is_sticky;
            let foreign = found.uid() != own && found.uid() != 0;
            if foreign || others_write {
                return Err(io::Error::new(
                    io::ErrorKind::PermissionDenied,
                    format!(
                        "folder {} belongs to user {} with mode {:o}: others could replace the socket; use a folder of mode 0700",
                        folder.display(),
                        found.uid(),
                        found.mode() & 0o7777
                    ),
                ));
            }
            Ok(())
        }
    }
}

fn remove_stale(path: &Path) -> io::Result<()> {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
        Ok(found) if !found.file_type().is_socket() => Err(io::Error::new(
            io::ErrorKind::AlreadyExists,
            format!("{} exists and is no socket: remove it, or use another path", path.display()),
        )),
        Ok(_) => match UnixStream::connect(path) {
            Ok(_) => Err(io::Error::new(
                io::ErrorKind::AddrInUse,
                format!("another process listens at {}: stop it, or use another path", path.display()),
            )),
            Err(_) => fs::remove_file(path),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_is_private_and_goes_with_its_owner() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new").join("rank-0.sock");
        let socket = SocketFile::bind(&path).unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o777;
        assert_eq!((mode(&path), mode(path.parent().unwrap())), (0o600, 0o700));
        let error = SocketFile::bind(&path).err().unwrap();
        assert!(error.to_string().contains("another process listens"), "{error}");
        drop(socket);
        assert!(!path.exists());
    }

    #[test]
    fn a_stale_socket_is_replaced_and_another_file_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rank-0.sock");
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists(), "the file outlives its socket");
        drop(SocketFile::bind(&path).unwrap());
        fs::write(&path, "precious").unwrap();
        let error = SocketFile::bind(&path).err().unwrap();
        assert!(error.to_string().contains("is no socket"), "{error}");
        assert_eq!(fs::read(&path).unwrap(), b"precious");
    }

    #[test]
    fn a_folder_that_others_write_to_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let shared = folder.path().join("shared");
        fs::create_dir(&shared).unwrap();
        fs::set_permissions(&shared, Permissions::from_mode(0o777)).unwrap();
        let error = SocketFile::bind(&shared.join("s")).err().unwrap();
        assert!(error.to_string().contains("mode 777") && error.to_string().contains("0700"), "{error}");
        fs::set_permissions(&shared, Permissions::from_mode(0o1777)).unwrap();
        drop(SocketFile::bind(&shared.join("s")).unwrap());
    }
}
