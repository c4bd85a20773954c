//! Both volumes under the conformance suite, and what is special to each.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Barrier, Mutex};
use std::time::{Duration, Instant, SystemTime};

use kvbm_plan::{
    GroupId, HeadRange, NamespaceId, NamespaceTag, Rank, RankSlice, Replication, SequenceHash, VolumeId,
};
use kvbm_volume::conformance::{self, Subject};
use kvbm_volume::{
    BlobKey, BlobScope, BlobSlice, DirectoryVolume, MAX_ALIGNMENT, MemoryVolume, RegistryError, Volume,
    VolumeDescriptor, VolumeError, VolumeExt, VolumeRegistry,
};

#[derive(Default)]
struct InMemory {
    latest: Mutex<Option<Arc<MemoryVolume>>>,
}

impl Subject for InMemory {
    fn open(&self, descriptor: VolumeDescriptor) -> Arc<dyn Volume> {
        let volume = Arc::new(MemoryVolume::open(descriptor).expect("a sound descriptor"));
        *self.latest.lock().expect("no test panicked") = Some(Arc::clone(&volume));
        volume
    }

    fn tamper(&self, key: &BlobKey, change: &mut dyn FnMut(&mut Vec<u8>)) -> bool {
        self.latest
            .lock()
            .expect("no test panicked")
            .as_ref()
            .is_some_and(|volume| volume.tamper(key, change))
    }
}

#[derive(Default)]
struct InDirectory {
    folders: Mutex<Vec<tempfile::TempDir>>,
}

impl Subject for InDirectory {
    fn open(&self, descriptor: VolumeDescriptor) -> Arc<dyn Volume> {
        let folder = tempfile::tempdir().expect("a folder");
        let volume = open_directory(&folder, &descriptor);
        self.folders.lock().expect("no test panicked").push(folder);
        Arc::new(volume)
    }

    fn tamper(&self, key: &BlobKey, change: &mut dyn FnMut(&mut Vec<u8>)) -> bool {
        let folders = self.folders.lock().expect("no test panicked");
        let file = folders.last().expect("an open volume").path().join(key.object_path());
        let mut object = fs::read(&file).expect("an object");
        change(&mut object);
        fs::write(&file, object).expect("a writable object");
        true
    }
}

fn open_directory(folder: &tempfile::TempDir, descriptor: &VolumeDescriptor) -> DirectoryVolume {
    let uri = format!("file://{}", folder.path().display());
    DirectoryVolume::open(VolumeDescriptor { uri, ..descriptor.clone() }).expect("an existing folder")
}

fn descriptor() -> VolumeDescriptor {
    VolumeDescriptor::new(VolumeId(3), "memory:")
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

fn key() -> BlobKey {
    let slice = RankSlice {
        rank: Rank(1),
        first_layer: 16,
        num_layers: 8,
        heads: HeadRange { start: 4, count: 2 },
        replication: Replication::None,
    };
    BlobKey {
        namespace: NamespaceTag::from_bytes([0xaa; 16]),
        label: NamespaceId(0x1234),
        group: GroupId(5),
        hash: SequenceHash::from_bytes([0xbc; 16]),
        slice: BlobSlice::from(&slice),
    }
}

#[test]
fn memory_conforms() {
    let subject = InMemory::default();
    conformance::check(&subject);
    assert!(subject.latest.lock().unwrap().is_some());
}

#[test]
fn directory_conforms() {
    let subject = InDirectory::default();
    conformance::check(&subject);
    for folder in subject.folders.lock().unwrap().iter() {
        let unfinished = fs::read_dir(folder.path().join(".incomplete")).unwrap().count();
        assert_eq!(unfinished, 0, "no put leaves an unfinished file");
    }
}

#[test]
fn object_paths_are_fixed() {
    let expected = format!("{}/00001234/g5/bc/{}.l16+8.h4+2", "aa".repeat(16), "bc".repeat(16));
    assert_eq!(key().object_path(), expected);
    assert_eq!(key().to_string(), expected);
    let longest =
        BlobSlice { first_layer: u32::MAX, num_layers: u32::MAX, first_head: u32::MAX, num_heads: u32::MAX };
    assert!(BlobKey { slice: longest, group: GroupId(u16::MAX), ..key() }.object_path().len() <= 140);
    assert_eq!(BlobKey::parse(&expected), Some(key()));
    for other in [
        "",
        "a/b/c/d/e",
        &expected.replace("+8", "+08"),
        &expected.replace("/bc/", "/bd/"),
        &format!("{expected}/x"),
        &expected[1..],
    ] {
        assert_eq!(BlobKey::parse(other), None, "{other}");
    }
}

#[test]
fn a_directory_is_remembered() {
    let folder = tempfile::tempdir().unwrap();
    let limited = VolumeDescriptor { capacity_bytes: Some(1 << 20), ..descriptor() };
    let first = open_directory(&folder, &limited);
    first.put_one(&key(), b"0123456789", soon()).unwrap();
    let used = first.used_bytes();
    drop(first);
    fs::write(folder.path().join("not-ours"), [0; 5000]).unwrap();
    let second = open_directory(&folder, &limited);
    assert_eq!(second.get_one(&key(), 10, soon()).unwrap(), b"0123456789");
    assert_eq!(second.used_bytes(), used);
}

#[test]
fn unfinished_files_of_a_crash_are_no_objects_and_can_be_removed() {
    let folder = tempfile::tempdir().unwrap();
    let volume = open_directory(&folder, &descriptor());
    fs::write(folder.path().join(".incomplete/1-2-3"), b"half of it").unwrap();
    assert!(matches!(volume.get_one(&key(), 10, soon()), Err(VolumeError::NotFound { .. })));

    let age = Duration::from_secs(3600);
    let now = SystemTime::now();
    assert_eq!(volume.remove_unfinished(age, now).unwrap(), 0, "it may still be written");
    assert_eq!(volume.remove_unfinished(age, now + age * 2).unwrap(), 1);

    // An opening removes what is too old to be anybody's, and nothing else.
    let day = VolumeDescriptor::MAX_DEADLINE * 24;
    for (name, age) in [("old", day + age), ("young", VolumeDescriptor::MAX_DEADLINE * 2)] {
        let file = fs::File::create(folder.path().join(".incomplete").join(name)).unwrap();
        file.set_modified(now - age).unwrap();
    }
    drop(open_directory(&folder, &descriptor()));
    let left = fs::read_dir(folder.path().join(".incomplete")).unwrap();
    let left: Vec<_> = left.map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["young"]);
}

#[test]
fn a_failed_put_says_which_object_and_counts_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let volume = open_directory(&folder, &VolumeDescriptor { capacity_bytes: Some(1 << 20), ..descriptor() });
    // A file where a folder is needed.
    fs::write(folder.path().join("aa".repeat(16)), b"").unwrap();
    let error = volume.put_one(&key(), b"0123456789", soon()).unwrap_err();
    assert!(matches!(error, VolumeError::Io { operation: "put", .. }), "{error}");
    assert!(error.to_string().contains(&key().to_string()) && !error.is_miss(), "{error}");
    assert_eq!(volume.used_bytes(), Some(0));
    assert_eq!(fs::read_dir(folder.path().join(".incomplete")).unwrap().count(), 0);
}

/// Mutation that makes it fail: `check_mounted` finds nothing wrong.
#[test]
fn a_directory_whose_mount_is_gone_says_nothing_of_its_objects() {
    let folder = tempfile::tempdir().unwrap();
    let [place, away] = ["place", "away"].map(|name| folder.path().join(name));
    fs::create_dir(&place).unwrap();
    let uri = place.display().to_string();
    let volume = DirectoryVolume::open(VolumeDescriptor { uri, ..descriptor() }).unwrap();
    volume.put_one(&key(), b"kept", soon()).unwrap();
    // What it was mounted on shows.
    fs::rename(&place, &away).unwrap();
    fs::create_dir(&place).unwrap();
    let scope = BlobScope { namespace: key().namespace, label: None };
    for error in [
        volume.get_one(&key(), 4, soon()).unwrap_err(),
        volume.put_one(&key(), b"lost", soon()).unwrap_err(),
        volume.exists(&[key()], soon()).remove(0).unwrap_err(),
        volume.delete(&[key()], soon()).remove(0).unwrap_err(),
        volume.list(&scope, None, 10, soon()).unwrap_err(),
    ] {
        assert!(!error.is_miss() && error.to_string().contains("still mounted?"), "{error}");
        assert!(error.to_string().contains(&place.display().to_string()), "{error}");
    }
    assert_eq!(fs::read_dir(&place).unwrap().count(), 0, "nothing was written there");
    fs::remove_dir(&place).unwrap();
    fs::rename(&away, &place).unwrap();
    assert_eq!(volume.get_one(&key(), 4, soon()).unwrap(), b"kept");
}

/// Mutation that makes it fail: what a put replaces is what was there before its bytes were
/// written.
#[test]
fn concurrent_changes_of_one_object_leave_the_count_right() {
    let folder = tempfile::tempdir().unwrap();
    let limited = VolumeDescriptor { capacity_bytes: Some(1 << 20), ..descriptor() };
    let volume = open_directory(&folder, &limited);
    for round in 0..20 {
        let start = Barrier::new(5);
        std::thread::scope(|scope| {
            for writer in 0..4 {
                let (start, volume) = (&start, &volume);
                scope.spawn(move || {
                    start.wait();
                    volume.put_one(&key(), &vec![1; 100 * (writer + 1)], soon()).unwrap();
                });
            }
            start.wait();
            volume.delete(&[key()], soon()).remove(0).unwrap();
        });
        let there = fs::metadata(volume.object_file(&key())).map_or(0, |file| file.len());
        assert_eq!(volume.used_bytes(), Some(there), "round {round}");
    }
}

#[test]
fn a_volume_is_never_created() {
    let folder = tempfile::tempdir().unwrap();
    let missing = folder.path().join("not-mounted");
    let file = folder.path().join("file");
    fs::write(&file, b"").unwrap();
    let registry = VolumeRegistry::new();
    for path in [&missing, &file] {
        let uri = path.display().to_string();
        let error =
            registry.register_volume(VolumeDescriptor { uri: uri.clone(), ..descriptor() }).err().unwrap();
        assert!(matches!(error, RegistryError::Open { .. }), "{error}");
        assert!(error.to_string().contains(&uri) && error.to_string().contains("mount it first"), "{error}");
    }
    assert!(!missing.exists());
}

#[cfg(target_os = "linux")]
#[test]
fn a_directory_that_cannot_be_written_is_refused() {
    // Nobody creates files there, as on a file system that is mounted for reading.
    let uri = "/proc/self/task".to_owned();
    let refused = DirectoryVolume::open(VolumeDescriptor { uri, ..descriptor() }).unwrap_err();
    assert!(matches!(refused, RegistryError::Open { .. }), "{refused}");
}

/// Modes of the folders and files below `root`.
fn modes(root: &Path, found: &mut Vec<(PathBuf, u32)>) {
    for entry in fs::read_dir(root).expect("a folder") {
        let path = entry.expect("an entry").path();
        found.push((path.clone(), fs::metadata(&path).expect("it is there").permissions().mode() & 0o777));
        if path.is_dir() {
            modes(&path, found);
        }
    }
}

#[test]
fn objects_are_private_unless_the_directory_is_shared_by_its_group() {
    for (root_mode, file_mode, dir_mode) in
        [(0o755, 0o600, 0o700), (0o777, 0o600, 0o700), (0o2750, 0o600, 0o700), (0o2770, 0o660, 0o770)]
    {
        let folder = tempfile::tempdir().unwrap();
        fs::set_permissions(folder.path(), Permissions::from_mode(root_mode)).unwrap();
        let volume = open_directory(&folder, &descriptor());
        volume.put_one(&key(), b"keys and values", soon()).unwrap();
        assert_eq!(volume.get_one(&key(), 15, soon()).unwrap(), b"keys and values");
        let mut found = Vec::new();
        modes(folder.path(), &mut found);
        assert!(found.len() >= 3, "{found:?}");
        for (path, mode) in found {
            let expected = if path.is_dir() { dir_mode } else { file_mode };
            assert_eq!(mode, expected, "{} has {mode:o} below {root_mode:o}", path.display());
        }
        let root = fs::metadata(folder.path()).unwrap().permissions().mode() & 0o7777;
        assert_eq!(root, root_mode, "the operator's directory stays as it is");
    }
}

#[test]
fn links_and_what_another_user_owns_are_refused() {
    const OTHER: u32 = 12_345;
    let folder = tempfile::tempdir().unwrap();
    let volume = open_directory(&folder, &descriptor());
    volume.put_one(&key(), b"kept", soon()).unwrap();
    let object = volume.object_file(&key());
    let elsewhere = folder.path().join("elsewhere");
    fs::rename(&object, &elsewhere).unwrap();
    std::os::unix::fs::symlink(&elsewhere, &object).unwrap();
    let error = volume.get_one(&key(), 4, soon()).unwrap_err();
    assert!(error.to_string().contains("symbolic link") && !error.is_miss(), "{error}");
    // A put takes the link's place.
    volume.put_one(&key(), b"anew", soon()).unwrap();
    assert_eq!(volume.get_one(&key(), 4, soon()).unwrap(), b"anew");
    // A folder that is a link could lead anywhere.
    let parent = object.parent().unwrap();
    fs::rename(parent, folder.path().join("moved")).unwrap();
    std::os::unix::fs::symlink(folder.path().join("moved"), parent).unwrap();
    let error = open_directory(&folder, &descriptor()).put_one(&key(), b"kept", soon()).unwrap_err();
    assert!(error.to_string().contains("not a directory"), "{error}");
    fs::remove_file(parent).unwrap();
    fs::rename(folder.path().join("moved"), parent).unwrap();
    // The rest needs the superuser, who alone can give files away.
    if std::os::unix::fs::chown(&object, Some(OTHER), None).is_err() {
        return;
    }
    let error = volume.get_one(&key(), 4, soon()).unwrap_err().to_string();
    for part in ["user 12345", "mode 0600", "chown", object.to_str().unwrap()] {
        assert!(error.contains(part), "{error} names {part}");
    }
    fs::set_permissions(folder.path(), Permissions::from_mode(0o2770)).unwrap();
    let shared = open_directory(&folder, &descriptor());
    assert_eq!(shared.get_one(&key(), 4, soon()).unwrap(), b"anew", "a group that may write is trusted");
    fs::set_permissions(folder.path(), Permissions::from_mode(0o700)).unwrap();
    std::os::unix::fs::chown(folder.path().join(".incomplete"), Some(OTHER), None).unwrap();
    let uri = folder.path().display().to_string();
    let refused = DirectoryVolume::open(VolumeDescriptor { uri, ..descriptor() }).unwrap_err().to_string();
    assert!(refused.contains("user 12345"), "{refused}");
}

#[test]
fn registering_and_unregistering() {
    let folder = tempfile::tempdir().unwrap();
    let registry = VolumeRegistry::default();
    let volume = registry.register_volume(descriptor()).unwrap();
    let uri = folder.path().display().to_string();
    registry.register_volume(VolumeDescriptor { id: VolumeId(1), uri, ..descriptor() }).unwrap();
    let ids: Vec<VolumeId> = registry.descriptors().iter().map(|descriptor| descriptor.id).collect();
    assert_eq!(ids, [VolumeId(1), VolumeId(3)]);
    assert!(Arc::ptr_eq(&volume, &registry.get(VolumeId(3)).unwrap()));

    let error = registry.register_volume(descriptor()).err().unwrap().to_string();
    assert!(error.contains("volume 3 is already registered as \"memory:\""), "{error}");
    let error = registry.register(Arc::clone(&volume)).unwrap_err();
    assert!(matches!(error, RegistryError::Duplicate { id: VolumeId(3), .. }), "{error}");

    volume.put_one(&key(), b"kept", soon()).unwrap();
    let given_back = registry.unregister_volume(VolumeId(3)).ok().unwrap();
    assert_eq!(given_back.get_one(&key(), 4, soon()).unwrap(), b"kept", "its objects stay");
    for error in
        [registry.get(VolumeId(3)).err().unwrap(), registry.unregister_volume(VolumeId(3)).err().unwrap()]
    {
        assert!(error.to_string().contains("registered: [VolumeId(1)]"), "{error}");
    }
}

#[test]
fn descriptors_are_checked() {
    let registry = VolumeRegistry::new();
    for alignment in [0, 3, MAX_ALIGNMENT * 2] {
        let error = registry.register_volume(VolumeDescriptor { alignment, ..descriptor() }).err().unwrap();
        assert!(error.to_string().contains(&format!("alignment {alignment} is not allowed")), "{error}");
    }
    let error = registry
        .register_volume(VolumeDescriptor { deadline: Duration::ZERO, ..descriptor() })
        .err()
        .unwrap();
    assert!(error.to_string().contains("deadline 0ns"), "{error}");
    for uri in ["", "s4://bucket"] {
        let error =
            registry.register_volume(VolumeDescriptor { uri: uri.into(), ..descriptor() }).err().unwrap();
        assert!(error.to_string().contains("known schemes: [\"dir\", \"file\", \"memory\""), "{error}");
    }
}

#[test]
fn a_vendor_adds_a_scheme() {
    let registry = VolumeRegistry::new()
        .with_scheme("vendor", Box::new(|descriptor| Ok(Arc::new(MemoryVolume::open(descriptor)?))));
    let uri = "vendor://pool/1".to_owned();
    let volume =
        registry.register_volume(VolumeDescriptor { uri: uri.clone(), ..descriptor() }).ok().unwrap();
    assert_eq!(volume.descriptor().uri, uri);
    // It need not know what a descriptor may say.
    for alignment in [0, 3] {
        let id = VolumeId(4);
        let refused =
            registry.register_volume(VolumeDescriptor { id, alignment, uri: uri.clone(), ..descriptor() });
        assert!(matches!(refused.err().unwrap(), RegistryError::Descriptor { field: "alignment", .. }));
    }
    let id = VolumeId(5);
    let unknown = VolumeDescriptor::new(id, "s4://user:hunter2@pool/p?secret_key=hunter2");
    let told = registry.register_volume(unknown).err().unwrap().to_string();
    assert!(told.contains("\"s4://pool/p\"") && !told.contains("hunter2"), "{told}");
}

#[test]
fn a_uri_without_a_scheme_is_a_path() {
    let registry = VolumeRegistry::new();
    for uri in ["./no-such-folder", "no-such-folder", "/no/such/folder", "../no:such"] {
        let error =
            registry.register_volume(VolumeDescriptor { uri: uri.into(), ..descriptor() }).err().unwrap();
        assert!(matches!(error, RegistryError::Open { .. }), "{error}");
    }
}
