//! The kernels' source as a C++ program: `cpu/program.cpp`, which says what it reads and writes.

use std::io::{BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::OnceLock;

use kvbm_kernels::{Launch, THREADS};
use kvbm_test_driver::CompileError;

use crate::memory::{Executor, Memory};

/// Wrong alignment and arithmetic that C++ leaves undefined end the program; this needs no library.
const FLAGS: [&str; 4] = ["-O1", "-g1", "-fsanitize=undefined", "-fsanitize-undefined-trap-on-error"];

/// A running program; it ends when this is dropped.
pub(crate) struct Program {
    child: Child,
    input: Option<BufWriter<ChildStdin>>,
    output: BufReader<ChildStdout>,
}

impl Program {
    /// Compiles and starts the program. `None`, with a note, where there is no C++ compiler, or
    /// none with this sanitizer, and none is required (`REQUIRE_CXX=1`).
    pub(crate) fn start(sanitizers: &[&str]) -> Option<Self> {
        static PLAIN: OnceLock<Result<PathBuf, CompileError>> = OnceLock::new();
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("cuda");
        let built = if sanitizers.is_empty() {
            PLAIN.get_or_init(|| compile(&source, "kernels", &[])).clone()
        } else {
            compile(&source, "kernels-sanitized", sanitizers)
        };
        Some(Self::spawn(&required(built, sanitizers)?, Stdio::inherit()))
    }

    /// The same from a source with one place of it changed: tests that cannot see the difference
    /// are worth nothing.
    pub(crate) fn start_mutated(name: &str, find: &str, replace: &str, sanitizers: &[&str]) -> Option<Self> {
        let original = Path::new(env!("CARGO_MANIFEST_DIR")).join("cuda");
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-source"));
        std::fs::create_dir_all(&folder).expect("a folder of our own");
        let mut found = 0;
        for file in ["kvbm_kernels.cu", "jobs.h", "portable.h"] {
            let text = std::fs::read_to_string(original.join(file)).expect("a source file");
            found += text.matches(find).count();
            std::fs::write(folder.join(file), text.replace(find, replace)).expect("a folder of our own");
        }
        assert!(found > 0, "`{find}` is not in the kernels any more");
        let program = required(compile(&folder, name, sanitizers), sanitizers)?;
        // What it says when it breaks is what is hoped for.
        Some(Self::spawn(&program, Stdio::null()))
    }

    fn spawn(program: &Path, errors: Stdio) -> Self {
        // Fibers switch stacks under the sanitizer's feet; addresses are what it is here for.
        let mut child = Command::new(program)
            .env("ASAN_OPTIONS", "detect_stack_use_after_return=0:detect_leaks=0:abort_on_error=1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(errors)
            .spawn()
            .expect("the program that was just built starts");
        let input = child.stdin.take().map(BufWriter::new);
        let output = BufReader::new(child.stdout.take().expect("piped"));
        Self { child, input, output }
    }

    fn exchange(&mut self, job: &[u8], memory: &mut Memory) -> std::io::Result<String> {
        let input = self.input.as_mut().expect("open until dropped");
        input.write_all(job)?;
        input.flush()?;
        let error = self.read_bytes()?;
        for segment in &mut memory.segments {
            let bytes = self.read_bytes()?;
            // Tables come back with the addresses that they have over there.
            if !segment.is_table {
                segment.bytes = bytes;
            }
        }
        Ok(String::from_utf8_lossy(&error).into_owned())
    }

    fn read_bytes(&mut self) -> std::io::Result<Vec<u8>> {
        let mut length = [0; 8];
        self.output.read_exact(&mut length)?;
        let mut bytes = vec![0; usize::try_from(u64::from_ne_bytes(length)).expect("small")];
        self.output.read_exact(&mut bytes)?;
        Ok(bytes)
    }
}

/// What was built, or a note that it is missing where that is allowed.
fn required(built: Result<PathBuf, CompileError>, sanitizers: &[&str]) -> Option<PathBuf> {
    let error = match built {
        Ok(program) => return Some(program),
        Err(error) => error,
    };
    let optional = matches!(error, CompileError::NoCompiler(_)) || !sanitizers.is_empty();
    assert!(optional && std::env::var_os("REQUIRE_CXX").is_none(), "{error}");
    eprintln!("skipped: {error}");
    None
}

fn compile(source: &Path, name: &str, sanitizers: &[&str]) -> Result<PathBuf, CompileError> {
    let cpu = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join("kernels").join("cpu");
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let flags = [&FLAGS, sanitizers].concat();
    kvbm_test_driver::compile(&[cpu.join("program.cpp")], &[source, &cpu], &flags, &program)?;
    Ok(program)
}

impl Drop for Program {
    fn drop(&mut self) {
        self.input = None;
        // It ends with its input.
        let _ = self.child.wait();
    }
}

impl Executor for Program {
    fn run(&mut self, launch: &Launch, memory: &mut Memory, reverse: bool) -> Result<(), String> {
        match self.exchange(&job(launch, memory, reverse), memory) {
            Ok(error) if error.is_empty() => Ok(()),
            Ok(error) => Err(error),
            Err(error) => Err(format!("the program ended ({:?}): {error}", self.child.wait())),
        }
    }
}

#[derive(Default)]
struct Job(Vec<u8>);

impl Job {
    fn numbers(&mut self, numbers: impl IntoIterator<Item = u64>) {
        self.0.extend(numbers.into_iter().flat_map(u64::to_ne_bytes));
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.numbers([bytes.len() as u64]);
        self.0.extend(bytes);
    }
}

fn job(launch: &Launch, memory: &Memory, reverse: bool) -> Vec<u8> {
    let mut job = Job::default();
    job.bytes(launch.kernel.name().as_bytes());
    job.numbers([launch.grid, THREADS, launch.shared_bytes, u32::from(reverse)].map(u64::from));
    job.bytes(&launch.params);
    job.numbers([memory.segments.len() as u64]);
    for segment in &memory.segments {
        job.numbers([segment.address % 64]);
        job.bytes(&segment.bytes);
    }
    let tables = memory.segments.iter().enumerate().filter(|(_, segment)| segment.is_table);
    let holders = tables.map(|(at, segment)| (at as u64 + 1, &segment.bytes)).chain([(0, &launch.params)]);
    let mut relocations = Vec::new();
    for (holder, bytes) in holders {
        for (at, word) in bytes.chunks_exact(8).enumerate() {
            let address = u64::from_le_bytes(word.try_into().expect("8 bytes"));
            if let Some((segment, offset)) = memory.find(address) {
                relocations.push([holder, at as u64 * 8, segment as u64, offset as u64]);
            }
        }
    }
    job.numbers([relocations.len() as u64]);
    job.numbers(relocations.into_iter().flatten());
    job.0
}
