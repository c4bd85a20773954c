//! Running conversions through a [`Driver`].

use std::collections::HashMap;

use crate::{
    Argument, Backend, Capabilities, Conversion, Crossover, DeviceLimits, FATBIN, Kernel, KernelError,
    Launch, PairCopies, Piece, THREADS,
};

/// Copies of one batch: longer ones are said to hang drivers.
const BATCH_PIECES: usize = 4096;

/// What a device's driver does for conversions. Work is queued on a stream and done in the stream's
/// order.
pub trait Driver {
    /// A loaded image.
    type Module;
    /// A kernel of it.
    type Function: Clone;
    /// A queue of work.
    type Stream: ?Sized;
    /// Words in device memory, kept there by this.
    type Staged;
    /// What the driver says when it refuses.
    type Error: std::error::Error;

    /// Number of the device.
    fn device(&self) -> u32;

    /// What launches have to know of it.
    fn limits(&self) -> DeviceLimits;

    /// Whether it takes batches of copies.
    fn has_batches(&self) -> bool;

    /// Loads a fatbin.
    ///
    /// # Errors
    /// As the driver says: no image for this device, out of memory.
    fn load(&self, fatbin: &'static [u8]) -> Result<Self::Module, Self::Error>;

    /// The kernel of this name.
    ///
    /// # Errors
    /// As the driver says: no such kernel.
    fn function(&self, module: &Self::Module, name: &'static str) -> Result<Self::Function, Self::Error>;

    /// Puts words into device memory, in the machine's byte order, before the next operation of the
    /// stream.
    ///
    /// # Errors
    /// As the driver says: out of memory.
    fn stage(&self, stream: &Self::Stream, words: &[u64]) -> Result<Self::Staged, Self::Error>;

    /// Device address of the first word.
    fn address(staged: &Self::Staged) -> u64;

    /// Queues a launch of one-dimensional blocks of `threads` threads. What is staged for it is
    /// kept until it is complete.
    ///
    /// # Errors
    /// As the driver says.
    ///
    /// # Safety
    /// The argument is that of the kernel. Whatever addresses it leads to are memory of this
    /// device. Until the launch is complete, it stays allocated, and nobody else writes it (or,
    /// where the kernel writes, reads it).
    #[allow(unsafe_code)]
    unsafe fn launch(
        &self,
        stream: &Self::Stream,
        function: &Self::Function,
        launch: Launch,
        threads: u32,
        staged: Vec<Self::Staged>,
    ) -> Result<(), Self::Error>;

    /// Queues copies in one call, without order among themselves. Called only if
    /// [`Driver::has_batches`].
    ///
    /// # Errors
    /// As the driver says.
    ///
    /// # Safety
    /// As for [`Driver::launch`].
    #[allow(unsafe_code)]
    unsafe fn copy_batch(&self, stream: &Self::Stream, pieces: &[Piece]) -> Result<(), Self::Error>;

    /// Queues copies one by one.
    ///
    /// # Errors
    /// As the driver says.
    ///
    /// # Safety
    /// As for [`Driver::launch`].
    #[allow(unsafe_code)]
    unsafe fn copy_each(&self, stream: &Self::Stream, pieces: &[Piece]) -> Result<(), Self::Error>;
}

/// Carries conversions out on one device.
#[derive(Debug)]
pub struct Converter<D: Driver> {
    driver: D,
    kernels: Result<Loaded<D>, KernelError>,
    crossover: Option<Crossover>,
}

/// The kernels, and the module that they are part of.
struct Loaded<D: Driver> {
    functions: HashMap<Kernel, D::Function>,
    _module: D::Module,
}

impl<D: Driver> std::fmt::Debug for Loaded<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} kernels", self.functions.len())
    }
}

impl<D: Driver> Converter<D> {
    /// Loads the kernels. Without them (see [`Converter::kernels`]) the copy engines do what they
    /// can.
    pub fn new(driver: D) -> Self {
        let kernels = load(&driver, FATBIN);
        Self { driver, kernels, crossover: None }
    }

    /// Uses what was measured on this device.
    #[must_use]
    pub fn with_crossover(mut self, crossover: Crossover) -> Self {
        self.crossover = Some(crossover);
        self
    }

    /// Whether the kernels were loaded.
    ///
    /// # Errors
    /// Why not.
    pub fn kernels(&self) -> Result<(), KernelError> {
        self.kernels.as_ref().map(|_| ()).map_err(Clone::clone)
    }

    /// What this device can do.
    pub fn capabilities(&self) -> Capabilities {
        Capabilities { kernels: self.kernels.is_ok(), batches: self.driver.has_batches() }
    }

    /// Its driver.
    pub fn driver(&self) -> &D {
        &self.driver
    }

    /// Queues a conversion and says which back end took it.
    ///
    /// # Errors
    /// [`KernelError::Device`], [`KernelError::Backend`], [`KernelError::TooMuch`] before anything
    /// is queued; [`KernelError::Driver`] with what the driver said, after which the destinations
    /// are undefined.
    ///
    /// # Safety
    /// All memory that the conversion names is memory of this device that stays allocated until the
    /// queued work is complete. Until then nobody else writes the sources or touches the
    /// destinations.
    #[allow(unsafe_code)]
    pub unsafe fn convert(
        &self,
        stream: &D::Stream,
        conversion: &Conversion,
        backend: Backend,
    ) -> Result<Backend, KernelError> {
        let expected = self.driver.device();
        if let Some(found) = conversion.device().filter(|found| *found != expected) {
            return Err(KernelError::Device { argument: "conversion".into(), found, expected });
        }
        let piece_bytes = conversion.piece_bytes();
        let backend = backend.choose(self.capabilities(), self.crossover.as_ref(), piece_bytes)?;
        if backend == Backend::Kernel {
            let limits = self.driver.limits();
            // Refused before anything is staged if it is too much for one launch.
            if conversion.launch(limits, 0, 0)?.is_none() {
                return Ok(backend);
            }
            let mut staged = Vec::new();
            let from = self.stage(stream, conversion.table(Argument::Sources), &mut staged)?;
            let to = self.stage(stream, conversion.table(Argument::Destinations), &mut staged)?;
            if let Some(launch) = conversion.launch(limits, from, to)? {
                // SAFETY: the argument was made for this kernel of checked operands; the caller
                // answers for their memory.
                unsafe { self.launch(stream, launch, staged) }?;
            }
        } else {
            let mut pieces = conversion.pieces();
            loop {
                let some: Vec<Piece> = pieces.by_ref().take(BATCH_PIECES).collect();
                if some.is_empty() {
                    break;
                }
                // SAFETY: the pieces are the rows of checked operands; the caller answers for their
                // memory.
                unsafe { self.copy_all(stream, backend, &some) }?;
            }
        }
        Ok(backend)
    }

    /// Queues copies of pairs and says which back end took them. The average length decides where
    /// nobody does.
    ///
    /// # Errors
    /// [`KernelError::Pair`], [`KernelError::Backend`], [`KernelError::TooMuch`] before anything is
    /// queued; [`KernelError::Driver`] with what the driver said, after which the destinations are
    /// undefined.
    ///
    /// # Safety
    /// As for [`Converter::convert`].
    #[allow(unsafe_code)]
    pub unsafe fn copy_pairs(
        &self,
        stream: &D::Stream,
        pieces: &[Piece],
        backend: Backend,
    ) -> Result<Backend, KernelError> {
        let copies = PairCopies::new(pieces)?;
        let average = copies.bytes() / (pieces.len() as u64).max(1);
        let backend = backend.choose(self.capabilities(), self.crossover.as_ref(), average)?;
        if backend == Backend::Kernel {
            let mut staged = Vec::new();
            let table = self.stage(stream, copies.table(), &mut staged)?;
            if let Some(launch) = copies.launch(self.driver.limits(), table) {
                // SAFETY: the argument was made for this kernel of checked pairs; the caller
                // answers for their memory.
                unsafe { self.launch(stream, launch, staged) }?;
            }
        } else {
            let whole: Vec<Piece> = pieces.iter().filter(|piece| piece.bytes > 0).copied().collect();
            for some in whole.chunks(BATCH_PIECES) {
                // SAFETY: the pairs were checked; the caller answers for their memory.
                unsafe { self.copy_all(stream, backend, some) }?;
            }
        }
        Ok(backend)
    }

    /// Address of the staged words, 0 if there are none.
    fn stage(
        &self,
        stream: &D::Stream,
        words: &[u64],
        staged: &mut Vec<D::Staged>,
    ) -> Result<u64, KernelError> {
        if words.is_empty() {
            return Ok(0);
        }
        let words =
            self.driver.stage(stream, words).map_err(|error| driver_error("staging addresses", &error))?;
        let address = D::address(&words);
        staged.push(words);
        Ok(address)
    }

    /// # Safety
    /// As for [`Driver::launch`].
    #[allow(unsafe_code)]
    unsafe fn launch(
        &self,
        stream: &D::Stream,
        launch: Launch,
        staged: Vec<D::Staged>,
    ) -> Result<(), KernelError> {
        let loaded = self.kernels.as_ref().map_err(Clone::clone)?;
        let name = launch.kernel.name();
        let function = &loaded.functions[&launch.kernel];
        // SAFETY: the caller answers for the argument and the memory.
        unsafe { self.driver.launch(stream, function, launch, THREADS, staged) }
            .map_err(|error| driver_error(name, &error))
    }

    /// # Safety
    /// As for [`Driver::copy_each`].
    #[allow(unsafe_code)]
    unsafe fn copy_all(
        &self,
        stream: &D::Stream,
        backend: Backend,
        pieces: &[Piece],
    ) -> Result<(), KernelError> {
        if backend == Backend::Batch {
            // SAFETY: the caller answers for the memory.
            return unsafe { self.driver.copy_batch(stream, pieces) }
                .map_err(|error| driver_error("a batch of copies", &error));
        }
        // SAFETY: the caller answers for the memory.
        unsafe { self.driver.copy_each(stream, pieces) }.map_err(|error| driver_error("copies", &error))
    }
}

fn load<D: Driver>(driver: &D, fatbin: &'static [u8]) -> Result<Loaded<D>, KernelError> {
    let module = driver.load(fatbin).map_err(|error| driver_error("loading the kernels", &error))?;
    let mut functions = HashMap::new();
    for kernel in Kernel::ALL {
        let function =
            driver.function(&module, kernel.name()).map_err(|error| driver_error(kernel.name(), &error))?;
        functions.insert(kernel, function);
    }
    Ok(Loaded { functions, _module: module })
}

fn driver_error(doing: &'static str, error: &dyn std::error::Error) -> KernelError {
    KernelError::Driver { doing, reason: error.to_string() }
}
