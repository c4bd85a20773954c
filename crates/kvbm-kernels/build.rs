//! Names the image of the kernels that is embedded: the prebuilt one, or, only if `CUDA_ARCHS` asks
//! for it, one that a local nvcc builds of the source.

#[path = "build/nvcc.rs"]
mod nvcc;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

fn main() -> ExitCode {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=build");
    println!("cargo::rerun-if-env-changed=CUDA_ARCHS");
    match image() {
        Ok(image) => {
            println!("cargo::rustc-env=KVBM_KERNELS_FATBIN={}", image.display());
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn image() -> Result<PathBuf, String> {
    let variable = |name: &str| std::env::var_os(name).ok_or_else(|| format!("cargo sets no {name}"));
    let cuda = Path::new(&variable("CARGO_MANIFEST_DIR")?).join("cuda");
    let Some(archs) = std::env::var_os("CUDA_ARCHS") else {
        return Ok(cuda.join("prebuilt").join("kvbm_kernels.fatbin"));
    };
    println!("cargo::rerun-if-changed=cuda");
    println!("cargo::rerun-if-env-changed=NVCC");
    let targets = nvcc::targets(&archs.to_string_lossy())?;
    let image = Path::new(&variable("OUT_DIR")?).join("kvbm_kernels.fatbin");
    nvcc::build(&cuda.join("kvbm_kernels.cu"), &image, &targets)?;
    Ok(image)
}
