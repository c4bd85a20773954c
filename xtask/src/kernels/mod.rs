//! The prebuilt kernels: how they are built, and that what is committed was built from the source
//! beside it.
//!
//! There is no compiler of CUDA on most machines, so the fatbin is committed. It is built by NVRTC,
//! which is a library: one machine image for each architecture by the version of CUDA 12 that knows
//! them all, and PTX of an old version for whatever comes later, since a driver takes only PTX that
//! is no newer than itself.

mod manifest;
mod regen;

use crate::workspace::Workspace;
use manifest::Manifest;
use std::path::{Path, PathBuf};

pub(crate) use regen::{Mode, run as regenerate};

/// A wheel of the Python package index.
struct Tool {
    package: &'static str,
    version: &'static str,
    /// Of the wheel for Linux on `x86_64`.
    sha256: &'static str,
    /// Its shared libraries, within the wheel.
    libraries: &'static str,
}

/// Compiles the machine images.
const CUBIN_COMPILER: Tool = Tool {
    package: "nvidia-cuda-nvrtc-cu12",
    version: "12.9.86",
    sha256: "210cf05005a447e29214e9ce50851e83fc5f4358df8b453155d5e1918094dcb4",
    libraries: "nvidia/cuda_nvrtc/lib",
};

/// Compiles the PTX: every driver of CUDA 12 takes it.
const PTX_COMPILER: Tool = Tool {
    package: "nvidia-cuda-nvrtc-cu12",
    version: "12.0.140",
    sha256: "8e94e991d85c422de4da87bdc7472fdc1364367bd4aace7000b559cd33122071",
    libraries: "nvidia/cuda_nvrtc/lib",
};

/// Puts the images into one file.
const PACKER: Tool = Tool {
    package: "nvidia-nvfatbin-cu12",
    version: "12.9.82",
    sha256: "16cbfbd12287508212f22f42dff6ff51cf9b528b906f57f615b080da16dea1ea",
    libraries: "nvidia/nvfatbin/lib",
};

/// Architectures with a machine image: A100, RTX 30, L4 and RTX 40, H100 and H200, B200, RTX 50.
const CUBIN_ARCHS: [u32; 6] = [80, 86, 89, 90, 100, 120];

/// Architecture of the PTX.
const PTX_ARCH: u32 = 80;

/// Options of both compilers, besides the architecture. No line numbers: they would name files.
const FLAGS: [&str; 1] = ["-std=c++17"];

/// The name that the images carry.
const NAME: &str = "kvbm";

/// Files of the kernels, relative to the workspace.
struct Files {
    source: PathBuf,
    folder: PathBuf,
    script: PathBuf,
    fatbin: PathBuf,
    manifest: PathBuf,
}

impl Files {
    fn of(root: &Path) -> Self {
        let folder = root.join("crates").join("kvbm-kernels").join("cuda");
        let prebuilt = folder.join("prebuilt");
        Self {
            source: folder.join("kvbm_kernels.cu"),
            script: root.join("xtask").join("src").join("kernels").join("compile.py"),
            fatbin: prebuilt.join("kvbm_kernels.fatbin"),
            manifest: prebuilt.join("manifest.json"),
            folder,
        }
    }
}

/// Fails if the committed fatbin is not what the committed manifest says, or was built from another
/// source, by other tools or with other flags than this version names.
pub(crate) fn verify(workspace: &Workspace) -> anyhow::Result<()> {
    let files = Files::of(&workspace.root);
    let committed = Manifest::read(&files.manifest)?;
    let differences = committed.differences(&Manifest::of(&files)?);
    anyhow::ensure!(
        differences.is_empty(),
        "the prebuilt kernels do not belong to this source; `cargo xtask regen-kernels` builds them again:\n{}",
        differences.join("\n")
    );
    Ok(())
}
