//! `cargo xtask test`: everything that must pass before a change is done.

use crate::space::Space;
use crate::steps::{Outcome, Report};
use crate::workspace::{Workspace, cargo, line_of, succeed};
use crate::{
    crash_test, dependencies, events, fuzz, gpu, kernels, miri, models, nats, outside, s3, smoke, tidy, zmq,
};
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};

/// A step: its name, whether `--quick` keeps it, what it does.
struct Step {
    name: &'static str,
    quick: bool,
    about: &'static str,
    run: fn(&Workspace) -> Outcome,
}

const STEPS: &[Step] = &[
    Step { name: "fmt", quick: true, about: "formatting", run: fmt },
    Step { name: "tidy", quick: true, about: "the rules of ARCHITECTURE.md", run: |w| tidy::check(w).into() },
    Step {
        name: "dependencies",
        quick: true,
        about: "what each crate may pull in",
        run: |w| dependencies::check(w).into(),
    },
    Step {
        name: "kernels",
        quick: true,
        about: "the prebuilt kernels belong to their source",
        run: |w| kernels::verify(w).into(),
    },
    Step { name: "clippy", quick: true, about: "lints, warnings are errors", run: clippy },
    Step { name: "test", quick: true, about: "unit, property, model and conformance tests", run: tests },
    Step { name: "doctest", quick: false, about: "the examples of the documentation", run: doctests },
    Step { name: "doc", quick: false, about: "documentation, warnings are errors", run: doc },
    Step {
        name: "outside",
        quick: false,
        about: "another project uses each crate by path",
        run: |w| outside::check(w).into(),
    },
    Step { name: "smoke", quick: false, about: "the product as a user runs it", run: |w| smoke::check(w) },
    Step { name: "nats", quick: false, about: "events over a real nats-server", run: nats::check },
    Step { name: "zmq", quick: false, about: "events over ZeroMQ, with libzmq", run: zmq::check },
    Step {
        name: "events",
        quick: false,
        about: "races and replays, followed to the end",
        run: events::check,
    },
    Step { name: "s3", quick: false, about: "G4 over a real S3 server", run: s3::check },
    Step {
        name: "crash",
        quick: false,
        about: "what is durable survives kill -9 and power loss",
        run: crash_test::check,
    },
    Step {
        name: "fuzz",
        quick: false,
        about: "a few seconds of coverage-guided fuzzing of every format",
        run: fuzz::check,
    },
    Step {
        name: "models",
        quick: false,
        about: "every order of threads (loom), many of more threads (shuttle), millions of operations",
        run: models::check,
    },
    Step {
        name: "gpu-bundle",
        quick: false,
        about: "the programs for a GPU, run on the test driver",
        run: |w| gpu::bundle(w, gpu::Mode::Rehearse).into(),
    },
    Step { name: "miri", quick: false, about: "undefined behaviour in the unsafe parts", run: miri::check },
];

/// What to run.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Options {
    quick: bool,
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
                "--quick" => options.quick = true,
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
            step.quick || !self.quick
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
    for step in STEPS.iter().filter(|step| options.wants(step)) {
        let is_good = report.run(step.name, step.about, || (step.run)(&workspace));
        if options.lean {
            leave_nothing(&workspace, step);
        }
        if !is_good {
            println!("{}\n", space.now());
        }
    }
    println!("{}", report.summary());
    Ok(report.is_ok())
}

/// Folders below the target folder that one step has for itself.
const OF_ONE_STEP: &[(&str, &str)] = &[
    ("doc", "doc"),
    ("outside", "outside"),
    ("crash", "crash-test"),
    ("fuzz", "fuzz"),
    ("models", "models"),
    ("gpu-bundle", "gpu-bundle"),
    ("gpu-bundle", "gpu-rehearsal"),
    ("miri", "miri"),
];

/// Removes what no other step needs.
fn leave_nothing(workspace: &Workspace, step: &Step) {
    for (_, folder) in OF_ONE_STEP.iter().filter(|(name, _)| *name == step.name) {
        // What was not made, or stays, is in nobody's way but the disk's.
        let _ = std::fs::remove_dir_all(workspace.target.join(folder));
    }
}

fn fmt(workspace: &Workspace) -> Outcome {
    succeed(cargo(&workspace.root).args(["fmt", "--all", "--check"])).into()
}

fn clippy(workspace: &Workspace) -> Outcome {
    let args = ["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"];
    succeed(cargo(&workspace.root).args(args)).into()
}

fn tests(workspace: &Workspace) -> Outcome {
    let args = ["test", "--workspace", "--no-fail-fast", "--lib", "--bins", "--tests", "--examples"];
    let mut command = cargo(&workspace.root);
    command.args(args);
    // A user without a C++ compiler is told which tests that skips; CI must not skip them. (A manager's configuration refuses
    // variables KVBM_... that it does not know.)
    if std::env::var_os("CI").is_some() {
        command.env("REQUIRE_CXX", "1");
    }
    counted(&mut command)
}

fn doctests(workspace: &Workspace) -> Outcome {
    counted(cargo(&workspace.root).args(["test", "--workspace", "--no-fail-fast", "--doc"]))
}

fn doc(workspace: &Workspace) -> Outcome {
    // What a scheduler builds: a page must not point at what only workers have.
    let scheduler = ["-p", "kvbm", "--no-default-features"];
    let document = |what: &[&str]| {
        let mut command = cargo(&workspace.root);
        succeed(command.args(["doc", "--no-deps"]).args(what).env("RUSTDOCFLAGS", "-D warnings"))
    };
    document(&scheduler).and_then(|()| document(&["--workspace"])).into()
}

/// Runs a command that runs tests, shows its output as it comes and counts their results.
pub(crate) fn counted(command: &mut Command) -> Outcome {
    counted_to(command, &mut std::io::stdout())
}

/// As [`counted`], showing the output elsewhere.
pub(crate) fn counted_to(command: &mut Command, shown: &mut dyn Write) -> Outcome {
    let broken = |why: String, tests, failed| Outcome::Failed { why, tests, failed };
    let line = line_of(command);
    let mut child = match command.stdout(Stdio::piped()).spawn() {
        Ok(child) => child,
        Err(error) => return broken(format!("cannot start {line}: {error}"), 0, 0),
    };
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
    match child.wait() {
        Ok(status) if status.success() && failed == 0 => Outcome::Passed { tests: passed },
        Ok(status) if names.is_empty() => broken(format!("`{line}` ended with {status}"), passed, failed),
        Ok(_) => broken(format!("`{line}`: {}", names.join(", ")), passed, failed),
        Err(error) => broken(format!("`{line}` was lost: {error}"), passed, failed),
    }
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

    /// What a script that plays a test program comes to. Not shown: the lines are not results of this program.
    fn shell(script: &str) -> Outcome {
        counted_to(Command::new("sh").args(["-c", script]), &mut std::io::sink())
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
        assert_eq!(chosen("").len(), STEPS.len());
        assert_eq!(chosen("--quick"), ["fmt", "tidy", "dependencies", "kernels", "clippy", "test"]);
        assert_eq!(chosen("--only miri --only fmt"), ["fmt", "miri"]);
        assert_eq!(chosen("--quick --only doc"), ["doc"], "what is named is run");
        assert!(parse("--lean --only doc").unwrap().lean);
        let known = |(name, _): &(&str, &str)| STEPS.iter().any(|step| step.name == *name);
        assert!(OF_ONE_STEP.iter().all(known), "steps that leave something are steps");
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
        let outcome = shell("exit 1");
        assert!(
            matches!(outcome, Outcome::Failed { tests: 0, failed: 0, .. }),
            "a build that fails: {outcome:?}"
        );
    }
}
