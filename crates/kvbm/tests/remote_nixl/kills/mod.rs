//! Random kills and stops of the processes of a small deployment: a reader, an owner, and the NATS
//! server on which they find each other. `NIXL_ROUNDS` sets how many (12), `NIXL_SEED` which (1),
//! `NIXL_JSON` where the figures go. `KVBM_NATS_SERVER` names the server's program; without it the
//! test says so and passes.
//! With `NIXL_LONG_STOPS` owner and reader are stopped for 30 s too.

mod member;
mod process;
mod round;

use crate::nats_server::NatsServer;
use round::{Deployment, Random};
use std::time::Duration;

/// Says to a process of this test which node it is, and where the server listens.
const MEMBER: &str = "KVBM_REMOTE_TEST_MEMBER";
const OWNER: u32 = 1;
const READER: u32 = 2;
/// Blocks of a sequence, 256 KiB each: two batches of a read.
const BLOCKS: u32 = 96;
/// Blocks of G1, and of G2: fewer than two sequences have, so that every round evicts.
const TIER_BLOCKS: u32 = 160;
const LOOKUP_DEADLINE: Duration = Duration::from_secs(1);
const READ_DEADLINE: Duration = Duration::from_secs(3);
const LEASE: Duration = Duration::from_secs(1);
/// Twice as long as an announcement holds on the server.
const LONG_STOP: Duration = Duration::from_secs(30);
/// Longest that anything may take beyond its own deadline, on a busy machine.
const SLACK: Duration = Duration::from_secs(5);

fn number(variable: &str, unless: u64) -> u64 {
    std::env::var(variable).ok().map_or(unless, |text| text.parse().expect("a number"))
}

/// The processes that the other test starts run this; elsewhere it has nothing to do.
#[test]
fn a_member_of_a_deployment() {
    let Ok(setup) = std::env::var(MEMBER) else {
        println!("not started by the other test");
        return;
    };
    assert!(member::serve(&setup) > 0, "it was told to do something");
}

#[test]
fn whoever_is_killed_or_stopped_no_read_hangs_and_no_byte_is_wrong() {
    let Some(server) = NatsServer::start(&[]) else { return };
    let (rounds, seed) = (number("NIXL_ROUNDS", 12), number("NIXL_SEED", 1));
    let mut random = Random(seed);
    let mut deployment = Deployment::start(server);
    for round in 0..rounds {
        deployment.round(round, &mut random);
    }
    let mut rounds = rounds;
    // They take a minute: the long form alone has them.
    if std::env::var_os("NIXL_LONG_STOPS").is_some() {
        deployment.long_stops(rounds, &mut random);
        rounds += 2;
    }
    let report = deployment.end().json(rounds, seed);
    println!("{report}");
    if let Some(file) = std::env::var_os("NIXL_JSON") {
        std::fs::write(file, report).expect("the report is written");
    }
}
