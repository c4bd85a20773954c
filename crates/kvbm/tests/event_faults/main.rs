//! Random runs of kills, partitions, stalls and restarts under real block managers: the follower's
//! index equals their pools after each.
//!
//! Managers serve random requests and publish over `ZeroMQ` with replay, `JetStream`, and core NATS
//! whose losses are repaired by snapshots. `KVBM_NATS_SERVER` names a nats-server (without it only
//! `ZeroMQ` is run), `KVBM_FAULT_ROUNDS` how many rounds, `KVBM_FAULT_SEED` where they begin,
//! `KVBM_FAULT_WITHIN_MS` how long the index may take to be right over core NATS once nothing is
//! wrong any more, `KVBM_FAULT_JSON` where the report goes. `cargo xtask event-faults` sets them.

#![cfg(all(feature = "nats", feature = "zmq"))]
#![allow(clippy::unwrap_used)] // In a test a panic is the report.

mod load;
#[path = "../../../kvbm-events/tests/support/nats_server.rs"]
mod nats_server;
mod network;
#[path = "../../../kvbm-events/tests/support/ports.rs"]
mod ports;
mod process;
#[path = "../../../kvbm-events/tests/support/proxy.rs"]
mod proxy;
mod report;
mod run;
mod source;
#[path = "../support/mod.rs"]
mod support;

use nats_server::NatsServer;
use network::Namespace;
use report::Report;
use run::{Mode, Run};
use std::process::Command;
use std::time::Duration;

/// Long enough for any machine; a correct run never waits for it.
const PATIENCE: Duration = Duration::from_secs(60);

/// Set for the test that is called inside a network namespace.
const INSIDE: &str = "KVBM_FAULT_INSIDE";

/// Set for the test that publishes in a process of its own: its number, its seed and where it
/// publishes.
const PUBLISHER: &str = "KVBM_FAULT_PUBLISHER";

/// Runs at a time: they wait more than they work.
const LANES: u64 = 4;

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap())
}

fn rounds() -> u64 {
    number("KVBM_FAULT_ROUNDS", 4)
}

fn seed() -> u64 {
    number("KVBM_FAULT_SEED", 1)
}

/// Mutations that make it fail: `Follower::take` of the `ZeroMQ` subscriber without `fetch`;
/// `Resync::note` that ignores gaps; `follow` of the `JetStream` subscriber that starts at the end;
/// a `Remove` that the pool does not tell.
#[test]
fn the_index_equals_the_pools_after_any_faults() {
    let lane = |lane: u64| {
        let mut report = Report::default();
        let mut server = NatsServer::start(&[]);
        for seed in (seed()..seed() + rounds()).filter(|seed| seed % LANES == lane) {
            match &mut server {
                Some(server) if (seed / LANES).is_multiple_of(2) => {
                    let outcome = Run::over_nats(Mode::JetStream, seed, server).run(Some(server), None);
                    server.delete_stream(&run::stream_of(&outcome.name));
                    report.add(outcome);
                }
                _ => report.add(Run::over_zmq(seed).run(None, None)),
            }
            if let Some(server) = &mut server {
                report.add(Run::over_nats(Mode::Core, seed, server).run(Some(server), None));
            }
        }
        report
    };
    let mut report = Report::default();
    std::thread::scope(|scope| {
        let lanes: Vec<_> = (0..LANES).map(|number| scope.spawn(move || lane(number))).collect();
        for lane in lanes {
            report.merge(lane.join().unwrap());
        }
    });
    report.print("faults", rounds());
    assert_eq!(report.failed, Vec::<String>::new());
    let runs = report.runs(Mode::JetStream) + report.runs(Mode::ZmqReplay);
    assert_eq!(runs, rounds());
    // One run may end just after everything was cleared.
    assert!(rounds() < 4 || report.on_volumes() > 0);
    // Where much was lost, something was noticed.
    assert!(report.runs(Mode::Core) < 10 || report.resyncs(Mode::Core) > 0);
}

/// Publishers are processes that are killed by a signal and started again where they were.
#[test]
fn the_index_equals_the_pools_after_publishers_are_killed() {
    let mut report = Report::default();
    let server = NatsServer::start(&[]);
    let rounds = rounds().div_ceil(8);
    let place = |server| process::Place { server, host: "127.0.0.1", network: None };
    for seed in seed()..seed() + rounds {
        report.add(process::run(Mode::ZmqReplay, seed, place(None)));
        if let Some(server) = &server {
            for mode in [Mode::JetStream, Mode::Core] {
                let outcome = process::run(mode, seed, place(Some(server.address())));
                if mode == Mode::JetStream {
                    server.delete_stream(&run::stream_of(&outcome.name));
                }
                report.add(outcome);
            }
        }
    }
    report.print("killed", rounds);
    assert_eq!(report.failed, Vec::<String>::new());
    assert_eq!(report.runs(Mode::ZmqReplay), rounds);
}

#[test]
fn a_publisher_in_a_process_of_its_own() {
    match std::env::var(PUBLISHER) {
        Ok(setup) => assert!(process::serve(&setup) > 0, "nobody asked for anything"),
        Err(_) => println!("skipped: the_index_equals_the_pools_after_publishers_are_killed calls this"),
    }
}

/// As above, with a server in a network namespace of its own whose link goes down and up. Skipped
/// where the system does not let us have one.
#[test]
fn the_index_equals_the_pools_after_partitions_of_a_network() {
    if std::env::var_os("KVBM_NATS_SERVER").is_none() {
        println!("skipped: KVBM_NATS_SERVER names no nats-server");
        return;
    }
    if let Err(reason) = network::is_permitted() {
        println!("skipped: no network namespace ({reason}); partitions by a proxy are tested all the same");
        report::skipped("namespace", &reason);
        return;
    }
    let mut inside = Command::new("unshare");
    inside.arg("-rn").arg(std::env::current_exe().unwrap());
    inside.args(["--exact", "inside_a_network_of_our_own", "--nocapture"]).env(INSIDE, "1");
    let output = inside.output().unwrap();
    let told = String::from_utf8_lossy(&output.stdout);
    // Without the lines of a test program: it is not counted twice.
    told.lines().filter(|line| line.starts_with("namespace: ")).for_each(|line| println!("{line}"));
    assert!(output.status.success(), "{told}{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn inside_a_network_of_our_own() {
    if std::env::var_os(INSIDE).is_none() {
        println!(
            "skipped: the_index_equals_the_pools_after_partitions_of_a_network calls this inside a namespace"
        );
        return;
    }
    let mut namespace = Namespace::new();
    let behind = namespace.enter();
    let mut server = NatsServer::start_at(Namespace::THERE, &behind).unwrap();
    let mut report = Report::default();
    let rounds = rounds().div_ceil(4);
    for seed in seed()..seed() + rounds {
        for mode in [Mode::JetStream, Mode::Core] {
            let run = Run::in_namespace(mode, seed, &server);
            let outcome = run.run(Some(&mut server), Some(&mut namespace));
            if mode == Mode::JetStream {
                server.delete_stream(&run::stream_of(&outcome.name));
            }
            report.add(outcome);
        }
        // Publishers on the other side of the link, without a server.
        let place = process::Place { server: None, host: Namespace::THERE, network: Some(&mut namespace) };
        report.add(process::run(Mode::ZmqReplay, seed, place));
    }
    report.print("namespace", rounds);
    assert_eq!(report.failed, Vec::<String>::new());
    let runs = [Mode::JetStream, Mode::Core, Mode::ZmqReplay].map(|mode| report.runs(mode));
    assert_eq!(runs, [rounds; 3]);
}
