//! Conversions on the CUDA device, its driver being the test driver of `kvbm-device` with the
//! kernels linked in: from tensors to bytes through the code that runs on a GPU.

use std::time::{Duration, Instant};

use kvbm_device::{
    CopyBatch, CudaDevice, CudaDriver, CudaStream, Device, DeviceId, DeviceMemory, Direction, HostBuffer,
    Stream,
};
use kvbm_kernels::{
    Backend, BlockForm, BlockShape, ChunkOrder, Conversion, Converter, CudaKernels, Operand, convert,
};

use kvbm_test_driver::TestDriver;

use crate::cases::Random;

fn device_of(library: &TestDriver) -> CudaDevice {
    // SAFETY: the library does what a driver does.
    let driver = unsafe { CudaDriver::open_library(library.path()) }.expect("the driver starts");
    CudaDevice::open(&driver, DeviceId(0)).expect("a device")
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

/// Chunks of a form in device memory.
struct Chunks {
    form: BlockForm,
    memory: Vec<DeviceMemory>,
}

impl Chunks {
    fn new(device: &CudaDevice, shape: &BlockShape, form: BlockForm, blocks: usize) -> Self {
        let bytes = form.chunk_bytes(shape) as u64;
        let count = blocks * form.chunks_per_block(shape);
        let memory = (0..count).map(|_| device.allocate(bytes, 256).expect("memory")).collect();
        Self { form, memory }
    }

    fn operand(&self) -> Operand {
        let addresses = self.memory.iter().map(DeviceMemory::address).collect();
        Operand::pointers(self.form, addresses).on_device(0)
    }

    fn upload(&self, stream: &dyn Stream, chunks: &[Vec<u8>]) {
        let mut batch = CopyBatch::new(Direction::HostToDevice);
        for (memory, bytes) in self.memory.iter().zip(chunks) {
            batch
                .push_host_to_device(&HostBuffer::from_bytes(bytes), 0, memory, 0, memory.len())
                .expect("fits");
        }
        stream.copy(batch).expect("queued");
    }

    fn download(&self, stream: &dyn Stream) -> Vec<Vec<u8>> {
        let mut hosts: Vec<_> =
            self.memory.iter().map(|memory| HostBuffer::zeroed(memory.len() as usize)).collect();
        let mut batch = CopyBatch::new(Direction::DeviceToHost);
        for (memory, host) in self.memory.iter().zip(&hosts) {
            batch.push_device_to_host(memory, 0, host, 0, memory.len()).expect("fits");
        }
        stream.copy(batch).expect("queued").wait(soon()).expect("the work completes");
        hosts.iter_mut().map(|host| host.exclusive_bytes().expect("the copies are over").to_vec()).collect()
    }
}

fn filled(form: BlockForm, shape: &BlockShape, blocks: usize, random: &mut Random) -> Vec<Vec<u8>> {
    let bytes = form.chunk_bytes(shape);
    let count = blocks * form.chunks_per_block(shape);
    (0..count).map(|_| (0..bytes).map(|_| (random.next() >> 56) as u8).collect()).collect()
}

fn by_the_reference(shape: &BlockShape, from: BlockForm, sources: &[Vec<u8>], to: BlockForm) -> Vec<Vec<u8>> {
    let blocks = sources.len() / from.chunks_per_block(shape);
    let count = blocks * to.chunks_per_block(shape);
    let mut destinations = vec![vec![0; to.chunk_bytes(shape)]; count];
    let sources: Vec<&[u8]> = sources.iter().map(Vec::as_slice).collect();
    let mut slices: Vec<&mut [u8]> = destinations.iter_mut().map(Vec::as_mut_slice).collect();
    convert(shape, from, &sources, to, &mut slices).expect("sound arguments");
    destinations
}

#[test]
fn conversions_through_the_cuda_device() {
    for version in [12_080, 12_040] {
        let Some(library) = TestDriver::new() else { return };
        library.machine(1, version);
        library.delay(Duration::from_micros(100));
        assert_eq!(convert_on(&device_of(&library), 12), 36);
    }
}

/// On a real GPU. Where there is none this says so, and fails only if one is required
/// (`KVBM_REQUIRE_GPU=1`, as `cargo xtask test-gpu` sets it).
#[test]
fn gpu_conversions() {
    let found = CudaDriver::open().and_then(|driver| CudaDevice::open(&driver, DeviceId(0)));
    match found {
        Ok(device) => assert_eq!(convert_on(&device, 300), 900),
        Err(why) => {
            assert!(std::env::var_os("KVBM_REQUIRE_GPU").is_none(), "no CUDA device was found: {why}");
            eprintln!("skipped: no CUDA device was found: {why}");
        }
    }
}

/// Converts random shapes on three streams at once, each against the CPU's result; how many.
fn convert_on(device: &CudaDevice, rounds: usize) -> usize {
    let converter = Converter::new(CudaKernels::new(device.clone()).expect("attributes"));
    assert_eq!(converter.kernels(), Ok(()));
    let converter = &converter;
    std::thread::scope(|scope| {
        for thread in 0..3_u64 {
            scope.spawn(move || {
                let opened = device.create_stream("conversions").expect("a stream");
                let stream = CudaStream::of(&*opened).expect("it is one");
                let mut random = Random(thread + 77);
                for round in 0..rounds {
                    let hd = random.pick(&[3, 8, 36, 64, 128]);
                    let shape = BlockShape::new(2, 2, 1 + random.below(5), 1 + random.below(17), hd, 2);
                    let shape = shape.expect("a small shape");
                    let (from, to) = (random.pick(&crate::cases::FORMS), random.pick(&crate::cases::FORMS));
                    let source = Chunks::new(device, &shape, from, 2);
                    let target = Chunks::new(device, &shape, to, 2);
                    let bytes = filled(from, &shape, 2, &mut random);
                    source.upload(stream, &bytes);
                    let conversion = Conversion::new(shape, source.operand(), target.operand());
                    let conversion = conversion.expect("sound arguments");
                    let backend = [Backend::Auto, Backend::Batch, Backend::Async][round % 3];
                    let batches = converter.capabilities().batches;
                    let backend = if batches || round % 3 != 1 { backend } else { Backend::Kernel };
                    // SAFETY: the memory is held until it was downloaded behind the conversion.
                    let taken = unsafe { converter.convert(stream, &conversion, backend) };
                    let expected = if backend == Backend::Auto { Backend::Kernel } else { backend };
                    assert_eq!(taken, Ok(expected));
                    let converted = target.download(stream);
                    assert!(
                        converted == by_the_reference(&shape, from, &bytes, to),
                        "{shape:?}: {from} to {to}"
                    );
                }
            });
        }
    });
    3 * rounds
}

#[test]
fn what_was_staged_is_given_back() {
    let Some(library) = TestDriver::new() else { return };
    let device = device_of(&library);
    let converter = Converter::new(CudaKernels::new(device.clone()).expect("attributes"));
    let shape = BlockShape::new(1, 2, 2, 4, 8, 2).expect("a small shape");
    let source = Chunks::new(&device, &shape, BlockForm::Stack(ChunkOrder::Nhd), 3);
    let target = Chunks::new(&device, &shape, BlockForm::Universal, 3);
    let opened = device.create_stream("staged").expect("a stream");
    let stream = CudaStream::of(&*opened).expect("it is one");
    let mut free = Vec::new();
    for _ in 0..20 {
        let conversion = Conversion::new(shape, source.operand(), target.operand()).expect("sound arguments");
        // SAFETY: the memory is held to the end of this test.
        let taken = unsafe { converter.convert(stream, &conversion, Backend::Kernel) };
        assert_eq!(taken, Ok(Backend::Kernel));
        stream.record().expect("queued").wait(soon()).expect("the work completes");
        free.push(device.info().free_bytes);
    }
    assert!(free.iter().all(|bytes| *bytes == free[0]), "staging memory is used again: {free:?}");
    drop((source, target, opened, converter, device));
    library.assert_nothing_is_left();
}

#[test]
fn host_copies_are_measured_once_and_leave_nothing_behind() {
    for version in [12_080, 12_040] {
        let Some(library) = TestDriver::new() else { return };
        library.machine(1, version);
        let device = device_of(&library);
        let converter = Converter::new(CudaKernels::new(device.clone()).expect("attributes"));
        library.fail(c"cuMemHostRegister_v2", 2, 0);
        let error = converter.host_copies().unwrap_err();
        assert!(matches!(error, kvbm_device::DeviceError::PinLimit { .. }), "{error}");
        let measured = converter.host_copies().expect("measured");
        for one in [&measured.to_host, &measured.from_host] {
            let first = one.measurements.first().expect("one size at least");
            assert_eq!((first.piece_bytes, first.batch_ns.is_some()), (2 << 10, version == 12_080));
            assert!(one.crossover.is_some());
        }
        let copied = |call| library.calls(call) > 0;
        assert!(copied(c"cuMemcpyHtoDAsync_v2") && copied(c"cuMemcpyDtoHAsync_v2"), "in both directions");
        let calls = library.calls(c"");
        let other = Converter::new(CudaKernels::new(device.clone()).expect("attributes"));
        let loading = library.calls(c"") - calls;
        assert_eq!(other.host_copies().expect("known"), measured, "another user of the device has the same");
        assert_eq!(library.calls(c"") - calls, loading, "nothing was measured again");
        drop((converter, other, device));
        library.assert_nothing_is_left();
    }
}
