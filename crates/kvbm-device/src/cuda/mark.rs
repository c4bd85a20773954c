//! Points of a stream whose distance the device measures.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::CudaContext;
use super::functions::sys::CUevent_flags;
use super::functions::{DriverHandle, EventHandle, StreamHandle, call};
use crate::{DeviceError, Event};

/// A thread that waits sleeps; the event has a time.
const FLAGS: u32 = CUevent_flags::CU_EVENT_BLOCKING_SYNC as u32;

/// A point of a stream, with the time at which the device passed it.
#[derive(Debug)]
pub struct CudaMark {
    pub(super) point: Arc<TimedEvent>,
    /// Complete when the device has passed it.
    pub(super) passed: Event,
}

/// An event of the driver that has a time; destroyed when dropped.
pub(super) struct TimedEvent {
    context: Arc<CudaContext>,
    event: EventHandle,
}

impl TimedEvent {
    pub(super) fn new(context: &Arc<CudaContext>) -> Result<Self, DeviceError> {
        let mut event = std::ptr::null_mut();
        let into = &raw mut event;
        // SAFETY: it writes a handle through a pointer to one.
        context.must(|driver| unsafe { call!(driver, cuEventCreate(into, FLAGS)) })?;
        Ok(Self { context: Arc::clone(context), event: DriverHandle(event) })
    }

    /// Records it; the context is entered.
    pub(super) fn record(&self, stream: StreamHandle) -> Result<(), DeviceError> {
        let functions = self.context.functions();
        // SAFETY: both handles are alive.
        self.context.check(unsafe { call!(functions, cuEventRecord(self.event.0, stream.0)) })
    }
}

impl Drop for TimedEvent {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once.
        self.context.release(|driver| unsafe { call!(driver, cuEventDestroy_v2(self.event.0)) });
    }
}

impl std::fmt::Debug for TimedEvent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "TimedEvent(of device {})", self.context.id)
    }
}

impl CudaMark {
    /// Time from `earlier`, a mark of the same device, to this one, as the device measured it.
    /// Waits for both.
    ///
    /// # Errors
    /// What failed on the stream before either, [`DeviceError::Deadline`], [`DeviceError::Driver`].
    pub fn since(&self, earlier: &Self, deadline: Instant) -> Result<Duration, DeviceError> {
        earlier.passed.wait(deadline)?;
        self.passed.wait(deadline)?;
        let (start, end) = (earlier.point.event.0, self.point.event.0);
        let mut ms = 0.0;
        let into = &raw mut ms;
        self.point.context.must(|driver| {
            // SAFETY: it writes a number through a pointer to one; both events are alive and were
            // recorded.
            unsafe { call!(driver, cuEventElapsedTime(into, start, end)) }
        })?;
        Ok(Duration::try_from_secs_f64(f64::from(ms) / 1e3).unwrap_or_default())
    }
}
