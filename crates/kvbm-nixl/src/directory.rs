//! A folder in which nodes publish their announcements: discovery for a few nodes that share a
//! file system, without a server.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use kvbm_keys::DeploymentKey;
use kvbm_plan::NodeId;

use crate::{ExportError, MAX_ANNOUNCEMENT_BYTES, NodeAnnouncement};

/// Most files of a folder that are read.
const MAX_FILES: usize = 4096;

/// A folder of announcements: one file a node, `node-ID.kvbm`, written in place at once.
///
/// Whoever may write to the folder may join the deployment, so it is made for its owner alone
/// (mode 0700), and a folder that others may write to is refused.
#[derive(Clone, Debug)]
pub struct FileDirectory {
    folder: PathBuf,
}

/// What a folder of announcements cannot do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DirectoryError {
    /// The file system refuses.
    #[error("{operation} {path}: {error}")]
    Io {
        /// What was tried.
        operation: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// What the system says.
        error: std::io::Error,
    },
    /// Others may write to the folder.
    #[error(
        "{path} has mode {mode:o} and owner {owner}: others could announce nodes there; use a folder of your own with \
         mode 0700"
    )]
    Open {
        /// The folder.
        path: PathBuf,
        /// Its mode.
        mode: u32,
        /// Its owner.
        owner: u32,
    },
    /// Too many files.
    #[error("{path} holds more than {MAX_FILES} files; use a folder for announcements alone")]
    TooMany {
        /// The folder.
        path: PathBuf,
    },
    /// The announcement cannot be written.
    #[error(transparent)]
    Export(#[from] ExportError),
}

impl FileDirectory {
    /// The folder, made for its owner alone if it is not there.
    ///
    /// # Errors
    /// [`DirectoryError::Io`], [`DirectoryError::Open`].
    pub fn open(folder: &Path) -> Result<Self, DirectoryError> {
        let io = |operation, error| DirectoryError::Io { operation, path: folder.to_owned(), error };
        let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(folder);
        made.map_err(|error| io("cannot make the folder", error))?;
        let status = fs::metadata(folder).map_err(|error| io("cannot look at the folder", error))?;
        let (mode, owner) = (status.mode() & 0o7777, status.uid());
        if mode & 0o022 != 0 || owner != rustix::process::geteuid().as_raw() {
            return Err(DirectoryError::Open { path: folder.to_owned(), mode, owner });
        }
        Ok(Self { folder: folder.to_owned() })
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    fn file(&self, node: NodeId) -> PathBuf {
        self.folder.join(NodeAnnouncement::name_of(node))
    }

    /// Publishes an announcement in place of the node's last one, signed with the deployment's
    /// `key`, if it has one.
    ///
    /// # Errors
    /// [`DirectoryError::Export`], [`DirectoryError::Io`].
    pub fn publish(
        &self,
        announcement: &NodeAnnouncement,
        key: Option<&DeploymentKey>,
    ) -> Result<(), DirectoryError> {
        let bytes = announcement.encode(key)?;
        let path = self.file(announcement.node);
        let part = path.with_extension(format!("part-{}", std::process::id()));
        let io = |operation, error| DirectoryError::Io { operation, path: path.clone(), error };
        let mut options = fs::OpenOptions::new();
        let file = options.write(true).create(true).truncate(true).mode(0o600).open(&part);
        let written = file.and_then(|mut file| file.write_all(&bytes));
        written.map_err(|error| io("cannot write beside", error))?;
        fs::rename(&part, &path).map_err(|error| io("cannot replace", error))
    }

    /// Takes the node's announcement away. A node without one is no error.
    ///
    /// # Errors
    /// [`DirectoryError::Io`].
    pub fn withdraw(&self, node: NodeId) -> Result<(), DirectoryError> {
        let path = self.file(node);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(DirectoryError::Io { operation: "cannot remove", path, error })
            }
            _ => Ok(()),
        }
    }

    /// The announcements as they lie there, unchecked: file name and bytes. A file that goes
    /// meanwhile is left out.
    ///
    /// # Errors
    /// [`DirectoryError::Io`] for the folder, [`DirectoryError::TooMany`].
    pub fn announcements(&self) -> Result<Vec<(String, Vec<u8>)>, DirectoryError> {
        let path = self.folder.clone();
        let io = |error| DirectoryError::Io { operation: "cannot list", path: path.clone(), error };
        let mut found = Vec::new();
        for (count, entry) in fs::read_dir(&self.folder).map_err(io)?.enumerate() {
            if count >= MAX_FILES {
                return Err(DirectoryError::TooMany { path });
            }
            let entry = entry.map_err(io)?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if name.strip_prefix("node-").and_then(|name| name.strip_suffix(".kvbm")).is_none() {
                continue;
            }
            if let Ok(file) = fs::File::open(entry.path()) {
                let mut bytes = Vec::new();
                // One byte more than is allowed, so that what is too long is seen to be.
                let limit = MAX_ANNOUNCEMENT_BYTES as u64 + 1;
                if file.take(limit).read_to_end(&mut bytes).is_ok() {
                    found.push((name, bytes));
                }
            }
        }
        found.sort();
        Ok(found)
    }
}
