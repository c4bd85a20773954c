//! Random requests of random tenants against a naive model: how many blocks each tenant gives
//! follows from what is there, in use and promised; which ones, the policy may choose.

use super::{GROUP, registries, share, tenant};
use kvbm_plan::{BlockIdentity, NamespaceId, SequenceHash, Tier};
use kvbm_pool::{
    BlockBatch, BlockChain, Cached, Duplicates, G1, Registry, RegistryConfig, Reset, TenantId, TierMask,
};
use std::collections::HashMap;

const CAPACITY: usize = 48;
/// Namespaces, and whose they are: nobody's, or a tenant's by its place and one.
const NAMESPACES: [(u32, usize); 5] = [(1, 1), (11, 1), (2, 2), (3, 3), (9, 0)];

struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % end.max(1)
    }
}

/// What the model knows of a block.
struct Block {
    tenant: usize,
    parent: Option<SequenceHash>,
    users: usize,
    pinned: bool,
}

struct Model {
    name: String,
    registry: Registry,
    blocks: HashMap<SequenceHash, Block>,
    shares: [f64; 4],
    used: Vec<Cached<G1>>,
    held: Vec<(usize, BlockBatch<G1, Reset>)>,
}

fn tenant_of(namespace: NamespaceId) -> usize {
    NAMESPACES.iter().find(|(known, _)| NamespaceId(*known) == namespace).unwrap().1
}

impl Model {
    fn held_by(&self, tenant: usize) -> usize {
        self.held.iter().filter(|(of, _)| *of == tenant).map(|(_, blocks)| blocks.len()).sum()
    }

    fn blocks_of(&self, tenant: usize) -> usize {
        self.blocks.values().filter(|block| block.tenant == tenant).count()
    }

    fn free(&self) -> usize {
        let held: usize = self.held.iter().map(|(_, blocks)| blocks.len()).sum();
        CAPACITY - held - self.blocks.len()
    }

    fn limit(&self, tenant: usize) -> usize {
        let limit = |tenant: usize| (CAPACITY as f64 * self.shares[tenant] + 1e-9) as usize;
        if tenant > 0 { limit(tenant) } else { CAPACITY - (1..4).map(limit).sum::<usize>() }
    }

    /// Blocks of each tenant that nobody uses or has pinned, and that nothing in use continues.
    fn evictable(&self) -> [usize; 4] {
        let mut needed: HashMap<SequenceHash, bool> = HashMap::new();
        for (hash, block) in self.blocks.iter().filter(|(_, block)| block.users > 0 || block.pinned) {
            let (mut hash, mut parent) = (Some(*hash), block.parent);
            while let Some(at) = hash {
                needed.insert(at, true);
                hash = parent;
                parent = hash.and_then(|hash| self.blocks[&hash].parent);
            }
        }
        let mut count = [0; 4];
        for (_, block) in self.blocks.iter().filter(|(hash, _)| !needed.contains_key(*hash)) {
            count[block.tenant] += 1;
        }
        count
    }

    /// How many blocks each tenant gives for `n` of another's (or of nobody in particular), and
    /// whether that is enough: if not, nobody gives any.
    fn givers(&self, claim: Option<usize>, n: usize) -> ([usize; 4], bool) {
        let mut gives = [0; 4];
        let missing = n.saturating_sub(self.free());
        let evictable = self.evictable();
        for _ in 0..missing {
            let excess = |tenant: usize| {
                let asked = if claim == Some(tenant) { n } else { 0 };
                let has = self.blocks_of(tenant) - gives[tenant] + self.held_by(tenant) + asked;
                i64::try_from(has).unwrap() - i64::try_from(self.limit(tenant)).unwrap()
            };
            let is_over = claim.is_some_and(|tenant| excess(tenant) > 0);
            let giver = (0..4)
                .filter(|&tenant| gives[tenant] < evictable[tenant] && (excess(tenant) > 0 || !is_over))
                .max_by_key(|&tenant| (excess(tenant), claim == Some(tenant), tenant));
            let Some(giver) = giver else { return ([0; 4], false) };
            gives[giver] += 1;
        }
        (gives, true)
    }

    fn snapshot(&self) -> HashMap<SequenceHash, BlockIdentity> {
        let (all, _) = self.registry.snapshot(Tier::G1);
        all.into_iter().map(|(_, identity)| (identity.hash, identity)).collect()
    }

    /// Allocates, and compares who gave what.
    fn allocate(&mut self, claim: Option<NamespaceId>, n: usize) -> Option<BlockBatch<G1, Reset>> {
        let by = claim.map(tenant_of);
        let (expected, enough) = self.givers(by, n);
        let pool = self.registry.pool::<G1>();
        let got = match claim {
            Some(namespace) => pool.get_mutable_blocks_for(namespace, n),
            None => pool.get_mutable_blocks(n),
        };
        assert_eq!(got.is_ok(), enough, "{}: {n} for {claim:?}: {got:?}", self.name);
        let there = self.snapshot();
        let mut gave = [0; 4];
        let gone: Vec<SequenceHash> =
            self.blocks.keys().copied().filter(|hash| !there.contains_key(hash)).collect();
        for hash in gone {
            let block = self.blocks.remove(&hash).unwrap();
            assert!(block.users == 0 && !block.pinned, "{}: a block that had to stay", self.name);
            gave[block.tenant] += 1;
        }
        assert_eq!(gave, expected, "{}: {n} for {claim:?}", self.name);
        assert!(
            there.values().all(|identity| identity.parent.is_none_or(|parent| there.contains_key(&parent)))
        );
        got.ok()
    }

    /// Branches part behind their second block.
    fn chain(random: &mut Random, namespace: u32) -> Vec<SequenceHash> {
        let (branch, length) = (random.below(7) as u32, 1 + random.below(12));
        let mut hashes = super::chain(namespace, 100, 2);
        hashes.extend(super::chain(namespace, branch, length));
        hashes
    }

    /// Pins what is there of a chain, where that is not too much, until the next iteration.
    fn pin(&mut self, random: &mut Random) {
        let (namespace, _) = NAMESPACES[random.below(NAMESPACES.len())];
        let hashes = Self::chain(random, namespace);
        let until = self.registry.iteration() + 1;
        if self.registry.pin(GROUP, &hashes, TierMask::ALL, until).is_ok() {
            for hash in hashes {
                self.blocks.entry(hash).and_modify(|block| block.pinned = true);
            }
        }
    }

    fn iterate(&mut self) {
        self.registry.step();
        self.blocks.values_mut().for_each(|block| block.pinned = false);
    }

    fn request(&mut self, random: &mut Random) {
        let (namespace, tenant) = NAMESPACES[random.below(NAMESPACES.len())];
        let hashes = Self::chain(random, namespace);
        let cached = self.registry.pool::<G1>().match_sequence_hashes(GROUP, &hashes);
        self.count_users(&cached, 1);
        self.used.push(cached);
        let found = self.used[self.used.len() - 1].len();
        if let Some(fresh) = self.allocate(Some(NamespaceId(namespace)), hashes.len() - found) {
            let partial = fresh.init_sequence(NamespaceId(namespace), GROUP, found as u32).unwrap();
            if let Ok((done, _)) = partial.commit(BlockChain::of_hashes(&hashes)) {
                for identity in done.identities() {
                    self.blocks.insert(
                        identity.hash,
                        Block { tenant, parent: identity.parent, users: 1, pinned: false },
                    );
                }
                self.used.push(self.registry.pool::<G1>().register(done, Duplicates::Reuse).unwrap());
            }
        }
        self.registry.touch(GROUP, &hashes);
        if random.below(6) == 0 {
            self.registry.branch_ends(GROUP, &hashes);
        }
    }

    fn count_users(&mut self, cached: &Cached<G1>, change: isize) {
        for identity in cached.identities() {
            let users = &mut self.blocks.get_mut(&identity.hash).unwrap().users;
            *users = users.checked_add_signed(change).unwrap();
        }
    }

    fn let_go(&mut self, random: &mut Random) {
        while self.used.len() > random.below(8) {
            let cached = self.used.swap_remove(random.below(self.used.len()));
            self.count_users(&cached, -1);
        }
    }

    fn hold(&mut self, random: &mut Random) {
        let (namespace, tenant) = NAMESPACES[random.below(NAMESPACES.len())];
        if let Some(mut blocks) = self.allocate(Some(NamespaceId(namespace)), random.below(12)) {
            // A part of it comes back at once.
            drop(blocks.split_off(random.below(12)));
            self.held.push((tenant, blocks));
        }
        while self.held.len() > random.below(4) {
            drop(self.held.swap_remove(random.below(self.held.len())));
        }
    }

    fn change_share(&mut self, random: &mut Random) {
        let (tenant, part) = (1 + random.below(3), random.below(6) as f64 / 10.0);
        let sum: f64 = (1..4).map(|other| if other == tenant { part } else { self.shares[other] }).sum();
        let changed = self.registry.set_share(TenantId(tenant as u8 - 1), share(part));
        assert_eq!(changed.is_ok(), sum <= 1.000_000_1, "{sum}");
        if changed.is_ok() {
            self.shares[tenant] = part;
        }
    }

    fn check(&self) {
        for (tenant, status) in self.registry.tenants(Tier::G1).iter().enumerate() {
            let counts = (self.blocks_of(tenant), self.held_by(tenant), self.limit(tenant));
            let counted = (status.blocks as usize, status.held as usize, status.limit as usize);
            assert_eq!(counted, counts, "{}: tenant {tenant}", self.name);
        }
    }
}

#[test]
fn who_gives_follows_from_the_shares_alone() {
    let tenants = vec![tenant(0.5, &[1, 11]), tenant(0.25, &[2]), tenant(0.0, &[3])];
    let config = RegistryConfig { tenants, ..RegistryConfig::new([CAPACITY as u32, 0, 0]) };
    for seed in 0..4 {
        for (name, registry) in registries(&config) {
            let mut random = Random(seed);
            let mut model = Model {
                name: format!("{name}, seed {seed}"),
                registry,
                blocks: HashMap::new(),
                shares: [0.25, 0.5, 0.25, 0.0],
                used: Vec::new(),
                held: Vec::new(),
            };
            for _ in 0..1500 {
                match random.below(20) {
                    0 => model.hold(&mut random),
                    1 => drop(model.allocate(None, 1)),
                    2 => model.change_share(&mut random),
                    3 => model.pin(&mut random),
                    4 => model.iterate(),
                    _ => model.request(&mut random),
                }
                model.let_go(&mut random);
                model.check();
            }
        }
    }
}
