//! The push form: prefill writes the blocks into memory that decode sets aside.

use std::any::Any;
use std::collections::HashMap;
use std::io::Read;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use kvbm_nixl::{BlockSink, FileDirectory, Landing, OfferedChain, RefusedRead, RemoteError};
use kvbm_plan::{SequenceHash, deadline_after};

use crate::model::{self, BLOCKS, GROUP, Shape};
use crate::{DECODE, PATIENCE, PREFILL, RETRY, connect_peer, start};

/// Computes the blocks and writes them into decode's memory.
pub(crate) fn prefill(folder: &Path) -> Result<()> {
    let directory = FileDirectory::open(folder)?;
    let node = start("prefill", PREFILL)?;
    let ranks = Shape { ranks: 4, is_layer_separate: false }.allocate()?;
    let (namespace, hashes) = model::prompt()?;
    for (block, hash) in (0..).zip(&hashes) {
        ranks.iter().try_for_each(|rank| model::compute(rank, block, hash))?;
    }
    // Registers the memory that the blocks come from.
    let _export = node.export_local_blockset(namespace, GROUP, ranks.clone())?;
    directory.publish(&node.announcement()?, None)?;
    connect_peer(&directory, &node, DECODE)?;

    let plans = node.plan_writes(DECODE, namespace, GROUP, &ranks)?;
    let deadline = deadline_after(Instant::now(), PATIENCE);
    let began = Instant::now();
    let slots = loop {
        // Decode answers once it has imported our announcement.
        let until = deadline_after(Instant::now(), RETRY);
        match node.get_remote_blocks_mutable(&plans, (namespace, &hashes, 0), hashes.len(), until) {
            Err(RemoteError::NoAnswer { .. }) if Instant::now() < deadline => {}
            answer => break answer?,
        }
    };
    let sources: Vec<u32> = slots.places().iter().map(|at| *at as u32).collect();
    let nothing: Arc<dyn Any + Send + Sync> = Arc::new(());
    // SAFETY: nothing writes the blocks any more.
    let written = unsafe { slots.write_from(&sources, &nothing, deadline) }?;
    if let Some(failure) = written.failure {
        return Err(failure.into());
    }
    println!("prefill: {} blocks of 4 ranks are written and taken in {:?}", written.blocks, began.elapsed());
    let mut rest = Vec::new();
    std::io::stdin().take(1).read_to_end(&mut rest).context("cannot wait on standard input")?;
    Ok(directory.withdraw(PREFILL)?)
}

/// Waits for the blocks and compares each byte.
pub(crate) fn decode(folder: &Path) -> Result<()> {
    let directory = FileDirectory::open(folder)?;
    let node = start("decode", DECODE)?;
    let ranks = Shape { ranks: 2, is_layer_separate: true }.allocate()?;
    let (namespace, hashes) = model::prompt()?;
    let export = node.export_local_blockset(namespace, GROUP, ranks.clone())?;
    let inbox = Arc::new(Inbox::default());
    // SAFETY: the slots are read when their blocks have arrived, and not used otherwise.
    unsafe { export.accept_writes(Arc::new(Sink(Arc::clone(&inbox)))) };
    directory.publish(&node.announcement()?, None)?;
    connect_peer(&directory, &node, PREFILL)?;

    let arrived = inbox.wait(hashes.len(), PATIENCE);
    ensure!(arrived.len() == hashes.len(), "{} of {} blocks arrived", arrived.len(), hashes.len());
    let mut bytes = 0;
    for hash in &hashes {
        let slot = arrived.get(hash).with_context(|| format!("block {hash} did not arrive"))?;
        for rank in &ranks {
            bytes += model::compare(rank, *slot, hash)?;
        }
    }
    println!("decode: {} blocks on 2 ranks came by themselves", arrived.len());
    println!("decode: all {bytes} bytes are those that prefill computed");
    Ok(directory.withdraw(DECODE)?)
}

/// Blocks that have arrived, and their slots.
#[derive(Default)]
struct Inbox {
    arrived: Mutex<HashMap<SequenceHash, u32>>,
    changed: Condvar,
}

impl Inbox {
    /// Waits until so many blocks are there.
    fn wait(&self, blocks: usize, patience: Duration) -> HashMap<SequenceHash, u32> {
        let arrived = self.arrived.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.changed.wait_timeout_while(arrived, patience, |arrived| arrived.len() < blocks);
        waited.unwrap_or_else(PoisonError::into_inner).0.clone()
    }
}

struct Sink(Arc<Inbox>);

/// Slots that are set aside. The example has one prompt: each block has a slot of its own, which is
/// used for nothing else.
struct SetAside {
    inbox: Arc<Inbox>,
    hashes: Vec<SequenceHash>,
    places: Vec<(usize, u32)>,
    is_closed: bool,
}

impl BlockSink for Sink {
    fn set_aside(&self, offer: OfferedChain<'_>) -> Result<Box<dyn Landing>, RefusedRead> {
        let blocks = offer.hashes.len().min(offer.most);
        if blocks > BLOCKS as usize {
            return Err(RefusedRead::NoRoom);
        }
        // The last slots first: slots of both sides have nothing to do with each other.
        let places = (0..blocks).map(|at| (at, BLOCKS - 1 - at as u32)).collect();
        let (inbox, hashes) = (Arc::clone(&self.0), offer.hashes[..blocks].to_vec());
        Ok(Box::new(SetAside { inbox, hashes, places, is_closed: false }))
    }
}

impl Landing for SetAside {
    fn places(&self) -> &[(usize, u32)] {
        &self.places
    }

    fn arrived(&mut self, places: Range<usize>) -> usize {
        if self.is_closed {
            return 0;
        }
        let mut arrived = self.inbox.arrived.lock().unwrap_or_else(PoisonError::into_inner);
        arrived.extend(places.clone().map(|at| (self.hashes[at], self.places[at].1)));
        self.inbox.changed.notify_all();
        places.len()
    }

    fn close(&mut self) {
        self.is_closed = true;
    }
}
