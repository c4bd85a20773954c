//! Files with a secret.

use std::fs::OpenOptions;
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

/// Bits of a file's mode that let others in.
const OTHERS: u32 = 0o077;
/// Those that let others write.
#[cfg(feature = "tls")]
const OTHERS_WRITE: u32 = 0o022;

/// Reads a file that belongs to this user, or to root, and that no other user reads: at most `most`
/// bytes of it.
///
/// # Errors
/// The system's, or what is wrong with the file.
pub fn read(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    read_closed_to(path, most, OTHERS, "open")
}

/// Reads a file that belongs to this user, or to root, and that no other user writes: at most
/// `most` bytes of it.
///
/// # Errors
/// The system's, or what is wrong with the file.
#[cfg(feature = "tls")]
pub fn read_unwritable(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    read_closed_to(path, most, OTHERS_WRITE, "write to")
}

fn read_closed_to(path: &Path, most: u64, others: u32, what: &str) -> io::Result<Vec<u8>> {
    // A pipe could wait for ever.
    let flags = rustix::fs::OFlags::NONBLOCK;
    let file = OpenOptions::new().read(true).custom_flags(flags.bits().cast_signed()).open(path)?;
    let found = file.metadata()?;
    if !found.is_file() {
        return Err(io::Error::other("it is no regular file"));
    }
    let own = rustix::process::geteuid().as_raw();
    if found.uid() != own && found.uid() != 0 {
        let text = format!("it belongs to user {}, this process to user {own}", found.uid());
        return Err(io::Error::other(text));
    }
    if found.mode() & others != 0 {
        let text = format!("others can {what} it (mode {:o}): chmod 600 it", found.mode() & 0o7777);
        return Err(io::Error::other(text));
    }
    let mut bytes = Vec::new();
    file.take(most).read_to_end(&mut bytes)?;
    Ok(bytes)
}
