//! The CUDA device that an engine's tensors lie on, and its events.

use crate::errors::{Error, Kind, Result};
use kvbm::device::{CudaDevice, CudaDriver, CudaStream, Device, DeviceId, Event, Stream};
use parking_lot::Mutex;
use pyo3::prelude::*;
use std::sync::Arc;

/// Opens a device of the driver.
pub(crate) fn open(ordinal: u32) -> Result<CudaDevice> {
    let device = CudaDriver::open().and_then(|driver| CudaDevice::open(&driver, DeviceId(ordinal)));
    device.map_err(|error| {
        let text = format!("the tensors lie on cuda:{ordinal}, and the device cannot be used: {error}");
        Error::new(Kind::Build, text)
    })
}

/// Makes events of kvbm out of events that an engine has recorded on its streams.
pub(crate) struct EngineEvents {
    device: CudaDevice,
    /// Waits for one of the engine's events after the other. A stream that failed is replaced.
    stream: Mutex<Arc<dyn Stream>>,
}

impl EngineEvents {
    pub(crate) fn new(device: CudaDevice) -> Result<Self> {
        let stream = Mutex::new(start(&device)?);
        Ok(Self { device, stream })
    }

    /// Those of an engine whose tensors lie on a device of this process.
    pub(crate) fn needed(events: Option<&Self>) -> Result<&Self> {
        events.ok_or_else(|| {
            let text = "the engine's tensors do not lie on a device of this process: on the CPU no fence is \
                        needed, and workers in other processes have `fence` and `Worker.signal`";
            Error::argument(text)
        })
    }

    /// An event that is complete when the engine's, as it was recorded last, is. `event` is an
    /// object with the handle in `cuda_event`, as `torch.cuda.Event` is, or the handle itself. It
    /// is kept until then.
    pub(crate) fn follow(&self, event: &Bound<'_, PyAny>) -> PyResult<Event> {
        let handle = match event.getattr("cuda_event") {
            Ok(handle) => handle.extract::<usize>(),
            Err(_) => event.extract::<usize>(),
        };
        let handle = handle.map_err(|_| {
            let name = event.get_type().name().map_or_else(|_| "object".to_owned(), |name| name.to_string());
            Error::argument(format!(
                "{name} is no event: give a torch.cuda.Event, or the number of a CUevent"
            ))
        })?;
        if handle == 0 {
            let text = "the event has no handle yet: record it on the engine's stream first";
            return Err(Error::argument(text).into());
        }
        let owner = event.clone().unbind();
        Ok(self.wait_for(handle, owner)?)
    }

    /// The event that a rank signals: complete at once, or when the engine's event `after` is.
    /// `events` is none where the tensors of this `owner` (mover, worker) are in host memory.
    pub(crate) fn signalled(
        events: Option<&Self>,
        after: Option<&Bound<'_, PyAny>>,
        owner: &str,
    ) -> PyResult<Event> {
        match (after, events) {
            (None, _) => Ok(Event::complete()),
            (Some(after), Some(events)) => events.follow(after),
            (Some(_), None) => {
                let text = format!(
                    "`after` is for tensors on a CUDA device, and those of this {owner} are in host memory: \
                     leave it out"
                );
                Err(Error::argument(text).into())
            }
        }
    }

    fn wait_for(&self, handle: usize, owner: Py<PyAny>) -> Result<Event> {
        let mut stream = self.stream.lock();
        if stream.status().is_err() {
            *stream = start(&self.device)?;
        }
        let cuda = CudaStream::of(&**stream)
            .ok_or_else(|| Error::new(Kind::Internal, "a stream of a CUDA device is none of CUDA's"))?;
        // SAFETY: `owner` keeps the event until the one that is recorded behind it is complete; of
        // a bare number the caller of `fence_after` or `signal` promises it.
        unsafe { cuda.wait_engine(handle) }.map_err(|error| failed(&error))?;
        let event = stream.record().map_err(|error| failed(&error))?;
        event.on_complete(move |_| drop(owner));
        Ok(event)
    }
}

fn start(device: &CudaDevice) -> Result<Arc<dyn Stream>> {
    device.create_stream("engine events").map_err(|error| failed(&error))
}

fn failed(error: &kvbm::device::DeviceError) -> Error {
    Error::new(Kind::Other, format!("an event of the engine cannot be followed: {error}"))
}
