//! A `SlotIo` that makes the system calls itself, and fails as it is told to.
#![allow(clippy::unwrap_used)] // In a test a panic is the report.

use kvbm_disk::{IoMemory, SlotIo, SlotIoLane, SlotIoRequest};
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

/// What becomes of a request.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Fate {
    /// It fails.
    Fail,
    /// So many bytes move.
    Short(u64),
    /// It says that it moved a byte more than it was asked for.
    TooMuch,
    /// A byte that was read is another one.
    WrongByte,
    /// It does not end before `FakeIo::let_go`, and then moves all.
    Hang,
}

#[derive(Debug, Default)]
pub(crate) struct State {
    /// Of the next requests.
    pub(crate) fates: VecDeque<Fate>,
    /// Registered for all lanes.
    pub(crate) memory: Vec<IoMemory>,
    /// Runs of each request.
    pub(crate) requests: Vec<usize>,
    pub(crate) hanging: usize,
    /// Opening a lane fails from this one on.
    pub(crate) lanes: Option<usize>,
    pub(crate) registers: bool,
    pub(crate) hides_short_writes: bool,
    let_go: bool,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct FakeIo(Arc<(Mutex<State>, Condvar)>);

impl FakeIo {
    pub(crate) fn new() -> Self {
        let fake = Self::default();
        fake.state().registers = true;
        fake
    }

    pub(crate) fn state(&self) -> parking_lot::MutexGuard<'_, State> {
        self.0.0.lock()
    }

    pub(crate) fn fates(&self, fates: &[Fate]) {
        self.state().fates.extend(fates);
    }

    pub(crate) fn let_go(&self) {
        self.state().let_go = true;
        self.0.1.notify_all();
    }
}

impl SlotIo for FakeIo {
    fn name(&self) -> &'static str {
        "fake"
    }

    fn describe(&self) -> String {
        "system calls of a test".to_owned()
    }

    fn hides_short_writes(&self) -> bool {
        self.state().hides_short_writes
    }

    fn open_lane(&self, files: Vec<OwnedFd>) -> io::Result<Box<dyn SlotIoLane>> {
        match &mut self.state().lanes {
            Some(0) => return Err(io::Error::other("no lane is left")),
            Some(left) => *left -= 1,
            None => {}
        }
        let files = files.into_iter().map(File::from).collect();
        Ok(Box::new(FakeLane { io: self.clone(), files, own: Vec::new() }))
    }

    fn register(&self, memory: IoMemory) -> io::Result<()> {
        let mut state = self.state();
        if !state.registers {
            return Err(io::Error::other("there is no room for it"));
        }
        state.memory.push(memory);
        Ok(())
    }
}

struct FakeLane {
    io: FakeIo,
    files: Vec<File>,
    own: Vec<IoMemory>,
}

impl FakeLane {
    fn call(&self, request: &SlotIoRequest<'_>) -> io::Result<u64> {
        let (file, mut at, mut moved) = (&self.files[request.file], request.offset, 0);
        for &(start, len) in request.runs {
            // SAFETY: the engine promises memory that is valid and ours until we return.
            let bytes = unsafe { std::slice::from_raw_parts_mut(start, len) };
            let now = if request.write { file.write_at(bytes, at) } else { file.read_at(bytes, at) }?;
            (at, moved) = (at + now as u64, moved + now as u64);
            if now < len {
                break;
            }
        }
        Ok(moved)
    }
}

impl SlotIoLane for FakeLane {
    fn register(&mut self, memory: IoMemory) -> io::Result<()> {
        self.own.push(memory);
        Ok(())
    }

    fn knows(&mut self, start: *mut u8, len: usize) -> bool {
        let holds = |memory: &IoMemory| {
            let first = memory.start().as_ptr().addr();
            first <= start.addr() && start.addr() + len <= first + memory.bytes() as usize
        };
        self.own.iter().any(holds) || self.io.state().memory.iter().any(holds)
    }

    unsafe fn transfer(&mut self, request: &SlotIoRequest<'_>) -> io::Result<u64> {
        let fate = {
            let mut state = self.io.state();
            state.requests.push(request.runs.len());
            let fate = state.fates.pop_front();
            if let Some(Fate::Hang) = fate {
                state.hanging += 1;
                self.io.0.1.wait_while(&mut state, |state| !state.let_go);
                state.hanging -= 1;
            }
            fate
        };
        for &(start, len) in request.runs {
            assert!(self.knows(start, len), "the engine names memory that is not registered");
        }
        let asked: usize = request.runs.iter().map(|(_, len)| len).sum();
        match fate {
            Some(Fate::Fail) => Err(io::Error::other("the fake fails")),
            Some(Fate::TooMuch) => Ok(asked as u64 + 1),
            Some(Fate::Short(bytes)) => self.call(request).map(|moved| moved.min(bytes)),
            Some(Fate::WrongByte) => {
                let moved = self.call(request)?;
                // SAFETY: as in `call`.
                unsafe { *request.runs[0].0 ^= 1 };
                Ok(moved)
            }
            Some(Fate::Hang) | None => self.call(request),
        }
    }
}
