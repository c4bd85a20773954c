//! The project's chores, as one program: `cargo xtask`.
//!
//! **Knows:** the workspace's files, cargo, and the rules that ARCHITECTURE.md states. **Must never
//! know:** anything that a crate needs in order to build or run; deleting this package breaks no
//! user.

#![forbid(unsafe_code)]

mod bench_peers;
mod contract_test;
mod crash_test;
mod dependencies;
mod engine_test;
mod event_faults;
mod fetch;
mod fuzz;
mod gpu;
mod hostile;
mod installed;
mod json_report;
mod kernels;
mod miri;
mod models;
mod nixl;
mod node_programs;
mod node_test;
mod outside;
mod python;
mod round_options;
mod servers;
mod sim;
mod smoke;
mod soak;
mod space;
mod steps;
mod test;
mod tidy;
mod wheel;
mod workspace;

use round_options::RoundOptions;
use std::process::ExitCode;

const USAGE: &str = "\
usage: cargo xtask COMMAND

  test [--all] [--lean] [--only STEP]...
                                   what must pass before a change is done; --all adds the slow steps (model checkers, Miri,
                                   fuzzing, crash loops, documentation, GPU bundle), --only runs the named steps (see
                                   `test --list`), --lean removes what a step built for itself alone
  tidy                             the rules of ARCHITECTURE.md that the compiler does not check
  bench-peers pool [--json FILE] [--rounds N] [--blocks N] [--only GROUPS] [--with FILE] [--plot FILE]
                                   our bookkeeping and the strongest peer's, side by side
  bench-peers index [--json FILE] [--rounds N] [--blocks N] [--workers N]
                                   our prefix index and the strongest peer's three, side by side
  bench-peers journal [--json FILE] [--rounds N] [--entries N] [--dir DIR]
                                   the index of our disk tier and an embedded database, side by side
  crash-test [--rounds N] [--json FILE] [--seed N] [--require-all]
                                   processes killed while they write to disk, file systems shut down, lost and torn
                                   writes simulated; N defaults to 200; a part that this machine cannot run is named as
                                   skipped, and with --require-all it is a failure
  node-test [--rounds N] [--take-overs N] [--seed N] [--model heads|latent|groups] [--json FILE]
                                   a node daemon, three engines of two ranks and movers, killed, stopped and started again at random;
                                   every byte is verified; N defaults to 200 rounds, and to 50 daemons that then take over
                                   from each other under load
  soak [--hours N] [--seed N] [--json FILE] [--html FILE]
                                   a node daemon with disk and volume and two engines at work for N hours (2), with
                                   accidents: memory, descriptors, threads, slots and bytes on disk must stay flat
  hostile [--seconds N] [--rate N] [--seed N] [--json FILE]
                                   strangers send N random streams a second (1,000) to every socket that listens, for N
                                   seconds (600): memory and descriptors stay bounded, honest clients are served
  verify-kernels                   that the prebuilt CUDA kernels belong to their source
  regen-kernels [--check]          builds them again, with tools fetched into the target folder; --check only compares
  event-faults [--rounds N] [--seed N] [--json FILE]
                                   random kills, partitions, stalls and restarts under block managers that publish: a
                                   follower's index equals their pools after each; N defaults to 200 rounds
  nixl [--rounds N] [--seed N] [--json FILE]
                                   managers that read from each other over the real NIXL: reader, owner and the NATS server
                                   on which they meet are killed, stopped and restarted at random; N defaults to 200 rounds
  sim [--seeds N] [--first-seed S] [--steps N] [--jobs N] [--seconds N] [--mutants] [--plant BUG] [--json FILE]
                                   the leader under seeds: simulated clock, ranks, links, disks and store; 1,000 seeds of 1,000
                                   steps; --mutants also plants every known bug and fails where one is not found
  sim --seed S [--trace]           one seed again, step for step
  sim --nodes N [--steps SECONDS] [--seed S] [--seeds N] [--mutants]
                                   N nodes that read from each other, for so many simulated seconds (300)
  fuzz TARGET...|--all [--seconds N] [--jobs N] [--keep]
                                   coverage-guided fuzzing of what is read from disks, volumes and strangers, each target for N
                                   seconds (60), N of them at a time; --keep makes the smallest corpus that covers as much the
                                   committed one
  fuzz TARGET --input FILE         one input again
  wheel                            the Python package kvbm-rs as a manylinux wheel, in target/wheels
  python-stress [--calls N] [--warm-up N] [--threads N] [--seconds S] [--json FILE]
                                   a million calls, then 64 threads for a minute, on the Python package of a release build
  engine-test [--quick] [--json FILE] [--only PART]...
                                   the connector under a real vLLM on this machine's processors (5 GB below target/): equality
                                   of tokens, restarts, failed loads, times to the first token
  test-gpu                         the tests that need a CUDA device; fails where there is none
  gpu-bundle [--rehearse]          programs for a machine with a GPU and without Rust, in target/gpu-bundle; --rehearse runs
                                   them here on the test driver
";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match run(&args) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) if error.is::<Usage>() => {
            eprint!("error: {error}\n\n{USAGE}");
            ExitCode::from(2)
        }
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Arguments that make no sense.
#[derive(Debug)]
struct Usage(String);

impl std::fmt::Display for Usage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Usage {}

/// Whether everything passed.
fn run(args: &[String]) -> anyhow::Result<bool> {
    let (command, rest) = match args.split_first() {
        None => return usage("a command is missing".into()),
        Some((command, rest)) => (command.as_str(), rest),
    };
    if command == "help" || args.iter().any(|argument| argument == "--help" || argument == "-h") {
        print!("{USAGE}");
        return Ok(true);
    }
    match command {
        "test" => with(test::Options::parse(rest), test::run),
        "bench-peers" => with(bench_peers::Options::parse(rest), bench_peers::run),
        "crash-test" => with(crash_test::Options::parse(rest), crash_test::run),
        "node-test" => with(node_test::Options::parse(rest), node_test::run),
        "engine-test" => with(engine_test::Options::parse(rest), engine_test::run),
        "hostile" => with(hostile::Options::parse(rest), hostile::run),
        "soak" => with(soak::Options::parse(rest), soak::run),
        "sim" => with(sim::Options::parse(rest), sim::run),
        "fuzz" => with(fuzz::Options::parse(rest), fuzz::run),
        "event-faults" => with(RoundOptions::parse("event-faults", rest), event_faults::run),
        "nixl" => with(RoundOptions::parse("nixl", rest), nixl::run),
        "regen-kernels" => regenerate_kernels(rest),
        "gpu-bundle" => gpu_bundle(rest),
        "tidy" | "test-gpu" | "verify-kernels" | "wheel" if !rest.is_empty() => {
            usage(format!("`{command}` takes no argument: {}", rest[0]))
        }
        "verify-kernels" => {
            kernels::verify(&workspace::Workspace::load()?)?;
            println!("the prebuilt kernels belong to their source");
            Ok(true)
        }
        "python-stress" => wheel::stress(&workspace::Workspace::load()?, rest).map(|()| true),
        "wheel" => wheel::build(&workspace::Workspace::load()?).map(|()| true),
        "tidy" => tidy::run(&workspace::Workspace::load()?),
        "test-gpu" => gpu::run(&workspace::Workspace::load()?),
        other => usage(format!("unknown command `{other}`")),
    }
}

fn usage(text: String) -> anyhow::Result<bool> {
    Err(Usage(text).into())
}

/// Runs a command, unless its options are wrong.
fn with<O>(
    options: Result<O, String>,
    command: impl FnOnce(&O) -> anyhow::Result<bool>,
) -> anyhow::Result<bool> {
    match options {
        Ok(options) => command(&options),
        Err(text) => usage(text),
    }
}

fn regenerate_kernels(rest: &[String]) -> anyhow::Result<bool> {
    let mode = match rest {
        [] => kernels::Mode::Write,
        [check] if check == "--check" => kernels::Mode::Check,
        _ => return usage(format!("`regen-kernels` takes only --check: {}", rest.join(" "))),
    };
    kernels::regenerate(&workspace::Workspace::load()?, mode).map(|()| true)
}

fn gpu_bundle(rest: &[String]) -> anyhow::Result<bool> {
    let mode = match rest {
        [] => gpu::Mode::Write,
        [rehearse] if rehearse == "--rehearse" => gpu::Mode::Rehearse,
        _ => return usage(format!("`gpu-bundle` takes only --rehearse: {}", rest.join(" "))),
    };
    gpu::bundle(&workspace::Workspace::load()?, mode).map(|()| true)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(line: &str) -> anyhow::Result<bool> {
        run(&line.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn bad_arguments_are_usage_errors() {
        for line in [
            "",
            "bench-peers",
            "bench-peers disk",
            "frobnicate",
            "tidy now",
            "test --fast",
            "test --only",
            "test --only nothing",
            "test-gpu x",
            "event-faults --rounds 0",
            "nixl --rounds 0",
            "fuzz nothing",
            "gpu-bundle x",
            "verify-kernels x",
            "wheel x",
            "engine-test --fast",
            "regen-kernels --force",
        ] {
            let error = call(line).unwrap_err();
            assert!(error.is::<Usage>(), "`{line}`: {error}");
        }
        for line in ["help", "--help", "bench-peers index --help", "crash-test -h"] {
            assert!(call(line).unwrap(), "`{line}`");
        }
    }
}
