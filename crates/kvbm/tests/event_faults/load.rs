//! Random requests to a manager, and what it holds then.

use crate::support;
use kvbm::{BlockChain, Cached, G1, KvBlockManager, Owned, SequenceHash, Tier, TokenSequence};
use std::collections::{BTreeMap, VecDeque};

/// Numbers by a seed: splitmix64.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ (z >> 31)) % limit
    }
}

/// Families of prompts, branches of each, blocks of a prompt, and how many of them a family shares.
const FAMILIES: u32 = 6;
const BRANCHES: u32 = 4;
const LENGTH: u32 = 14;
const SHARED: u32 = 5;

/// Blocks of G1, G2 and G3, or of the volume in its place: fewer than the prompts have, so that
/// every tier evicts.
pub(crate) const TIERS: [u32; 3] = [40, 70, 120];

/// The first `blocks` blocks of a prompt.
fn prompt(manager: &KvBlockManager<Owned>, family: u32, branch: u32, blocks: u32) -> TokenSequence {
    let page = manager.config().model.page_size;
    let tokens = (0..blocks * page).map(|token| {
        let own = if token < SHARED * page { 0 } else { 1 + branch };
        (family << 20) + (own << 16) + token
    });
    manager.sequence(&tokens.collect::<Vec<_>>(), b"").unwrap()
}

/// Every prompt in full.
pub(crate) fn prompts(manager: &KvBlockManager<Owned>) -> Vec<TokenSequence> {
    let pairs = (0..FAMILIES).flat_map(|family| (0..BRANCHES).map(move |branch| (family, branch)));
    pairs.map(|(family, branch)| prompt(manager, family, branch, LENGTH)).collect()
}

/// An engine that serves random requests.
#[derive(Default)]
pub(crate) struct Engine {
    /// Requests that are still running.
    running: VecDeque<Cached<G1>>,
}

impl Engine {
    /// One thing that an engine or an operator does.
    pub(crate) fn work(&mut self, manager: &KvBlockManager<Owned>, random: &mut Random) {
        match random.below(24) {
            0 => drop(manager.clear(Tier::ALL[random.below(4) as usize])),
            1 if random.below(4) == 0 => drop(manager.forget(manager.namespace())),
            2 => drop(manager.step()),
            // Given up before it is computed.
            3 => drop(manager.allocate(random.below(9) as usize)),
            4 | 5 => drop(self.running.pop_front()),
            6 => self.offload(manager),
            _ => self.serve(manager, random),
        }
    }

    fn offload(&self, manager: &KvBlockManager<Owned>) {
        if let Some(cached) = self.running.back() {
            manager.offload(cached, Tier::G2).unwrap();
        }
    }

    /// Matches, onboards, computes the rest and registers it, as far as there is room.
    fn serve(&mut self, manager: &KvBlockManager<Owned>, random: &mut Random) {
        let (family, branch) = (random.below(u64::from(FAMILIES)), random.below(u64::from(BRANCHES)));
        let blocks = 1 + random.below(u64::from(LENGTH));
        let sequence = prompt(manager, family as u32, branch as u32, blocks as u32);
        let onboarding = manager.onboard(manager.match_prefix(&sequence));
        // Where G1 is full of running requests, this one has to wait.
        let Ok(cached) = onboarding.wait_until(support::soon()) else { return };
        if let Ok(fresh) = manager.allocate(sequence.num_blocks() - cached.len()) {
            if !fresh.is_empty() {
                let (done, _) = manager.commit(fresh, &sequence, cached.len()).unwrap();
                self.running.push_back(manager.register(done).unwrap());
            }
            self.running.push_back(cached);
        }
        while self.running.len() > 4 {
            self.running.pop_front();
        }
    }
}

/// On which tiers each block is that the manager holds: what its pools say, block by block.
pub(crate) fn held(
    manager: &KvBlockManager<Owned>,
    prompts: &[TokenSequence],
) -> BTreeMap<SequenceHash, Vec<Tier>> {
    let hashes = prompts.iter().flat_map(TokenSequence::hashes);
    let tiers = |hash: &SequenceHash| -> Vec<Tier> {
        let found = manager.look_up(BlockChain::of_hashes(std::slice::from_ref(hash)));
        Tier::ALL.into_iter().filter(|tier| found.first().is_some_and(|mask| mask.contains(*tier))).collect()
    };
    hashes.map(|hash| (*hash, tiers(hash))).filter(|(_, tiers)| !tiers.is_empty()).collect()
}
