//! A folder in which nodes publish their announcements: discovery for a few nodes that share a
//! file system, without a server.
//!
//! A file is an announcement. Where its owner renews it, 20 bytes stand behind that: `kvbmlife`,
//! how often it was renewed (64 bits), and how many milliseconds it holds without a renewal (32
//! bits), little-endian.

use std::collections::HashMap;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use kvbm_keys::DeploymentKey;
use kvbm_plan::NodeId;

use crate::{ExportError, MAX_ANNOUNCEMENT_BYTES, NodeAnnouncement};

/// Most files of a folder that are read.
const MAX_FILES: usize = 4096;

/// What a renewal begins with.
const RENEWAL: [u8; 8] = *b"kvbmlife";
const RENEWAL_BYTES: usize = RENEWAL.len() + 8 + 4;

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
        self.write(announcement.node, &announcement.encode(key)?)
    }

    /// Publishes the bytes of an announcement that holds for `lease` without a renewal: until then
    /// its owner has to call this again, with the next larger `renewal`.
    ///
    /// # Errors
    /// [`DirectoryError::Io`].
    pub fn publish_for(
        &self,
        node: NodeId,
        announcement: &[u8],
        renewal: u64,
        lease: Duration,
    ) -> Result<(), DirectoryError> {
        let lease = u32::try_from(lease.as_millis()).unwrap_or(u32::MAX);
        let bytes = [announcement, &RENEWAL, &renewal.to_le_bytes(), &lease.to_le_bytes()].concat();
        self.write(node, &bytes)
    }

    fn write(&self, node: NodeId, bytes: &[u8]) -> Result<(), DirectoryError> {
        let path = self.file(node);
        let part = path.with_extension(format!("part-{}", std::process::id()));
        let io = |operation, error| DirectoryError::Io { operation, path: path.clone(), error };
        let mut options = fs::OpenOptions::new();
        let file = options.write(true).create(true).truncate(true).mode(0o600).open(&part);
        let written = file.and_then(|mut file| file.write_all(bytes));
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
    /// meanwhile is left out. Their owners may be gone: see [`LiveFiles`].
    ///
    /// # Errors
    /// [`DirectoryError::Io`] for the folder, [`DirectoryError::TooMany`].
    pub fn announcements(&self) -> Result<Vec<(String, Vec<u8>)>, DirectoryError> {
        let files = self.files()?.into_iter();
        Ok(files.filter_map(|(name, file)| Some((name, file?.bytes))).collect())
    }

    /// The files of announcements, by name; none where one is there and cannot be read.
    fn files(&self) -> Result<Vec<(String, Option<AnnouncementFile>)>, DirectoryError> {
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
            match read(&entry.path()) {
                Ok(bytes) => found.push((name, Some(AnnouncementFile::new(bytes)))),
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                // A file that is replaced while it is read may be stale for a moment on NFS.
                Err(_) => found.push((name, None)),
            }
        }
        found.sort_by(|(one, _), (other, _)| one.cmp(other));
        Ok(found)
    }
}

fn read(path: &Path) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    // One byte more than is allowed, so that what is too long is seen to be.
    let limit = (MAX_ANNOUNCEMENT_BYTES + RENEWAL_BYTES) as u64 + 1;
    fs::File::open(path)?.take(limit).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// A file of the folder.
#[derive(Clone, Debug, PartialEq, Eq)]
struct AnnouncementFile {
    /// The announcement.
    bytes: Vec<u8>,
    /// How often it was renewed, and how long it holds without a renewal.
    renewal: Option<(u64, Duration)>,
}

impl AnnouncementFile {
    fn new(mut bytes: Vec<u8>) -> Self {
        let renewal = renewal(&bytes);
        if renewal.is_some() {
            bytes.truncate(bytes.len() - RENEWAL_BYTES);
        }
        Self { bytes, renewal }
    }
}

fn renewal(bytes: &[u8]) -> Option<(u64, Duration)> {
    let (_, renewal) = bytes.split_last_chunk::<RENEWAL_BYTES>()?;
    let (count, lease) = renewal.strip_prefix(&RENEWAL)?.split_first_chunk::<8>()?;
    let lease = u32::from_le_bytes(lease.try_into().ok()?);
    Some((u64::from_le_bytes(*count), Duration::from_millis(lease.into())))
}

/// Tells the announcements of nodes that live from those that dead nodes have left: a file that is
/// not renewed in its time, by the clock of the reader, is left out.
///
/// No time of a file system is used, and no clock of another machine. A file whose owner promises
/// no renewal holds as long as it is there. A file that cannot be read counts as not renewed.
#[derive(Debug, Default)]
pub struct LiveFiles {
    /// By name.
    seen: HashMap<String, SeenFile>,
    looked: Option<Instant>,
}

/// A file as it was read last.
#[derive(Debug)]
struct SeenFile {
    file: AnnouncementFile,
    /// For how long the reader has found it unchanged.
    unchanged: Duration,
}

impl LiveFiles {
    /// Looks between which a file has to be unchanged, at least, before it is left out.
    const LOOKS: u32 = 3;

    /// The announcements in `directory` whose owners live, as
    /// [`FileDirectory::announcements`] gives them, and that of `own` in any case.
    ///
    /// # Errors
    /// As there.
    pub fn announcements(
        &mut self,
        directory: &FileDirectory,
        own: NodeId,
        now: Instant,
    ) -> Result<Vec<(String, Vec<u8>)>, DirectoryError> {
        let files = directory.files()?;
        let passed = self.looked.map_or(Duration::ZERO, |looked| now.saturating_duration_since(looked));
        self.looked = Some(now);
        let own = NodeAnnouncement::name_of(own);
        let (mut seen, mut live) = (HashMap::with_capacity(files.len()), Vec::new());
        for (name, file) in files {
            let (file, before) = match (file, self.seen.remove(&name)) {
                (Some(file), Some(known)) if known.file == file => (file, Some(known.unchanged)),
                (Some(file), _) => (file, None),
                (None, Some(known)) => (known.file, Some(known.unchanged)),
                (None, None) => continue,
            };
            let unchanged = match (before, file.renewal) {
                // While the reader, or the file system, stood still nobody could be seen to renew.
                (Some(before), Some((_, lease))) => before.saturating_add(passed.min(lease / Self::LOOKS)),
                _ => Duration::ZERO,
            };
            let is_live = file.renewal.is_none_or(|(_, lease)| unchanged < lease);
            if is_live || name == own {
                live.push((name.clone(), file.bytes.clone()));
            }
            seen.insert(name, SeenFile { file, unchanged });
        }
        self.seen = seen;
        Ok(live)
    }
}
