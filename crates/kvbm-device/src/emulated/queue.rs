//! The thread behind a stream: takes operations in order, stops at the first failure.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crossbeam_channel::Receiver;

use super::EmulatedState;
use super::delays::Disorder;
use super::faults::{Fault, OpKind};
use super::work::{self, KernelMemory};
use crate::submission::Health;
use crate::{Completer, CopyBatch, DeviceError, DeviceMemory, Event, EventStatus, Owner};

/// The body of an emulated kernel.
pub(super) type KernelBody = Box<dyn FnOnce(&mut KernelMemory<'_>) -> Result<(), DeviceError> + Send>;

pub(super) enum EmulatedOperation {
    Work(EmulatedWork, Completer),
    Record(Completer),
    Wait(Event),
}

pub(super) enum EmulatedWork {
    Copy(CopyBatch),
    Fill { memory: DeviceMemory, offset: u64, len: u64, byte: u8 },
    Launch { name: &'static str, kernel: KernelBody, owners: Vec<Owner> },
}

impl EmulatedWork {
    fn kind(&self) -> OpKind {
        match self {
            Self::Copy(batch) => OpKind::Copy(batch.direction()),
            Self::Fill { .. } => OpKind::Fill,
            Self::Launch { .. } => OpKind::Launch,
        }
    }

    fn describe(&self) -> String {
        match self {
            Self::Copy(batch) => {
                format!("{} copy of {} bytes in {} pieces", batch.direction(), batch.bytes(), batch.len())
            }
            Self::Fill { memory, offset, len, .. } => format!("fill of {len} bytes at {offset} of {memory}"),
            Self::Launch { name, .. } => format!("kernel {name}"),
        }
    }
}

/// Waits on a stream's thread. An event that can no longer complete fails, so the wait ends.
pub(super) fn wait_in_stream(event: &Event) -> EventStatus {
    loop {
        let status = event.backend().wait(Instant::now() + Duration::from_secs(60));
        if status != EventStatus::Pending {
            return status;
        }
    }
}

pub(super) struct Runner {
    pub(super) device: Arc<EmulatedState>,
    pub(super) health: Arc<Health>,
    pub(super) disorder: Option<Disorder>,
}

impl Drop for Runner {
    fn drop(&mut self) {
        self.device.streams_alive.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Runner {
    /// Runs until every handle of the stream is gone and the queue is empty.
    pub(super) fn run(mut self, queue: &Receiver<EmulatedOperation>) {
        for op in queue {
            match op {
                EmulatedOperation::Record(done) => done.complete(self.health.status()),
                EmulatedOperation::Wait(event) => {
                    if let EventStatus::Failed(error) = wait_in_stream(&event) {
                        self.health.stop(&error);
                    }
                }
                EmulatedOperation::Work(work, done) => {
                    let result = self.health.status().and_then(|()| self.perform(work));
                    if let Err(error) = &result {
                        self.health.stop(error);
                    }
                    done.complete(result);
                }
            }
        }
    }

    /// The work is consumed: its memory is dropped before its event completes.
    fn perform(&mut self, work: EmulatedWork) -> Result<(), DeviceError> {
        if let Some(disorder) = &mut self.disorder {
            disorder.pause();
        }
        let fault = self
            .device
            .faults
            .strike_for(self.health.name(), work.kind())
            .map(super::faults::Strike::announce);
        let failed = |reason: &str| DeviceError::OperationFailed {
            stream: Arc::clone(self.health.name()),
            operation: work.describe(),
            reason: reason.to_owned(),
        };
        match fault {
            Some(Fault::Fail) => return Err(failed("injected fault")),
            Some(Fault::FailHalfway | Fault::FlipBit) if !matches!(&work, EmulatedWork::Copy(batch) if !batch.is_empty()) =>
            {
                return Err(failed("injected fault"));
            }
            _ => {}
        }
        let halfway = failed("injected fault half-way");
        let panicked = failed("the kernel panicked");
        match work {
            EmulatedWork::Copy(mut batch) => {
                let observer = batch.take_observer();
                let bytes = if fault == Some(Fault::FailHalfway) { batch.bytes() / 2 } else { batch.bytes() };
                work::copy(&self.device, &batch, observer, bytes, self.disorder.as_mut())?;
                match fault {
                    Some(Fault::FailHalfway) => Err(halfway),
                    Some(Fault::FlipBit) => work::flip_bit(&self.device, &batch),
                    _ => Ok(()),
                }
            }
            EmulatedWork::Fill { memory, offset, len, byte } => {
                work::fill(&self.device, &memory, offset, len, byte)
            }
            EmulatedWork::Launch { kernel, owners, .. } => {
                let mut memory = KernelMemory::new(&self.device);
                let result = catch_unwind(AssertUnwindSafe(|| kernel(&mut memory))).unwrap_or(Err(panicked));
                drop(owners);
                result
            }
        }
    }
}
