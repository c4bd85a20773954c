//! The options of commands that run rounds of random faults.

use std::path::PathBuf;

const DEFAULT_ROUNDS: u64 = 200;
const NUMBERS: std::ops::RangeInclusive<u64> = 1..=1_000_000;

/// How many rounds, with which numbers, and where the report goes.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct RoundOptions {
    pub(crate) rounds: u64,
    pub(crate) seed: u64,
    pub(crate) json: Option<PathBuf>,
}

impl RoundOptions {
    /// Reads `[--rounds N] [--seed N] [--json FILE]` behind `command`.
    pub(crate) fn parse(command: &str, args: &[String]) -> Result<Self, String> {
        let mut options = Self { rounds: DEFAULT_ROUNDS, seed: 1, json: None };
        let mut args = args.iter();
        while let Some(name) = args.next() {
            let value = args.next().ok_or_else(|| format!("`{name}` of `{command}` needs a value"))?;
            let number = || {
                let number = value.parse::<u64>().ok().filter(|number| NUMBERS.contains(number));
                number.ok_or_else(|| format!("{name} {value}: expected 1 to {}", NUMBERS.end()))
            };
            match name.as_str() {
                "--rounds" => options.rounds = number()?,
                "--seed" => options.seed = number()?,
                "--json" => options.json = Some(value.into()),
                other => return Err(format!("unknown argument `{other}` of `{command}`")),
            }
        }
        Ok(options)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_and_seed_are_read() {
        let parse = |line: &str| {
            let words: Vec<_> = line.split_whitespace().map(str::to_owned).collect();
            RoundOptions::parse("nixl", &words)
        };
        assert_eq!(parse(""), Ok(RoundOptions { rounds: 200, seed: 1, json: None }));
        let json = Some("n.json".into());
        assert_eq!(parse("--seed 7 --json n.json --rounds 5"), Ok(RoundOptions { rounds: 5, seed: 7, json }));
        for wrong in ["--rounds", "--rounds 0", "--rounds many", "now", "now 1", "--json"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }
}
