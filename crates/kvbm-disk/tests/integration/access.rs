//! Who may read what the engine keeps: modes, owners and links.

use kvbm_disk::{Archive, DiskConfig, DiskEngine, EngineMode, FileAccess, OpenError, offline};
use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::slice;
use std::time::Duration;

fn config(dirs: &[PathBuf], access: FileAccess) -> DiskConfig {
    let mut config = DiskConfig::new(&dirs[0], 4, 8192, [7; 16]);
    config.more_dirs = dirs[1..].to_vec();
    config.engine = EngineMode::Buffered;
    config.access = access;
    config
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o777
}

/// The mode of the directories and of all files in them.
fn modes(dirs: &[PathBuf]) -> Vec<(PathBuf, u32)> {
    let mut modes = Vec::new();
    for dir in dirs {
        modes.push((dir.clone(), mode(dir)));
        let files = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
        modes.extend(files.map(|file| (file.clone(), mode(&file))));
    }
    modes
}

fn open(dirs: &[PathBuf], access: FileAccess) -> Result<(), OpenError> {
    let (engine, _) = DiskEngine::open(config(dirs, access))?;
    assert!(engine.shutdown(Duration::MAX), "no deadline is too long");
    Ok(())
}

#[test]
fn files_and_directories_have_the_configured_mode_whatever_they_had() {
    // SAFETY: a system call without memory. The tests of this file expect this umask or a stricter
    // one.
    unsafe { libc::umask(0o022) };
    let root = tempfile::tempdir().unwrap();
    let dirs: Vec<_> = ["a", "b"].map(|name| root.path().join("ns").join(name)).into();
    for access in [FileAccess::Owner, FileAccess::GroupWrite, FileAccess::GroupRead, FileAccess::Owner] {
        open(&dirs, access).unwrap();
        let found = modes(&dirs);
        assert!(found.len() >= 2 + 2 * 3, "slots, lock and mark in each: {found:?}");
        for (path, mode) in found {
            let expected = if path.is_dir() { access.dir_mode() } else { access.file_mode() };
            assert_eq!(mode, expected, "{} is {mode:o}", path.display());
        }
        // Whoever only reads changes no mode, and a repair keeps them.
        let before = modes(&dirs);
        Archive::open(&dirs, access, None).unwrap();
        offline::repair(&dirs, None, &mut |_, _| {}).unwrap();
        assert_eq!(modes(&dirs), before);
        // As an earlier version left them.
        for (path, _) in before {
            fs::set_permissions(&path, Permissions::from_mode(0o755)).unwrap();
        }
    }
    assert_eq!(mode(&root.path().join("ns")), 0o700, "what was missing above is private too");
}

#[test]
fn a_link_or_a_pipe_in_the_place_of_a_file_is_refused() {
    for name in ["slots.kvbm", "journal.kvbm", "LOCK"] {
        let root = tempfile::tempdir().unwrap();
        let (dir, other) = (root.path().join("kv"), root.path().join("other"));
        open(slice::from_ref(&dir), FileAccess::Owner).unwrap();
        fs::rename(dir.join(name), &other).unwrap();
        symlink(&other, dir.join(name)).unwrap();
        let before = fs::read(&other).unwrap();
        let error = open(slice::from_ref(&dir), FileAccess::Owner).unwrap_err().to_string();
        assert!(error.contains("symbolic link") && error.contains(name), "{error}");
        assert_eq!(fs::read(&other).unwrap(), before, "the file behind the link is left alone");
        fs::remove_file(dir.join(name)).unwrap();
        let path = std::ffi::CString::new(dir.join(name).to_str().unwrap()).unwrap();
        // SAFETY: the name ends with a zero and lives through the call.
        assert_eq!(unsafe { libc::mkfifo(path.as_ptr(), 0o600) }, 0);
        let error = open(slice::from_ref(&dir), FileAccess::Owner).unwrap_err().to_string();
        assert!(error.contains("not a regular file"), "{error}");
        assert!(
            Archive::open(&[dir], FileAccess::Owner, None).is_err(),
            "a reader does not wait for a writer"
        );
    }
}

/// Needs the superuser, who alone can give files away.
#[test]
fn files_and_directories_of_another_user_are_refused() {
    const OTHER: u32 = 12_345;
    let root = tempfile::tempdir().unwrap();
    if std::os::unix::fs::chown(root.path(), Some(OTHER), None).is_err() {
        return;
    }
    let dir = root.path().join("kv");
    let dirs = [dir.clone()];
    open(&dirs, FileAccess::Owner).unwrap();
    let own = |path: &Path, user: u32| std::os::unix::fs::chown(path, Some(user), None).unwrap();
    for name in ["slots.kvbm", "journal.kvbm", "LOCK", "."] {
        let path = dir.join(name);
        own(&path, OTHER);
        for access in [FileAccess::Owner, FileAccess::GroupRead] {
            let error = open(&dirs, access).unwrap_err().to_string();
            for part in [&format!("user {OTHER}"), "mode 0", "kv", "chown"] {
                assert!(error.contains(part), "{error} names {part}");
            }
        }
        if ["slots.kvbm", "journal.kvbm"].contains(&name) {
            assert!(
                Archive::open(&dirs, FileAccess::Owner, None).is_err(),
                "blocks of another user are not taken"
            );
        }
        // Reading needs the system's permission alone, and a group that may write is trusted.
        offline::verify(&dirs, None, &mut |_, _| {}).unwrap();
        open(&dirs, FileAccess::GroupWrite).unwrap();
        own(&path, 0);
    }
}
