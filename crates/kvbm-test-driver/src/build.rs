//! Building the library, once for all tests of a build folder.

use std::hash::{DefaultHasher, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{fs, io};

/// Why there is no library.
#[derive(Debug, Clone)]
pub enum BuildError {
    /// There is no C++ compiler.
    NoCompiler(String),
    /// The compiler, or the system, refuses.
    Failed(String),
}

const FLAGS: [&str; 11] = [
    "-std=c++17",
    "-O2",
    "-g1",
    "-Wall",
    "-Wextra",
    "-Wno-unknown-pragmas",
    "-fno-strict-aliasing",
    "-fvisibility=hidden",
    "-shared",
    "-fPIC",
    "-pthread",
];

/// Builds the library unless it is there already, built of the same sources.
///
/// # Errors
/// No compiler (`c++`, or what `CXX` names), or what it says.
pub fn build() -> Result<PathBuf, BuildError> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let kernels = here.join("..").join("kvbm-kernels");
    let (cuda, cpu) = (kernels.join("cuda"), kernels.join("tests").join("kernels").join("cpu"));
    let failed = |what: &Path, error: io::Error| BuildError::Failed(format!("{}: {error}", what.display()));
    let mut sources = files(&here.join("driver"), "cpp").map_err(|error| failed(here, error))?;
    sources.push(cpu.join("linked.cpp"));

    let mut hasher = DefaultHasher::new();
    for folder in [&here.join("driver"), &cuda, &cpu] {
        for kind in ["cpp", "h", "cu"] {
            for file in files(folder, kind).map_err(|error| failed(folder, error))? {
                hasher.write(&fs::read(&file).map_err(|error| failed(&file, error))?);
            }
        }
    }
    let folder = folder();
    fs::create_dir_all(&folder).map_err(|error| failed(&folder, error))?;
    let library = folder.join(format!("libcuda-{:016x}.so", hasher.finish()));
    if library.is_file() {
        return Ok(library);
    }
    // Test programs may build it at the same time: whoever is last replaces it by the same.
    let own = folder.join(format!("building-{}-{:?}.so", std::process::id(), std::thread::current().id()));
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
    let mut command = Command::new(&compiler);
    command.args(FLAGS).arg("-I").arg(&cuda).arg("-I").arg(&cpu).args(&sources).arg("-o").arg(&own);
    let output = command.output().map_err(|error| {
        BuildError::NoCompiler(format!("no C++ compiler: `{compiler}` ({error}); name one in CXX"))
    })?;
    if !output.status.success() {
        return Err(BuildError::Failed(String::from_utf8_lossy(&output.stderr).into_owned()));
    }
    fs::rename(&own, &library).map_err(|error| failed(&library, error))?;
    Ok(library)
}

/// Beside the test programs, which are in `target/<profile>/deps`.
fn folder() -> PathBuf {
    let program = std::env::current_exe().unwrap_or_default();
    let folder = program.parent().unwrap_or(Path::new("."));
    let folder = if folder.ends_with("deps") { folder.parent().unwrap_or(folder) } else { folder };
    folder.join("test-driver")
}

fn files(folder: &Path, kind: &str) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == kind) {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}
