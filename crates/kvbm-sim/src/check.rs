//! The invariants of ARCHITECTURE.md, against what the world knows.

use crate::bench::Bench;
use kvbm::simulation;
use kvbm_events::{Delivery, EventKind, StreamId};
use kvbm_plan::{BlockId, BlockIdentity, Tier};
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::time::Duration;

/// The stream of the pool's events.
const POOL: u16 = 0;

impl<G: 'static> Bench<G> {
    /// After every step.
    pub(crate) fn check(&mut self) {
        self.world.check_disks();
        let tiers = Tier::SLOTTED.map(|tier| (tier, simulation::snapshot(&self.manager(), tier)));
        for (tier, blocks) in &tiers {
            let mut slots = BTreeSet::new();
            for (slot, identity) in blocks {
                if !slots.insert(slot) {
                    self.world.violate(format!("slot {slot} of {tier} holds two blocks"));
                }
                self.check_block(*tier, *slot, identity);
            }
        }
        for tier in self.manager().status().tiers.iter().filter(|tier| tier.tier != Tier::G4) {
            let sum = tier.free
                + tier.held
                + tier.arriving
                + tier.active
                + tier.inactive
                + tier.detached
                + tier.quarantined;
            if sum != tier.capacity {
                self.world.violate(format!("slots do not add up: {tier:?}"));
            }
        }
        self.keep_durable();
    }

    /// Invariants 1 and 2: what is found is there, whole, on every rank.
    fn check_block(&self, tier: Tier, slot: BlockId, identity: &BlockIdentity) {
        let lacks = match tier {
            Tier::G3 => self.world.disk_lacks(slot, identity),
            _ => self.world.lacks(tier, slot, *identity.hash.as_bytes()),
        };
        if let Some(rank) = lacks {
            let position = identity.position;
            self.world.violate(format!(
                "invariant 1: block {position} ({}) is found in slot {slot} of {tier} and is not there on rank {rank}",
                identity.hash
            ));
        }
    }

    /// Invariant 3: what is handed out, no worker touches any more.
    pub(crate) fn check_fresh(&self, slots: &[BlockId]) {
        for &slot in slots {
            if let Some((rank, plan)) = self.world.in_use(Tier::G1, slot) {
                self.world.violate(format!(
                    "invariant 3: slot {slot} of G1 was handed out, and plan {plan} still uses it on rank {rank}"
                ));
            }
        }
    }

    /// What left G3 since is not expected after a crash.
    pub(crate) fn keep_durable(&mut self) {
        if self.durable.is_empty() {
            return;
        }
        let there: BTreeMap<_, _> = simulation::snapshot(&self.manager(), Tier::G3).into_iter().collect();
        let (world, flushed) = (&self.world, self.flushed);
        // A slot may have had another block meanwhile, and this one again.
        let is_rewritten = |slot| world.with(|state| state.is_written_since(slot, flushed));
        self.durable.retain(|slot, identity| there.get(slot) == Some(identity) && !is_rewritten(*slot));
    }

    /// Durable is durable: what a flush confirmed and nobody removed is found by the next leader.
    pub(crate) fn check_recovered(&mut self, durable: &BTreeMap<BlockId, BlockIdentity>) {
        // Perhaps in another slot: disks keep records of what a rank loss took from the leader.
        let found: HashSet<_> = simulation::snapshot(&self.manager(), Tier::G3)
            .into_iter()
            .map(|(_, identity)| identity)
            .collect();
        let is_sound = |slot: &BlockId| self.world.with(|state| state.is_sound(*slot));
        let mut blocks: Vec<_> = durable.iter().filter(|(slot, _)| is_sound(slot)).collect();
        blocks.sort_by_key(|(_, identity)| identity.position);
        // A block goes with the block before it.
        let mut expected = HashSet::new();
        for (slot, identity) in blocks {
            if identity.parent.is_none_or(|parent| expected.contains(&parent)) {
                expected.insert(identity.hash);
                if !found.contains(identity) {
                    self.world.violate(format!(
                        "durable: block {} was flushed to slot {slot} of G3 and is not found by the next leader",
                        identity.position
                    ));
                }
            }
        }
    }

    /// Forgotten is forgotten, once every rank and volume has confirmed it.
    pub(crate) fn check_removed(&self, unconfirmed: usize) {
        let is_certain = unconfirmed == 0 && !self.world.with(|state| state.has_lied);
        for (&namespace, &step) in self.forgotten.iter().filter(|_| is_certain) {
            if let Some(what) = self.world.remains(namespace, step) {
                self.world.violate(format!("removed: a namespace was forgotten in step {step}, and {what}"));
            }
        }
    }

    /// Invariant 4: who follows the events knows what the manager holds.
    pub(crate) fn follow(&mut self) {
        let manager = self.manager();
        if !manager.events().pump() {
            return;
        }
        let follower = &mut self.follower;
        while let Ok(Some(delivery)) = follower.subscriber.next(Duration::ZERO) {
            match delivery {
                Delivery::Events { stream: StreamId { shard: POOL, .. }, events } => {
                    for event in events.iter().filter(|event| event.sequence >= follower.covered) {
                        match &event.kind {
                            EventKind::Store(block) => {
                                follower.blocks.insert((block.location.tier, block.identity.hash));
                            }
                            EventKind::Remove(block) => {
                                follower.blocks.remove(&(block.location.tier, block.identity.hash));
                            }
                            EventKind::Cleared => follower.blocks.clear(),
                        }
                    }
                }
                Delivery::Gap { stream: StreamId { shard: POOL, .. }, .. } => {
                    let snapshot = manager.events().snapshot();
                    let tier_and_hash =
                        |block: &kvbm_events::EventBlock| (block.location.tier, block.identity.hash);
                    follower.blocks = snapshot.blocks.iter().map(tier_and_hash).collect();
                    follower.covered = snapshot.next_sequence;
                }
                _ => {}
            }
        }
        let held = Tier::SLOTTED.into_iter().flat_map(|tier| {
            let blocks = simulation::snapshot(&manager, tier).into_iter();
            blocks.map(move |(_, identity)| (tier, identity.hash))
        });
        let held: BTreeSet<_> = held.collect();
        if let Some((tier, hash)) = held.symmetric_difference(&self.follower.blocks).next() {
            let side = if held.contains(&(*tier, *hash)) { "there" } else { "gone" };
            self.world
                .violate(format!("invariant 4: {hash} is {side} on {tier}, and its events say otherwise"));
        }
    }

    /// When nothing fails any more every rank has opened the volume, and what is there is sound.
    fn check_volume(&self) {
        if !self.setup.has_volume {
            return;
        }
        self.world.with(|state| state.store.audit());
        if let Some(rank) = self.world.with(|state| state.store.closed()) {
            self.world.violate(format!("rank {rank} has not opened the volume when all is over"));
        }
        self.world.check_disks();
    }

    /// At the end, when nothing fails any more: every slot has come back, and what was forgotten is
    /// gone.
    pub(crate) fn check_end(&mut self) {
        self.tame();
        self.check();
        self.check_volume();
        self.follow();
        let status = self.manager().status();
        let withheld: u32 = status.disk_directories.iter().map(|disk| disk.withheld_slots).sum();
        let held = status.tiers.iter().map(|tier| {
            u64::from(tier.arriving + tier.held + tier.active + tier.detached) + tier.transfer_pins
        });
        let (held, plans) = (held.sum::<u64>(), status.paths.iter().map(|path| path.plans).sum::<usize>());
        if held != u64::from(withheld) || plans > 0 {
            self.world.violate(format!("slots have not come back when all is over: {:?}", status.tiers));
        }
        let report = self.manager().shutdown(Duration::from_secs(60));
        if !report.drained || report.flush_error.is_some() || report.removals_unconfirmed > 0 {
            self.world.violate(format!("the last shutdown is not complete: {report:?}"));
        }
        self.check_removed(report.removals_unconfirmed);
        self.world.check_disks();
        self.end();
    }
}
