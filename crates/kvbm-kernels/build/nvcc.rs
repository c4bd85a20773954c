//! A build of the kernels by a local nvcc.

use std::path::Path;
use std::process::Command;

/// Oldest architecture that the kernels are meant for.
const OLDEST: u32 = 70;

/// The options of nvcc for a list like `80,90`: machine code for each, and PTX of the newest for
/// what comes later.
pub(crate) fn targets(archs: &str) -> Result<Vec<String>, String> {
    let rule = "CUDA_ARCHS is a list of compute capabilities without the dot, like 80,90; unset it to use the prebuilt kernels";
    let mut numbers = Vec::new();
    for arch in archs.split(',').map(str::trim) {
        match arch.parse::<u32>() {
            Ok(number) if number >= OLDEST => numbers.push(number),
            Ok(number) => return Err(format!("CUDA_ARCHS names {number}, older than {OLDEST}; {rule}")),
            Err(_) => return Err(format!("CUDA_ARCHS names `{arch}`; {rule}")),
        }
    }
    numbers.sort_unstable();
    numbers.dedup();
    let newest = numbers.last().map(|arch| format!("arch=compute_{arch},code=compute_{arch}"));
    let machine = numbers.iter().map(|arch| format!("arch=compute_{arch},code=sm_{arch}"));
    Ok(machine.chain(newest).flat_map(|target| ["-gencode".to_owned(), target]).collect())
}

/// Compiles `source` to a fatbin. The compiler is `nvcc`, or what `NVCC` names.
pub(crate) fn build(source: &Path, image: &Path, targets: &[String]) -> Result<(), String> {
    let nvcc = std::env::var("NVCC").unwrap_or_else(|_| "nvcc".to_owned());
    let mut command = Command::new(&nvcc);
    // Not compressed, like the prebuilt image: what is embedded can be listed.
    command.args(["-fatbin", "-std=c++17", "--no-compress"]).args(targets);
    command.arg(source).arg("-o").arg(image);
    let way_out = "set NVCC to CUDA's nvcc, or unset CUDA_ARCHS to use the prebuilt kernels";
    let output =
        command.output().map_err(|error| format!("`{nvcc}` cannot be started ({error}); {way_out}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("`{nvcc}` failed; {way_out}\n{}", String::from_utf8_lossy(&output.stderr)))
}
