//! `cargo xtask node-test`: engines and their node daemon are killed, stopped and started again.
//!
//! The work is done by `crates/kvbm-node/examples/node`; this builds it, gives it a folder and says
//! what came of it.

use crate::json_report;
use crate::node_programs::NodePrograms;
use crate::steps::Outcome;
use crate::workspace::Workspace;
use serde_json::Value;
use std::path::PathBuf;

/// Rounds of the step of `cargo xtask test`.
const FEW: u64 = 12;
const DEFAULT_ROUNDS: u64 = 200;
/// Daemons that take over from each other: of the step, and unless the caller says otherwise.
const FEW_TAKE_OVERS: u64 = 3;
const DEFAULT_TAKE_OVERS: u64 = 50;

/// What the engines compute, in the order of `MODELS` of the program `node`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum NodeTestModel {
    /// Keys and values of heads, divided among the ranks.
    #[default]
    Heads,
    /// A latent that both ranks hold: host memory has one copy.
    Latent,
    /// Three cache groups: a window, full attention and a state.
    Groups,
}

impl NodeTestModel {
    const ALL: [Self; 3] = [Self::Heads, Self::Latent, Self::Groups];

    fn name(self) -> &'static str {
        match self {
            Self::Heads => "heads",
            Self::Latent => "latent",
            Self::Groups => "groups",
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Options {
    rounds: u64,
    take_overs: u64,
    seed: u64,
    model: NodeTestModel,
    json: Option<PathBuf>,
}

impl Options {
    /// Reads `[--rounds N] [--take-overs N] [--seed N] [--model heads|latent|groups]
    /// [--json FILE]`.
    pub(crate) fn parse(args: &[String]) -> Result<Self, String> {
        let mut options = Self::default();
        let mut args = args.iter();
        while let Some(name) = args.next() {
            let value = args.next().ok_or_else(|| format!("`{name}` of `node-test` needs a value"))?;
            let number = || value.parse::<u64>().map_err(|_| format!("{name} {value}: expected a number"));
            match name.as_str() {
                "--rounds" => options.rounds = number()?,
                "--take-overs" => options.take_overs = number()?,
                "--seed" => options.seed = number()?,
                "--model" => {
                    let model = NodeTestModel::ALL.into_iter().find(|model| model.name() == value);
                    let wrong = || format!("--model {value}: expected heads, latent or groups");
                    options.model = model.ok_or_else(wrong)?;
                }
                "--json" => options.json = Some(value.into()),
                other => return Err(format!("unknown argument `{other}` of `node-test`")),
            }
        }
        if !(1..=100_000).contains(&options.rounds) {
            return Err(format!("--rounds {}: expected 1 to 100000", options.rounds));
        }
        if options.take_overs > 100_000 {
            return Err(format!("--take-overs {}: expected 0 to 100000", options.take_overs));
        }
        Ok(options)
    }
}

impl Default for Options {
    fn default() -> Self {
        let (rounds, take_overs) = (DEFAULT_ROUNDS, DEFAULT_TAKE_OVERS);
        Self { rounds, take_overs, seed: 1, model: NodeTestModel::default(), json: None }
    }
}

/// Runs it; whether all rounds passed.
pub(crate) fn run(options: &Options) -> anyhow::Result<bool> {
    let (passed, report) = node_test(&Workspace::load()?, options)?;
    json_report::deliver(options.json.as_deref(), &report)?;
    Ok(passed)
}

/// A few rounds, as a step of `cargo xtask test`.
pub(crate) fn check(workspace: &Workspace) -> Outcome {
    let few = |model| {
        let (rounds, take_overs) = (FEW, FEW_TAKE_OVERS);
        match node_test(workspace, &Options { rounds, take_overs, model, ..Options::default() }) {
            Ok((true, _)) => Outcome::Passed { tests: 0 },
            Ok((false, report)) => Outcome::Failed { why: format!("{report:#}"), tests: 0, failed: 0 },
            Err(error) => Err(error).into(),
        }
    };
    NodeTestModel::ALL.into_iter().map(few).fold(Outcome::Passed { tests: 0 }, Outcome::and)
}

fn node_test(workspace: &Workspace, options: &Options) -> anyhow::Result<(bool, Value)> {
    let programs = NodePrograms::build(workspace, "node-test")?;
    let Options { rounds, take_overs, seed, model, .. } = *options;
    println!("node test, {rounds} rounds, {take_overs} take-overs, model of {}", model.name());
    let model = ("--model", model as u64);
    programs.run("test", &[("--rounds", rounds), ("--take-overs", take_overs), ("--seed", seed), model])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_have_defaults_and_bounds() {
        let parse =
            |line: &str| Options::parse(&line.split_whitespace().map(str::to_owned).collect::<Vec<_>>());
        let all = parse("").unwrap();
        assert_eq!((all.rounds, all.take_overs, all.seed, all.model), (200, 50, 1, NodeTestModel::Heads));
        let options = parse("--rounds 5 --json r.json --seed 9 --take-overs 0 --model latent").unwrap();
        assert_eq!((options.rounds, options.take_overs, options.seed), (5, 0, 9));
        assert_eq!(options.model, NodeTestModel::Latent);
        assert_eq!(options.json, Some("r.json".into()));
        assert!(parse("--rounds").unwrap_err().contains("needs a value"));
        assert!(parse("--rounds 0").unwrap_err().contains("1 to 100000"));
        assert!(parse("--model small").unwrap_err().contains("heads, latent or groups"));
        assert!(parse("--fast 1").unwrap_err().contains("unknown argument"));
    }
}
