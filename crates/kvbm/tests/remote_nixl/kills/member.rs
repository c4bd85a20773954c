//! A process of the deployment: a manager that does what its standard input says.

use super::{LEASE, LOOKUP_DEADLINE, READ_DEADLINE, READER, SLACK, TIER_BLOCKS};
use crate::support::store::{hashes, onboard, put};
use crate::support::{holds, namespace, soon, tokens, unlimited};
use kvbm::config::{Blocks, EvictionPolicy, ModelConfig, Secret};
use kvbm::plan::NodeId;
use kvbm::{KvBlockManager, Owned, Tier};
use std::time::{Duration, Instant};

/// 8 layers x 2 x 16 tokens x 8 heads x 64 x bf16: 256 KiB a block.
fn model() -> ModelConfig {
    ModelConfig { num_layers: 8, num_kv_heads: 8, head_dim: 64, ..ModelConfig::default() }
}

fn manager(id: u32, server: &str) -> KvBlockManager<Owned> {
    let builder = KvBlockManager::<Owned>::builder().model(model()).namespace(namespace());
    let configured = builder.device(Blocks(TIER_BLOCKS)).host(Blocks(TIER_BLOCKS)).configure(|config| {
        unlimited(config);
        config.policy.eviction = EvictionPolicy::LruLeaf;
        config.remote.enabled = true;
        config.remote.node = id;
        config.remote.url = Some(Secret::new(format!("nats://{server}?bucket=kills")));
        config.remote.refresh = Duration::from_millis(50);
        config.remote.lookup_deadline = LOOKUP_DEADLINE;
        config.remote.read_deadline = READ_DEADLINE;
        config.remote.lease = LEASE;
        config.remote.longest_pause = Duration::from_millis(500);
    });
    configured.build().unwrap()
}

/// Does what it is told until its standard input ends; then the manager ends in order. `setup` is
/// the number of the node and the address of the server. How much it was told to do.
pub(super) fn serve(setup: &str) -> usize {
    let (id, server) = setup.split_once(' ').unwrap();
    let manager = manager(id.parse().unwrap(), server);
    // The line with the name of this test has begun and has no end yet.
    println!("\nready");
    let mut orders = 0;
    for line in std::io::stdin().lines().map(Result::unwrap) {
        let mut words = line.split(' ');
        let order = words.next().unwrap();
        let start = words.next().map_or(0, |word| word.parse().unwrap());
        let blocks = words.next().map_or(0, |word| word.parse().unwrap());
        match order {
            "put" => put(&manager, &tokens(&manager, start, blocks)),
            "find" => find(&manager, start, blocks),
            "read" => read(&manager, start, blocks),
            "push" => push(&manager, start, blocks),
            "check" => check(&manager, start, blocks),
            "free" => free(&manager, start),
            other => panic!("{other} is no order"),
        }
        println!("done {order}");
        orders += 1;
    }
    orders
}

/// Waits until a peer says that it has the sequence: they know each other then.
fn find(manager: &KvBlockManager<Owned>, start: u32, blocks: u32) {
    let (sequence, until) = (tokens(manager, start, blocks), soon());
    while manager.match_prefix(&sequence).len() < blocks as usize {
        assert!(Instant::now() < until, "no peer says that it has sequence {start}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Reads a sequence and compares every byte of what has arrived.
fn read(manager: &KvBlockManager<Owned>, start: u32, blocks: u32) {
    let sequence = tokens(manager, start, blocks);
    println!("reading");
    let began = Instant::now();
    let (cached, why) = match manager.onboard(manager.match_prefix(&sequence)).wait() {
        Ok(cached) => (cached, "nothing failed".to_owned()),
        Err(error) => {
            let why = error.to_string();
            (error.arrived, why)
        }
    };
    let took = began.elapsed();
    for (block, hash) in cached.block_ids().iter().zip(hashes(&sequence)) {
        assert!(holds(manager, *block, hash), "wrong bytes");
    }
    println!("arrived {} {} {}", cached.len(), took.as_millis(), why.replace('\n', " "));
    drop(cached);
    assert!(manager.wait_offloads(soon()));
}

/// Writes a sequence into the host memory of the reader.
fn push(manager: &KvBlockManager<Owned>, start: u32, blocks: u32) {
    let sequence = tokens(manager, start, blocks);
    println!("pushing");
    let began = Instant::now();
    let pushed = manager.push(NodeId(READER), &sequence, began + READ_DEADLINE);
    let why = pushed.failure.map_or_else(|| "nothing failed".to_owned(), |failure| failure.to_string());
    println!("pushed {} {} {}", pushed.written, began.elapsed().as_millis(), why.replace('\n', " "));
}

/// Compares every byte of what host memory has of a sequence, from its first block on.
fn check(manager: &KvBlockManager<Owned>, start: u32, blocks: u32) {
    let sequence = tokens(manager, start, blocks);
    manager.clear(Tier::G1).unwrap();
    let places = manager.look_up(&sequence);
    let there = places.iter().take_while(|place| place.contains(Tier::G2)).count();
    let arrived = onboard(manager, &tokens(manager, start, there as u32));
    assert_eq!(arrived, there, "all of host memory is right");
    println!("checked {there}");
}

/// Waits until no peer holds a lease, and until every slot of G2 can be had for new blocks: those
/// of the sequence that begins with `start`.
fn free(manager: &KvBlockManager<Owned>, start: u32) {
    let began = Instant::now();
    while manager.metrics().remote.leases_held.get() > 0 {
        assert!(began.elapsed() < LEASE + SLACK, "a lease has not ended");
        std::thread::sleep(Duration::from_millis(5));
        // Refreshes what is counted.
        let _text = manager.metrics().encode();
    }
    println!("unleased {}", began.elapsed().as_millis());
    let until = soon();
    for attempt in 0.. {
        let sequence = tokens(manager, start + attempt, TIER_BLOCKS);
        put(manager, &sequence);
        let places = manager.look_up(&sequence);
        let there = places.iter().filter(|place| place.contains(Tier::G2)).count();
        if there == TIER_BLOCKS as usize {
            break;
        }
        assert!(Instant::now() < until, "{there} of {TIER_BLOCKS} slots can be used");
        std::thread::sleep(Duration::from_millis(100));
    }
    println!("usable {}", began.elapsed().as_millis());
}
