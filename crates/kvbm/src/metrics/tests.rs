//! Tests of the exposition and its server.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use kvbm_plan::{FailureKind, Path, Tier};

use super::*;

fn value(text: &str, series: &str) -> Option<f64> {
    text.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' ')?.parse().ok())
}

#[test]
fn every_combination_starts_at_zero() {
    let text = Metrics::new().encode();
    assert!(text.ends_with("# EOF\n"), "{text}");
    let mut series = 0;
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let (name, value) = line.rsplit_once(' ').unwrap();
        assert!(name.starts_with("kvbm_"), "{line}");
        assert!(value.parse::<f64>().unwrap() == 0.0, "{line}");
        series += 1;
    }
    let (tiers, paths) = (Tier::ALL.len(), Path::ALL.len() + 1);
    let per_tier = 4 + EvictReason::ALL.len() + LoadReason::ALL.len() + SlotState::ALL.len();
    // Blocks, bytes, queue depth, in flight, busy time; sum, count, 26 bounds and +Inf of the
    // latency.
    let per_path = 5 + 29 + FailureKind::ALL.len() + DropReason::ALL.len();
    // Look-ups, audits, waits, malformed messages, ignored reports; nine of events; two of disks
    // that are left alone.
    let outcomes = RecoveryOutcome::ALL.len() + PrefetchOutcome::ALL.len();
    assert_eq!(series, 5 + 9 + 2 + outcomes + tiers * per_tier + paths * per_path);
    for needed in [
        "kvbm_sync_offloads_total",
        "kvbm_events_lost_total",
        "kvbm_evicted_blocks_total{tier=\"g3\",reason=\"capacity\"}",
        "kvbm_recovered_blocks_total{outcome=\"orphan\"}",
        "kvbm_tier_slots{tier=\"g2\",state=\"cached\"}",
        "kvbm_transfer_bytes_total{path=\"g3_g1\"}",
        "kvbm_transfer_latency_seconds_count{path=\"g1_g2\"}",
        "kvbm_transfer_failed_blocks_total{path=\"g2_g3\",reason=\"deadline\"}",
        "kvbm_offload_dropped_blocks_total{path=\"g1_g2\",reason=\"queue_full\"}",
    ] {
        assert_eq!(value(&text, needed), Some(0.0), "{needed}");
    }
}

#[test]
fn each_handle_counts_its_own_series() {
    let metrics = Metrics::new();
    for (n, kind) in (1..).zip(FailureKind::ALL) {
        metrics.path(Path::G1_G2).failures(kind).add(n);
    }
    for (n, tier) in (1..).zip(Tier::ALL) {
        metrics.tier(tier).hits.add(n);
        metrics.tier(tier).slots(SlotState::Free).set(n * 10);
    }
    for (n, reason) in (1..).zip(EvictReason::ALL) {
        metrics.tier(Tier::G2).evictions(*reason).add(n);
    }
    for (n, path) in (1..).zip(Path::ALL) {
        metrics.path(path).arrived(n, n * 100, Duration::from_micros(n));
        metrics.path(path).dropped(DropReason::WearBudget).add(n);
    }
    metrics.path(Path::new(Tier::G4, Tier::G2)).arrived(7, 7, Duration::from_micros(7));

    let text = metrics.encode();
    let expect = |series: String, n: u64| assert_eq!(value(&text, &series), Some(n as f64), "{series}");
    for (n, kind) in (1..).zip(FailureKind::ALL) {
        expect(format!("kvbm_transfer_failed_blocks_total{{path=\"g1_g2\",reason=\"{kind}\"}}"), n);
    }
    for (n, tier) in (1..).zip(Tier::ALL) {
        expect(format!("kvbm_hit_blocks_total{{tier=\"{}\"}}", tier.as_str()), n);
        expect(format!("kvbm_tier_slots{{tier=\"{}\",state=\"free\"}}", tier.as_str()), n * 10);
    }
    for (n, reason) in (1..).zip(EvictReason::ALL) {
        expect(format!("kvbm_evicted_blocks_total{{tier=\"g2\",reason=\"{}\"}}", reason.as_str()), n);
    }
    for (n, path) in (1..).zip(Path::ALL) {
        expect(format!("kvbm_transfer_blocks_total{{path=\"{path}\"}}"), n);
        expect(format!("kvbm_transfer_bytes_total{{path=\"{path}\"}}"), n * 100);
        expect(format!("kvbm_transfer_latency_seconds_count{{path=\"{path}\"}}"), 1);
        expect(format!("kvbm_offload_dropped_blocks_total{{path=\"{path}\",reason=\"wear_budget\"}}"), n);
    }
    expect("kvbm_transfer_blocks_total{path=\"other\"}".into(), 7);
}

#[cfg(feature = "worker")]
#[test]
fn what_a_disk_counts_is_brought_up_to_date_before_it_is_read() {
    let metrics = Metrics::new();
    assert!(!metrics.encode().contains("disk_errors"), "no disk, nothing to show");
    let (counters, devices) = (metrics.counters(), [("/a", 0), ("/b", 7)]);
    metrics.refresh_by(move || {
        for (dir, errors) in devices {
            counters.disks.errors(kvbm_plan::Rank(1), dir).raise_to(errors);
        }
        let disk = counters.disks.rank(kvbm_plan::Rank(1));
        disk.failed_snapshots.raise_to(3);
        disk.renewed.raise_to(5);
        disk.given_up.raise_to(2);
        disk.other_key.raise_to(6);
        disk.unsynced.set(4);
    });
    let text = metrics.encode();
    for (dir, errors) in devices {
        let series = format!("kvbm_disk_errors_total{{rank=\"1\",dir=\"{dir}\"}}");
        assert_eq!(value(&text, &series), Some(errors as f64), "{text}");
    }
    for (series, expected) in [
        ("kvbm_disk_failed_snapshots_total", 3.0),
        ("kvbm_disk_renewed_blocks_total", 5.0),
        ("kvbm_disk_given_up_blocks_total", 2.0),
        ("kvbm_disk_other_key_records_total", 6.0),
        ("kvbm_disk_unsynced_blocks", 4.0),
    ] {
        assert_eq!(value(&text, &format!("{series}{{rank=\"1\"}}")), Some(expected), "{text}");
    }
}

#[test]
fn a_path_is_busy_while_anything_is_in_flight() {
    let metrics = Metrics::new();
    let path = metrics.path(Path::G2_G3);
    let (first, second) = (path.begin(), path.begin());
    assert_eq!(path.in_flight(), 2);
    first.arrived(2, 200);
    drop(second);
    assert_eq!(path.in_flight(), 0);
    let summary = path.summary();
    assert_eq!((summary.blocks, summary.bytes, summary.latency.count), (2, 200, 1));
    assert!(summary.busy_s > 0.0 && summary.gb_per_s() > 0.0);
    assert_eq!(path.summary().busy_s.to_bits(), summary.busy_s.to_bits(), "an idle path does not get busier");
    path.leave();
    assert_eq!(path.in_flight(), 0, "leaving too often does no harm");
}

fn request(addr: SocketAddr, text: &str) -> String {
    let mut stream = TcpStream::connect(addr).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    stream.write_all(text.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

const ANY_PORT: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 0);

#[test]
fn the_server_answers_get_metrics_and_refuses_the_rest() {
    let metrics = Metrics::new();
    metrics.lookups.add(42);
    let server = metrics.serve(ANY_PORT).unwrap();
    let answer = request(server.addr(), "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
    assert!(head.contains("application/openmetrics-text"), "{head}");
    assert!(head.contains(&format!("Content-Length: {}\r\n", body.len())), "{head}");
    assert_eq!(value(body, "kvbm_lookup_blocks_total"), Some(42.0));

    let head = request(server.addr(), "HEAD /metrics?x=1 HTTP/1.0\r\n\r\n");
    assert!(head.starts_with("HTTP/1.1 200 OK") && head.ends_with("\r\n\r\n"), "{head}");
    for (text, status) in [
        ("GET / HTTP/1.1\r\n\r\n", "404"),
        ("POST /metrics HTTP/1.1\r\n\r\n", "405"),
        ("nonsense\r\n\r\n", "400"),
        ("GET /metrics SPDY/3\r\n\r\n", "400"),
    ] {
        let answer = request(server.addr(), text);
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{text}: {answer}");
    }
}

#[test]
fn an_endless_head_is_cut_off_and_the_next_client_served() {
    let server = Metrics::new().serve(ANY_PORT).unwrap();
    let mut stream = TcpStream::connect(server.addr()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    let mut refused = String::new();
    // The server reads what is sent beyond the limit, so its answer is not lost.
    stream.write_all("x".repeat(9 << 10).as_bytes()).unwrap();
    stream.read_to_string(&mut refused).unwrap();
    assert!(refused.starts_with("HTTP/1.1 431 "), "{refused}");
    assert!(request(server.addr(), "GET /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 200 "));
}

#[test]
fn dropping_the_server_frees_the_port() {
    let server = Metrics::new().serve(ANY_PORT).unwrap();
    let addr = server.addr();
    let error = Metrics::new().serve(addr).unwrap_err().to_string();
    assert!(error.contains(&addr.to_string()) && error.contains("free port"), "{error}");
    drop(server);
    assert!(TcpStream::connect(addr).is_err());
}

#[test]
fn other_machines_are_let_in_only_when_asked_for() {
    let addr: SocketAddr = "0.0.0.0:0".parse().unwrap();
    let error = Metrics::new().serve(addr).unwrap_err();
    assert!(matches!(error, HttpError::Exposed { .. }), "{error}");
    let security = HttpSecurity { insecure: true, ..HttpSecurity::default() };
    let server = Metrics::new().serve_with(addr, &security).unwrap();
    let local = SocketAddr::new(ANY_PORT.ip(), server.addr().port());
    assert!(request(local, "GET /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 200 "));
}
