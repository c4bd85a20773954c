//! Benchmarks against peers: programs of their own outside the workspace, so that what peers bring
//! stays out of ours.

use crate::workspace::{Workspace, cargo, succeed};
use anyhow::Context;
use std::path::PathBuf;

/// The benchmarks: a folder of that name under `bench-peers/`.
const BENCHMARKS: &[&str] = &["index", "journal", "pool"];

/// One call: which benchmark, and what it is told.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Options {
    benchmark: &'static str,
    /// Cargo's profile: `release`, or `peer` where the benchmark has one, which is built as the
    /// peer builds its programs.
    profile: String,
    arguments: Vec<String>,
}

impl Options {
    /// Reads `NAME [--json FILE] [...]`. The benchmark checks the rest.
    pub(crate) fn parse(args: &[String]) -> Result<Self, String> {
        let names = BENCHMARKS.join(", ");
        let Some((name, rest)) = args.split_first() else {
            return Err(format!("`bench-peers` needs a benchmark: {names}"));
        };
        let known = BENCHMARKS.iter().find(|known| *known == name);
        let benchmark: &str = known.ok_or_else(|| format!("unknown benchmark `{name}`: there is {names}"))?;
        if rest.last().is_some_and(|last| last == "--json") {
            return Err("`--json` needs a file, or `-` for standard output".into());
        }
        let mut arguments = rest.to_vec();
        let mut profile = "release".to_owned();
        if let Some(at) = arguments.iter().position(|argument| argument == "--profile") {
            let values: Vec<_> = arguments.drain(at..arguments.len().min(at + 2)).collect();
            profile = match values.get(1).map(String::as_str) {
                Some(name @ ("release" | "peer")) if name == "release" || benchmark == "pool" => {
                    name.to_owned()
                }
                Some(name) => {
                    return Err(format!("`--profile {name}`: give `release`, or for `pool` `peer`"));
                }
                None => return Err("`--profile` needs a name: `release`, or for `pool` `peer`".into()),
            };
        }
        Ok(Self { benchmark, profile, arguments })
    }
}

pub(crate) fn run(options: &Options) -> anyhow::Result<bool> {
    let workspace = Workspace::load()?;
    let folder = workspace.root.join("bench-peers").join(options.benchmark);
    let mut arguments = options.arguments.clone();
    // The benchmark runs elsewhere: a relative file is one of the caller's folder.
    for option in ["--json", "--with", "--plot", "--table", "--dir"] {
        let value = arguments.iter().position(|argument| argument == option).map(|at| at + 1);
        if let Some(file) = value.and_then(|at| arguments.get_mut(at)).filter(|file| *file != "-") {
            let path: PathBuf = std::path::absolute(&*file).context("the current folder is gone")?;
            *file = path.to_string_lossy().into_owned();
        }
    }
    let mut command = cargo(&folder);
    command
        .args(["run", "--quiet", "--profile", &options.profile, "--locked", "--"])
        .args(&arguments)
        .env("BENCH_PROFILE", &options.profile)
        .env("CARGO_TARGET_DIR", workspace.target.join("bench-peers"));
    succeed(&mut command)
        .context("the benchmark fetches its peers from the public registry the first time")?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Options, String> {
        Options::parse(&line.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn a_known_benchmark_and_its_arguments() {
        let options = parse("pool --json rows.json --rounds 3").unwrap();
        assert_eq!(options.benchmark, "pool");
        assert_eq!(options.arguments, ["--json", "rows.json", "--rounds", "3"]);
        assert_eq!(options.profile, "release");
        let options = parse("pool --profile peer --rounds 3").unwrap();
        assert_eq!((options.profile.as_str(), options.arguments.len()), ("peer", 2));
        assert!(parse("index --profile peer").unwrap_err().contains("for `pool` `peer`"));
        assert!(parse("pool --profile").unwrap_err().contains("needs a name"));
        assert!(parse("").unwrap_err().contains("needs a benchmark"));
        assert!(parse("disk").unwrap_err().contains("unknown benchmark `disk`"));
        assert!(parse("pool --json").unwrap_err().contains("needs a file"));
    }

    #[test]
    fn every_benchmark_has_a_folder_with_a_lock_file() {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        for name in BENCHMARKS {
            assert!(root.join("bench-peers").join(name).join("Cargo.lock").is_file(), "{name}");
        }
    }
}
