//! Room on file systems.

use std::io;
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Bytes that an ordinary user may still write into `dir`.
pub(crate) fn free(dir: &Path) -> io::Result<u64> {
    let path = std::ffi::CString::new(dir.as_os_str().as_bytes())?;
    let mut stat = MaybeUninit::<libc::statvfs>::zeroed();
    // SAFETY: the path ends with a NUL, and the kernel fills the struct behind the pointer.
    let failed = unsafe { libc::statvfs(path.as_ptr(), stat.as_mut_ptr()) } != 0;
    if failed {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: zeroed at first, and filled by the kernel since.
    let stat = unsafe { stat.assume_init() };
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_has_room_and_what_is_not_there_has_none() {
        let dir = tempfile::tempdir().unwrap();
        assert!(free(dir.path()).unwrap() > 0);
        assert_eq!(free(&dir.path().join("absent")).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
