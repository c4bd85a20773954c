//! Files with a secret.

use std::fs::OpenOptions;
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

/// Bits of a file's mode that let others in.
const OTHERS: u32 = 0o077;

/// Reads a file that belongs to this user, or to root, and that no other user reads: at most `most`
/// bytes of it.
pub(crate) fn read(path: &Path, most: u64) -> io::Result<Vec<u8>> {
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
    if found.mode() & OTHERS != 0 {
        let text = format!("others can open it (mode {:o}): chmod 600 it", found.mode() & 0o7777);
        return Err(io::Error::other(text));
    }
    let mut bytes = Vec::new();
    file.take(most).read_to_end(&mut bytes)?;
    Ok(bytes)
}
