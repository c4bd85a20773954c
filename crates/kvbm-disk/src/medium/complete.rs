//! Complete reads and writes over files that may move fewer bytes than asked: any number of
//! buffers, short and interrupted calls.

use super::BlockFile;
use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Buffers in one system call: `IOV_MAX` of Linux.
pub(crate) const IOV_MAX: usize = 1024;

/// Calls in a row that may move less than one alignment unit before the device counts as
/// failed.
const MAX_STALLS: u32 = 16;

/// How a transfer ended before its end.
#[derive(Debug)]
pub(crate) struct Stopped {
    /// Bytes moved.
    pub(crate) done: u64,
    /// Why; `None` at the end of the file.
    pub(crate) error: Option<io::Error>,
}

/// Progress of one transfer; counts its continuations.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    done: u64,
    total: u64,
    /// 1, or what direct I/O needs: a continuation must start at a multiple of it.
    alignment: u64,
    calls: u64,
    stalls: u32,
}

impl Progress {
    pub(crate) fn new(total: u64, alignment: u64) -> Self {
        Self { done: 0, total, alignment, calls: 0, stalls: 0 }
    }

    /// Bytes moved.
    pub(crate) fn done(&self) -> u64 {
        self.done
    }

    pub(crate) fn is_done(&self) -> bool {
        self.done >= self.total
    }

    /// Takes the result of a call that was asked for `asked` bytes; returns by how many bytes to
    /// advance.
    pub(crate) fn advance(&mut self, result: io::Result<usize>, asked: u64) -> Result<usize, Stopped> {
        self.calls += 1;
        let stopped = |done, error| Err(Stopped { done, error });
        match result {
            Err(error) if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock) => {
                let error = io::Error::other(format!("the device makes no progress: {error}"));
                self.stall(self.done, Some(error))
            }
            Err(error) => stopped(self.done, Some(error)),
            Ok(0) => stopped(self.done, None),
            Ok(moved) if moved as u64 > asked => {
                stopped(self.done, Some(io::Error::other(format!("{moved} bytes moved, {asked} asked for"))))
            }
            Ok(moved) => {
                let end = self.done + moved as u64;
                let usable = if end == self.total {
                    moved
                } else {
                    (moved as u64 / self.alignment * self.alignment) as usize
                };
                if usable == 0 {
                    // Less than a unit again and again: the file ends within it.
                    return self.stall(end, None);
                }
                self.stalls = 0;
                self.done += usable as u64;
                Ok(usable)
            }
        }
    }

    /// No whole unit was moved. After too many such calls in a row the transfer ends with `done`
    /// bytes.
    fn stall(&mut self, done: u64, error: Option<io::Error>) -> Result<usize, Stopped> {
        self.stalls += 1;
        if self.stalls <= MAX_STALLS { Ok(0) } else { Err(Stopped { done, error }) }
    }
}

fn sum(lens: impl Iterator<Item = usize>) -> u64 {
    lens.map(|len| len as u64).sum()
}

/// Reads until `buffers` are full. Returns the number of calls.
pub(crate) fn read(
    file: &dyn BlockFile,
    offset: u64,
    mut buffers: &mut [IoSliceMut<'_>],
    alignment: u64,
) -> Result<u64, Stopped> {
    let mut progress = Progress::new(sum(buffers.iter().map(|buffer| buffer.len())), alignment);
    while progress.done < progress.total {
        let count = buffers.len().min(IOV_MAX);
        let now = &mut buffers[..count];
        let asked = sum(now.iter().map(|buffer| buffer.len()));
        let result = file.read_at(offset + progress.done, now);
        let moved = progress.advance(result, asked)?;
        IoSliceMut::advance_slices(&mut buffers, moved);
    }
    Ok(progress.calls)
}

/// Writes all of `buffers`. Returns the number of calls.
pub(crate) fn write(
    file: &dyn BlockFile,
    offset: u64,
    mut buffers: &mut [IoSlice<'_>],
    alignment: u64,
) -> Result<u64, Stopped> {
    let mut progress = Progress::new(sum(buffers.iter().map(|buffer| buffer.len())), alignment);
    while progress.done < progress.total {
        let count = buffers.len().min(IOV_MAX);
        let now = &buffers[..count];
        let asked = sum(now.iter().map(|buffer| buffer.len()));
        let result = file.write_at(offset + progress.done, now);
        let moved = progress.advance(result, asked)?;
        IoSlice::advance_slices(&mut buffers, moved);
    }
    Ok(progress.calls)
}

/// Writes all of `bytes`.
pub(crate) fn write_all(file: &dyn BlockFile, offset: u64, bytes: &[u8]) -> io::Result<()> {
    match write(file, offset, &mut [IoSlice::new(bytes)], 1) {
        Ok(_) => Ok(()),
        Err(stopped) => Err(stopped.error.unwrap_or_else(|| ErrorKind::WriteZero.into())),
    }
}

/// Reads into `bytes` up to the end of the file; returns how many bytes there were.
pub(crate) fn read_up_to(file: &dyn BlockFile, offset: u64, bytes: &mut [u8]) -> io::Result<usize> {
    let len = bytes.len();
    match read(file, offset, &mut [IoSliceMut::new(bytes)], 1) {
        Ok(_) => Ok(len),
        Err(Stopped { done, error: None }) => Ok(done as usize),
        Err(Stopped { error: Some(error), .. }) => Err(error),
    }
}

/// Runs `call`; a panic of the medium becomes an error. The committer has one thread, which must
/// not end.
pub(crate) fn contained<T>(call: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|_| Err(io::Error::other("the medium panicked")))
}
