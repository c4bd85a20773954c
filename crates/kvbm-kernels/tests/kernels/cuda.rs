//! Conversions on the CUDA device, its driver being the test driver of `kvbm-device` with the kernels linked in: from tensors
//! to bytes through the code that runs on a GPU.

use std::ffi::{CString, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use kvbm_device::{
    CopyBatch, CudaDevice, CudaDriver, CudaStream, Device, DeviceId, DeviceMemory, Direction, HostBuffer,
    Stream,
};
use kvbm_kernels::{
    Backend, BlockForm, BlockShape, ChunkOrder, Conversion, Converter, CudaKernels, Operand, convert,
};

use crate::cases::Random;
use crate::program::{compiler, required};

/// The test driver; its library stays loaded.
struct Machine {
    driver: Arc<CudaDriver>,
    library: *mut c_void,
}

impl Machine {
    fn new(name: &str) -> Option<Self> {
        static BUILT: OnceLock<Result<PathBuf, String>> = OnceLock::new();
        let built = required(BUILT.get_or_init(build).clone(), &[])?;
        // The loader knows libraries by their files: a copy is another driver.
        let path = built.with_file_name(format!("lib{name}.so"));
        std::fs::copy(built, &path).expect("a folder of our own");
        let path = CString::new(path.as_os_str().as_bytes()).expect("no NUL");
        // SAFETY: the library does what a driver does.
        let driver = unsafe { CudaDriver::open_library(&path) }.expect("the driver starts");
        // SAFETY: it is loaded already.
        let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        Some(Self { driver, library })
    }

    fn function(&self, name: &std::ffi::CStr) -> *mut c_void {
        // SAFETY: the library is never unloaded, the name ends with NUL.
        let function = unsafe { libc::dlsym(self.library, name.as_ptr()) };
        assert!(!function.is_null(), "{name:?} is in the library");
        function
    }

    fn delay(&self, us: c_int) {
        // SAFETY: the function has this type.
        let set = unsafe {
            std::mem::transmute::<*mut c_void, extern "C" fn(c_int)>(self.function(c"kvbm_test_delay"))
        };
        set(us);
    }

    fn assert_nothing_is_left(&self) {
        // SAFETY: the function has this type.
        let left = unsafe {
            std::mem::transmute::<*mut c_void, extern "C" fn() -> c_int>(self.function(c"kvbm_test_left"))
        };
        let deadline = soon();
        while left() != 0 {
            assert!(Instant::now() < deadline, "{} resources of the driver are left", left());
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

fn build() -> Result<PathBuf, String> {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR"));
    let cpu = crates.join("tests").join("kernels").join("cpu");
    let driver = crates.join("..").join("kvbm-device").join("tests").join("cuda").join("driver.cpp");
    let library = Path::new(env!("CARGO_TARGET_TMPDIR")).join("libcuda-kernels.so");
    let mut command = Command::new(compiler());
    command.args(["-std=c++17", "-O1", "-Wall", "-Wno-unknown-pragmas", "-fno-strict-aliasing"]);
    command.args(["-shared", "-fPIC", "-pthread", "-I"]).arg(crates.join("cuda")).arg("-I").arg(&cpu);
    command.arg(driver).arg(cpu.join("linked.cpp")).arg("-o").arg(&library);
    crate::program::run_compiler(&mut command).map(|()| library)
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
        let hosts: Vec<_> =
            self.memory.iter().map(|memory| HostBuffer::zeroed(memory.len() as usize)).collect();
        let mut batch = CopyBatch::new(Direction::DeviceToHost);
        for (memory, host) in self.memory.iter().zip(&hosts) {
            batch.push_device_to_host(memory, 0, host, 0, memory.len()).expect("fits");
        }
        stream.copy(batch).expect("queued").wait(soon()).expect("the work completes");
        hosts.iter().map(HostBuffer::to_vec).collect()
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
    let Some(machine) = Machine::new("cuda-conversions") else { return };
    machine.delay(100);
    let device = CudaDevice::open(&machine.driver, DeviceId(0)).expect("a device");
    assert_eq!(convert_on(&device, 12), 36);
}

/// On a real GPU. Where there is none this says so, and fails only if one is required (`KVBM_REQUIRE_GPU=1`, as
/// `cargo xtask test-gpu` sets it).
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
                    let backend = if round % 3 == 2 { Backend::Async } else { Backend::Auto };
                    // SAFETY: the memory is held until it was downloaded behind the conversion.
                    let taken = unsafe { converter.convert(stream, &conversion, backend) };
                    let expected = if round % 3 == 2 { Backend::Async } else { Backend::Kernel };
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
    let Some(machine) = Machine::new("cuda-staged") else { return };
    let device = CudaDevice::open(&machine.driver, DeviceId(0)).expect("a device");
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
    machine.assert_nothing_is_left();
}
