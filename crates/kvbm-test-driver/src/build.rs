//! Building C++ for tests: the library, once for all tests of a build folder, and other programs.

use std::hash::{DefaultHasher, Hasher};
use std::path::{Path, PathBuf};
use std::{fs, io};

/// Why there is no library or program.
#[derive(Debug, Clone, thiserror::Error)]
pub enum CompileError {
    /// There is no C++ compiler.
    #[error("no C++ compiler: {0}; name one in CXX")]
    NoCompiler(String),
    /// The compiler, or the system, refuses.
    #[error("{0}")]
    Failed(String),
}

impl CompileError {
    fn of(path: &Path) -> impl Fn(io::Error) -> Self {
        let path = path.display().to_string();
        move |error| Self::Failed(format!("{path}: {error}"))
    }
}

/// Compiles C++ sources to a program, or to a library if the flags say so. The compiler is `c++`,
/// or the one that `CXX` names.
///
/// # Errors
/// No compiler, or its messages.
pub fn compile(
    sources: &[PathBuf],
    include: &[&Path],
    flags: &[&str],
    output: &Path,
) -> Result<(), CompileError> {
    // Outside a build script nothing names the target; the result runs on this machine.
    let target = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let mut build = cc::Build::new();
    build
        .cpp(true)
        .std("c++17")
        .warnings(true)
        .extra_warnings(true)
        .cargo_output(false)
        .cargo_metadata(false)
        .cargo_warnings(false);
    build.target(&target).host(&target).opt_level(2).out_dir(output.parent().unwrap_or(output));
    build.includes(include).flag("-Wno-unknown-pragmas").flag("-fno-strict-aliasing").flags(flags);
    let compiler = build.try_get_compiler();
    let compiler = compiler.map_err(|error| CompileError::NoCompiler(error.to_string()))?;
    let done = compiler.to_command().args(sources).arg("-o").arg(output).output();
    let done =
        done.map_err(|error| CompileError::NoCompiler(format!("`{}` ({error})", compiler.path().display())))?;
    if done.status.success() {
        return Ok(());
    }
    Err(CompileError::Failed(String::from_utf8_lossy(&done.stderr).into_owned()))
}

/// Builds the library, unless one of the same sources is there.
///
/// # Errors
/// No compiler, or its messages.
pub fn build() -> Result<PathBuf, CompileError> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("driver");
    let kernels = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join("kvbm-kernels");
    let (cuda, cpu) = (kernels.join("cuda"), kernels.join("tests").join("kernels").join("cpu"));
    let mut sources = files(&here, "cpp")?;
    sources.push(cpu.join("linked.cpp"));

    let mut hasher = DefaultHasher::new();
    for folder in [&here, &cuda, &cpu] {
        for kind in ["cpp", "h", "cu"] {
            for file in files(folder, kind)? {
                hasher.write(&fs::read(&file).map_err(CompileError::of(&file))?);
            }
        }
    }
    let folder = folder();
    fs::create_dir_all(&folder).map_err(CompileError::of(&folder))?;
    let library = folder.join(format!("libcuda-{:016x}.so", hasher.finish()));
    if library.is_file() {
        return Ok(library);
    }
    // Test programs may build it at the same time: the last one replaces it by the same.
    let thread = std::thread::current().id();
    let own = folder.join(format!("building-{}-{thread:?}.so", std::process::id()));
    let flags = ["-g1", "-fvisibility=hidden", "-shared", "-fPIC", "-pthread"];
    compile(&sources, &[&cuda, &cpu], &flags, &own)?;
    fs::rename(&own, &library).map_err(CompileError::of(&library))?;
    Ok(library)
}

/// Beside the test programs, which are in `target/<profile>/deps`.
fn folder() -> PathBuf {
    let program = std::env::current_exe().unwrap_or_default();
    let folder = program.parent().unwrap_or(Path::new("."));
    let folder = if folder.ends_with("deps") { folder.parent().unwrap_or(folder) } else { folder };
    folder.join("test-driver")
}

fn files(folder: &Path, kind: &str) -> Result<Vec<PathBuf>, CompileError> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).map_err(CompileError::of(folder))? {
        let path = entry.map_err(CompileError::of(folder))?.path();
        if path.extension().is_some_and(|extension| extension == kind) {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}
