//! `cargo xtask test`: everything that must pass before a change is done.

use crate::servers::Servers;
use crate::space::Space;
use crate::steps::{Outcome, Report};
use crate::workspace::{FEATURES, Workspace, cargo, line_of, succeed};
use crate::{
    contract_test, crash_test, dependencies, engine_test, fuzz, gpu, hostile, installed, kernels, miri,
    models, nixl, node_test, outside, sim, smoke, tidy, wheel,
};
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Command, Stdio};
use std::sync::mpsc::Sender;
use std::time::Duration;

/// When a step runs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum When {
    /// Always.
    Always,
    /// With `--all`, or by its name.
    All,
    /// By its name alone: before a release, because its build takes minutes.
    Release,
}

/// A step: its name, when it runs, what it does.
struct Step {
    name: &'static str,
    when: When,
    about: &'static str,
    run: fn(&Workspace) -> Outcome,
}

const fn step(name: &'static str, when: When, about: &'static str, run: fn(&Workspace) -> Outcome) -> Step {
    Step { name, when, about, run }
}

const STEPS: &[Step] = &[
    step("fmt", When::Always, "formatting", fmt),
    step("tidy", When::Always, "the rules of ARCHITECTURE.md", |w| tidy::check(w).into()),
    step("dependencies", When::Always, "what each crate may pull in", |w| dependencies::check(w).into()),
    step("kernels", When::Always, "the prebuilt kernels belong to their source", |w| {
        kernels::verify(w).into()
    }),
    step("clippy", When::Always, "lints, warnings are errors", clippy),
    step("test", When::Always, "all crates' tests, with a real nats-server, libzmq and S3 server", tests),
    step("doctest", When::Always, "the examples of the documentation", doctests),
    step("python", When::Always, "types and tests of the Python package", wheel::check),
    step("wheel", When::All, "the wheel, installed by pip without an index", installed::check),
    step("engine", When::All, "the connector under a real vLLM", engine_test::check),
    step(
        "contracts",
        When::All,
        "connectors against the classes that SGLang publishes",
        contract_test::check,
    ),
    step("doc", When::All, "documentation, warnings are errors", doc),
    step("outside", When::All, "another project uses each crate by path", |w| outside::check(w).into()),
    step("smoke", When::All, "the product as a user runs it", smoke::check),
    step("event-race", When::All, "a registration races the last drop, followed to the end", event_race),
    step("nixl", When::All, "remote memory over the real NIXL, in several processes", nixl::check),
    step("crash", When::All, "durable blocks survive kill -9 and power loss", crash_test::check),
    step("node", When::All, "a cache outlives its engines and its daemon", node_test::check),
    step("hostile", When::All, "random bytes at every socket keep no honest client away", hostile::check),
    step("fuzz", When::All, "a few seconds of coverage-guided fuzzing of every format", fuzz::check),
    step(
        "models",
        When::All,
        "loom, shuttle, and millions of operations against a naive model",
        models::check,
    ),
    step("sim", When::All, "the first seeds of the simulator, and every planted bug", sim::check),
    step("gpu-bundle", When::All, "the programs for a GPU, run on the test driver", |w| {
        gpu::bundle(w, gpu::Mode::Rehearse).into()
    }),
    step("miri", When::All, "undefined behaviour in the unsafe parts", miri::check),
    step("s3", When::Release, "G4 over a second S3 server, which is compiled", s3),
];

/// What to run.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Options {
    all: bool,
    list: bool,
    lean: bool,
    only: Vec<String>,
}

impl Options {
    /// Reads the arguments behind `test`.
    pub(crate) fn parse(args: &[String]) -> Result<Self, String> {
        let mut options = Self::default();
        let mut args = args.iter();
        while let Some(argument) = args.next() {
            match argument.as_str() {
                "--all" => options.all = true,
                "--list" => options.list = true,
                "--lean" => options.lean = true,
                "--only" => match args.next() {
                    Some(name) if STEPS.iter().any(|step| step.name == name) => {
                        options.only.push(name.clone());
                    }
                    Some(name) => return Err(format!("no step is called `{name}`: {}", names())),
                    None => return Err(format!("--only needs a step: {}", names())),
                },
                other => return Err(format!("unknown argument `{other}` of `test`")),
            }
        }
        Ok(options)
    }

    fn wants(&self, step: &Step) -> bool {
        if self.only.is_empty() {
            match step.when {
                When::Always => true,
                When::All => self.all,
                When::Release => false,
            }
        } else {
            self.only.iter().any(|name| name == step.name)
        }
    }
}

fn names() -> String {
    STEPS.iter().map(|step| step.name).collect::<Vec<_>>().join(", ")
}

/// Runs the steps that were asked for, all of them even after a failure; whether all passed.
pub(crate) fn run(options: &Options) -> anyhow::Result<bool> {
    if options.list {
        for step in STEPS {
            println!("{:<14} {}", step.name, step.about);
        }
        return Ok(true);
    }
    let workspace = Workspace::load()?;
    let space = Space::of(&workspace.target);
    println!("{}\n", space.now());
    let mut report = Report::default();
    std::thread::scope(|scope| {
        let started = FETCHED.iter().filter(|fetched| fetched.is_wanted(options));
        let workspace = &workspace;
        let mut started: Vec<_> =
            started.map(|fetched| (fetched, scope.spawn(|| (fetched.fetch)(workspace)))).collect();
        for step in STEPS.iter().filter(|step| options.wants(step)) {
            let is_good = report.run(step.name, step.about, || {
                for (_, thread) in started.extract_if(.., |(fetched, _)| fetched.is_for(step)) {
                    // The step fetches again what could not be fetched, and says why it cannot.
                    let _again = thread.join();
                }
                (step.run)(workspace)
            });
            if options.lean {
                remove_outputs(workspace, step);
            }
            if !is_good {
                println!("{}\n", space.now());
            }
        }
    });
    println!("{}", report.summary());
    Ok(report.is_ok())
}

/// What is fetched while steps before build: it waits for the network most of its time.
struct Fetched {
    /// The steps that need it.
    steps: &'static [&'static str],
    fetch: fn(&Workspace),
}

const FETCHED: &[Fetched] = &[
    Fetched { steps: &["test"], fetch: |workspace| drop(Servers::fetch(workspace)) },
    Fetched { steps: &["engine", "contracts"], fetch: |workspace| drop(engine_test::install(workspace)) },
];

impl Fetched {
    fn is_for(&self, step: &Step) -> bool {
        self.steps.contains(&step.name)
    }

    fn is_wanted(&self, options: &Options) -> bool {
        STEPS.iter().any(|step| self.is_for(step) && options.wants(step))
    }
}

/// Folders below the target folder, each with the last step that needs it.
const OUTPUTS: &[(&str, &str)] = &[
    ("wheel", "wheel-test"),
    ("contracts", "engine-test"),
    ("contracts", "tools/vllm"),
    ("contracts", "tools/sglang-0.5.23"),
    ("doc", "doc"),
    ("outside", "outside"),
    ("crash", "crash-test"),
    ("fuzz", "fuzz"),
    ("models", "models"),
    ("sim", "sim"),
    ("gpu-bundle", "gpu-bundle"),
    ("gpu-bundle", "gpu-rehearsal"),
    ("miri", "miri"),
];

/// Removes what no later step needs.
fn remove_outputs(workspace: &Workspace, step: &Step) {
    for (_, folder) in OUTPUTS.iter().filter(|(name, _)| *name == step.name) {
        // What was not made, or stays, is in nobody's way but the disk's.
        let _ = std::fs::remove_dir_all(workspace.target.join(folder));
    }
}

fn fmt(workspace: &Workspace) -> Outcome {
    succeed(cargo(&workspace.root).args(["fmt", "--all", "--check"])).into()
}

fn clippy(workspace: &Workspace) -> Outcome {
    let args = ["clippy", "--workspace", "--all-targets", "--features", FEATURES, "--", "-D", "warnings"];
    succeed(cargo(&workspace.root).args(args)).into()
}

fn tests(workspace: &Workspace) -> Outcome {
    let servers = Servers::fetch(workspace);
    let mut command = workspace_tests(workspace);
    command.args(["--no-fail-fast", "--lib", "--bins", "--tests", "--examples"]);
    if std::env::var_os("RUST_TEST_THREADS").is_none() {
        command.env("RUST_TEST_THREADS", test_threads().to_string());
    }
    servers.name_to(&mut command);
    // A user without a C++ compiler is told which tests that skips; CI must not skip them. (A
    // manager's configuration refuses variables KVBM_... that it does not know.)
    if std::env::var_os("CI").is_some() {
        command.env("REQUIRE_CXX", "1");
    }
    servers.outcome(counted(&mut command))
}

/// Tests at a time. Most of them wait: for a deadline, a disk, another process.
fn test_threads() -> usize {
    const FOR_EACH_PROCESSOR: usize = 3;
    std::thread::available_parallelism().map_or(1, usize::from) * FOR_EACH_PROCESSOR
}

/// `cargo test` with the features of every test build. A selection by `-p` would build other
/// features.
pub(crate) fn workspace_tests(workspace: &Workspace) -> Command {
    let mut command = cargo(&workspace.root);
    command.args(["test", "--workspace", "--features", FEATURES]);
    command
}

fn s3(workspace: &Workspace) -> Outcome {
    let servers = Servers::compile(workspace);
    let mut command = workspace_tests(workspace);
    command.args(["--test", "s3", "--test", "replay_volume"]);
    servers.name_to(&mut command);
    servers.outcome(counted(&mut command))
}

fn event_race(workspace: &Workspace) -> Outcome {
    const ROUNDS: &str = "100000";
    let mut command = workspace_tests(workspace);
    counted(command.args(["--test", "event_race"]).env("KVBM_RACE_ROUNDS", ROUNDS))
}

fn doctests(workspace: &Workspace) -> Outcome {
    counted(workspace_tests(workspace).args(["--no-fail-fast", "--doc"]))
}

fn doc(workspace: &Workspace) -> Outcome {
    // What a scheduler builds: a page must not point at what only workers have.
    let scheduler = ["-p", "kvbm", "--no-default-features"];
    let document = |what: &[&str]| {
        let mut command = cargo(&workspace.root);
        succeed(command.args(["doc", "--no-deps"]).args(what).env("RUSTDOCFLAGS", "-D warnings"))
    };
    document(&scheduler).and_then(|()| document(&["--workspace", "--features", FEATURES])).into()
}

/// Runs a command that runs tests, shows its output as it comes and counts their results.
pub(crate) fn counted(command: &mut Command) -> Outcome {
    counted_to(command, &mut std::io::stdout(), std::io::stderr())
}

/// How long standard error is read behind the end of a command.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// As [`counted`], showing the output and the errors elsewhere.
pub(crate) fn counted_to(
    command: &mut Command,
    shown: &mut dyn Write,
    errors: impl Write + Send + 'static,
) -> Outcome {
    let broken = |why: String, tests, failed| Outcome::Failed { why, tests, failed };
    let line = line_of(command);
    let mut child = match command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn() {
        Ok(child) => child,
        Err(error) => return broken(format!("cannot start {line}: {error}"), 0, 0),
    };
    let (found, ended) = std::sync::mpsc::channel();
    if let Some(stderr) = child.stderr.take() {
        std::thread::spawn(move || show_and_find(stderr, errors, &found));
    }
    let (mut passed, mut failed, mut names) = (0, 0, Vec::new());
    if let Some(stdout) = child.stdout.take() {
        for text in BufReader::new(stdout).split(b'\n').map_while(Result::ok) {
            let text = String::from_utf8_lossy(&text);
            let (good, bad) = counts(&text);
            (passed, failed) = (passed + good, failed + bad);
            names.extend(failed_test(&text).map(str::to_owned));
            // A reader that went away must not stop the tests.
            let _ = writeln!(shown, "{text}");
        }
    }
    let status = child.wait();
    // A process that a test left behind may hold standard error open for ever.
    while let Ok(name) = ended.recv_timeout(LAST_WORDS) {
        names.push(name);
    }
    match status {
        Ok(status) if status.success() && failed == 0 => Outcome::Passed { tests: passed },
        Ok(status) if names.is_empty() => broken(format!("`{line}` ended with {status}"), passed, failed),
        Ok(_) => broken(format!("`{line}`: {}", names.join(", ")), passed, failed),
        Err(error) => broken(format!("`{line}` was lost: {error}"), passed, failed),
    }
}

/// Shows what cargo and the tests write to standard error, and sends the programs that a signal or
/// an abort ended: no line of theirs names the test.
fn show_and_find(stderr: impl Read, mut shown: impl Write, found: &Sender<String>) {
    for text in BufReader::new(stderr).split(b'\n').map_while(Result::ok) {
        let text = String::from_utf8_lossy(&text);
        if let Some(program) = ended_by_signal(&text) {
            // Nobody waits for it any more: then it was too late.
            let _ = found.send(program.to_owned());
        }
        let _ = writeln!(shown, "{text}");
    }
}

/// What a line like "  process didn't exit successfully: `tests/a` (signal: 6, SIGABRT: ...)" says.
fn ended_by_signal(line: &str) -> Option<&str> {
    line.trim_start()
        .strip_prefix("process didn't exit successfully: ")
        .filter(|text| text.contains("(signal: "))
}

/// The test that a line like `test a::b ... FAILED` names.
fn failed_test(line: &str) -> Option<&str> {
    line.strip_prefix("test ")?.strip_suffix("FAILED")?.split_whitespace().next()
}

/// Passed and failed of a line like `test result: ok. 6 passed; 0 failed; 0 ignored; ...`.
fn counts(line: &str) -> (u64, u64) {
    let Some((_, rest)) = line.split_once("test result: ") else { return (0, 0) };
    let words: Vec<&str> = rest.split_whitespace().collect();
    let before = |label: &str| {
        let at = words.iter().position(|word| word.trim_end_matches(';') == label)?;
        words.get(at.checked_sub(1)?)?.parse().ok()
    };
    (before("passed").unwrap_or(0), before("failed").unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a script that plays a test program comes to. Not shown: the lines are not results of
    /// this program.
    fn shell(script: &str) -> Outcome {
        counted_to(Command::new("sh").args(["-c", script]), &mut std::io::sink(), std::io::sink())
    }

    fn parse(line: &str) -> Result<Options, String> {
        Options::parse(&line.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn options_select_steps() {
        let chosen = |line: &str| {
            let options = parse(line).unwrap();
            STEPS.iter().filter(|step| options.wants(step)).map(|step| step.name).collect::<Vec<_>>()
        };
        let all = chosen("--all");
        assert_eq!((all.len(), all.contains(&"s3")), (STEPS.len() - 1, false), "s3 is for releases");
        assert_eq!(chosen("--only s3"), ["s3"]);
        assert_eq!(
            chosen(""),
            ["fmt", "tidy", "dependencies", "kernels", "clippy", "test", "doctest", "python"]
        );
        assert_eq!(chosen("--only miri --only fmt"), ["fmt", "miri"]);
        let fetches = |line: &str| {
            let options = parse(line).unwrap();
            FETCHED.iter().map(|fetched| fetched.is_wanted(&options)).collect::<Vec<_>>()
        };
        assert_eq!(fetches("--all"), [true, true]);
        assert_eq!(fetches(""), [true, false]);
        assert_eq!(fetches("--only contracts"), [false, true]);
        let vllm = FETCHED[1].steps;
        let is_step = |name: &&str| STEPS.iter().any(|step| step.name == *name);
        assert!(FETCHED.iter().all(|fetched| fetched.steps.iter().all(is_step)));
        assert_eq!(chosen("--all --only doc"), ["doc"], "a named step is the only one");
        assert!(parse("--lean --only doc").unwrap().lean);
        let known = |(name, _): &(&str, &str)| STEPS.iter().any(|step| step.name == *name);
        let last = STEPS.iter().rfind(|step| vllm.contains(&step.name)).map(|step| step.name);
        let removing = OUTPUTS.iter().find(|(_, folder)| *folder == "tools/vllm").map(|(name, _)| *name);
        assert_eq!(removing, last, "no step installs again what another one has removed");
        assert!(OUTPUTS.iter().all(known), "steps that leave something are steps");
        assert!(parse("--only nothing").unwrap_err().contains("fmt, tidy"));
    }

    #[test]
    fn results_of_test_programs_are_counted() {
        assert_eq!(
            counts("test result: ok. 6 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out"),
            (6, 0)
        );
        assert_eq!(counts("test result: FAILED. 9 passed; 2 failed; 0 ignored"), (9, 2));
        assert_eq!(counts("running 5 tests"), (0, 0));
        let script =
            "echo 'test result: ok. 6 passed; 0 failed; x'; echo 'test result: ok. 1 passed; 0 failed; x'";
        assert_eq!(shell(script), Outcome::Passed { tests: 7 });
        let script =
            "echo 'test a::b ... FAILED'; echo 'test c ... ok'; echo 'test d - should panic ... FAILED'
                      echo 'test result: FAILED. 6 passed; 2 failed; x'; exit 101";
        let Outcome::Failed { why, tests: 6, failed: 2 } = shell(script) else {
            panic!("{:?}", shell(script))
        };
        assert!(why.ends_with(": a::b, d"), "{why}");
        let script = "echo \"  process didn't exit successfully: \\`x\\` (signal: 6, SIGABRT)\" >&2
                      echo \"  process didn't exit successfully: \\`y\\` (exit status: 101)\" >&2; exit 101";
        let Outcome::Failed { why, tests: 0, failed: 0 } = shell(script) else {
            panic!("{:?}", shell(script))
        };
        assert!(why.ends_with(": `x` (signal: 6, SIGABRT)"), "{why}");
        let outcome = shell("exit 1");
        assert!(
            matches!(outcome, Outcome::Failed { tests: 0, failed: 0, .. }),
            "a build that fails: {outcome:?}"
        );
    }
}
