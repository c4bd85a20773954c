//! Copies to a volume, reads of it, removals from it and damage on it, from several threads at
//! once: what is known to be on the volume is there, whatever came before what.
//! `KVBM_FUZZ_ROUNDS=200 cargo test -p kvbm --test integration volume_races` for longer.
#![cfg(feature = "worker")]

use crate::random::Random;
use crate::support::store::{Store, hashes, onboard, registry};
use crate::support::{compute, model, namespace, soon, tokens, unlimited};
use kvbm::config::Blocks;
use kvbm::plan::SequenceHash;
use kvbm::{KvBlockManager, Namespace, Owned, Tier, TokenSequence};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

type Manager = KvBlockManager<Owned>;

/// Chains of three blocks, more than the volume has room for.
const CHAINS: u32 = 6;
const ROOM: u32 = 10;
const THREADS: u64 = 3;
const STEPS: usize = 30;

fn manager(store: &Arc<Store>) -> Manager {
    KvBlockManager::<Owned>::builder()
        .model(model())
        .namespace(namespace())
        .device(Blocks(32))
        .host(Blocks(64))
        .volume("test:")
        .volumes(registry(&[("test", store)]))
        .configure(|config| {
            unlimited(config);
            config.volume[0].capacity = Blocks(ROOM).into();
            config.volumes.recheck = Duration::from_millis(1);
        })
        .build()
        .expect("a manager")
}

/// Computes and registers a chain, where there is room just now.
fn offer(manager: &Manager, sequence: &TokenSequence) {
    let Ok(fresh) = manager.allocate(sequence.num_blocks()) else { return };
    for (block, hash) in fresh.block_ids().iter().zip(hashes(sequence)) {
        compute(manager, *block, hash);
    }
    let (done, _) = manager.commit(fresh, sequence, 0).expect("commit");
    drop(manager.register(done).expect("register"));
}

fn forget_above(manager: &Manager) {
    for tier in [Tier::G1, Tier::G2] {
        manager.clear(tier).expect("a tier of ours");
    }
}

fn meddle(manager: &Manager, store: &Store, chains: &[TokenSequence], mut random: Random) {
    for _ in 0..STEPS {
        let chain = &chains[random.below(chains.len())];
        match random.below(60) {
            0..24 => offer(manager, chain),
            // Compared byte for byte.
            24..45 => drop(onboard(manager, chain)),
            45..51 => forget_above(manager),
            51..59 => {
                let all = store.keys();
                let at = random.below(1 + all.len());
                all.get(at).map(|key| store.memory.tamper(key, |object| object[150] ^= 1));
            }
            _ => drop(manager.clear(Tier::G4).expect("a volume")),
        }
    }
}

fn on_the_volume(store: &Store) -> BTreeSet<SequenceHash> {
    store.keys().iter().map(|key| key.hash).collect()
}

/// Blocks that are said to be on the volume.
fn known(manager: &Manager, chains: &[TokenSequence]) -> BTreeSet<SequenceHash> {
    let of = |chain: &TokenSequence| {
        let places = manager.look_up(chain);
        let said = places.into_iter().zip(hashes(chain)).filter(|(places, _)| places.contains(Tier::G4));
        said.map(|(_, hash)| hash).collect::<Vec<_>>()
    };
    chains.iter().flat_map(of).collect()
}

/// Waits until every removal that was asked for is over: they go one after the other, and a
/// namespace is looked for again once its own removal, the last, is.
fn settle(manager: &Manager, store: &Store) {
    assert!(manager.wait_offloads(soon()));
    let nobody = Namespace::new("nobody").page_size(16).dtype(model().dtype.name());
    let sequence = manager.sequence_in(&nobody, &(0..48).collect::<Vec<_>>(), b"").expect("a sequence");
    manager.forget(&nobody);
    let (until, before) = (soon(), store.probes.load(Ordering::Relaxed));
    while store.probes.load(Ordering::Relaxed) == before {
        assert!(Instant::now() < until, "it comes to rest");
        assert!(manager.match_prefix(&sequence).is_empty());
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Mutations that make it fail: `Index::begin` does not ask what is on its way out; `Index::learn`
/// does not ask what went since the look began.
#[test]
fn what_is_known_to_be_on_a_volume_is_there_whatever_came_before_what() {
    let rounds = std::env::var("KVBM_FUZZ_ROUNDS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(12);
    let (mut found, mut damaged) = (0, 0);
    for seed in 0..rounds {
        let store = Store::new();
        let manager = manager(&store);
        let chains: Vec<_> = (1..=CHAINS).map(|start| tokens(&manager, start, 3)).collect();
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let (manager, store, chains) = (&manager, &store, &chains);
                scope.spawn(move || meddle(manager, store, chains, Random(1000 * seed + thread)));
            }
        });
        settle(&manager, &store);
        let until = soon();
        loop {
            let (known, there) = (known(&manager, &chains), on_the_volume(&store));
            if known.is_subset(&there) && there.len() <= ROOM as usize {
                found += known.len();
                break;
            }
            assert!(Instant::now() < until, "seed {seed}: {known:?} known, {there:?} there");
            std::thread::sleep(Duration::from_millis(5));
        }
        damaged += manager.metrics().tier(Tier::G4).corrupt.get();
    }
    assert!(rounds == 0 || found > 0 && damaged > 0, "{found} blocks known, {damaged} damaged ones found");
}
