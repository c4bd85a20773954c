//! A real manager publishes over `ZeroMQ`; the advisor listens, and the manager never learns of it.
#![allow(clippy::unwrap_used)] // In a test a panic is the report.

#[path = "../../../crates/kvbm-events/tests/support/ports.rs"]
mod ports;

use advisor::{Advisor, Policy, Proposal, follow};
use kvbm::config::{Blocks, ModelConfig, Secret};
use kvbm::{KvBlockManager, Namespace, Owned, Tier, TokenSequence};
use ports::free_port;
use std::time::{Duration, Instant};

fn serve(manager: &KvBlockManager<Owned>, tokens: &TokenSequence) {
    let cached = manager.onboard(manager.match_prefix(tokens)).wait().unwrap();
    let missing = tokens.num_blocks() - cached.len();
    if missing > 0 {
        let (done, _) = manager.commit(manager.allocate(missing).unwrap(), tokens, cached.len()).unwrap();
        drop(manager.register(done).unwrap());
    }
    drop(cached);
    assert!(manager.wait_offloads(Instant::now() + Duration::from_secs(60)));
}

#[test]
fn a_prefix_that_comes_again_is_proposed_for_promotion() {
    let url = format!("zmq+tcp://127.0.0.1:{}?replay={}", free_port(), free_port());
    let manager = KvBlockManager::<Owned>::builder()
        .model(ModelConfig { num_layers: 1, num_kv_heads: 1, head_dim: 64, ..ModelConfig::default() })
        .namespace(Namespace::new("advised"))
        .device(Blocks(8))
        .host(Blocks(64))
        .disk("never-opened", Blocks(64))
        .configure(|config| {
            config.offload.g2_g3.write_through = true;
            config.events.url = Some(Secret::new(url.as_str()));
        })
        .build_metadata_only()
        .unwrap();
    let sequence = |start: u32| manager.sequence(&(start..start + 64).collect::<Vec<_>>(), b"").unwrap();
    // What was there before the advisor came reaches it by a snapshot.
    serve(&manager, &sequence(0));
    assert!(manager.events().pump());
    let mut following = follow(&url.parse().unwrap(), Advisor::new(Policy::default())).unwrap();
    for round in 1..8 {
        // Four blocks each, and G1 holds eight: the first one has to come back from below every
        // time.
        serve(&manager, &sequence(1000 * round));
        serve(&manager, &sequence(1000 * round + 500));
        serve(&manager, &sequence(0));
    }
    assert!(manager.events().pump());
    let held = manager.events().snapshot().blocks;
    let on = |tier| held.iter().filter(|block| block.location.tier == tier).count() as u64;
    let bytes = held[0].block_bytes;
    let deadline = Instant::now() + Duration::from_secs(30);
    let agrees =
        |advisor: &Advisor| Tier::SLOTTED.iter().all(|tier| advisor.bytes_on(*tier) == bytes * on(*tier));
    while !(agrees(&following.advisor) && following.suspects() == 0) {
        assert!(
            Instant::now() < deadline,
            "{:?}",
            Tier::SLOTTED.map(|tier| following.advisor.bytes_on(tier))
        );
        following.listen(Duration::from_millis(50)).unwrap();
    }
    let hot = sequence(0).hashes()[0];
    let proposals = following.advisor.proposals(Instant::now());
    // How much of it was let down to G3 is the manager's business; what there is of it is hot.
    let is_hot = matches!(&proposals[0], Proposal::Promote { prefix, from, .. }
        if prefix.hash == hot && from.tier == Tier::G3);
    assert!(is_hot, "{proposals:?}");
}
