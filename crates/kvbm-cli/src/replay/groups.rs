//! Requests to a model with several cache groups, and an oracle that says what each group could
//! serve.

use anyhow::{Context, Result};
use kvbm::config::CacheGroup;
use kvbm::{BlockChain, GroupBlocks, GroupId, KvBlockManager, Owned, SequenceHash, Tier};
use std::collections::HashSet;

use super::engine::Engine;
use super::requests::Requests;
use super::serve::{Served, Server};
use crate::human;
use crate::summary::{GroupFigures, Summary};

/// What a request needs to know of the model's groups.
pub(super) struct Groups {
    all: Vec<CacheGroup>,
    page_size: u32,
    checkpoint_every: usize,
}

impl Groups {
    /// Those of a model that has several.
    pub(super) fn of(manager: &KvBlockManager<Owned>) -> Option<Self> {
        let config = manager.config();
        let all = config.model.cache_groups();
        let checkpoint_every = config.policy.checkpoint_every as usize;
        (all.len() > 1).then_some(Self { all, page_size: config.model.page_size, checkpoint_every })
    }

    fn ids(&self) -> impl Iterator<Item = GroupId> + use<> {
        (0..self.all.len() as u16).map(GroupId)
    }

    /// Slots of G1 that a request of so many blocks holds at most: what it found in each group, and
    /// what it computes.
    pub(super) fn slots(&self, blocks: usize) -> usize {
        let slots = |group: &CacheGroup| match group.blocks_needed(self.page_size) {
            None => blocks,
            Some(needed) => {
                let ends = 2 + blocks.checked_div(self.checkpoint_every).unwrap_or(0);
                blocks.min(needed.saturating_mul(ends)) + needed.min(blocks)
            }
        };
        self.all.iter().map(slots).sum()
    }

    /// The most blocks of a request that hold at most `slots` slots.
    pub(super) fn blocks_within(&self, slots: usize) -> usize {
        let (mut fits, mut too_many) = (0, slots + 1);
        while fits + 1 < too_many {
            let middle = fits.midpoint(too_many);
            if self.slots(middle) <= slots { fits = middle } else { too_many = middle }
        }
        fits
    }

    /// Blocks of `chain` that every group could serve, by a look at each block of each group and a
    /// try of each length.
    fn oracle(&self, manager: &KvBlockManager<Owned>, chain: BlockChain<'_>) -> usize {
        let there: Vec<Vec<bool>> = self
            .ids()
            .map(|group| manager.places_of(group, chain).iter().map(|places| !places.is_empty()).collect())
            .collect();
        let serves = |length: usize| {
            self.all.iter().zip(&there).all(|(group, there)| {
                let needed = group.blocks_needed(self.page_size).unwrap_or(length);
                there[length.saturating_sub(needed)..length].iter().all(|there| *there)
            })
        };
        (0..=chain.len()).rev().find(|&length| serves(length)).unwrap_or(0)
    }

    /// Serves a request: what every group has is onboarded and compared, the rest computed.
    pub(super) fn run(
        &self,
        server: &Server<'_>,
        index: usize,
        hashes: &[SequenceHash],
        mut engine: Option<&mut Engine<'_>>,
        served: &mut Served,
    ) -> Result<()> {
        let (manager, chain) = (server.manager, server.requests.chain(index, hashes));
        let prefix = manager.match_groups(chain);
        // What volumes hold of an earlier run is known when they were asked.
        served.oracle = self.oracle(manager, chain) as u64;
        let tiers = Self::tiers(&prefix);
        let blocks = prefix.parts().iter().flat_map(kvbm::Prefix::blocks);
        let lower = blocks.filter(|block| block.tier != Tier::G1).count() as u64;
        let asked = prefix.len();
        let found = match manager.onboard_groups(prefix).wait() {
            Ok(found) => found,
            // What failed is in the manager's metrics and is computed again.
            Err(error) => {
                server.log(&error.to_string());
                error.arrived
            }
        };
        let good = match engine.as_deref_mut() {
            Some(engine) => {
                // Of a prefix that did not arrive whole, it is not known what came from where.
                served.verified_onboarded = if found.len == asked { lower } else { 0 };
                verify(server, engine, &found, hashes, served)?
            }
            None => found.len,
        };
        for tier in tiers.iter().take(good) {
            served.hits[tier.index()] += 1;
        }
        // As without groups: offloads of what was onboarded come first.
        server.wait_offloads()?;
        for group in self.ids() {
            compute(server, index, group, (hashes, found.len), engine.as_deref_mut())?;
        }
        Ok(())
    }

    /// For each block of a prefix the tier farthest from the compute that some group has it on.
    fn tiers(prefix: &kvbm::GroupPrefix) -> Vec<Tier> {
        let mut tiers = vec![Tier::G1; prefix.len()];
        for part in prefix.parts() {
            for (tier, block) in tiers[part.start()..].iter_mut().zip(part.blocks()) {
                *tier = (*tier).max(block.tier);
            }
        }
        tiers
    }
}

/// Computes and registers what a group keeps of a request beyond the blocks that were found.
fn compute(
    server: &Server<'_>,
    index: usize,
    group: GroupId,
    (hashes, found): (&[SequenceHash], usize),
    mut engine: Option<&mut Engine<'_>>,
) -> Result<()> {
    let namespace = server.tenants.namespace(server.requests.namespace(index));
    for range in server.manager.kept_blocks(group, hashes.len()) {
        let range = range.start.max(found)..range.end;
        if range.is_empty() {
            continue;
        }
        let fresh = server.allocate(namespace, range.len())?;
        if let Some(engine) = engine.as_deref_mut() {
            engine.compute(group, fresh.block_ids(), &hashes[range.clone()])?;
        }
        let chain = server.requests.chain(index, &hashes[..range.end]);
        let committed = server.manager.commit_group(group, fresh, chain, range.start);
        let (done, _) = committed.context("commit")?;
        drop(server.manager.register(done).context("register")?);
    }
    Ok(())
}

/// Compares every byte of every group with what was computed. Blocks of the prefix before the first
/// wrong one of any group.
fn verify(
    server: &Server<'_>,
    engine: &mut Engine<'_>,
    found: &GroupBlocks,
    hashes: &[SequenceHash],
    served: &mut Served,
) -> Result<usize> {
    let mut good = found.len;
    for (group, part) in (0_u16..).map(GroupId).zip(&found.parts) {
        let blocks = part.blocks.block_ids();
        let wrong = server.wrong(engine, group, blocks, &hashes[part.start..part.start + blocks.len()])?;
        served.verified += blocks.len() as u64;
        served.corrupt += wrong.len() as u64;
        if let Some(at) = blocks.iter().position(|block| wrong.contains(block)) {
            good = good.min(part.start + at);
        }
    }
    Ok(good)
}

/// What the oracle says, and what each group has.
pub(super) fn add_figures(
    summary: &mut Summary,
    manager: &KvBlockManager<Owned>,
    requests: &Requests,
    served: &[Served],
) {
    let (config, several) = (manager.config(), Groups::of(manager));
    let sum = |read: fn(&Served) -> u64| served.iter().map(read).sum::<u64>();
    if several.is_some() {
        summary.oracle_hit_ratio = Some(human::share(sum(|served| served.oracle), summary.blocks));
    }
    let held = manager.events().snapshot().blocks;
    let slot_bytes = config.slot_bytes(Tier::G1);
    let bytes = config.group_block_bytes();
    for (at, (group, block_bytes)) in config.model.cache_groups().iter().zip(bytes).enumerate() {
        let id = GroupId(at as u16);
        let ours = held.iter().filter(|block| block.identity.group == id);
        let ours: HashSet<SequenceHash> = ours.map(|block| block.identity.hash).collect();
        let mut needed: HashSet<SequenceHash> = HashSet::new();
        for (index, served) in served.iter().enumerate() {
            let hashes = requests.hashes(index);
            let hashes = &hashes[..hashes.len() - (served.left_out as usize).min(hashes.len())];
            for range in manager.kept_blocks(id, hashes.len()) {
                needed.extend(&hashes[range]);
            }
        }
        summary.groups.push(GroupFigures {
            group: group.to_string(),
            block_bytes,
            slot_bytes,
            held_blocks: ours.len() as u64,
            needed_blocks: needed.len() as u64,
        });
    }
}
