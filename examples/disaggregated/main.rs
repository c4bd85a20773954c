//! Prefill with four ranks and decode with two, in two processes that exchange KV blocks over NIXL.
//! See README.md.

mod model;
mod push;

use std::any::Any;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use kvbm_nixl::{FileDirectory, NixlOptions, NodeOptions, RemoteAgent, RemoteError, RemoteNode};
use kvbm_plan::{Epoch, NodeId, deadline_after};
use model::{BLOCKS, GROUP, Shape};

const PREFILL: NodeId = NodeId(1);
const DECODE: NodeId = NodeId(2);
/// Longest wait for the other process.
const PATIENCE: Duration = Duration::from_secs(60);

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        [] => both(&[]),
        ["push"] => both(&["push"]),
        ["prefill", folder] => prefill(Path::new(folder)),
        ["decode", folder] => decode(Path::new(folder)),
        ["push", "prefill", folder] => push::prefill(Path::new(folder)),
        ["push", "decode", folder] => push::decode(Path::new(folder)),
        _ => bail!("usage: disaggregated [push] [prefill DIR | decode DIR]"),
    }
}

/// Starts both roles in processes of their own; `form` stands before the name of the role.
fn both(form: &[&str]) -> Result<()> {
    let folder = std::env::temp_dir().join(format!("kvbm-disaggregated-{}", std::process::id()));
    let program = std::env::current_exe().context("cannot find this program")?;
    let role = |name: &str| {
        let mut command = Command::new(&program);
        command.args(form).arg(name).arg(&folder).stdin(Stdio::piped());
        command
    };
    let mut prefill = role("prefill").spawn().context("cannot start prefill")?;
    let decoded = role("decode").status();
    // Prefill ends with its standard input.
    drop(prefill.stdin.take());
    let served = prefill.wait().context("cannot wait for prefill")?;
    let removed = std::fs::remove_dir_all(&folder);
    ensure!(decoded.context("cannot start decode")?.success(), "decode failed");
    ensure!(served.success(), "prefill ended with {served}");
    removed.with_context(|| format!("cannot remove {}", folder.display()))
}

fn prefill(folder: &Path) -> Result<()> {
    let directory = FileDirectory::open(folder)?;
    let node = start("prefill", PREFILL)?;
    let shape = Shape { ranks: 4, is_layer_separate: false };
    let ranks = shape.allocate()?;
    let (namespace, hashes) = model::prompt()?;
    for (block, hash) in (0..).zip(&hashes) {
        ranks.iter().try_for_each(|rank| model::compute(rank, block, hash))?;
    }
    let export = node.export_local_blockset(namespace, GROUP, ranks)?;
    let blocks: Vec<_> = hashes.iter().copied().zip(0..).collect();
    let nothing: Arc<dyn Any + Send + Sync> = Arc::new(());
    // SAFETY: nothing writes the blocks any more.
    let _publication = unsafe { export.publish(&blocks, &nothing) }?;
    directory.publish(&node.announcement()?, None)?;
    println!("prefill: {BLOCKS} blocks on 4 ranks are published");
    // Decode may come later than this; its announcement lets it ask.
    connect_peer(&directory, &node, DECODE)?;
    let mut rest = Vec::new();
    std::io::stdin().take(1).read_to_end(&mut rest).context("cannot wait on standard input")?;
    println!("prefill: {:?}", node.counts());
    Ok(directory.withdraw(PREFILL)?)
}

fn decode(folder: &Path) -> Result<()> {
    let directory = FileDirectory::open(folder)?;
    let node = start("decode", DECODE)?;
    let shape = Shape { ranks: 2, is_layer_separate: true };
    let ranks = shape.allocate()?;
    let (namespace, hashes) = model::prompt()?;
    // Registers the memory that the blocks go to.
    let _export = node.export_local_blockset(namespace, GROUP, ranks.clone())?;
    directory.publish(&node.announcement()?, None)?;
    connect_peer(&directory, &node, PREFILL)?;

    let plans = node.plan_reads(PREFILL, namespace, GROUP, &ranks)?;
    let deadline = deadline_after(Instant::now(), PATIENCE);
    let slots: Vec<u32> = (0..BLOCKS).rev().collect();
    let claim: Arc<dyn Any + Send + Sync> = Arc::new(());
    let began = Instant::now();
    let blocks = loop {
        // Prefill answers once it has imported our announcement.
        match node.get_remote_blocks_immutable(&plans, &hashes, deadline_after(Instant::now(), RETRY)) {
            Err(RemoteError::NoAnswer { .. }) if Instant::now() < deadline => {}
            answer => break answer?,
        }
    };
    // SAFETY: nobody else uses the slots.
    let arrived = unsafe { blocks.read_into(&slots, &claim, deadline) }?;
    if let Some(failure) = arrived.failure {
        return Err(failure.into());
    }
    ensure!(arrived.blocks == hashes.len(), "{} of {} blocks arrived", arrived.blocks, hashes.len());
    println!("decode: {} blocks on 2 ranks arrived in {:?}", arrived.blocks, began.elapsed());
    let mut bytes = 0;
    for (slot, hash) in slots.iter().zip(&hashes) {
        for rank in &ranks {
            bytes += model::compare(rank, *slot, hash)?;
        }
    }
    println!("decode: all {bytes} bytes are those that prefill computed");
    Ok(directory.withdraw(DECODE)?)
}

/// How long an answer is waited for before the question is asked again.
const RETRY: Duration = Duration::from_secs(1);

/// A node over NIXL, named after its role and process.
fn start(role: &str, node: NodeId) -> Result<RemoteNode> {
    let agent = agent(&format!("{role}-{}", std::process::id()))?;
    Ok(RemoteNode::start(agent, NodeOptions::new(node, Epoch(1)))?)
}

#[cfg(feature = "nixl")]
fn agent(name: &str) -> Result<Arc<dyn RemoteAgent>> {
    Ok(Arc::new(kvbm_nixl::NixlAgent::new(&NixlOptions::new(name))?))
}

#[cfg(not(feature = "nixl"))]
fn agent(name: &str) -> Result<Arc<dyn RemoteAgent>> {
    bail!("{}", NixlOptions::new(name).probe())
}

/// Imports what is announced until `wanted` is among it.
fn connect_peer(directory: &FileDirectory, node: &RemoteNode, wanted: NodeId) -> Result<()> {
    let until = deadline_after(Instant::now(), PATIENCE);
    loop {
        for (file, bytes) in directory.announcements()? {
            match node.import_remote_blockset(&bytes) {
                Ok((found, _)) if found == wanted => return Ok(()),
                Ok(_) | Err(RemoteError::Ourselves { .. }) => {}
                Err(error) => return Err(error).with_context(|| file),
            }
        }
        let folder: PathBuf = directory.folder().to_owned();
        ensure!(Instant::now() < until, "node {wanted} has not announced itself in {}", folder.display());
        std::thread::sleep(Duration::from_millis(10));
    }
}
