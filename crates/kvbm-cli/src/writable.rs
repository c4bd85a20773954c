//! Files that a long command writes at its end: whether they can be written shows before it begins.

use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use anyhow::{Context, Result, ensure};

/// Whether a file can be written at `path`, as far as that shows before it is.
pub(crate) fn expect(path: &Path) -> Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let shown = path.display();
    ensure!(folder.is_dir(), "cannot write {shown}: create the directory {} first", folder.display());
    ensure!(!path.is_dir(), "cannot write {shown}: it is a directory; name a file in it");
    let changes = if path.exists() { path } else { folder };
    may_write(changes).with_context(|| format!("cannot write {shown}; name a file that this user may write"))
}

/// Whether this process may write a file, or into a folder.
fn may_write(path: &Path) -> io::Result<()> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: the path ends with a NUL, and nothing else is read.
    let failed = unsafe { libc::faccessat(libc::AT_FDCWD, path.as_ptr(), libc::W_OK, libc::AT_EACCESS) } != 0;
    if failed { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn files_are_expected_in_folders_that_are_there() {
        let dir = tempfile::tempdir().unwrap();
        assert!(expect(&dir.path().join("report.html")).is_ok());
        assert!(expect(Path::new("report.html")).is_ok());
        let error = expect(&dir.path().join("a/b.html")).unwrap_err().to_string();
        assert!(error.contains("create the directory") && error.contains("/a first"), "{error}");
        assert!(expect(dir.path()).unwrap_err().to_string().contains("it is a directory"));
    }

    #[test]
    fn what_may_not_be_written_is_named_before() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o555)).unwrap();
        let file = dir.path().join("x.json");
        if std::fs::write(&file, "").is_ok() {
            return println!("SKIPPED: this user may write everywhere");
        }
        let error = format!("{:#}", expect(&file).unwrap_err());
        assert!(error.contains("x.json; name a file that this user may write: Permission denied"), "{error}");
    }
}
