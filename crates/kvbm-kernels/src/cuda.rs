//! The [`Driver`] of the CUDA devices of `kvbm-device`.

use std::ffi::CString;
use std::sync::Arc;

use kvbm_device::{
    CopyBatch, CopyEngine, CudaDevice, CudaFunction, CudaLaunch, CudaModule, CudaStream, Device, DeviceError,
    DeviceMemory, Direction, Event, EventStatus, HostBuffer, Owner, Stream,
};
use parking_lot::Mutex;

use crate::{DeviceLimits, Driver, Launch, Piece};

/// Bytes of the smallest staging buffer; larger ones are powers of two, so that they are used
/// again.
const SMALLEST: u64 = 64 << 10;

/// Staging buffers that are kept for the next conversions: two for each of many that are queued.
/// Freeing one waits for the whole device.
const KEPT: usize = 64;

/// A CUDA device as a [`Driver`].
#[derive(Debug)]
pub struct CudaKernels {
    device: CudaDevice,
    limits: DeviceLimits,
    free: Arc<Mutex<Vec<DeviceMemory>>>,
}

impl CudaKernels {
    /// Of a device.
    ///
    /// # Errors
    /// [`DeviceError::Driver`].
    pub fn new(device: CudaDevice) -> Result<Self, DeviceError> {
        let limits = DeviceLimits { multiprocessors: device.multiprocessors()?, ..DeviceLimits::default() };
        Ok(Self { device, limits, free: Arc::default() })
    }

    /// The device.
    pub fn cuda_device(&self) -> &CudaDevice {
        &self.device
    }

    /// A buffer of at least `bytes`, an old one if there is one: allocating and freeing may wait
    /// for the whole device.
    fn buffer(&self, bytes: u64) -> Result<DeviceMemory, DeviceError> {
        let size = bytes.next_power_of_two().max(SMALLEST);
        let mut free = self.free.lock();
        let old = free.iter().position(|memory| memory.len() == size).map(|at| free.swap_remove(at));
        drop(free);
        let memory = match old {
            Some(memory) => memory,
            None => self.device.allocate(size, 256)?,
        };
        Ok(memory)
    }
}

/// Words in device memory; the memory is used again when this is dropped.
#[derive(Debug)]
pub struct StagedWords {
    memory: DeviceMemory,
    /// Complete when the words are there.
    copied: Event,
    free: Arc<Mutex<Vec<DeviceMemory>>>,
}

impl Drop for StagedWords {
    fn drop(&mut self) {
        // Of a launch that never was: the words may still come, so nobody else may have the memory.
        if self.copied.query() != EventStatus::Complete {
            return;
        }
        let mut free = self.free.lock();
        if free.len() < KEPT {
            free.push(self.memory.clone());
        }
    }
}

impl Driver for CudaKernels {
    type Module = Arc<CudaModule>;
    type Function = CudaFunction;
    type Stream = CudaStream;
    type Staged = StagedWords;
    type Error = DeviceError;

    fn device(&self) -> u32 {
        self.device.id().0
    }

    fn limits(&self) -> DeviceLimits {
        self.limits
    }

    fn has_batches(&self) -> bool {
        self.device.driver().has_batch_copies()
    }

    fn load(&self, fatbin: &'static [u8]) -> Result<Self::Module, DeviceError> {
        // SAFETY: the fatbin is the one that is built into this crate, whose length its tests
        // check.
        unsafe { self.device.load_module(fatbin) }
    }

    fn function(&self, module: &Self::Module, name: &'static str) -> Result<CudaFunction, DeviceError> {
        let rule = "a name has no NUL";
        let name = CString::new(name).map_err(|error| DeviceError::Invalid {
            what: "name",
            value: error.nul_position() as u64,
            rule,
        })?;
        module.function(&name)
    }

    fn stage(&self, stream: &CudaStream, words: &[u64]) -> Result<StagedWords, DeviceError> {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let memory = self.buffer(bytes.len() as u64)?;
        let mut batch = CopyBatch::new(Direction::HostToDevice);
        batch.push_host_to_device(&HostBuffer::from_bytes(&bytes), 0, &memory, 0, bytes.len() as u64)?;
        let copied = stream.copy(batch).map_err(DeviceError::from)?;
        Ok(StagedWords { memory, copied, free: Arc::clone(&self.free) })
    }

    fn address(staged: &StagedWords) -> u64 {
        staged.memory.address()
    }

    unsafe fn launch(
        &self,
        stream: &CudaStream,
        function: &CudaFunction,
        launch: Launch,
        threads: u32,
        staged: Vec<StagedWords>,
    ) -> Result<(), DeviceError> {
        let Launch { grid, shared_bytes, params, .. } = launch;
        let owners = staged.into_iter().map(|words| Arc::new(words) as Owner).collect();
        let launch = CudaLaunch { grid, threads, shared_bytes, argument: params };
        // SAFETY: the caller answers for argument and memory; what was staged is held by the
        // launch.
        unsafe { stream.launch(function, launch, owners) }.map(|_event| ())
    }

    unsafe fn copy_batch(&self, stream: &CudaStream, pieces: &[Piece]) -> Result<(), DeviceError> {
        // SAFETY: as here.
        unsafe { self.copy_by(stream, pieces, CopyEngine::Batch) }
    }

    unsafe fn copy_each(&self, stream: &CudaStream, pieces: &[Piece]) -> Result<(), DeviceError> {
        // SAFETY: as here.
        unsafe { self.copy_by(stream, pieces, CopyEngine::Single) }
    }
}

impl CudaKernels {
    /// # Safety
    /// As for [`Driver::copy_each`].
    unsafe fn copy_by(
        &self,
        stream: &CudaStream,
        pieces: &[Piece],
        engine: CopyEngine,
    ) -> Result<(), DeviceError> {
        let mut batch = CopyBatch::with_capacity(Direction::DeviceToDevice, pieces.len());
        let no_owner: Owner = Arc::new(());
        for Piece { from, to, bytes } in pieces {
            let memory = |address| {
                // SAFETY: the caller says that it is memory of this device, and keeps it until the
                // copies are complete.
                unsafe {
                    DeviceMemory::from_raw(self.device.id(), address, *bytes, true, Arc::clone(&no_owner))
                }
            };
            batch.push_device_to_device(&memory(*from), 0, &memory(*to), 0, *bytes)?;
        }
        stream.copy_by(batch, engine).map(|_event| ()).map_err(DeviceError::from)
    }
}
