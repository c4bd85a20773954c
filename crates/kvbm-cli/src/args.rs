//! The command line.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, Parser, Subcommand, ValueEnum};
use kvbm::config::{Bytes, Capacity, EvictionPolicy, Scales, Secret, TenantShares};
use kvbm::events_plane::EventUrl;
use kvbm::layout::DType;

use crate::bench::BenchCommand;
use crate::ctl::CtlArgs;
use crate::ctl::top::TopArgs;
use crate::disk::DiskCommand;
use crate::doctor::EngineName;
use crate::events::EventsCommand;
use crate::features;
use crate::layout::LayoutCommand;
use crate::number::{SOME, whole};
use crate::remote::RemoteCommand;
use crate::serve::ServeArgs;
use crate::size::SizeArgs;
use crate::volume::VolumeCommand;
use crate::worker::WorkerArgs;

/// KV-cache block manager: keeps what an LLM engine computed, on four tiers of memory.
///
/// Without a command: a built-in multi-turn workload through an emulated device, host memory and a
/// directory, and a report of it in kvbm-report.html.
#[derive(Debug, Parser)]
#[command(name = "kvbm", version, after_help = "Exit status: 0 done, 1 failed, 2 wrong usage.")]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Option<CliCommand>,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum CliCommand {
    /// Replay a request trace through a block manager and verify every byte that comes back.
    Replay(Box<ReplayArgs>),
    /// Measure what this machine reaches, each figure beside its own limit.
    Bench {
        /// What to measure.
        #[command(subcommand)]
        command: BenchCommand,
    },
    /// Look into directories of G3, verify, mend or empty them.
    Disk {
        /// What to do.
        #[command(subcommand)]
        command: DiskCommand,
    },
    /// Say what this machine offers to kvbm, what is missing, and which command would fix it.
    Doctor(DoctorArgs),
    /// Follow what travels on the event plane.
    Events {
        /// What to do.
        #[command(subcommand)]
        command: EventsCommand,
    },
    /// Look into the memory of other nodes: who is announced, a prefix from a peer, what it costs.
    Remote {
        /// What to do.
        #[command(subcommand)]
        command: RemoteCommand,
    },
    /// Say how many tokens of a model fit into host memory and disk.
    Size(SizeArgs),
    /// Keep a cache for engines in other processes, which may come and go, until SIGTERM or Ctrl-C.
    Serve(ServeArgs),
    /// Change the data keys of encrypted volumes.
    Volume {
        /// What to do.
        #[command(subcommand)]
        command: VolumeCommand,
    },
    /// Run the worker of one rank for a leader in another process, until SIGTERM or Ctrl-C.
    Worker(WorkerArgs),
    /// Ask a running manager, or steer it.
    Ctl(CtlArgs),
    /// Watch a running manager in a terminal.
    Top(TopArgs),
    /// Print a dashboard for Grafana, made of the metrics that there are.
    Dashboard,
    /// Print alert rules for Prometheus, made of the metrics that there are.
    Alerts,
    /// Show how blocks lie in memory.
    Layout {
        /// What to show.
        #[command(subcommand)]
        command: LayoutCommand,
    },
}

/// A value that no command can use, or options that contradict each other: found behind the parser,
/// exit status 2 all the same.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct WrongUsage(pub String);

/// Where JSON goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output {
    /// Standard output (`-`); text for people goes to standard error then.
    Stdout,
    /// A file, replaced.
    File(PathBuf),
}

impl Output {
    /// The file, if it is one.
    pub fn file(&self) -> Option<&Path> {
        match self {
            Self::Stdout => None,
            Self::File(path) => Some(path),
        }
    }
}

impl FromStr for Output {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "" => Err("give a file, or - for standard output".into()),
            "-" => Ok(Self::Stdout),
            path => Ok(Self::File(path.into())),
        }
    }
}

/// Capacities of G1, G2, G3 and G4.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capacities(pub [Capacity; 4]);

impl FromStr for Capacities {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts: Vec<&str> = text.split(',').collect();
        if parts.len() > 4 {
            return Err(format!("{} values, but there are four tiers: G1,G2,G3,G4", parts.len()));
        }
        let mut capacities = [Capacity::NONE; 4];
        for (capacity, part) in capacities.iter_mut().zip(parts) {
            *capacity = part.parse().map_err(|error: kvbm::config::ParseCapacityError| error.to_string())?;
        }
        if capacities[0].is_none() {
            return Err("G1 must hold at least one block".into());
        }
        Ok(Self(capacities))
    }
}

impl fmt::Display for Capacities {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [g1, g2, g3, g4] = self.0;
        write!(f, "{g1}, {g2}, {g3}")?;
        if g4.is_none() { Ok(()) } else { write!(f, ", {g4}") }
    }
}

/// The device that G1 lies on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceChoice {
    /// Emulated in host memory.
    Emulated,
    /// The NVIDIA GPU of this number.
    Cuda(u32),
}

impl FromStr for DeviceChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = match text.split_once(':') {
            None if text == "emulated" => return Ok(Self::Emulated),
            None if text == "cuda" => Some(0),
            Some(("cuda", number)) => number.parse().ok(),
            _ => None,
        };
        number.map(Self::Cuda).ok_or_else(|| format!("{text}: give emulated, cuda or cuda:N"))
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Emulated => f.write_str("emulated"),
            Self::Cuda(number) => write!(f, "cuda:{number}"),
        }
    }
}

/// What to do with a request's offloads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OffloadMode {
    /// Let them finish, with a deadline, after each onboard and before the next request: results
    /// repeat.
    Wait,
    /// Go on: offloads that do not keep up are dropped and counted, as in the product.
    Drop,
}

/// Options of `kvbm replay`.
#[derive(Clone, Debug, Args)]
pub struct ReplayArgs {
    /// Mooncake trace: JSON lines with timestamp, `input_length`, `output_length`, `hash_ids`
    /// [default: a made-up workload].
    #[arg(long, value_name = "FILE", conflicts_with = "synthetic")]
    pub trace: Option<PathBuf>,

    /// Requests of a made-up multi-turn workload, decided by --seed [default without --trace: 2000;
    /// at most 10,000,000].
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = whole::<u32>(1..=10_000_000))]
    pub synthetic: Option<u32>,

    /// What G1, G2 and G3 hold, each in blocks (1000) or as a size (512MiB, 8GiB); what is left out
    /// is 0: no such tier. A fourth value is what --volume may hold; without it, as much as there
    /// is room for.
    #[arg(long, value_name = "G1,G2,G3[,G4]", default_value = "1000,4000,16000", allow_hyphen_values = true)]
    pub capacity: Capacities,

    /// Bytes of a block, like 65536 or 64KiB: a multiple of 512 (8 layers of keys and values of 16
    /// tokens, 2 bytes each, or as many as --dtype has). With --model, the most that a block has.
    #[arg(long, value_name = "SIZE", default_value = "64KiB", allow_negative_numbers = true)]
    pub block_bytes: Bytes,

    /// A model with the cache groups of its configuration: deepseek-v3, gemma-3, gpt-oss, jamba,
    /// llama-3, qwen2.5, qwen3, qwen3-next, or its config.json of Hugging Face. Its heads and
    /// states are made smaller until a block has at most --block-bytes.
    #[arg(long, value_name = "NAME|FILE")]
    pub model: Option<String>,

    /// Element type of the KV cache, like `fp8_e4m3`, `fp8_e5m2`, int8, bf16 or fp32 [default:
    /// bf16, or the model's].
    #[arg(long, value_name = "NAME")]
    pub dtype: Option<DType>,

    /// Scales of the elements beside them in each block: block, head or token (of each head), and
    /// their type, like token:f16 [default: none; the type: f32]. They come on top of
    /// --block-bytes.
    #[arg(long, value_name = "PART[:TYPE]")]
    pub scales: Option<Scales>,

    /// Ranks that divide the KV heads of each block; what cannot be divided each has, and G3 and G4
    /// once.
    #[arg(long, visible_alias = "tp", value_name = "N", default_value_t = 1, allow_negative_numbers = true, value_parser = whole::<u32>(1..=64))]
    pub tensor_parallel: u32,

    /// With --model, where prefixes can end in groups with a sliding window or state, beside the
    /// ends of requests: after every N blocks [default: nowhere].
    #[arg(long, value_name = "N", requires = "model", default_value_t = 0, allow_negative_numbers = true, value_parser = whole::<u32>(0..=1_000_000))]
    pub checkpoint_every: u32,

    /// The device of G1: emulated, or an NVIDIA GPU, cuda or cuda:N (its driver's library may be
    /// named in `KVBM_CUDA_DRIVER`).
    #[arg(long, value_name = "DEVICE", default_value_t = DeviceChoice::Emulated, conflicts_with = "metadata_only")]
    pub device: DeviceChoice,

    /// Eviction policy, among the blocks that no other block on their tier follows. hazard: the one
    /// least likely to be used again soon, by what was seen so far; lru-leaf: the one used longest
    /// ago.
    #[arg(long, value_name = "NAME", default_value = "hazard", value_parser = policies())]
    pub policy: EvictionPolicy,

    /// After each request, tell the eviction policy whether its branch ends (its last two blocks
    /// occur in no later request), and tell the truth with probability P, 0 to 1 [default: no
    /// hints].
    #[arg(long, value_name = "P", allow_negative_numbers = true, value_parser = probability)]
    pub hint_accuracy: Option<f64>,

    /// Tenants with a share of every tier that is kept for each, like acme=0.5,beta=0.25. A request
    /// is of the one that "tenant" names in its line of the trace, or of nobody, who has what the
    /// shares leave; of a made-up workload, each system prompt is one's in turn. Tenants share no
    /// blocks. Without this, "tenant" is not looked at.
    #[arg(long, value_name = "NAME=SHARE,..", default_value_t, hide_default_value = true)]
    pub tenants: TenantShares,

    /// What to do with the offloads of a request.
    #[arg(long, value_enum, default_value_t = OffloadMode::Wait)]
    pub offload: OffloadMode,

    /// Requests at a time, 1 to 1024.
    #[arg(long, value_name = "N", default_value_t = 1, allow_negative_numbers = true, value_parser = whole::<u32>(1..=1024))]
    pub concurrency: u32,

    /// Model id in the blocks' namespace: runs under different names never share a block.
    #[arg(long, value_name = "NAME", default_value = "replay")]
    pub namespace: String,

    /// Decides the made-up workload and every random choice of the replay.
    #[arg(long, value_name = "N", default_value_t = 0, allow_negative_numbers = true, value_parser = whole::<u64>(0..=u64::MAX))]
    pub seed: u64,

    /// Publish every event to URL while replaying, like `nats://127.0.0.1:4222` (docs/events.md).
    /// The replay goes on where that cannot be reached, and fails at its end if events were left.
    #[arg(long, value_name = "URL", value_parser = events_url)]
    pub events: Option<Secret>,

    /// Serve Prometheus metrics at `/metrics` of ADDR during the replay. A port alone means
    /// 127.0.0.1, port 0 any free one. An address that other machines reach is refused.
    #[arg(long, value_name = "ADDR", value_parser = metrics_addr)]
    pub metrics: Option<SocketAddr>,

    /// Move no bytes: only the bookkeeping.
    #[arg(long)]
    pub metadata_only: bool,

    /// Directory of G3, kept afterwards; several, with commas, share the blocks [default: a
    /// temporary one].
    #[arg(long, value_name = "DIR,..", value_delimiter = ',', conflicts_with = "metadata_only")]
    pub dir: Vec<PathBuf>,

    /// After every N requests, wait until all blocks on disk are durable, and say so: they survive
    /// whatever happens to the process from then on.
    #[arg(long, value_name = "N", requires = "dir", allow_negative_numbers = true, value_parser = whole::<u32>(SOME))]
    pub flush_every: Option<u32>,

    /// Volume of G4, kept afterwards: `dir:///mnt/kv`, memory:, or
    /// `s3://BUCKET/PREFIX?endpoint=http://HOST:PORT` (needs a build with --features s3;
    /// credentials as the AWS tools take them from the environment, or `&anonymous=true`). It must
    /// exist.
    #[arg(long, value_name = "URI", conflicts_with = "metadata_only")]
    pub volume: Option<String>,

    /// Write the results as JSON; - for standard output (the table goes to standard error then).
    #[arg(long, value_name = "FILE")]
    pub json: Option<Output>,

    /// Write a report with plots as one HTML file.
    #[arg(long, value_name = "FILE.html")]
    pub report: Option<PathBuf>,
}

impl ReplayArgs {
    /// The options of a command line that says nothing but `replay`.
    pub fn defaults() -> Self {
        #[derive(Parser)]
        struct Only {
            #[command(flatten)]
            args: ReplayArgs,
        }
        Only::parse_from(["replay"]).args
    }

    /// What `kvbm` alone does: tiers small enough that a made-up workload passes through all of
    /// them, and a report.
    pub fn demo() -> Self {
        let blocks = |blocks| Capacity::Blocks(kvbm::config::Blocks(blocks));
        Self {
            capacity: Capacities([blocks(512), blocks(1536), blocks(6_000), Capacity::NONE]),
            report: Some(PathBuf::from("kvbm-report.html")),
            ..Self::defaults()
        }
    }

    /// Rules between options that the parser cannot express.
    pub fn check(&self) -> Result<(), WrongUsage> {
        self.contradiction().map_or(Ok(()), |problem| Err(WrongUsage(problem.to_owned())))
    }

    fn contradiction(&self) -> Option<&'static str> {
        let [.., g3, g4] = self.capacity.0;
        if !self.dir.is_empty() && g3.is_none() {
            return Some("--dir has no use without G3: give it room with --capacity G1,G2,G3");
        }
        if self.volume.is_none() && !g4.is_none() {
            return Some("--capacity: G4 needs a place: name it with --volume URI");
        }
        if self.block_bytes.get() == 0 {
            return Some("--block-bytes must be more than 0");
        }
        if self.namespace.is_empty() {
            return Some("--namespace must not be empty");
        }
        None
    }
}

/// Options of `kvbm doctor`.
#[derive(Clone, Debug, Default, Args)]
pub struct DoctorArgs {
    /// Directory that G3 would use [default: those of --config, or the current one].
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,

    /// Configuration whose directories and volumes are looked at.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// A volume of G4 to be looked at, like `dir:///mnt/kv`; may come several times. A small object
    /// is written there and deleted.
    #[arg(long, value_name = "URI")]
    pub volume: Vec<String>,

    /// Look also at the engine that kvbm is to work with.
    #[arg(long, value_enum)]
    pub engine: Option<EngineName>,

    /// Python interpreter of the engine's environment.
    #[arg(long, value_name = "FILE", default_value = "python3", requires = "engine")]
    pub python: PathBuf,

    /// What vLLM is started with as --kv-transfer-config, to be checked: a JSON object.
    #[arg(long, value_name = "JSON", requires = "engine")]
    pub kv_transfer_config: Option<String>,

    /// Write what was found as JSON; - for standard output.
    #[arg(long, value_name = "FILE")]
    pub json: Option<Output>,
}

impl DoctorArgs {
    /// Rules between options that the parser cannot express.
    pub fn check(&self) -> Result<(), WrongUsage> {
        if self.kv_transfer_config.is_some() && self.engine != Some(EngineName::Vllm) {
            let problem = "--kv-transfer-config is an option of vLLM: give it with --engine vllm";
            return Err(WrongUsage(problem.to_owned()));
        }
        Ok(())
    }
}

/// The text is kept: it may hold a password, so nobody shows it.
pub(crate) fn events_url(text: &str) -> Result<Secret, String> {
    text.parse::<EventUrl>().map(|_| Secret::new(text)).map_err(|error| features::explain_url(&error))
}

fn probability(text: &str) -> Result<f64, String> {
    let in_range = text.parse().ok().filter(|p| (0.0..=1.0).contains(p));
    in_range.ok_or_else(|| format!("{text}: give a number from 0 to 1"))
}

fn policies() -> impl TypedValueParser<Value = EvictionPolicy> {
    let names = EvictionPolicy::ALL.iter().map(|(_, name)| *name);
    PossibleValuesParser::new(names).try_map(|name| {
        let known = EvictionPolicy::ALL.iter().find(|(_, known)| *known == name);
        known.map(|(policy, _)| *policy).ok_or("no such policy")
    })
}

pub(crate) fn metrics_addr(text: &str) -> Result<SocketAddr, String> {
    if let Ok(port) = text.trim_start_matches(':').parse() {
        return Ok(SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port));
    }
    let text = text.strip_prefix("localhost:").map_or(text.to_owned(), |port| format!("127.0.0.1:{port}"));
    text.parse().map_err(|_| "expected a port, or an address like 127.0.0.1:9400".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;
    use kvbm::config::Blocks;

    fn replay(line: &str) -> Result<ReplayArgs, String> {
        let words = ["kvbm", "replay"].into_iter().chain(line.split_whitespace());
        let cli = Cli::try_parse_from(words).map_err(|error| error.to_string())?;
        let Some(CliCommand::Replay(args)) = cli.command else { panic!("not a replay") };
        args.check().map(|()| *args).map_err(|error| error.to_string())
    }

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
        assert!(Cli::try_parse_from(["kvbm"]).unwrap().command.is_none());
    }

    #[test]
    fn the_lines_of_the_readme_parse() {
        let args = replay("--trace t.jsonl --metadata-only --policy lru-leaf --capacity 10000,0,0 --json -")
            .unwrap();
        assert_eq!(args.capacity.0[0], Capacity::Blocks(Blocks(10_000)));
        assert!(args.metadata_only && args.capacity.0[2].is_none());
        assert_eq!(args.json, Some(Output::Stdout));
        let args = replay("--synthetic 50 --block-bytes 16KiB --capacity 1,2GiB,3 --offload drop --concurrency 8 --dir d --metrics 9400").unwrap();
        assert_eq!(args.block_bytes, Bytes::kib(16));
        assert_eq!(args.offload, OffloadMode::Drop);
        assert_eq!(args.metrics, Some("127.0.0.1:9400".parse().unwrap()));
        assert_eq!(ReplayArgs::defaults().device, DeviceChoice::Emulated);
        assert_eq!(replay("--device cuda").unwrap().device, DeviceChoice::Cuda(0));
        assert_eq!(replay("--device cuda:3").unwrap().device.to_string(), "cuda:3");
        assert_eq!(replay("--metrics localhost:1").unwrap().metrics, Some("127.0.0.1:1".parse().unwrap()));
        let defaults = ReplayArgs::defaults();
        assert_eq!(defaults.offload, OffloadMode::Wait);
        assert_eq!(defaults.concurrency, 1);
        assert!(replay("--capacity 1,0,3").is_ok(), "a disk without host memory");
        assert!(replay("--capacity 1 --volume memory:").is_ok(), "a volume without host memory");
        assert_eq!(replay("--capacity 5").unwrap().capacity.to_string(), "5 blocks, 0 blocks, 0 blocks");
    }

    #[test]
    fn wrong_usage_says_what_is_expected() {
        for (line, message) in [
            ("--trace a --synthetic 5", "cannot be used with"),
            ("--capacity 1,2,3,4,5", "four tiers"),
            ("--capacity 1,2,3,4", "--volume URI"),
            ("--metadata-only --volume memory:", "cannot be used with"),
            ("--capacity 0,2,3", "at least one block"),
            ("--capacity 1,x,3", "not a capacity"),
            ("--capacity -1,2,3", "'-1' is not a capacity"),
            ("--block-bytes -1", "'-1' is not a size"),
            ("--block-bytes 8G", "write it like 64KiB"),
            ("--block-bytes 0", "more than 0"),
            ("--policy lru", "possible values: lru-leaf"),
            ("--hint-accuracy 2", "from 0 to 1"),
            ("--hint-accuracy nan", "from 0 to 1"),
            ("--offload never", "wait, drop"),
            ("--device gpu", "emulated, cuda or cuda:N"),
            ("--device cuda:x", "emulated, cuda or cuda:N"),
            ("--device cuda --metadata-only", "cannot be used with"),
            ("--concurrency 0", "from 1 to 1024"),
            ("--metrics here", "127.0.0.1:9400"),
            ("--metadata-only --dir d", "cannot be used with"),
            ("--flush-every 5", "--dir"),
            ("--dir d --flush-every 0", "from 1 to"),
            ("--synthetic -1", "from 1 to 10000000"),
            ("--seed x", "invalid value 'x' for '--seed <N>': give a whole number"),
            ("--dir d --capacity 5,5,0", "--dir has no use without G3"),
            ("--events x", "it has no scheme"),
        ] {
            let error = replay(line).unwrap_err();
            assert!(error.contains(message), "{line}\n got: {error}\nwant: {message}");
        }
    }
}
