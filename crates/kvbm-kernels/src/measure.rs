//! From which size of fragments on the copy engines are faster than a kernel, to host memory and
//! from there. This is measured once on a device, in a fraction of a second, and kept with it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvbm_device::{
    CopyBatch, CopyEngine, CudaStream, Device, DeviceError, DeviceMemory, Direction, HostBuffer, Stream,
};

use crate::{Backend, Converter, Crossover, CudaKernels, Measurement, Piece};

/// Bytes that each way moves for each size.
const BYTES: u64 = 4 << 20;

/// Sizes of fragments, in the order in which they are measured.
const SIZES: [u64; 5] = [2 << 10, 8 << 10, 32 << 10, 128 << 10, 512 << 10];

/// No size of a direction is begun after this time; what takes longer than a deadline is an error.
const BUDGET: Duration = Duration::from_millis(200);
const DEADLINE: Duration = Duration::from_secs(30);

/// What was measured on a device, for each direction. The links to and from a device are not
/// equally fast, and a kernel that scatters is not as fast as one that gathers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostCopies {
    /// From device memory to page-locked host memory.
    pub to_host: OneWay,
    /// From page-locked host memory to device memory.
    pub from_host: OneWay,
}

/// What was measured for one direction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OneWay {
    /// Time of each way, for fragments of each size.
    pub measurements: Vec<Measurement>,
    /// What follows.
    pub crossover: Option<Crossover>,
}

impl Converter<CudaKernels> {
    /// How fragments of device memory get to page-locked host memory and from there fastest. They
    /// are gathered or scattered by a kernel and copied whole, or go in a batch of copies, or by
    /// single ones. The first call on a device measures, which takes less than half a second; later
    /// ones have its result.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`], [`DeviceError::PinLimit`], [`DeviceError::Driver`], or that
    /// the kernels are missing.
    pub fn host_copies(&self) -> Result<Arc<HostCopies>, DeviceError> {
        let device = self.driver().cuda_device();
        device.measured(|| Bench::new(self)?.run())
    }
}

struct Bench<'a> {
    converter: &'a Converter<CudaKernels>,
    scattered: DeviceMemory,
    staging: DeviceMemory,
    host: kvbm_device::PinnedHost,
}

impl<'a> Bench<'a> {
    fn new(converter: &'a Converter<CudaKernels>) -> Result<Self, DeviceError> {
        let device = converter.driver().cuda_device();
        let host = device.register_host(HostBuffer::zeroed(BYTES as usize).region().clone())?;
        // Every other fragment is moved, so that none has a neighbour.
        let (scattered, staging) = (device.allocate(2 * BYTES, 256)?, device.allocate(BYTES, 256)?);
        Ok(Self { converter, scattered, staging, host })
    }

    fn run(&self) -> Result<HostCopies, DeviceError> {
        let opened = self.converter.driver().cuda_device().create_stream("measure")?;
        let Some(stream) = CudaStream::of(&*opened) else {
            return Err(DeviceError::Unsupported { device: "this device".into(), operation: "CUDA streams" });
        };
        let to_host = self.one_way(stream, Direction::DeviceToHost)?;
        Ok(HostCopies { to_host, from_host: self.one_way(stream, Direction::HostToDevice)? })
    }

    fn one_way(&self, stream: &CudaStream, direction: Direction) -> Result<OneWay, DeviceError> {
        let (begin, mut measurements) = (Instant::now(), Vec::new());
        let batches = self.converter.capabilities().batches;
        for piece_bytes in SIZES {
            if begin.elapsed() > BUDGET {
                break;
            }
            let kernel_ns = self.time(stream, || self.by_kernel(stream, direction, piece_bytes))?;
            let copies =
                |engine| self.time(stream, || self.by_copies(stream, direction, piece_bytes, engine));
            let batch_ns = if batches { Some(copies(CopyEngine::Batch)?) } else { None };
            let async_ns = copies(CopyEngine::Single)?;
            measurements.push(Measurement { piece_bytes, kernel_ns, batch_ns, async_ns });
        }
        let crossover = Crossover::from_measurements(&measurements);
        Ok(OneWay { measurements, crossover })
    }

    /// The best of three, as the device measures it, after one that warms up.
    fn time(
        &self,
        stream: &CudaStream,
        way: impl Fn() -> Result<(), DeviceError>,
    ) -> Result<u64, DeviceError> {
        way()?;
        let mut best = u64::MAX;
        for _ in 0..3 {
            // What it is measured behind keeps the device busy while it is queued.
            stream.fill(&self.staging, 0, BYTES, 0)?;
            let start = stream.mark()?;
            way()?;
            let took = stream.mark()?.since(&start, Instant::now() + DEADLINE)?;
            best = best.min(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX));
        }
        Ok(best)
    }

    fn by_kernel(
        &self,
        stream: &CudaStream,
        direction: Direction,
        piece_bytes: u64,
    ) -> Result<(), DeviceError> {
        let mut whole = CopyBatch::new(direction);
        if direction == Direction::HostToDevice {
            whole.push_host_to_device(self.host.region(), 0, &self.staging, 0, BYTES)?;
            stream.copy_by(whole, CopyEngine::Single)?;
            return self.rearrange(stream, direction, piece_bytes);
        }
        self.rearrange(stream, direction, piece_bytes)?;
        whole.push_device_to_host(&self.staging, 0, self.host.region(), 0, BYTES)?;
        Ok(stream.copy_by(whole, CopyEngine::Single).map(|_event| ())?)
    }

    /// The kernel: it gathers what goes to the host, and scatters what came from there.
    fn rearrange(
        &self,
        stream: &CudaStream,
        direction: Direction,
        piece_bytes: u64,
    ) -> Result<(), DeviceError> {
        let pieces: Vec<Piece> = (0..BYTES / piece_bytes)
            .map(|at| {
                let scattered = self.scattered.address() + 2 * at * piece_bytes;
                let staged = self.staging.address() + at * piece_bytes;
                let (from, to) = match direction {
                    Direction::HostToDevice => (staged, scattered),
                    _ => (scattered, staged),
                };
                Piece { from, to, bytes: piece_bytes }
            })
            .collect();
        // SAFETY: `time` waits for the mark behind it before anybody lets go of the memory; an
        // error of the stream means that nothing runs on it any more.
        let taken = unsafe { self.converter.copy_pairs(stream, &pieces, Backend::Kernel) };
        taken.map(|_kernel| ()).map_err(|error| DeviceError::OperationFailed {
            stream: stream.name().into(),
            operation: "rearranging by a kernel".into(),
            reason: error.to_string(),
        })
    }

    fn by_copies(
        &self,
        stream: &CudaStream,
        direction: Direction,
        piece_bytes: u64,
        engine: CopyEngine,
    ) -> Result<(), DeviceError> {
        let mut batch = CopyBatch::new(direction);
        let host = self.host.region();
        for at in 0..BYTES / piece_bytes {
            let (there, here) = (2 * at * piece_bytes, at * piece_bytes);
            match direction {
                Direction::HostToDevice => {
                    batch.push_host_to_device(host, here, &self.scattered, there, piece_bytes)?;
                }
                _ => batch.push_device_to_host(&self.scattered, there, host, here, piece_bytes)?,
            }
        }
        Ok(stream.copy_by(batch, engine).map(|_event| ())?)
    }
}
