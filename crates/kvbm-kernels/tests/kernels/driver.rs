//! Conversions through the driver seam, down to the shipped PTX: what is queued is done at once, on
//! memory of a device that does not exist.

use std::cell::{Cell, RefCell};

use kvbm_kernels::{
    Backend, BlockForm, BlockShape, ChunkOrder, Conversion, Converter, Crossover, DeviceLimits, Driver,
    Kernel, KernelError, Launch, Operand, Piece, THREADS,
};

use crate::memory::{Executor, Memory};
use crate::ptx::Machine;

#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Refused(String);

/// A driver that answers every call, or refuses one kind of them.
struct Emulated {
    memory: RefCell<Memory>,
    machine: RefCell<Machine>,
    batches: bool,
    refuses: Cell<&'static str>,
    calls: RefCell<Vec<String>>,
}

impl Emulated {
    fn new(batches: bool) -> Self {
        Self {
            memory: RefCell::default(),
            machine: RefCell::new(Machine::shipped()),
            batches,
            refuses: Cell::new(""),
            calls: RefCell::default(),
        }
    }

    fn call(&self, name: &str, what: &str) -> Result<(), Refused> {
        if self.refuses.get() == name {
            return Err(Refused(format!("{name} is refused")));
        }
        self.calls.borrow_mut().push(format!("{name} {what}"));
        Ok(())
    }

    fn count(&self, name: &str) -> usize {
        self.calls.borrow().iter().filter(|call| call.split(' ').next() == Some(name)).count()
    }

    fn move_piece(&self, piece: Piece) -> Result<(), Refused> {
        let mut memory = self.memory.borrow_mut();
        let outside = |what: &str| Refused(format!("the {what} of {piece:?} is nobody's"));
        let len = usize::try_from(piece.bytes).map_err(|error| Refused(error.to_string()))?;
        let bytes = memory.at(piece.from, len).ok_or_else(|| outside("source"))?.to_vec();
        memory.at(piece.to, len).ok_or_else(|| outside("destination"))?.copy_from_slice(&bytes);
        Ok(())
    }
}

impl Driver for &Emulated {
    type Module = Vec<u8>;
    type Function = &'static str;
    type Stream = ();
    type Staged = u64;
    type Error = Refused;

    fn device(&self) -> u32 {
        0
    }

    fn limits(&self) -> DeviceLimits {
        DeviceLimits { multiprocessors: 2, max_grid: 3 }
    }

    fn has_batches(&self) -> bool {
        self.batches
    }

    fn load(&self, fatbin: &'static [u8]) -> Result<Vec<u8>, Refused> {
        self.call("load", &fatbin.len().to_string())?;
        Ok(fatbin.to_vec())
    }

    fn function(&self, module: &Vec<u8>, name: &'static str) -> Result<&'static str, Refused> {
        self.call("function", name)?;
        let found = module.windows(name.len()).any(|bytes| bytes == name.as_bytes());
        if found { Ok(name) } else { Err(Refused(format!("no kernel {name}"))) }
    }

    fn stage(&self, (): &(), words: &[u64]) -> Result<u64, Refused> {
        self.call("stage", &words.len().to_string())?;
        Ok(self.memory.borrow_mut().table(words))
    }

    fn address(staged: &u64) -> u64 {
        *staged
    }

    unsafe fn launch(
        &self,
        (): &(),
        function: &&'static str,
        launch: Launch,
        threads: u32,
        staged: Vec<u64>,
    ) -> Result<(), Refused> {
        self.call("launch", function)?;
        assert_eq!((*function, threads), (launch.kernel.name(), THREADS));
        let memory = self.memory.borrow();
        assert!(staged.iter().all(|address| memory.find(*address).is_some()), "what was staged is there");
        drop(memory);
        self.machine.borrow_mut().run(&launch, &mut self.memory.borrow_mut(), false).map_err(Refused)
    }

    unsafe fn copy_batch(&self, (): &(), pieces: &[Piece]) -> Result<(), Refused> {
        self.call("batch", &pieces.len().to_string())?;
        assert!(self.batches && pieces.len() <= 4096, "{} pieces", pieces.len());
        pieces.iter().try_for_each(|piece| self.move_piece(*piece))
    }

    unsafe fn copy_each(&self, (): &(), pieces: &[Piece]) -> Result<(), Refused> {
        self.call("copy", &pieces.len().to_string())?;
        pieces.iter().try_for_each(|piece| self.move_piece(*piece))
    }
}

const NHD: BlockForm = BlockForm::Stack(ChunkOrder::Nhd);
const OPERATIONAL: BlockForm = BlockForm::Operational(ChunkOrder::Nhd);

/// Two blocks in each form, the stacks filled, all else blank.
struct Blocks {
    shape: BlockShape,
    stacks: [Vec<u64>; 2],
    universals: Vec<u64>,
    operationals: Vec<u64>,
    content: Vec<u8>,
}

impl Blocks {
    fn new(driver: &Emulated) -> Self {
        let shape = BlockShape::new(2, 2, 3, 5, 8, 2).expect("a small shape");
        let mut memory = driver.memory.borrow_mut();
        let mut allocate = |form: BlockForm| -> Vec<u64> {
            let count = 2 * form.chunks_per_block(&shape);
            (0..count).map(|_| memory.allocate(form.chunk_bytes(&shape), 0, 0)).collect()
        };
        let stacks = [allocate(NHD), allocate(NHD)];
        let (universals, operationals) = (allocate(BlockForm::Universal), allocate(OPERATIONAL));
        let content: Vec<u8> = (0..2 * shape.block_bytes()).map(|i| ((i * 37) >> 2) as u8).collect();
        let chunk = NHD.chunk_bytes(&shape);
        for (address, bytes) in stacks[0].iter().zip(content.chunks_exact(chunk)) {
            memory.at(*address, chunk).expect("allocated").copy_from_slice(bytes);
        }
        Self { shape, stacks, universals, operationals, content }
    }

    fn round_trip(&self) -> [Conversion; 3] {
        let operand = |form, addresses: &Vec<u64>| Operand::pointers(form, addresses.clone()).on_device(0);
        let step = |from, to| Conversion::new(self.shape, from, to).expect("sound arguments");
        let universal = || operand(BlockForm::Universal, &self.universals);
        let operational = || operand(OPERATIONAL, &self.operationals);
        [
            step(operand(NHD, &self.stacks[0]), universal()),
            step(universal(), operational()),
            step(operational(), operand(NHD, &self.stacks[1])),
        ]
    }

    /// What lies in the second stacks.
    fn back(&self, driver: &Emulated) -> Vec<u8> {
        let mut memory = driver.memory.borrow_mut();
        let chunk = NHD.chunk_bytes(&self.shape);
        self.stacks[1].iter().flat_map(|at| memory.at(*at, chunk).expect("allocated").to_vec()).collect()
    }
}

fn convert(
    converter: &Converter<&Emulated>,
    step: &Conversion,
    backend: Backend,
) -> Result<Backend, KernelError> {
    // SAFETY: the memory does not exist; every access to it is checked.
    unsafe { converter.convert(&(), step, backend) }
}

#[test]
fn fused_copy_roundtrip() {
    for backend in [Backend::Kernel, Backend::Batch, Backend::Async] {
        let driver = Emulated::new(true);
        let blocks = Blocks::new(&driver);
        let converter = Converter::new(&driver);
        for step in &blocks.round_trip() {
            assert_eq!(convert(&converter, step, backend), Ok(backend));
        }
        assert_eq!(blocks.back(&driver), blocks.content, "{backend}");
        let count = |name| driver.count(name);
        assert_eq!(count("function"), Kernel::ALL.len());
        match backend {
            Backend::Kernel => assert_eq!((count("launch"), count("batch"), count("copy")), (3, 0, 0)),
            Backend::Batch => assert_eq!((count("launch"), count("batch"), count("copy")), (0, 3, 0)),
            _ => assert_eq!((count("launch"), count("batch")), (0, 0)),
        }
    }
}

#[test]
fn auto_uses_what_there_is_and_what_was_measured() {
    let run = |driver: &Emulated, crossover: Option<Crossover>| {
        let blocks = Blocks::new(driver);
        let converter = Converter::new(driver);
        let converter = match crossover {
            Some(crossover) => converter.with_crossover(crossover),
            None => converter,
        };
        let steps = blocks.round_trip();
        let taken: Vec<_> = steps.iter().map(|step| convert(&converter, step, Backend::Auto)).collect();
        assert_eq!(blocks.back(driver), blocks.content, "{taken:?}");
        taken.into_iter().map(|taken| taken.expect("it went well")).collect::<Vec<_>>()
    };
    assert_eq!(run(&Emulated::new(true), None), [Backend::Kernel; 3]);
    // Rows of 16 bytes to and from the universal form; chunks of 240 bytes between the others.
    let crossover = Crossover { batch_from_bytes: 100, async_from_bytes: u64::MAX };
    let expected = [Backend::Kernel, Backend::Kernel, Backend::Batch];
    assert_eq!(run(&Emulated::new(true), Some(crossover)), expected);
    for (batches, expected) in [(true, Backend::Batch), (false, Backend::Async)] {
        let driver = Emulated::new(batches);
        driver.refuses.set("load");
        assert_eq!(run(&driver, Some(crossover)), [expected; 3], "without an image");
    }
}

#[test]
fn pairs_take_the_same_back_ends() {
    for backend in [Backend::Kernel, Backend::Batch, Backend::Async] {
        let driver = Emulated::new(true);
        let converter = Converter::new(&driver);
        let mut pieces = Vec::new();
        for bytes in [0_u64, 1, 17, 4096, 70_000] {
            let len = usize::try_from(bytes).expect("small");
            let mut memory = driver.memory.borrow_mut();
            let (from, to) = (memory.allocate(len, 3, 0xA5), memory.allocate(len, 5, 0));
            pieces.push(Piece { from, to, bytes });
        }
        // SAFETY: the memory does not exist; every access to it is checked.
        let taken = unsafe { converter.copy_pairs(&(), &pieces, backend) };
        assert_eq!(taken, Ok(backend));
        let memory = driver.memory.borrow();
        for segment in memory.segments.iter().filter(|segment| !segment.is_table) {
            assert!(
                segment.bytes.iter().all(|byte| *byte == 0xA5),
                "{backend}: {} bytes",
                segment.bytes.len()
            );
        }
    }
}

#[test]
fn every_call_that_the_driver_refuses_is_an_error_that_says_which() {
    for (call, backend, expected) in [
        ("load", Backend::Kernel, "back end kernel is not available"),
        ("function", Backend::Kernel, "back end kernel is not available"),
        ("stage", Backend::Kernel, "staging addresses: the driver reported: stage is refused"),
        ("launch", Backend::Kernel, "kvbm_rows_16: the driver reported: launch is refused"),
        ("batch", Backend::Batch, "a batch of copies: the driver reported: batch is refused"),
        ("copy", Backend::Async, "copies: the driver reported: copy is refused"),
    ] {
        let driver = Emulated::new(true);
        driver.refuses.set(call);
        let blocks = Blocks::new(&driver);
        let converter = Converter::new(&driver);
        let error = convert(&converter, &blocks.round_trip()[0], backend).unwrap_err().to_string();
        assert!(error.contains(expected), "{call}: {error}");
    }
    let driver = Emulated::new(true);
    driver.refuses.set("function");
    let error = Converter::new(&driver).kernels().unwrap_err().to_string();
    assert!(error.starts_with("kvbm_rows_16: the driver reported: function is refused"), "{error}");
}

#[test]
fn memory_of_another_device_is_refused_before_anything_is_queued() {
    let driver = Emulated::new(true);
    let blocks = Blocks::new(&driver);
    let converter = Converter::new(&driver);
    let operand = |form, at: &Vec<u64>| Operand::pointers(form, at.clone()).on_device(7);
    let from = operand(NHD, &blocks.stacks[0]);
    let to = operand(BlockForm::Universal, &blocks.universals);
    let conversion = Conversion::new(blocks.shape, from, to).expect("one device");
    let error = convert(&converter, &conversion, Backend::Auto).unwrap_err();
    assert_eq!(error, KernelError::Device { argument: "conversion".into(), found: 7, expected: 0 });
    assert_eq!(driver.count("stage") + driver.count("launch"), 0);
}
