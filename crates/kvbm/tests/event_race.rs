//! Registration racing the last drop and removal of the same block, seen by a follower: through
//! pool, ring, publisher, transport and index. `KVBM_RACE_ROUNDS` sets the number of rounds (the
//! step `event-race` of `cargo xtask test --all` runs 100,000).
#![allow(clippy::unwrap_used)] // In a test a panic is the report.

#[cfg(feature = "zmq")]
#[path = "../../kvbm-events/tests/support/ports.rs"]
mod ports;
mod support;

use kvbm::events_plane::{Delivery, KvIndex, Subscriber};
use kvbm::{BlockChain, Cached, G1, KvBlockManager, Owned, SequenceHash, Tier};
use std::collections::{BTreeSet, VecDeque};
use std::sync::Barrier;
use std::time::Duration;
use support::books;

/// Blocks that are fought over in turn. Winners hold the last half of them, so that they are there
/// when it is checked.
const BLOCKS: usize = 16;
/// Rounds between two checks: no block is fought over twice before its final state was looked at.
const EVERY: usize = BLOCKS;
const FIGHTERS: usize = 3;

fn rounds() -> usize {
    std::env::var("KVBM_RACE_ROUNDS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(4000)
}

fn hash(round: usize) -> SequenceHash {
    SequenceHash::from_bytes([1 + (round % BLOCKS) as u8; 16])
}

/// Registers the block of a round, or takes it as somebody else registered it.
fn register(manager: &KvBlockManager<Owned>, hash: SequenceHash) -> Option<Cached<G1>> {
    let fresh = manager.allocate(1).ok()?;
    let hashes = [hash];
    let (done, _) = manager.commit(fresh, BlockChain::of_hashes(&hashes), 0).unwrap();
    Some(manager.register(done).unwrap())
}

struct Mirror {
    subscriber: Subscriber,
    index: KvIndex,
    heard: u64,
}

impl Mirror {
    /// Blocks of which the follower's last word is not the pool's.
    fn wrong(&mut self, manager: &KvBlockManager<Owned>) -> usize {
        assert!(manager.events().flush(Duration::from_secs(20)));
        let published = manager.events().status().published;
        while self.heard < published {
            match self.subscriber.next(Duration::from_secs(20)).unwrap() {
                Some(Delivery::Events { stream, events }) => {
                    self.index.apply(stream, &events);
                    self.heard += events.len() as u64;
                }
                other => panic!("{} of {published} events, then {other:?}", self.heard),
            }
        }
        let told: BTreeSet<SequenceHash> = self.index.holdings().map(|(.., hash)| hash).collect();
        let there = |hash: &SequenceHash| {
            let tiers = manager.look_up(BlockChain::of_hashes(std::slice::from_ref(hash)));
            tiers.first().is_some_and(|tiers| tiers.contains(Tier::G1))
        };
        (0..BLOCKS).map(hash).filter(|hash| told.contains(hash) != there(hash)).count()
    }
}

/// How many final states were wrong, and in how many checks blocks were there at all.
fn race(manager: &KvBlockManager<Owned>, subscriber: Subscriber, rounds: usize) -> (usize, usize) {
    let mut mirror = Mirror { subscriber, index: KvIndex::default(), heard: 0 };
    let (start, end) = (Barrier::new(FIGHTERS + 1), Barrier::new(FIGHTERS + 1));
    let (mut wrong, mut alive) = (0, 0);
    std::thread::scope(|scope| {
        for fighter in 0..FIGHTERS {
            let (start, end) = (&start, &end);
            scope.spawn(move || {
                let mut held = VecDeque::new();
                for round in 0..rounds {
                    start.wait();
                    match fighter {
                        // Registers, lets go at once and has it removed.
                        0 => {
                            drop(register(manager, hash(round)));
                            manager.clear(Tier::G1).unwrap();
                        }
                        // The last user goes while the others register.
                        1 => drop(register(manager, hash(round))),
                        _ => {
                            held.push_back(register(manager, hash(round)));
                            held.drain(..held.len().saturating_sub(BLOCKS / 2));
                        }
                    }
                    end.wait();
                }
            });
        }
        for round in 0..rounds {
            start.wait();
            end.wait();
            if round % EVERY == EVERY - 1 {
                wrong += mirror.wrong(manager);
                alive += usize::from(mirror.index.holdings().count() > 0);
            }
        }
    });
    (wrong, alive)
}

/// Mutation that makes it fail: an event appended after the entry's lock was released.
#[test]
fn no_final_state_is_wrong_when_registration_races_the_last_drop() {
    let manager = books([64, 0, 0], |config| config.events.batch_age = Duration::ZERO);
    let subscriber = manager.events().subscribe().unwrap();
    let rounds = rounds();
    let (wrong, alive) = race(&manager, subscriber, rounds);
    assert_eq!(wrong, 0, "of {} checks after {rounds} rounds", rounds / EVERY);
    assert!(alive > rounds / EVERY / 2, "there was something to be wrong about in {alive} checks");
    assert_eq!(manager.events().status().lost, 0);
}

#[cfg(feature = "zmq")]
#[test]
fn nor_over_a_socket() {
    use kvbm::config::Secret;
    use kvbm::events_plane::{EventUrl, url::EventRole};
    use ports::free_port;
    let url = format!("zmq+tcp://127.0.0.1:{}?replay={}&from=start", free_port(), free_port());
    let manager = books([64, 0, 0], |config| {
        config.events.url = Some(Secret::new(url.as_str()));
        config.events.batch_age = Duration::ZERO;
    });
    let transport =
        url.parse::<EventUrl>().unwrap().open(EventRole::Subscriber, Duration::from_secs(20)).unwrap();
    let rounds = rounds().min(20_000);
    let (wrong, _) = race(&manager, Subscriber::new(transport.subscribe().unwrap()), rounds);
    assert_eq!(wrong, 0, "of {} checks after {rounds} rounds", rounds / EVERY);
}
