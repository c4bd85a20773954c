//! `cargo xtask fuzz`: bytes that reach ever more of the parsers, from the committed corpus on.
//!
//! The bodies of the targets are in the crates (`fuzz.rs`), where `cargo test` runs them over the
//! corpus; `fuzz/` makes programs of them, instrumented by the stable compiler. This builds those,
//! runs them and says what they found.

use crate::steps::Outcome;
use crate::workspace::{Workspace, cargo, output_of, succeed};
use anyhow::{Context, bail, ensure};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};

/// A program of `fuzz/targets`, and folders of files that are good to begin with, beside its
/// corpus.
struct Target {
    name: &'static str,
    /// Longest input, in bytes.
    most: usize,
    seeds: &'static [&'static str],
    /// Whether what is found may become the committed corpus. Derived code has edges of its own for
    /// each type and field that it reads: thousands of files would be needed for them, so there one
    /// of each kind is committed, and stays.
    grows: bool,
}

const TARGETS: &[Target] = &[
    Target { name: "announcement", most: 4096, seeds: &[], grows: true },
    Target { name: "batch", most: 4096, seeds: &["crates/kvbm-events/tests/golden"], grows: true },
    Target { name: "blob_key", most: 256, seeds: &[], grows: true },
    Target { name: "block_set", most: 2048, seeds: &[], grows: true },
    Target { name: "engine", most: 4096, seeds: &["crates/kvbm-events/tests/golden/vllm"], grows: true },
    Target { name: "frame", most: 4096, seeds: &[], grows: true },
    Target { name: "geometry", most: 512, seeds: &[], grows: true },
    // Without whole journals, whose header is 4 KiB of almost nothing: the body makes one of a few
    // bytes.
    Target { name: "journal", most: 2048, seeds: &[], grows: true },
    Target { name: "keys", most: 1024, seeds: &[], grows: true },
    Target { name: "link", most: 4096, seeds: &[], grows: false },
    Target { name: "model", most: 4096, seeds: &["crates/kvbm-model/tests/configs"], grows: false },
    Target { name: "node", most: 4096, seeds: &[], grows: false },
    Target { name: "object", most: 8192, seeds: &["crates/kvbm-volume/tests/corpus"], grows: true },
    Target { name: "peer", most: 4096, seeds: &[], grows: false },
    Target { name: "plan", most: 4096, seeds: &[], grows: false },
    Target { name: "request", most: 4096, seeds: &[], grows: false },
    Target { name: "snapshot", most: 4096, seeds: &[], grows: true },
    Target { name: "stripes", most: 128, seeds: &[], grows: true },
    Target { name: "volume_key", most: 512, seeds: &[], grows: true },
    Target { name: "zmtp", most: 4096, seeds: &[], grows: true },
];

/// Coverage of every edge, and the operands of comparisons. What is compiled for the host (build
/// scripts) is left out by `--target`.
const FLAGS: &str = "-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
                     -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
                     -Cllvm-args=-sanitizer-coverage-trace-compares -Ccodegen-units=1 --cfg fuzzing";

/// An input that takes longer is a failure: none is longer than a few kilobytes.
const TIMEOUT_S: u32 = 5;
/// Memory of a program, the fuzzer's own included. What an input may take is bounded more tightly
/// by the target.
const RSS_MB: u32 = 1024;
/// Longest file of a committed corpus. Each is there for an edge that no other reaches; how often
/// edges are taken is found again soon.
const KEPT_BYTES: usize = 1024;
const DEFAULT_SECONDS: u64 = 60;
/// Seconds for each target in the step of `cargo xtask test`.
const FEW: u64 = 3;

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Options {
    targets: Vec<&'static str>,
    seconds: u64,
    jobs: usize,
    keep: bool,
    input: Option<PathBuf>,
}

impl Options {
    /// Reads `TARGET... | --all`, `[--seconds N] [--jobs N] [--keep]`, or `TARGET --input FILE`.
    pub(crate) fn parse(args: &[String]) -> Result<Self, String> {
        let mut options =
            Self { targets: Vec::new(), seconds: DEFAULT_SECONDS, jobs: 1, keep: false, input: None };
        let mut args = args.iter();
        while let Some(argument) = args.next() {
            let mut value = || args.next().ok_or_else(|| format!("`{argument}` of `fuzz` needs a value"));
            match argument.as_str() {
                "--all" => options.targets = TARGETS.iter().map(|target| target.name).collect(),
                "--keep" => options.keep = true,
                "--seconds" => options.seconds = positive(argument, value()?)?,
                "--jobs" => options.jobs = positive(argument, value()?)? as usize,
                "--input" => options.input = Some(value()?.into()),
                name => match TARGETS.iter().find(|target| target.name == name) {
                    Some(target) => options.targets.push(target.name),
                    None => return Err(format!("no target is called `{name}`: {}", names())),
                },
            }
        }
        match (&options.input, options.targets.len()) {
            (_, 0) => Err(format!("`fuzz` needs a target, or --all: {}", names())),
            (Some(_), 2..) => Err("`--input` is for one target".into()),
            _ => Ok(options),
        }
    }
}

fn positive(name: &str, value: &str) -> Result<u64, String> {
    let number = value.parse().ok().filter(|number| (1..=1_000_000).contains(number));
    number.ok_or_else(|| format!("{name} {value}: expected 1 to 1000000"))
}

fn names() -> String {
    TARGETS.iter().map(|target| target.name).collect::<Vec<_>>().join(", ")
}

/// Runs it; whether nothing was found.
pub(crate) fn run(options: &Options) -> anyhow::Result<bool> {
    let fuzzer = Fuzzer::build(&Workspace::load()?)?;
    if let Some(input) = &options.input {
        let program = fuzzer.program(find(options.targets[0])?);
        return Ok(Command::new(program).arg(input).status().context("cannot start the target")?.success());
    }
    let targets = options.targets.iter().map(|name| find(name)).collect::<anyhow::Result<Vec<_>>>()?;
    let failures = fuzzer.fuzz(&targets, options.seconds, options.jobs);
    for failure in &failures {
        eprintln!("{failure}");
    }
    if options.keep {
        for target in targets.into_iter().filter(|target| target.grows) {
            fuzzer.keep(target)?;
        }
    }
    Ok(failures.is_empty())
}

/// A few seconds of each target, as a step of `cargo xtask test`.
pub(crate) fn check(workspace: &Workspace) -> Outcome {
    // A user without a C++ compiler is told so; CI has one.
    if std::env::var_os("CI").is_none() && !has_cxx() {
        return Outcome::Skipped("no C++ compiler, which the fuzzer needs".into());
    }
    let all: Vec<&Target> = TARGETS.iter().collect();
    let jobs = std::thread::available_parallelism().map_or(1, usize::from);
    let checked = Fuzzer::build(workspace).and_then(|fuzzer| {
        let failures = fuzzer.fuzz(&all, FEW, jobs);
        ensure!(failures.is_empty(), failures.join("\n"));
        Ok(())
    });
    checked.into()
}

fn has_cxx() -> bool {
    let starts = |name: &str| Command::new(name).arg("--version").output().is_ok();
    std::env::var_os("CXX").is_some() || ["c++", "g++", "clang++"].into_iter().any(starts)
}

fn find(name: &str) -> anyhow::Result<&'static Target> {
    TARGETS.iter().find(|target| target.name == name).with_context(|| format!("no target is called `{name}`"))
}

/// The programs, built.
struct Fuzzer {
    root: PathBuf,
    /// Build outputs, what was found, and the working corpora.
    folder: PathBuf,
    programs: PathBuf,
}

impl Fuzzer {
    fn build(workspace: &Workspace) -> anyhow::Result<Self> {
        let host = output_of(Command::new("rustc").arg("-vV"))?;
        let host =
            host.lines().find_map(|line| line.strip_prefix("host: ")).context("rustc names no host")?;
        let folder = workspace.target.join("fuzz");
        let mut build = cargo(&workspace.root.join("fuzz"));
        build
            .args(["build", "--quiet", "--release", "--locked", "--target", host])
            .env("RUSTFLAGS", FLAGS)
            .env_remove("CARGO_ENCODED_RUSTFLAGS")
            .env("CARGO_TARGET_DIR", &folder);
        succeed(&mut build).context(
            "the fuzzer comes from the public registry the first time, and needs a C++ compiler (`apt-get install g++`)",
        )?;
        let programs = folder.join(host).join("release");
        Ok(Self { root: workspace.root.clone(), folder, programs })
    }

    fn program(&self, target: &Target) -> PathBuf {
        self.programs.join(target.name)
    }

    /// What is committed.
    fn corpus(&self, target: &Target) -> PathBuf {
        self.root.join("fuzz").join("corpus").join(target.name)
    }

    /// A folder of the target that goes with the build outputs.
    fn scratch(&self, kind: &str, target: &Target) -> anyhow::Result<PathBuf> {
        let folder = self.folder.join(kind).join(target.name);
        fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
        Ok(folder)
    }

    /// Runs targets, `jobs` of them at a time; what failed, and how to see it again.
    fn fuzz(&self, targets: &[&Target], seconds: u64, jobs: usize) -> Vec<String> {
        let (waiting, failures) = (Mutex::new(targets.iter()), Mutex::new(Vec::new()));
        let work = || {
            loop {
                let next = waiting.lock().ok().and_then(|mut waiting| waiting.next());
                let Some(target) = next else { return };
                match self.fuzz_one(target, seconds) {
                    Ok(printed) => println!("{printed}"),
                    Err(error) => {
                        let text = format!("{error:#}");
                        failures.lock().unwrap_or_else(PoisonError::into_inner).push(text);
                    }
                }
            }
        };
        std::thread::scope(|scope| {
            (0..jobs.min(targets.len())).for_each(|_| drop(scope.spawn(work)));
        });
        failures.into_inner().unwrap_or_default()
    }

    /// Runs a target: what it came to.
    fn fuzz_one(&self, target: &Target, seconds: u64) -> anyhow::Result<String> {
        let (work, found) = (self.scratch("corpus", target)?, self.scratch("found", target)?);
        let log = found.join("log");
        let mut program = Command::new(self.program(target));
        program
            .arg(&work)
            .arg(self.corpus(target))
            .args(target.seeds.iter().map(|seeds| self.root.join(seeds)))
            .arg(format!("-max_total_time={seconds}"))
            .args([format!("-max_len={}", target.most), format!("-timeout={TIMEOUT_S}")])
            .args([format!("-rss_limit_mb={RSS_MB}"), "-print_final_stats=1".into()])
            .arg(format!("-artifact_prefix={}/", found.display()))
            .stdout(Stdio::null())
            .stderr(fs::File::create(&log).with_context(|| format!("cannot create {}", log.display()))?);
        let status = program.status().with_context(|| format!("cannot start {}", target.name))?;
        let printed = fs::read_to_string(&log).with_context(|| format!("cannot read {}", log.display()))?;
        if status.success() {
            return summary(target.name, &printed)
                .with_context(|| format!("{} says too little", log.display()));
        }
        bail!(
            "{}: {}\n  all of it: {}\n  again: cargo xtask fuzz {} --input {}",
            target.name,
            reason(&printed).unwrap_or_else(|| status.to_string()),
            log.display(),
            target.name,
            artifact(&printed).unwrap_or("FILE"),
        )
    }

    /// Replaces the committed corpus by the smallest part of it and of all that was found that
    /// covers as much. Files that somebody named stay: they are there for what they mean.
    fn keep(&self, target: &Target) -> anyhow::Result<()> {
        let (corpus, work) = (self.corpus(target), self.scratch("corpus", target)?);
        let fresh = self.scratch("kept", target)?;
        fs::remove_dir_all(&fresh)
            .and_then(|()| fs::create_dir(&fresh))
            .context("cannot empty the folder")?;
        let mut merge = Command::new(self.program(target));
        merge
            .args([
                "-set_cover_merge=1",
                "-use_counters=0",
                &format!("-max_len={}", target.most.min(KEPT_BYTES)),
            ])
            .args([&fresh, &corpus, &work])
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        succeed(&mut merge)?;
        for file in files(&corpus)?.iter().filter(|file| was_found(file)) {
            fs::remove_file(file).with_context(|| format!("cannot remove {}", file.display()))?;
        }
        let kept = files(&fresh)?;
        for file in &kept {
            let name = file.file_name().context("a file has a name")?;
            fs::copy(file, corpus.join(name)).with_context(|| format!("cannot copy {}", file.display()))?;
        }
        println!("{}: {} files are the corpus now", target.name, kept.len());
        Ok(())
    }
}

fn files(folder: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder).with_context(|| folder.display().to_string())?;
    entries.map(|entry| Ok(entry?.path())).collect()
}

/// The fuzzer names what it finds by its SHA-1.
fn was_found(file: &Path) -> bool {
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    name.len() == 40 && name.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// One line about a run, from what the fuzzer printed.
fn summary(name: &str, printed: &str) -> Option<String> {
    let executed =
        printed.lines().find_map(|line| line.strip_prefix("stat::number_of_executed_units:"))?.trim();
    let last = printed.lines().rfind(|line| line.contains(" cov: "))?;
    let words: Vec<&str> = last.split_whitespace().collect();
    let after = |label: &str| words.iter().position(|word| *word == label).and_then(|at| words.get(at + 1));
    let (edges, features) = (after("cov:")?, after("ft:")?);
    Some(format!("{name}: {executed} executions, {edges} edges, {features} features, nothing found"))
}

/// Why a run ended early: the panic, or what the fuzzer says.
fn reason(printed: &str) -> Option<String> {
    let mut lines = printed.lines();
    let panic = lines.by_ref().find(|line| line.contains(" panicked at "));
    let text = lines.find(|line| !line.trim().is_empty());
    let summary = || printed.lines().find(|line| line.starts_with("SUMMARY: ") || line.contains("ERROR: "));
    panic.and(text).or_else(summary).map(|line| line.chars().take(400).collect())
}

/// The file that a failing input was written to.
fn artifact(printed: &str) -> Option<&str> {
    printed.lines().find_map(|line| line.split_once("Test unit written to ")).map(|(_, file)| file.trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Options, String> {
        Options::parse(&line.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn targets_and_their_options_are_read() {
        let options = parse("journal object --seconds 5 --jobs 2 --keep").unwrap();
        assert_eq!(options.targets, ["journal", "object"]);
        assert_eq!((options.seconds, options.jobs, options.keep), (5, 2, true));
        assert_eq!(parse("--all").unwrap().targets.len(), TARGETS.len());
        assert_eq!(parse("batch --input f").unwrap().input, Some("f".into()));
        for (line, why) in [
            ("", "needs a target"),
            ("nothing", "no target is called `nothing`: announcement, "),
            ("--all --seconds 0", "expected 1 to"),
            ("--all --seconds", "needs a value"),
            ("--all --input f", "for one target"),
        ] {
            assert!(parse(line).unwrap_err().contains(why), "{line}");
        }
    }

    #[test]
    fn every_target_has_a_program_a_corpus_and_its_seeds() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let mut programs: Vec<String> = files(&root.join("fuzz/targets"))
            .unwrap()
            .iter()
            .map(|file| file.file_stem().unwrap().to_string_lossy().into_owned())
            .collect();
        programs.sort_unstable();
        assert_eq!(programs, TARGETS.iter().map(|target| target.name).collect::<Vec<_>>());
        for target in TARGETS {
            assert!(
                !files(&root.join("fuzz/corpus").join(target.name)).unwrap().is_empty(),
                "{}",
                target.name
            );
            assert!(target.seeds.iter().all(|seeds| root.join(seeds).is_dir()), "{}", target.name);
        }
    }

    #[test]
    fn files_with_a_name_of_their_own_stay() {
        assert!(was_found(Path::new("corpus/stripes/e8ec87d0e65f60cbb3756984acaf1db63b64ee07")));
        assert!(!was_found(Path::new("e8ec87d0e65f60cbb3756984acaf1db63b64ee07/last_number")));
    }

    #[test]
    fn what_the_fuzzer_prints_is_read() {
        let good = "#2 INITED cov: 1 ft: 2\n#64 DONE   cov: 245 ft: 919 corp: 9/1Kb\nstat::number_of_executed_units: 64\n";
        assert_eq!(
            summary("object", good).as_deref(),
            Some("object: 64 executions, 245 edges, 919 features, nothing found")
        );
        let bad = "thread '<unnamed>' panicked at a.rs:1:5:\nattempt to add with overflow\nstack backtrace:\n\
                   SUMMARY: libFuzzer: deadly signal\nartifact_prefix='x/'; Test unit written to x/crash-1\n";
        assert_eq!(reason(bad).as_deref(), Some("attempt to add with overflow"));
        assert_eq!(artifact(bad), Some("x/crash-1"));
        assert_eq!(reason("SUMMARY: libFuzzer: timeout\n").as_deref(), Some("SUMMARY: libFuzzer: timeout"));
        assert_eq!((summary("a", bad), reason(""), artifact(good)), (None, None, None));
    }
}
