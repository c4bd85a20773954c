//! File descriptors that pass over a Unix socket beside its bytes.

use crate::timed::Timed;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;

/// Most descriptors that pass at a time; the system closes those beyond.
const MAX_FILES: usize = 64;
const SPACE: usize = rustix::cmsg_space!(ScmRights(MAX_FILES));

/// Sends `bytes`, and `files` with the first of them.
pub(crate) fn send(line: &mut Timed<'_>, bytes: &[u8], files: &[impl AsFd]) -> io::Result<()> {
    let files: Vec<BorrowedFd<'_>> = files.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); SPACE];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if files.len() > MAX_FILES
        || (!files.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&files)))
    {
        let why = format!("{} descriptors at a time, at most {MAX_FILES} pass", files.len());
        return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
    }
    let socket = line.for_write()?;
    let sent = sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)?;
    line.write_all(&bytes[sent..])
}

/// Reads from `line`; descriptors that come go to `files`.
pub(crate) fn receive<'a, 'b>(line: &'a Timed<'b>, files: &'a mut Vec<OwnedFd>) -> Receiver<'a, 'b> {
    Receiver { line, files }
}

/// See [`receive`].
pub(crate) struct Receiver<'a, 'b> {
    line: &'a Timed<'b>,
    files: &'a mut Vec<OwnedFd>,
}

impl Read for Receiver<'_, '_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let mut space = [MaybeUninit::uninit(); SPACE];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let socket = self.line.for_read()?;
        let received = recvmsg(socket, &mut [IoSliceMut::new(bytes)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(files) = message {
                // What is too much is closed as it is dropped.
                let room = MAX_FILES.saturating_sub(self.files.len());
                self.files.extend(files.take(room));
            }
        }
        Ok(received.bytes)
    }
}
