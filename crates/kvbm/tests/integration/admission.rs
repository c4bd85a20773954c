//! What goes down is the admission policy's to say, with the deployment's costs before it.

use crate::support::script::{IN_TIME, Mode, Ranks};
use crate::support::{books, fill, model, model_of, namespace, soon, tokens, unlimited};
use kvbm::admission::{AdmissionPolicy, LoadOffer, Offer, Trigger, Verdict};
use kvbm::config::{Blocks, Config};
use kvbm::metrics::DropReason;
use kvbm::{KvBlockManager, Owned, Path, Tier, TokenSequence};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

fn on(manager: &KvBlockManager<Owned>, sequence: &TokenSequence, tier: Tier) -> usize {
    manager.look_up(sequence).iter().filter(|tiers| tiers.contains(tier)).count()
}

fn refused(manager: &KvBlockManager<Owned>, path: Path) -> u64 {
    manager.metrics().path(path).dropped(DropReason::NotWorthIt).get()
}

/// Reads `sequence` back from disk alone.
fn read_from_disk(manager: &KvBlockManager<Owned>, sequence: &TokenSequence) {
    for tier in [Tier::G1, Tier::G2] {
        manager.clear(tier).unwrap();
    }
    assert_eq!(on(manager, sequence, Tier::G3), sequence.num_blocks());
    let cached = manager.onboard(manager.match_prefix(sequence)).wait().unwrap();
    assert_eq!(cached.len(), sequence.num_blocks());
}

#[test]
fn a_disk_slower_than_recompute_is_refused() {
    // No disk is as fast as an engine that computes a block in 16 ps, and none as slow as one that
    // takes 16 s.
    for (tokens_per_s, goes_down) in [(1e12, false), (1.0, true), (0.0, true)] {
        let manager = books([128, 128, 256], |config: &mut Config| {
            config.policy.prefill_tokens_per_s = tokens_per_s;
            config.offload.g2_g3.write_through = true;
        });
        let first = tokens(&manager, 1, 80);
        drop(fill(&manager, &first, 0));
        assert!(manager.wait_offloads(soon()));
        read_from_disk(&manager, &first);
        assert!(manager.wait_offloads(soon()));
        let second = tokens(&manager, 2, 8);
        drop(fill(&manager, &second, 0));
        assert!(manager.wait_offloads(soon()));
        assert_eq!(on(&manager, &second, Tier::G2), 8, "host memory was never measured, so it is used");
        assert_eq!(on(&manager, &second, Tier::G3), if goes_down { 8 } else { 0 });
        assert_eq!(refused(&manager, Path::G2_G3), if goes_down { 0 } else { 8 });
    }
}

/// An offer, as far as it outlives the call.
#[derive(Clone, Debug)]
struct Seen {
    path: Path,
    trigger: Trigger,
    positions: Vec<u32>,
    block_bytes: u64,
    block_tokens: u32,
    write_budget: Option<usize>,
    estimated: usize,
}

/// Keeps blocks from `depth` on away from `tier`.
struct Shallow {
    tier: Tier,
    depth: u32,
    seen: Arc<Mutex<Vec<Seen>>>,
}

impl AdmissionPolicy for Shallow {
    fn judge(&self, offer: &Offer<'_>, verdicts: &mut [Verdict]) {
        for (block, verdict) in offer.blocks.iter().zip(verdicts) {
            if offer.path.dst == self.tier && block.identity.position == self.depth {
                *verdict = Verdict::Refuse;
            }
        }
        self.seen.lock().unwrap().push(Seen {
            path: offer.path,
            trigger: offer.trigger,
            positions: offer.blocks.iter().map(|block| block.identity.position).collect(),
            block_bytes: offer.costs.block_bytes,
            block_tokens: offer.costs.block_tokens,
            write_budget: offer.costs.write_budget,
            estimated: offer.blocks.iter().filter(|block| block.expected_reuse.is_some()).count(),
        });
    }
}

#[test]
fn a_policy_of_the_caller_is_asked_on_every_edge_and_obeyed() {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let manager = KvBlockManager::<Owned>::builder()
        .model(model())
        .namespace(namespace())
        .device(Blocks(32))
        .host(Blocks(64))
        .disk("never-opened", Blocks(240))
        .configure(|config| {
            unlimited(config);
            config.disk.drive_writes_per_day = 1.0;
            config.offload.g2_g3.write_through = true;
        })
        .admission(Shallow { tier: Tier::G3, depth: 3, seen: Arc::clone(&seen) })
        .build_metadata_only()
        .unwrap();
    let sequence = tokens(&manager, 1, 8);
    drop(fill(&manager, &sequence, 0));
    assert!(manager.wait_offloads(soon()));
    assert_eq!([Tier::G2, Tier::G3].map(|tier| on(&manager, &sequence, tier)), [8, 3]);
    assert_eq!(refused(&manager, Path::G2_G3), 5, "the refused block and those behind it");
    let offers = seen.lock().unwrap().clone();
    assert_eq!(offers.len(), 2, "{offers:?}");
    let bytes = manager.config().rank_block_bytes();
    for (offer, path, write_budget) in [(&offers[0], Path::G1_G2, None), (&offers[1], Path::G2_G3, Some(8))] {
        assert_eq!((offer.path, offer.trigger), (path, Trigger::WriteThrough));
        assert_eq!(offer.positions, (0..8).collect::<Vec<_>>());
        assert_eq!((offer.block_bytes, offer.block_tokens), (bytes, 16));
        assert_eq!(offer.write_budget, write_budget);
        assert_eq!(offer.estimated, 8, "the default eviction policy estimates reuse");
    }
    // By name everything goes.
    let lower = manager.match_prefix(&sequence).into_parts();
    drop(lower);
    manager.clear(Tier::G1).unwrap();
    let lower = manager.match_prefix(&sequence).into_parts();
    manager.offload(&lower.g2, Tier::G3).unwrap();
    assert!(manager.wait_offloads(soon()));
    assert_eq!(on(&manager, &sequence, Tier::G3), 8);
    assert_eq!(seen.lock().unwrap().len(), 2);
}

#[test]
fn a_policy_counts_whenever_the_builder_was_given_it() {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let first = || {
        let policy = Shallow { tier: Tier::G2, depth: 2, seen: Arc::clone(&seen) };
        KvBlockManager::<Owned>::builder().admission(policy)
    };
    let before_model = first().model(model()).namespace(namespace()).device(Blocks(8)).host(Blocks(8));
    let mut config = Config { model: model(), ..Config::default() };
    config.namespace.model = "test-model".into();
    (config.device.capacity, config.host.capacity) = (Blocks(8).into(), Blocks(8).into());
    unlimited(&mut config);
    for builder in [before_model.configure(unlimited), first().config(config)] {
        let manager = builder.build_metadata_only().unwrap();
        let sequence = tokens(&manager, 1, 4);
        drop(fill(&manager, &sequence, 0));
        assert!(manager.wait_offloads(soon()));
        assert_eq!(on(&manager, &sequence, Tier::G2), 2);
    }
    assert_eq!(seen.lock().unwrap().len(), 2);
}

/// Mutation that makes it fail: nothing catches what fails in `Leader::expire`.
#[test]
fn a_policy_that_fails_keeps_nobody_from_his_deadline() {
    struct Fails(Arc<AtomicBool>);

    impl AdmissionPolicy for Fails {
        fn judge(&self, _offer: &Offer<'_>, _verdicts: &mut [Verdict]) {
            assert!(!self.0.load(Ordering::Relaxed), "planted");
        }
    }

    let (ranks, fails) = (Ranks::new(1), Arc::new(AtomicBool::new(false)));
    let manager = KvBlockManager::<Owned>::builder()
        .model(model())
        .namespace(namespace())
        .device(Blocks(2048))
        .host(Blocks(2048))
        .disk("never-opened", Blocks(2048))
        .configure(|config| {
            unlimited(config);
            config.offload.g2_g3.write_through = true;
            config.disk.read_deadline = IN_TIME;
        })
        .admission(Fails(Arc::clone(&fails)))
        .build_with_workers(|rank, epoch, sink| ranks.connect(rank, epoch, sink))
        .unwrap();
    let chains = [1, 2].map(|start| tokens(&manager, start, 200));
    for chain in &chains {
        drop(fill(&manager, chain, 0));
    }
    assert!(manager.wait_offloads(soon()));
    for tier in [Tier::G1, Tier::G2] {
        manager.clear(tier).unwrap();
    }
    ranks.set_all(Mode::Hold);
    fails.store(true, Ordering::Relaxed);
    // Of the first one a part arrives: what counts of it at its deadline is offered to the policy.
    // Nobody waits for them but the leader.
    for chain in &chains {
        let onboarding = manager.onboard(manager.match_prefix(chain));
        ranks.execute(0);
        let until = soon();
        while !onboarding.is_done() {
            assert!(Instant::now() < until, "nothing ends it");
            std::thread::yield_now();
        }
    }
}

#[test]
fn what_is_first_seen_goes_down_and_a_partial_block_never_does() {
    let manager = books([32, 64, 64], |config| config.offload.g2_g3.write_through = true);
    let prompt: Vec<u32> = (0..16 * 3 + 7).collect();
    let sequence = manager.sequence(&prompt, b"").unwrap();
    let fresh = manager.allocate(4).unwrap();
    let (done, rest) = manager.commit(fresh, &sequence, 0).unwrap();
    assert_eq!((done.len(), rest.len()), (3, 1), "the block of the tail is not complete");
    drop(manager.register(done).unwrap());
    assert!(manager.wait_offloads(soon()));
    for tier in [Tier::G1, Tier::G2, Tier::G3] {
        assert_eq!(on(&manager, &sequence, tier), 3);
        let status = manager.status().tiers[tier.index()];
        assert_eq!(status.inactive, 3, "{tier}: {status:?}");
    }
}

/// A window without its end is of no use. Mutation that makes it fail: `leave_out_slow` cuts the
/// prefix of any group.
#[test]
fn of_a_window_all_blocks_are_loaded_or_none() {
    struct LeavesOut(usize);

    impl AdmissionPolicy for LeavesOut {
        fn judge(&self, _offer: &Offer<'_>, _verdicts: &mut [Verdict]) {}

        fn load(&self, offer: &LoadOffer<'_>) -> usize {
            offer.blocks() - self.0
        }
    }

    for (model, left_out, covers) in [
        (model(), 0, 8),
        (model(), 1, 7),
        (model_of("window=64 layers=2 heads=2 head_dim=8"), 0, 8),
        (model_of("window=64 layers=2 heads=2 head_dim=8"), 1, 0),
    ] {
        let ranks = Ranks::new(1);
        let manager = KvBlockManager::<Owned>::builder()
            .model(model)
            .namespace(namespace())
            .device(Blocks(16))
            .host(Blocks(16))
            .configure(|config| {
                unlimited(config);
                config.policy.prefill_tokens_per_s = 1000.0;
            })
            .admission(LeavesOut(left_out))
            .build_with_workers(|rank, epoch, sink| ranks.connect(rank, epoch, sink))
            .unwrap();
        let sequence = tokens(&manager, 1, 8);
        drop(fill(&manager, &sequence, 0));
        assert!(manager.wait_offloads(soon()));
        manager.clear(Tier::G1).unwrap();
        let prefix = manager.match_prefix(&sequence);
        assert_eq!((prefix.len(), prefix.is_empty()), (covers, covers == 0));
        let cached = manager.onboard(prefix).wait().unwrap();
        assert_eq!(cached.is_empty(), covers == 0);
    }
}
