//! The command line.

use std::path::PathBuf;
use std::time::Duration;

/// What to do.
#[derive(Debug)]
pub(crate) struct Options {
    pub(crate) first: u64,
    pub(crate) seeds: u64,
    /// Of a leader; simulated seconds with `nodes`.
    pub(crate) steps: u64,
    /// So many nodes that read from each other, in place of a leader.
    pub(crate) nodes: Option<usize>,
    pub(crate) jobs: usize,
    pub(crate) json: Option<PathBuf>,
    pub(crate) trace: bool,
    pub(crate) mutants: bool,
    pub(crate) plant: Option<String>,
    /// Seeds are begun until then.
    pub(crate) time: Option<Duration>,
}

impl Options {
    pub(crate) fn parse(mut args: impl Iterator<Item = String>) -> Result<Self, String> {
        let jobs = std::thread::available_parallelism().map_or(1, usize::from);
        let (json, plant, time, nodes) = (None, None, None, None);
        let mut options = Self {
            first: 1,
            // Not given yet.
            seeds: 0,
            steps: 0,
            nodes,
            jobs,
            json,
            trace: false,
            mutants: false,
            plant,
            time,
        };
        while let Some(name) = args.next() {
            match name.as_str() {
                "--trace" => options.trace = true,
                "--mutants" => options.mutants = true,
                _ => {
                    let value = args.next().ok_or_else(|| format!("`{name}` needs a value"))?;
                    options.set(&name, value)?;
                }
            }
        }
        let (seeds, steps) = if options.nodes.is_some() { (1, 300) } else { (1000, 1000) };
        options.seeds = if options.seeds == 0 { seeds } else { options.seeds };
        options.steps = if options.steps == 0 { steps } else { options.steps };
        Ok(options)
    }

    fn set(&mut self, name: &str, value: String) -> Result<(), String> {
        let number = || value.parse::<u64>().map_err(|_| format!("{name} {value}: expected a number"));
        let above_zero = || match number()? {
            0 => Err(format!("{name} 0: expected a number above 0")),
            number => Ok(number),
        };
        match name {
            "--seeds" => self.seeds = above_zero()?,
            "--first-seed" => self.first = number()?,
            "--seed" => (self.first, self.seeds) = (number()?, 1),
            "--steps" => self.steps = above_zero()?,
            "--nodes" => {
                let nodes = number()?;
                if !(2..=4000).contains(&nodes) {
                    return Err(format!("--nodes {nodes}: expected 2 to 4000"));
                }
                self.nodes = Some(nodes as usize);
            }
            "--jobs" => self.jobs = above_zero()? as usize,
            "--seconds" => self.time = Some(Duration::from_secs(above_zero()?)),
            "--plant" => self.plant = Some(value),
            "--json" => self.json = Some(value.into()),
            _ => return Err(format!("unknown argument `{name}` of `sim`")),
        }
        Ok(())
    }
}
