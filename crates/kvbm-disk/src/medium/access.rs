//! Opens files that hold users' KV: follows no link, uses no file of another user, and sets the
//! configured mode.

use kvbm_plan::{FileAccess, FileOwner};
use std::fs::{self, DirBuilder, File, Metadata, OpenOptions, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

/// The file that finds out whom the file system takes this process for.
const PROBE_FILE: &str = "probe.tmp";

/// Opens the file `path` with `options` and `flags`, and refuses the file of another user. Sets the
/// mode of `access`; without, a file that exists keeps its mode and a new one gets 0600.
pub(super) fn open(
    path: &Path,
    options: &mut OpenOptions,
    flags: i32,
    access: Option<FileAccess>,
) -> io::Result<File> {
    let mode = access.unwrap_or_default().file_mode();
    let file = open_regular(path, options.mode(mode), flags)?;
    let found = file.metadata()?;
    check_owner(path, &found, access.unwrap_or_default())?;
    if access.is_some() {
        // Also after a creation: the umask takes bits from the mode that was asked for. Files of
        // earlier versions were open to every user.
        set_mode(&found, mode, |mode| file.set_permissions(mode))?;
    }
    Ok(file)
}

/// Opens a file with `flags` to read it. With `access`, the file of another user is refused;
/// without, the system's permissions decide.
pub(super) fn open_read_only(path: &Path, flags: i32, access: Option<FileAccess>) -> io::Result<File> {
    // Without `O_NONBLOCK`, the open of a pipe that somebody put there waits for a writer. Reads of
    // files do not change.
    let file = open_regular(path, OpenOptions::new().read(true), flags | libc::O_NONBLOCK)?;
    if let Some(access) = access {
        check_owner(path, &file.metadata()?, access)?;
    }
    Ok(file)
}

fn open_regular(path: &Path, options: &mut OpenOptions, flags: i32) -> io::Result<File> {
    let refused = |what: &str| {
        let text = format!("{} is {what}: remove it, or choose another directory", path.display());
        io::Error::new(ErrorKind::PermissionDenied, text)
    };
    let file = options.custom_flags(flags | libc::O_NOFOLLOW).open(path).map_err(|error| {
        if error.raw_os_error() == Some(libc::ELOOP) { refused("a symbolic link") } else { error }
    })?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(refused("not a regular file")) }
}

/// Creates the directory `dir` and those missing above it.
pub(super) fn create_dirs(dir: &Path, missing: &[&Path], access: FileAccess) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(access.dir_mode()).create(dir)?;
    for created in missing {
        set_mode(&fs::metadata(created)?, access.dir_mode(), |mode| fs::set_permissions(created, mode))?;
    }
    Ok(())
}

/// Sets the mode of the directory that holds the files, and refuses one that another user owns. The
/// superuser may own it: a mount point usually is theirs.
pub(super) fn check_dir(dir: &Path, access: FileAccess) -> io::Result<()> {
    let found = fs::metadata(dir)?;
    if found.uid() != 0 {
        check_owner(dir, &found, access)?;
    }
    set_mode(&found, access.dir_mode(), |mode| fs::set_permissions(dir, mode))
}

/// Owner and mode of a file.
fn owner_of(found: &Metadata) -> FileOwner {
    FileOwner { uid: found.uid(), gid: found.gid(), mode: found.mode() & 0o7777 }
}

fn check_owner(path: &Path, found: &Metadata, access: FileAccess) -> io::Result<()> {
    let dir = if found.is_dir() { path } else { path.parent().unwrap_or(path) };
    let gid = fs::metadata(dir).map_or(found.gid(), |dir| dir.gid());
    let refusal = |uid| {
        let ours = FileOwner { uid, gid, mode: access.file_mode() };
        access.refusal(path, owner_of(found), ours)
    };
    match refusal(effective_user()) {
        // Network file systems map users: what counts is whom a file belongs to that this process
        // creates there.
        Some(_) => match user_in(dir).map_or_else(|_| refusal(effective_user()), refusal) {
            Some(refused) => Err(io::Error::new(ErrorKind::PermissionDenied, refused)),
            None => Ok(()),
        },
        None => Ok(()),
    }
}

fn effective_user() -> u32 {
    // SAFETY: a system call without arguments that cannot fail.
    unsafe { libc::geteuid() }
}

/// The owner of a file that this process creates in `dir`.
fn user_in(dir: &Path) -> io::Result<u32> {
    let path = dir.join(PROBE_FILE);
    let probe = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path)?;
    let found = probe.metadata();
    fs::remove_file(&path)?;
    Ok(found?.uid())
}

/// Sets the permission bits to `mode` where they differ. Files of others in a shared directory keep
/// theirs.
fn set_mode(found: &Metadata, mode: u32, set: impl FnOnce(Permissions) -> io::Result<()>) -> io::Result<()> {
    let is_ours = found.uid() == effective_user();
    if found.mode() & 0o777 == mode || !is_ours {
        return Ok(());
    }
    // The set-group-id bit of a directory hands its group down: it stays.
    set(Permissions::from_mode(found.mode() & 0o7000 | mode))
}
