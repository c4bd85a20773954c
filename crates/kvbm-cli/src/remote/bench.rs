//! `kvbm remote bench`: verified reads from a peer, beside the same ranges moved by the agent
//! alone.

use std::any::Any;
use std::fmt::Write;
use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use kvbm::plan::NodeId;
use kvbm_nixl::{
    FileDirectory, InProcessNetwork, PeerPlans, RemoteAgent, RemoteError, RemoteNode, RemoteRequest,
    TransferDirection,
};
use serde::Serialize;
use serde_json::json;

use super::fixture::{self, BLOCK_BYTES, CASES, Case, GROUP, Landing, OWNER, Offer, READER, hash};
use super::{AgentName, BenchArgs, OwnerArgs, deliver};
use crate::args::Output;

/// Longest wait for the other side, and for one read.
const PATIENCE: Duration = Duration::from_secs(120);
/// How long an answer is waited for before the question is asked again.
const RETRY: Duration = Duration::from_secs(1);
const TICK: Duration = Duration::from_millis(10);

/// One row: verified reads, bare ones, and the first as a share of the second.
#[derive(Debug, Serialize)]
struct Row {
    name: &'static str,
    gb_per_s: f64,
    bare_gb_per_s: f64,
    ratio: f64,
}

pub(super) fn run(args: &BenchArgs) -> Result<()> {
    args.json.as_ref().and_then(Output::file).map_or(Ok(()), crate::writable::expect)?;
    let default = if cfg!(feature = "nixl") { AgentName::Nixl } else { AgentName::InProcess };
    let agent_name = args.agent.unwrap_or(default);
    let network = InProcessNetwork::new();
    let agent = fixture::agent(agent_name, "reader", &network)?;
    let node = fixture::node(&agent, READER)?;
    let owner = match agent_name {
        AgentName::Nixl => Owner::process(&node, args.blocks)?,
        AgentName::InProcess => Owner::here(&node, &network, args.blocks)?,
    };
    let rows =
        CASES.iter().map(|case| measure(case, args, &agent, &node, &owner)).collect::<Result<Vec<_>>>()?;
    drop(owner);
    let mut text = format!("{} blocks of 1 MiB, {:?}, {} rounds\n", args.blocks, agent_name, args.rounds);
    for row in &rows {
        let _ = writeln!(
            text,
            "{:<16} {:>7.2} GB/s verified, {:>7.2} GB/s bare, ratio {:.2}",
            row.name, row.gb_per_s, row.bare_gb_per_s, row.ratio
        );
    }
    deliver(args.json.as_ref(), &text, &json!({ "rows": rows }))
}

/// The owner's side, in a process of its own until its standard input ends.
pub(super) fn own(args: &OwnerArgs) -> Result<()> {
    let directory = FileDirectory::open(&args.directory)?;
    let agent = fixture::agent(AgentName::Nixl, "owner", &InProcessNetwork::new())?;
    let node = fixture::node(&agent, OWNER)?;
    let _offer = Offer::new(&node, args.blocks)?;
    directory.publish(&node.announcement()?, None)?;
    let until = Instant::now() + PATIENCE;
    import(&node, &directory, READER, until)?;
    // The reader announces itself again when it has more memory.
    let followed = node.clone();
    std::thread::spawn(move || {
        loop {
            for (_, bytes) in directory.announcements().unwrap_or_default() {
                // An announcement that is known already changes nothing.
                let _known = followed.import_remote_blockset(&bytes);
            }
            std::thread::sleep(TICK);
        }
    });
    let mut rest = Vec::new();
    std::io::stdin().take(1).read_to_end(&mut rest).context("cannot wait on standard input")?;
    Ok(())
}

/// The owner of the blocks. It ends when this is dropped.
enum Owner {
    Here { node: RemoteNode, _offer: Offer, _agent: Arc<dyn RemoteAgent> },
    Process { child: Child, directory: FileDirectory, _folder: Folder },
}

/// A folder that is removed when this is dropped.
struct Folder(std::path::PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.0) {
            crate::note::note(&format!("cannot remove {}: {error}", self.0.display()));
        }
    }
}

impl Owner {
    fn here(reader: &RemoteNode, network: &InProcessNetwork, blocks: u32) -> Result<Self> {
        let agent = fixture::agent(AgentName::InProcess, "owner", network)?;
        let node = fixture::node(&agent, OWNER)?;
        let offer = Offer::new(&node, blocks)?;
        reader.import_remote_blockset(&node.announcement()?.encode(None)?)?;
        Ok(Self::Here { node, _offer: offer, _agent: agent })
    }

    fn process(reader: &RemoteNode, blocks: u32) -> Result<Self> {
        let folder = Folder(std::env::temp_dir().join(format!("kvbm-remote-bench-{}", std::process::id())));
        let directory = FileDirectory::open(&folder.0)?;
        directory.publish(&reader.announcement()?, None)?;
        let program = std::env::current_exe().context("cannot find this program")?;
        let mut command = Command::new(program);
        command.args(["remote", "bench-owner"]).arg(&folder.0).args(["--blocks", &blocks.to_string()]);
        let child = command.stdin(Stdio::piped()).spawn().context("cannot start the owner's process")?;
        let mut owner = Self::Process { child, directory, _folder: folder };
        owner.wait(reader)?;
        Ok(owner)
    }

    /// Waits until the owner is announced, or has ended.
    fn wait(&mut self, reader: &RemoteNode) -> Result<()> {
        let Self::Process { child, directory, .. } = self else { return Ok(()) };
        let until = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = child.try_wait().context("cannot look at the owner's process")? {
                anyhow::bail!("the owner's process ended with {status}");
            }
            if import(reader, directory, OWNER, Instant::now()).is_ok() {
                return Ok(());
            }
            ensure!(Instant::now() < until, "the owner has published nothing in {} s", PATIENCE.as_secs());
            std::thread::sleep(TICK);
        }
    }

    /// Sends the owner a description of the reader's memory.
    fn send_announcement(&self, reader: &RemoteNode) -> Result<()> {
        let announcement = reader.announcement()?;
        match self {
            Self::Here { node, .. } => {
                node.import_remote_blockset(&announcement.encode(None)?)?;
            }
            Self::Process { directory, .. } => directory.publish(&announcement, None)?,
        }
        Ok(())
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        if let Self::Process { child, .. } = self {
            // It ends with its standard input.
            drop(child.stdin.take());
            let _ended = child.wait();
        }
    }
}

/// Imports what is announced until `wanted` is among it.
fn import(node: &RemoteNode, directory: &FileDirectory, wanted: NodeId, until: Instant) -> Result<()> {
    loop {
        for (file, bytes) in directory.announcements()? {
            match node.import_remote_blockset(&bytes) {
                Ok((found, _)) if found == wanted => return Ok(()),
                Ok(_) | Err(RemoteError::Ourselves { .. }) => {}
                Err(error) => return Err(error).context(file),
            }
        }
        ensure!(Instant::now() < until, "node {wanted} has not announced itself");
        std::thread::sleep(TICK);
    }
}

fn measure(
    case: &Case,
    args: &BenchArgs,
    agent: &Arc<dyn RemoteAgent>,
    node: &RemoteNode,
    owner: &Owner,
) -> Result<Row> {
    let landing = Landing::new(node, case, args.blocks)?;
    owner.send_announcement(node)?;
    let plans = node.plan_reads(OWNER, case.namespace(), GROUP, &landing.ranks)?;
    let (mut verified, mut bare) = (Vec::new(), Vec::new());
    // The first round of each connects and touches memory.
    for round in 0..=args.rounds {
        let times = [read(node, &plans, args.blocks)?, move_bare(agent, &plans, args.blocks)?];
        if round > 0 {
            verified.push(times[0]);
            bare.push(times[1]);
        }
    }
    let bytes = (BLOCK_BYTES * u64::from(args.blocks)) as f64;
    let [gb_per_s, bare_gb_per_s] = [verified, bare].map(|times| bytes / median(times) / 1e9);
    Ok(Row { name: case.name, gb_per_s, bare_gb_per_s, ratio: gb_per_s / bare_gb_per_s })
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Seconds of a lease and a verified read of all blocks.
fn read(node: &RemoteNode, plans: &Arc<PeerPlans>, blocks: u32) -> Result<f64> {
    let hashes: Vec<_> = (0..blocks).map(hash).collect();
    let slots: Vec<u32> = (0..blocks).collect();
    let claim: Arc<dyn Any + Send + Sync> = Arc::new(());
    let until = Instant::now() + PATIENCE;
    loop {
        let began = Instant::now();
        let remote = match node.get_remote_blocks_immutable(plans, &hashes, began + RETRY) {
            // It answers once it has imported our announcement.
            Err(RemoteError::NoAnswer { .. }) if began < until => continue,
            answer => answer?,
        };
        // SAFETY: nobody else uses the slots; the last move into them is over.
        let arrived = unsafe { remote.read_into(&slots, &claim, until) }?;
        let elapsed = began.elapsed().as_secs_f64();
        if let Some(failure) = arrived.failure {
            return Err(failure.into());
        }
        ensure!(arrived.blocks == hashes.len(), "{} of {} blocks arrived", arrived.blocks, hashes.len());
        return Ok(elapsed);
    }
}

/// Seconds in which the agent alone moves the same ranges.
fn move_bare(agent: &Arc<dyn RemoteAgent>, plans: &PeerPlans, blocks: u32) -> Result<f64> {
    let pairs: Vec<(u32, u32)> = (0..blocks).map(|block| (block, block)).collect();
    let mut requests = Vec::new();
    for plan in plans.plans() {
        for lists in plan.lists(&pairs)? {
            requests.push(RemoteRequest {
                direction: TransferDirection::Read,
                peer: lists.agent,
                local: lists.local,
                remote: lists.remote,
                notification: None,
                keep: Box::new(plan.local().clone()),
            });
        }
    }
    let began = Instant::now();
    let mut transfers = Vec::new();
    for request in requests {
        // SAFETY: nobody else uses either side: the owner writes nothing, the last read is over.
        transfers.push(unsafe { agent.start(request) }?);
    }
    for transfer in &mut transfers {
        transfer.wait(began + PATIENCE)?;
    }
    Ok(began.elapsed().as_secs_f64())
}
