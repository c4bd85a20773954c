//! Points of a stream whose distance the device measures.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Shared;
use super::driver::Handle;
use crate::{DeviceError, Event};

/// `CU_EVENT_BLOCKING_SYNC`, with a time.
const FLAGS: u32 = 1;

/// A point of a stream, with the time at which the device passed it.
#[derive(Debug)]
pub struct CudaMark {
    pub(super) point: Arc<TimedEvent>,
    /// Complete when the device has passed it.
    pub(super) passed: Event,
}

/// An event of the driver that has a time; destroyed when dropped.
pub(super) struct TimedEvent {
    shared: Arc<Shared>,
    event: Handle,
}

impl TimedEvent {
    pub(super) fn new(shared: &Arc<Shared>) -> Result<Self, DeviceError> {
        let entered = shared.enter()?;
        let mut event = 0;
        // SAFETY: writes a handle through a pointer to one.
        let code = unsafe { (shared.functions().event_create)(&raw mut event, FLAGS) };
        drop(entered);
        shared.check("cuEventCreate", code)?;
        Ok(Self { shared: Arc::clone(shared), event })
    }

    /// Records it; the context is entered.
    pub(super) fn record(&self, stream: Handle) -> Result<(), DeviceError> {
        // SAFETY: both handles are alive.
        let code = unsafe { (self.shared.functions().event_record)(self.event, stream) };
        self.shared.check("cuEventRecord", code)
    }
}

impl Drop for TimedEvent {
    fn drop(&mut self) {
        if let Ok(_entered) = self.shared.enter() {
            // SAFETY: created once, destroyed once.
            let _nothing_to_do_about_it = unsafe { (self.shared.functions().event_destroy)(self.event) };
        }
    }
}

impl std::fmt::Debug for TimedEvent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "TimedEvent(of device {})", self.shared.id)
    }
}

impl CudaMark {
    /// Time from `earlier`, a mark of the same device, to this one, as the device measured it. Waits for both.
    ///
    /// # Errors
    /// What failed on the stream before either, [`DeviceError::Deadline`], [`DeviceError::Driver`].
    pub fn since(&self, earlier: &Self, deadline: Instant) -> Result<Duration, DeviceError> {
        earlier.passed.wait(deadline)?;
        self.passed.wait(deadline)?;
        let shared = &self.point.shared;
        let _entered = shared.enter()?;
        let mut ms = 0.0;
        // SAFETY: writes a number through a pointer to one; both events are alive and were recorded.
        let code =
            unsafe { (shared.functions().event_elapsed)(&raw mut ms, earlier.point.event, self.point.event) };
        shared.check("cuEventElapsedTime", code)?;
        Ok(Duration::try_from_secs_f64(f64::from(ms) / 1e3).unwrap_or_default())
    }
}
