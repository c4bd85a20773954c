//! `kvbm remote`: who offers memory, a prefix from a peer, and what reading from one costs.

mod bench;
mod fixture;
mod list;
mod pull;

use std::path::PathBuf;

use anyhow::Result;
use clap::{Args, Subcommand};
use kvbm::config::{Config, Secret};
use kvbm::events_plane::BucketUrl;

use crate::args::{Output, WrongUsage};
use crate::features::explain_url;
use crate::secret::SecretArgs;

/// What to do with remote memory.
#[derive(Debug, Subcommand)]
pub enum RemoteCommand {
    /// Show the nodes that are announced in a folder, and what each offers.
    Ls(ListArgs),
    /// Read the blocks of a prompt from whichever peer has them, verify them, and say how long it
    /// took.
    Pull(PullArgs),
    /// Measure verified reads from a peer beside the same ranges without leases and checksums.
    Bench(BenchArgs),
    /// The owner's side of `bench`, in a process of its own.
    #[command(hide = true)]
    BenchOwner(OwnerArgs),
}

/// Where nodes find each other: a folder, or a URL that may hold a password. The
/// command line takes any text: what it refuses it would quote.
#[derive(Clone, Debug)]
pub struct DiscoveryPlace(Secret);

impl From<&str> for DiscoveryPlace {
    fn from(text: &str) -> Self {
        Self(Secret::new(text))
    }
}

impl DiscoveryPlace {
    /// The folder, or the URL once it was checked.
    ///
    /// # Errors
    /// What is wrong with the URL, without its password.
    pub(crate) fn checked(&self) -> Result<&Secret> {
        let text = self.0.text();
        if text.contains("://") {
            text.parse::<BucketUrl>().map_err(|error| WrongUsage(explain_url(&error)))?;
        }
        Ok(&self.0)
    }
}

/// Has the node of `config` find its peers in this folder, or on this server.
///
/// # Errors
/// What is wrong with the URL.
pub(crate) fn set_discovery(config: &mut Config, place: &DiscoveryPlace) -> Result<()> {
    let place = place.checked()?;
    let text = place.text();
    let is_url = text.contains("://");
    config.remote.directory = (!is_url).then(|| text.into_owned().into());
    config.remote.url = is_url.then(|| place.clone());
    Ok(())
}

/// Options of `kvbm remote ls`.
#[derive(Clone, Debug, Args)]
pub struct ListArgs {
    /// What `remote.directory` or `remote.url` of the nodes names.
    #[arg(value_name = "DIR|URL")]
    pub place: DiscoveryPlace,

    /// The secret with which announcements are signed.
    #[command(flatten)]
    pub secret: SecretArgs,

    /// Write the list as JSON; - for standard output.
    #[arg(long, value_name = "FILE")]
    pub json: Option<Output>,
}

/// Options of `kvbm remote pull`.
#[derive(Clone, Debug, Args)]
pub struct PullArgs {
    /// Configuration of a node of the deployment: the model, its namespace, `[remote]`. Disks,
    /// volumes and events in it are left alone.
    #[arg(long, value_name = "FILE")]
    pub config: PathBuf,

    /// The prompt: a file with token ids, separated by blanks, commas or line ends.
    #[arg(long, value_name = "FILE")]
    pub tokens: PathBuf,

    /// Number of this node, which no other node may have.
    #[arg(long, value_name = "N")]
    pub node: u32,

    /// Folder or NATS server where nodes find each other [default: remote.directory or remote.url].
    #[arg(long, value_name = "DIR|URL")]
    pub directory: Option<DiscoveryPlace>,

    /// How long to wait for peers that have something of it, in seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 10)]
    pub wait: u32,

    /// Write the result as JSON; - for standard output.
    #[arg(long, value_name = "FILE")]
    pub json: Option<Output>,
}

/// Options of `kvbm remote bench`.
#[derive(Clone, Debug, Args)]
pub struct BenchArgs {
    /// What moves the bytes: `nixl` between two processes, `in-process` within one [default: nixl
    /// where this program has it].
    #[arg(long, value_name = "NAME")]
    pub agent: Option<AgentName>,

    /// Blocks of 1 MiB that are read at a time.
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub blocks: u32,

    /// Times that each is measured; the median counts.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: u32,

    /// Write the rows as JSON; - for standard output.
    #[arg(long, value_name = "FILE")]
    pub json: Option<Output>,
}

/// Options of the owner's side.
#[derive(Clone, Debug, Args)]
pub struct OwnerArgs {
    /// The folder in which both sides find each other.
    pub directory: PathBuf,

    /// Blocks.
    #[arg(long)]
    pub blocks: u32,
}

/// What moves the bytes of a benchmark.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum AgentName {
    /// NIXL, between two processes.
    Nixl,
    /// Copies within one process.
    InProcess,
}

/// Carries out a command.
pub fn run(command: &RemoteCommand) -> Result<()> {
    match command {
        RemoteCommand::Ls(args) => list::run(args),
        RemoteCommand::Pull(args) => pull::run(args),
        RemoteCommand::Bench(args) => bench::run(args),
        RemoteCommand::BenchOwner(args) => bench::own(args),
    }
}

/// Writes JSON where it is wanted, and the text for people.
fn deliver(json: Option<&Output>, text: &str, value: &serde_json::Value) -> Result<()> {
    crate::show(text, json == Some(&Output::Stdout))?;
    json.map_or(Ok(()), |output| crate::write_json(output, &serde_json::to_string_pretty(value)?))
}
