//! Checks and benchmarks of kvbm on an NVIDIA GPU: `gpu check`, `gpu bench`, `gpu report`. It needs
//! a driver and nothing else.

mod bench;
mod blocks;
mod check;
mod report;
mod results;

use std::path::PathBuf;
use std::process::ExitCode;

use kvbm_device::{CudaDevice, CudaDriver, DeviceId};
use kvbm_kernels::{Converter, CudaKernels};

/// What went wrong, for people.
pub(crate) type Failure = Box<dyn std::error::Error + Send + Sync>;

const USAGE: &str = "\
usage: gpu check  [--quick] [--device N] [--seconds S] --json FILE   every result compared with the CPU's
       gpu bench  [--quick] [--device N] --json FILE                 rates beside a device copy in the same run
       gpu note   --json FILE NAME ok|failed TEXT                    adds a row
       gpu report --json CHECK.json --json BENCH.json --html FILE    table and plot
The driver's library may be named in KVBM_CUDA_DRIVER.";

/// The command line.
#[derive(Default)]
pub(crate) struct Options {
    pub(crate) quick: bool,
    pub(crate) device: u32,
    pub(crate) seconds: u64,
    pub(crate) json: Vec<PathBuf>,
    pub(crate) html: Option<PathBuf>,
    rest: Vec<String>,
}

impl Options {
    fn parse(args: impl Iterator<Item = String>) -> Result<Self, Failure> {
        let mut options = Self { seconds: 60, ..Self::default() };
        let mut args = args.peekable();
        while let Some(argument) = args.next() {
            let mut value = || args.next().ok_or_else(|| format!("{argument} needs a value"));
            match argument.as_str() {
                "--quick" => options.quick = true,
                "--device" => options.device = value()?.parse()?,
                "--seconds" => options.seconds = value()?.parse()?,
                "--json" => options.json.push(value()?.into()),
                "--html" => options.html = Some(value()?.into()),
                _ => options.rest.push(argument),
            }
        }
        Ok(options)
    }

    /// The only file of results.
    pub(crate) fn file(&self) -> Result<&PathBuf, Failure> {
        self.json.first().ok_or_else(|| "--json FILE is missing".into())
    }
}

/// A device with its kernels.
pub(crate) struct Gpu {
    pub(crate) device: CudaDevice,
    pub(crate) converter: Converter<CudaKernels>,
}

impl Gpu {
    fn open(options: &Options) -> Result<Self, Failure> {
        let device = CudaDevice::open(&CudaDriver::open()?, DeviceId(options.device))?;
        let converter = Converter::new(CudaKernels::new(device.clone())?);
        converter.kernels()?;
        Ok(Self { device, converter })
    }
}

fn main() -> ExitCode {
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("gpu: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<bool, Failure> {
    let mut args = std::env::args().skip(1);
    let command = args.next().unwrap_or_default();
    let options = Options::parse(args)?;
    match command.as_str() {
        "check" => check::run(&Gpu::open(&options)?, &options),
        "bench" => bench::run(&Gpu::open(&options)?, &options).map(|()| true),
        "report" => report::run(&options).map(|()| true),
        "note" => match &options.rest[..] {
            [name, result, text] if ["ok", "failed"].contains(&result.as_str()) => {
                results::note(options.file()?, name, result == "ok", text).map(|()| true)
            }
            _ => Err(USAGE.into()),
        },
        _ => Err(USAGE.into()),
    }
}
