//! A volume in a directory: a local disk or a mounted network file system.

use std::fs::{self, File};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use crate::access::Access;
use crate::durable_folders::DurableFolders;
use crate::key_locks::{KeyLock, KeyLocks};
use crate::object::{HEADER_BYTES, Header};
use crate::quota::Quota;
use crate::volume::{check, in_time};
use crate::{
    BlobKey, BlobScope, GetRequest, ObjectCorruption, PutRequest, RegistryError, StoreFacts, Volume,
    VolumeDescriptor, VolumeError, one_by_one,
};

/// Where objects are written before they are complete.
const TEMPORARY: &str = ".incomplete";

/// Age at which an unfinished file belongs to a writer that crashed. No put takes longer than
/// [`MAX_DEADLINE`](VolumeDescriptor::MAX_DEADLINE), and clocks of machines that share a directory
/// may differ.
const ABANDONED_AFTER: Duration = VolumeDescriptor::MAX_DEADLINE.saturating_mul(24);

/// Objects as files below a directory that exists already: `file:///path`.
///
/// An object is written beside its place, synced, and renamed, and its folder is synced: after a
/// crash it is there whole or not at all. Several processes may share the directory. Objects have
/// mode 0600, folders 0700; where the directory has the set-group-id bit and its group may write
/// (mode 2770), 0660 and 0770. Links and objects of other users are refused, except those of that
/// group. The capacity counts what this process found at [`open`](Self::open) and did since.
#[derive(Debug)]
pub struct DirectoryVolume {
    descriptor: VolumeDescriptor,
    root: PathBuf,
    access: Access,
    folders: DurableFolders,
    quota: Quota,
    /// Held where an object takes or leaves its place.
    key_locks: KeyLocks,
    /// A random number, for the names of unfinished files: writers on several machines may share
    /// the directory.
    writer: u64,
    next_temporary: AtomicU64,
}

impl DirectoryVolume {
    /// Opens the directory that the descriptor's URI names (`dir:///path`, `file:///path`, or just
    /// a path). What writers that crashed a day ago or more have left unfinished is removed.
    ///
    /// # Errors
    /// [`RegistryError::Open`] where the directory is not there, is none, or cannot be written;
    /// [`RegistryError::Descriptor`].
    pub fn open(descriptor: VolumeDescriptor) -> Result<Self, RegistryError> {
        check(&descriptor)?;
        let uri = &descriptor.uri;
        let path =
            ["file://", "dir://", "dir:"].iter().find_map(|scheme| uri.strip_prefix(scheme)).unwrap_or(uri);
        let root = PathBuf::from(path);
        let open = || {
            let mut access = Access::of_root(&root)?;
            access.create_dirs(&root.join(TEMPORARY))?;
            access.try_out(&root.join(TEMPORARY))?;
            let folders = DurableFolders::below(root.clone(), access);
            folders.ensure(&root.join(TEMPORARY))?;
            let is_counted = descriptor.capacity_bytes.is_some();
            let quota = if is_counted { count_objects(&root)? } else { Quota::default() };
            Ok((access, folders, quota))
        };
        match open() {
            Ok((access, folders, quota)) => {
                let volume = Self {
                    root,
                    access,
                    folders,
                    quota,
                    key_locks: KeyLocks::default(),
                    writer: RandomState::new().build_hasher().finish(),
                    next_temporary: AtomicU64::new(0),
                    descriptor,
                };
                // Files that cannot be removed do no harm. The next opening tries again.
                let _removed = volume.remove_unfinished(ABANDONED_AFTER, SystemTime::now());
                Ok(volume)
            }
            Err(source) => Err(RegistryError::Open { id: descriptor.id, uri: descriptor.uri, source }),
        }
    }

    /// The file of an object: for tools, and for failure tests.
    pub fn object_file(&self, key: &BlobKey) -> PathBuf {
        self.root.join(key.object_path())
    }

    /// Deletes unfinished files of crashed writers that are older than `age`; gives their number.
    ///
    /// `age` must be longer than any put takes: other processes may be writing.
    ///
    /// # Errors
    /// The folder cannot be read, or a file not removed: those before it are.
    pub fn remove_unfinished(&self, age: Duration, now: SystemTime) -> io::Result<u64> {
        let mut removed = 0;
        let remove_old = |entry: &fs::DirEntry| {
            let modified = entry.metadata()?.modified()?;
            let is_old = now.duration_since(modified).is_ok_and(|since| since > age);
            if is_old {
                fs::remove_file(entry.path())?;
            }
            Ok::<_, io::Error>(is_old)
        };
        for entry in fs::read_dir(self.root.join(TEMPORARY))? {
            removed += match remove_old(&entry?) {
                Ok(was_old) => u64::from(was_old),
                // It got its name, or another process removed it.
                Err(error) if error.kind() == io::ErrorKind::NotFound => 0,
                Err(error) => return Err(error),
            };
        }
        Ok(removed)
    }

    fn get_object(&self, request: &mut GetRequest<'_>) -> Result<(), VolumeError> {
        let volume = self.descriptor.id;
        let key = request.key;
        let io_error = |source| self.io_error("get", key, source);
        let corrupt = |reason| VolumeError::Corrupt { volume, key, reason };
        let file = self.look("get", key, self.access.open(&self.object_file(&key)))?;
        let mut file = file.ok_or(VolumeError::NotFound { volume, key })?;
        let length = file.metadata().map_err(io_error)?.len();
        if length < HEADER_BYTES as u64 {
            return Err(corrupt(ObjectCorruption::NoHeader(length)));
        }
        // The file may have been cut since: an early end is damage too.
        let cut = |source: io::Error| match source.kind() {
            io::ErrorKind::UnexpectedEof => corrupt(ObjectCorruption::Cut),
            _ => io_error(source),
        };
        let mut head = [0; HEADER_BYTES];
        file.read_exact(&mut head).map_err(cut)?;
        let mut table = vec![0; Header::table_bytes(&head).map_err(corrupt)?];
        file.read_exact(&mut table).map_err(cut)?;
        let header = Header::decode(&head, &table, &key, length, &request.seal).map_err(corrupt)?;
        header.check_request(volume, request)?;
        file.seek(SeekFrom::Start(u64::from(header.payload_offset))).map_err(io_error)?;
        let mut filled: Vec<&mut [u8]> = header.filled(request).collect();
        for part in &mut filled {
            file.read_exact(part).map_err(cut)?;
        }
        header.verify(filled.iter().map(|part| &**part)).map_err(corrupt)
    }

    fn put_object(&self, request: &PutRequest<'_>, deadline: Instant) -> Result<(), VolumeError> {
        let header = Header::new(self.descriptor.id, request, self.descriptor.alignment)?;
        let failed = |source| self.put_error(&request.key, header.object_length(), source);
        let path = self.object_file(&request.key);
        let replaced = fs::metadata(&path).map_or(0, |old| old.len());
        self.quota.reserve(&self.descriptor, &request.key, header.object_length(), replaced)?;

        let temporary = self.temporary_file();
        let placed = self.write_synced(&temporary, &header, &request.pieces).map_err(failed).and_then(|()| {
            let _ours = self.claim("put", &request.key, deadline)?;
            self.place(&request.key, &temporary, &path).map_err(failed)
        });
        if placed.is_err() {
            self.quota.release(&request.key, header.object_length());
            // It may not even exist, and the write's error is the one to report.
            let _ = fs::remove_file(&temporary);
        }
        // The object is visible from here on, durable or not.
        placed?.sync_all().map_err(|source| self.io_error("put", request.key, source))
    }

    fn write_synced(&self, path: &Path, header: &Header, pieces: &[&[u8]]) -> io::Result<()> {
        let mut file = self.access.create_new(path)?;
        file.write_all(&header.encode())?;
        for piece in pieces {
            file.write_all(piece)?;
        }
        file.sync_all()
    }

    fn temporary_file(&self) -> PathBuf {
        let number = self.next_temporary.fetch_add(1, Ordering::Relaxed);
        self.root.join(TEMPORARY).join(format!("{:016x}-{number}", self.writer))
    }

    /// Locks the key for a change of its object.
    fn claim(
        &self,
        operation: &'static str,
        key: &BlobKey,
        deadline: Instant,
    ) -> Result<KeyLock<'_>, VolumeError> {
        let late = VolumeError::DeadlineExceeded { volume: self.descriptor.id, operation, key: *key };
        self.key_locks.take(key, deadline).ok_or(late)
    }

    /// Renames an object to its path, and removes a former one from the quota. Returns the folder,
    /// whose names the caller syncs.
    fn place(&self, key: &BlobKey, temporary: &Path, path: &Path) -> io::Result<File> {
        let path_of_folder = path.parent().unwrap_or(&self.root);
        self.folders.ensure(path_of_folder)?;
        let folder = File::open(path_of_folder)?;
        let replaced = fs::metadata(path).map_or(0, |old| old.len());
        fs::rename(temporary, path)?;
        self.quota.release(key, replaced);
        Ok(folder)
    }

    fn delete_object(&self, key: &BlobKey, deadline: Instant) -> Result<bool, VolumeError> {
        let path = self.object_file(key);
        let _ours = self.claim("delete", key, deadline)?;
        let removed = fs::metadata(&path).and_then(|old| fs::remove_file(&path).map(|()| old.len()));
        let removed = self.look("delete", *key, removed)?;
        self.quota.release(key, removed.unwrap_or(0));
        Ok(removed.is_some())
    }

    /// What was looked for, unless it is not there.
    fn look<T>(
        &self,
        operation: &'static str,
        key: BlobKey,
        looked: io::Result<T>,
    ) -> Result<Option<T>, VolumeError> {
        match looked {
            Ok(found) => Ok(Some(found)),
            Err(error) if error.kind() == io::ErrorKind::NotFound && self.check_mounted().is_ok() => Ok(None),
            Err(error) => Err(self.io_error(operation, key, error)),
        }
    }

    /// Whether this is still the directory that was opened. Where its mount is gone, nothing is in
    /// its place, and that says nothing of the objects.
    fn check_mounted(&self) -> io::Result<()> {
        match fs::metadata(self.root.join(TEMPORARY)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let root = self.root.display();
                let text = format!(
                    "{root} has no folder {TEMPORARY} any more: is what belongs there still mounted?"
                );
                Err(io::Error::new(io::ErrorKind::NotConnected, text))
            }
            found => found.map(drop),
        }
    }

    /// A full file system is no failure: what is there can be read, and what is used least makes
    /// room.
    fn put_error(&self, key: &BlobKey, needed: u64, source: io::Error) -> VolumeError {
        let error = self.io_error("put", *key, source);
        if error.is_full() {
            return VolumeError::Full { volume: self.descriptor.id, needed, free: 0 };
        }
        error
    }

    fn io_error(&self, operation: &'static str, key: BlobKey, source: io::Error) -> VolumeError {
        let explained = match source.kind() {
            io::ErrorKind::NotFound => self.check_mounted().err(),
            kind @ io::ErrorKind::ReadOnlyFilesystem => Some(io::Error::new(kind, self.read_only())),
            _ => None,
        };
        VolumeError::Io { volume: self.descriptor.id, operation, key, source: explained.unwrap_or(source) }
    }

    /// Systems make file systems read-only when their device fails.
    fn read_only(&self) -> String {
        let root = self.root.display();
        format!(
            "{root} is read-only, and only read from now on: look for its device in the kernel's log, and mount it writable"
        )
    }
}

impl Volume for DirectoryVolume {
    fn descriptor(&self) -> &VolumeDescriptor {
        &self.descriptor
    }

    fn get(&self, requests: &mut [GetRequest<'_>], deadline: Instant) -> Vec<Result<(), VolumeError>> {
        let volume = self.descriptor.id;
        one_by_one(volume, "get", requests, deadline, |request| self.get_object(request))
    }

    fn put(&self, requests: &[PutRequest<'_>], deadline: Instant) -> Vec<Result<(), VolumeError>> {
        let volume = self.descriptor.id;
        one_by_one(volume, "put", requests, deadline, |request| self.put_object(request, deadline))
    }

    fn exists(&self, keys: &[BlobKey], deadline: Instant) -> Vec<Result<bool, VolumeError>> {
        let exists = |key: &BlobKey| {
            let found = self.look("exists", *key, fs::metadata(self.object_file(key)));
            found.map(|found| found.is_some())
        };
        one_by_one(self.descriptor.id, "exists", keys, deadline, exists)
    }

    fn delete(&self, keys: &[BlobKey], deadline: Instant) -> Vec<Result<bool, VolumeError>> {
        one_by_one(self.descriptor.id, "delete", keys, deadline, |key| self.delete_object(key, deadline))
    }

    fn list(
        &self,
        scope: &BlobScope,
        after: Option<&BlobKey>,
        max: usize,
        deadline: Instant,
    ) -> Result<Vec<BlobKey>, VolumeError> {
        in_time(self.descriptor.id, scope, deadline)?;
        let after = after.map_or_else(String::new, BlobKey::object_path);
        let mut keys = Vec::new();
        let walked = list_below(&self.root, &scope.prefix(), &after, max, deadline, &mut keys);
        let walked = walked.and_then(|()| if keys.is_empty() { self.check_mounted() } else { Ok(()) });
        let failed = |source| VolumeError::List { volume: self.descriptor.id, scope: *scope, source };
        walked.map(|()| keys).map_err(failed)
    }

    fn used_bytes(&self) -> Option<u64> {
        self.descriptor.capacity_bytes.map(|_| self.quota.used())
    }

    fn facts(&self, _deadline: Instant) -> StoreFacts {
        StoreFacts { folder: Some(self.root.clone()), conditional_puts: None }
    }
}

/// Adds the objects below `root/prefix` whose path comes after `after`, in the order of paths.
/// Folders that are not there, or vanish meanwhile, hold nothing.
fn list_below(
    root: &Path,
    prefix: &str,
    after: &str,
    max: usize,
    deadline: Instant,
    keys: &mut Vec<BlobKey>,
) -> io::Result<()> {
    if Instant::now() >= deadline {
        return Err(io::Error::new(io::ErrorKind::TimedOut, "the deadline passed; give more time"));
    }
    let mut names = Vec::new();
    let entries = match fs::read_dir(root.join(prefix)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    for entry in entries {
        let entry = entry?;
        // Names that are no text are none of ours.
        let Ok(name) = entry.file_name().into_string() else { continue };
        match entry.file_type() {
            Ok(kind) => names.push(if kind.is_dir() { name + "/" } else { name }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    names.sort_unstable();
    for name in names {
        let path = format!("{prefix}{name}");
        let is_past = path.as_str() > after || after.starts_with(&path);
        if keys.len() >= max || !is_past {
            continue;
        }
        if name.ends_with('/') {
            list_below(root, &path, after, max, deadline, keys)?;
        } else if path.as_str() > after {
            keys.extend(BlobKey::parse(&path));
        }
    }
    Ok(())
}

/// Counts all objects below `root`. Files that vanish meanwhile do not count.
fn count_objects(root: &Path) -> io::Result<Quota> {
    let mut quota = Quota::default();
    let mut folders = vec![String::new()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(root.join(&folder))? {
            let entry = entry?;
            // Names that are no text are none of ours.
            let Ok(name) = entry.file_name().into_string() else { continue };
            match entry.metadata() {
                Ok(found) if found.is_dir() => folders.push(format!("{folder}{name}/")),
                Ok(found) => quota.found(&format!("{folder}{name}"), found.len()),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
    }
    Ok(quota)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::BlobSlice;
    use kvbm_plan::{GroupId, NamespaceId, NamespaceTag, SequenceHash, VolumeId};

    /// Mutation that makes it fail: every failed write is one of the store, which is left alone
    /// then with all that it holds.
    #[test]
    fn a_full_file_system_has_no_room_and_does_not_fail() {
        let folder = tempfile::tempdir().expect("a folder");
        let uri = format!("dir://{}", folder.path().display());
        let volume = DirectoryVolume::open(VolumeDescriptor::new(VolumeId(3), uri)).expect("a volume");
        let key = BlobKey {
            namespace: NamespaceTag::from_bytes([1; 16]),
            label: NamespaceId(2),
            group: GroupId(0),
            hash: SequenceHash::from_bytes([3; 16]),
            slice: BlobSlice { first_layer: 0, num_layers: 1, first_head: 0, num_heads: 1 },
        };
        for kind in [io::ErrorKind::StorageFull, io::ErrorKind::QuotaExceeded] {
            let error = volume.put_error(&key, 700, kind.into());
            assert!(matches!(error, VolumeError::Full { needed: 700, free: 0, .. }), "{error}");
        }
        let error = volume.put_error(&key, 700, io::ErrorKind::PermissionDenied.into());
        assert!(matches!(error, VolumeError::Io { operation: "put", .. }), "{error}");
        let error = volume.put_error(&key, 700, io::ErrorKind::ReadOnlyFilesystem.into());
        let root = folder.path().display();
        assert!(
            error.is_forbidden() && error.to_string().contains(&format!("{root} is read-only")),
            "{error}"
        );
    }
}
