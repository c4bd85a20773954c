//! `kvbm replay` as people and scripts run it: its files, its JSON, its exit status, what it leaves
//! behind.

// A helper that fails is a test that fails.
#![allow(clippy::unwrap_used)]

mod models;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

/// Longest time that anything here may take; a healthy run takes a small part of it.
const DEADLINE: Duration = Duration::from_secs(60);

/// Two conversations over one system prompt, and a third request that comes back to the first.
const TRACE: &str = r#"{"timestamp": 0, "input_length": 2048, "output_length": 9, "hash_ids": [1, 2, 3, 4]}
{"timestamp": 10, "input_length": 1536, "output_length": 9, "hash_ids": [1, 2, 7]}
{"timestamp": 20, "input_length": 2560, "output_length": 9, "hash_ids": [1, 2, 3, 4, 5]}
"#;

fn command(dir: &Path, line: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvbm"));
    command.current_dir(dir).env("TMPDIR", dir).arg("replay").args(line.split_whitespace());
    command
}

fn run(dir: &Path, line: &str) -> Output {
    command(dir, line).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Hits of a trace on one tier that evicts the block used least recently. A request uses its blocks
/// last to first, so that a block is always as recent as what continues it. As naive as can be: a
/// list of resident chains with the time of their last use.
fn naive_lru_hits(requests: &[Vec<u64>], capacity: usize) -> u64 {
    let mut last_use: std::collections::HashMap<Vec<u64>, (usize, std::cmp::Reverse<usize>)> =
        std::collections::HashMap::new();
    let mut hits = 0;
    for (time, request) in requests.iter().enumerate() {
        let chains: Vec<Vec<u64>> =
            (1..=request.len().min(capacity)).map(|end| request[..end].to_vec()).collect();
        let found = chains.iter().take_while(|chain| last_use.contains_key(*chain)).count();
        hits += found as u64;
        for (position, chain) in chains[..found].iter().enumerate() {
            last_use.insert(chain.clone(), (time, std::cmp::Reverse(position)));
        }
        while last_use.len() + chains.len() - found > capacity {
            let oldest = last_use.iter().min_by_key(|(_, used)| **used).unwrap().0.clone();
            assert!(!chains[..found].contains(&oldest), "blocks in use are not evicted");
            last_use.remove(&oldest);
        }
        for (position, chain) in chains.into_iter().enumerate().skip(found) {
            last_use.insert(chain, (time, std::cmp::Reverse(position)));
        }
    }
    hits
}

#[test]
fn hits_of_lru_leaf_are_those_of_a_naive_model() {
    let dir = temp();
    let mut state = 7_u64;
    let mut random = move |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    // Conversations that grow, branch and come back.
    let mut conversations: Vec<Vec<u64>> = (0..12).map(|n| vec![n % 3, 100 + n]).collect();
    let mut requests = Vec::new();
    for turn in 0..400 {
        let at = random(12) as usize;
        if random(9) == 0 {
            let kept = 1 + random(conversations[at].len() as u64) as usize;
            conversations[at].truncate(kept);
        }
        let grown = (0..=random(4)).map(|n| 1000 + turn * 10 + n);
        conversations[at].extend(grown);
        requests.push(conversations[at].clone());
    }
    let lines = requests.iter().enumerate().map(|(at, ids)| {
        let line = serde_json::json!({
            "timestamp": at, "input_length": ids.len() * 512, "output_length": 1, "hash_ids": ids,
        });
        line.to_string() + "\n"
    });
    std::fs::write(dir.path().join("t.jsonl"), lines.collect::<String>()).unwrap();
    for capacity in [20, 90, 300, 900] {
        let line = format!("--trace t.jsonl --metadata-only --policy lru-leaf --capacity {capacity}");
        let expected = naive_lru_hits(&requests, capacity);
        assert!(expected > 0, "the trace repeats itself");
        assert_eq!(hits(&json(dir.path(), &line)), [expected, 0, 0], "{capacity} blocks");
    }
}

/// The JSON of a run that succeeds.
fn json(dir: &Path, line: &str) -> Value {
    let output = run(dir, &format!("{line} --json -"));
    assert_eq!(output.status.code(), Some(0), "{line}: {}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn number(json: &Value, field: &str) -> u64 {
    json.pointer(field).and_then(Value::as_u64).unwrap_or_else(|| panic!("no {field} in {json:#}"))
}

fn hits(json: &Value) -> [u64; 3] {
    ["/hits/g1", "/hits/g2", "/hits/g3"].map(|field| number(json, field))
}

/// The slot file in the only namespace of `dir`.
fn slot_file(dir: &Path) -> std::path::PathBuf {
    let namespaces: Vec<_> = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(namespaces.len(), 1);
    namespaces[0].join("rank-0-of-1/slots.kvbm")
}

fn temp() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

#[test]
fn tenants_have_their_shares() {
    let dir = temp();
    let line = |tenant: &str, ids: &str| {
        format!(
            "{{\"timestamp\": 0, \"input_length\": 9, \"hash_ids\": [{ids}], \"tenant\": \"{tenant}\"}}\n"
        )
    };
    // What acme comes back to stays, however much beta asks for; the same ids of both are not the
    // same blocks.
    let noise: String = (1..30).map(|n| line("beta", &format!("{n}0, {n}1, {n}2, {n}3"))).collect();
    let trace = [line("acme", "10, 11, 12, 13"), noise, line("acme", "10, 11, 12, 13")].concat();
    std::fs::write(dir.path().join("t.jsonl"), trace).unwrap();
    let run_with = |options: &str| json(dir.path(), &format!("--trace t.jsonl --metadata-only {options}"));
    let shared = run_with("--capacity 16 --tenants acme=0.25,beta=0.75 --policy lru-leaf --concurrency 2");
    assert_eq!(hits(&shared), [4, 0, 0], "{shared:#}");
    let acme = &shared["tenants"]["acme"];
    assert_eq!(
        (number(acme, "/requests"), number(acme, "/hits"), &acme["hit_ratio"]),
        (2, 4, &Value::from(0.5))
    );
    assert_eq!(
        (number(acme, "/g1/limit"), number(acme, "/g1/blocks"), number(acme, "/g1/evicted")),
        (4, 4, 0)
    );
    assert_eq!(number(&shared, "/tenants/beta/g1/blocks"), 12);
    assert_eq!(number(&shared, "/tenants/(none)/g1/limit"), 0);
    let without = run_with("--capacity 16 --policy lru-leaf");
    assert_eq!(
        (hits(&without), without.get("tenants")),
        ([4, 0, 0], None),
        "one namespace: beta's block 10 is acme's"
    );

    let refused = run(dir.path(), "--trace t.jsonl --metadata-only --tenants acme=0.5");
    assert_eq!(refused.status.code(), Some(1));
    let message = text(&refused.stderr);
    assert!(message.contains("requests of 'beta'") && message.contains("--tenants"), "{message}");
    let refused = run(dir.path(), "--metadata-only --synthetic 9 --tenants a=0.6,b=0.6");
    assert_eq!(refused.status.code(), Some(2));
    assert!(text(&refused.stderr).contains("tenants.shares = 1.2 in all"), "{}", text(&refused.stderr));
    let made_up =
        json(dir.path(), "--metadata-only --synthetic 300 --capacity 300,600 --tenants a=0.5,b=0.3");
    let requests: u64 = ["a", "b"].map(|name| number(&made_up["tenants"][name], "/requests")).iter().sum();
    assert_eq!(requests, 300);
}

#[test]
fn a_trace_is_counted_block_by_block() {
    let dir = temp();
    std::fs::write(dir.path().join("t.jsonl"), TRACE).unwrap();
    for mode in ["", "--metadata-only", "--concurrency 3", "--offload drop"] {
        let json = json(dir.path(), &format!("--trace t.jsonl --block-bytes 512 --capacity 40,40,40 {mode}"));
        assert_eq!((number(&json, "/requests"), number(&json, "/blocks")), (3, 12), "{mode}");
        if mode != "--concurrency 3" {
            // Nothing of the first request, two blocks of the second, four of the third.
            assert_eq!(hits(&json), [6, 0, 0], "{mode}: {json:#}");
            assert_eq!(json["hit_ratio"], 0.5, "{mode}");
            // Of requests that run side by side any may end first.
            assert_eq!(json["hit_ratio_first_10pct"], 0.0, "{mode}");
        }
        let verified = if mode == "--metadata-only" { 0 } else { hits(&json).iter().sum() };
        assert_eq!(number(&json, "/verified_blocks"), verified, "{mode}");
        for nothing in ["/corrupt_blocks", "/failed_transfers", "/quarantined_blocks", "/offload_dropped"] {
            assert_eq!(number(&json, nothing), 0, "{mode}: {nothing}");
        }
        assert_eq!(json["capacity"], serde_json::json!([40, 40, 40]));
        assert_eq!(json["policy"], "hazard");
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "only the trace is left");
}

#[test]
fn tiers_of_any_size_serve_only_what_is_right() {
    let dir = temp();
    for capacity in
        ["5", "1,1,1", "100,0,0", "100,0,300", "3,200,0", "2,1,1", "50,2,2", "1,5,9", "60,20KiB,1MiB"]
    {
        for mode in ["--offload wait", "--offload drop --concurrency 4"] {
            let line = format!("--synthetic 40 --seed 3 --block-bytes 512 --capacity {capacity} {mode}");
            let json = json(dir.path(), &line);
            assert_eq!(number(&json, "/verified_blocks"), hits(&json).iter().sum::<u64>(), "{line}");
            let (onboarded, below) = (number(&json, "/onboarded_blocks"), hits(&json)[1] + hits(&json)[2]);
            if mode.contains("concurrency") {
                // Requests that want the same block at the same time share one transfer.
                assert!(below == 0 || onboarded > 0, "{line}: {json:#}");
            } else {
                assert!(onboarded >= below, "{line}: {json:#}");
            }
            let blocks = number(&json, "/blocks") as f64;
            let ratio = json["hit_ratio"].as_f64().unwrap() * blocks;
            assert!((ratio - hits(&json).iter().sum::<u64>() as f64).abs() < 1e-6, "{line}: {json:#}");
            for nothing in ["/corrupt_blocks", "/failed_transfers"] {
                assert_eq!(number(&json, nothing), 0, "{line}: {nothing}");
            }
        }
    }
}

#[test]
fn what_does_not_fit_is_reported() {
    let dir = temp();
    let output = run(dir.path(), "--synthetic 10 --block-bytes 512 --capacity 5");
    let table = text(&output.stdout);
    assert!(table.contains("blocks did not fit into G1"), "{table}");
    assert!(text(&output.stderr).contains("requests: 10 of 10"), "progress in plain lines");
    let output = run(dir.path(), "--synthetic 5 --block-bytes 512 --capacity 10,10,5 --dir kept");
    let message = text(&output.stderr);
    assert!(
        message.contains("the next run will not find them; where the last tier is full, give it"),
        "{message}"
    );
}

#[test]
fn without_bytes_nothing_is_written() {
    let dir = temp();
    for (mode, message) in
        [("", " MiB written to G3: "), ("--metadata-only", " MiB would be written to G3: ")]
    {
        let output = run(dir.path(), &format!("--synthetic 40 --capacity 50,100,2000 {mode}"));
        let table = text(&output.stdout);
        assert!(table.contains(message), "{table}");
    }
}

/// `--offload wait` promises the same figures from run to run, with bytes and without. Mutation
/// that makes it fail: do not wait between the onboard of a request and the registration of its new
/// blocks.
#[test]
fn runs_agree_with_and_without_bytes() {
    let dir = temp();
    let disk = "--synthetic 120 --seed 9 --block-bytes 512 --capacity 90,200,900 --policy lru-leaf";
    let no_disk = "--synthetic 120 --seed 9 --block-bytes 512 --capacity 90,900,0";
    let no_host = "--synthetic 120 --seed 9 --block-bytes 512 --capacity 90,0,900 --policy lru-leaf";
    for line in [disk, no_disk, no_host] {
        let without_bytes = json(dir.path(), &format!("{line} --metadata-only"));
        for _ in 0..3 {
            let with_bytes = json(dir.path(), line);
            for field in ["hits", "hit_ratio", "evictions", "onboarded_blocks", "offload_dropped"] {
                assert_eq!(with_bytes[field], without_bytes[field], "{field}, {line}");
            }
        }
        let tiers = hits(&without_bytes).map(|hits| hits > 0);
        assert_eq!(tiers, [true, line != no_host, line != no_disk], "{without_bytes:#}");
    }
}

#[test]
fn hits_are_reported_for_each_byte_that_the_disk_took() {
    let dir = temp();
    let disk = "--synthetic 120 --seed 9 --block-bytes 64KiB --policy lru-leaf --capacity";
    let tiers = ["90,200,900", "90,0,900"];
    for (tiers, mode) in tiers.into_iter().flat_map(|tiers| ["", "--metadata-only"].map(|mode| (tiers, mode)))
    {
        let json = json(dir.path(), &format!("{disk} {tiers} {mode}"));
        let path = if tiers == "90,0,900" { "g1_g3" } else { "g2_g3" };
        let written = number(&json, "/g3/bytes_written");
        assert_eq!(written, number(&json, &format!("/paths/{path}/blocks")) * (64 << 10), "{mode}");
        let per_gib = json["g3"]["hits_per_gib_written"].as_f64().unwrap();
        let expected = number(&json, "/hits/g3") as f64 * f64::from(1 << 30) / written as f64;
        assert!(written > 0 && per_gib > 0.0 && (per_gib / expected - 1.0).abs() < 1e-9, "{json:#}");
    }
    let json = json(dir.path(), "--synthetic 20 --block-bytes 64KiB --capacity 90,200,0");
    assert_eq!(json["g3"], serde_json::json!({"bytes_written": 0, "hits_per_gib_written": null}));
}

#[test]
fn a_kept_directory_is_found_again() {
    let dir = temp();
    let no_host = "--synthetic 60 --block-bytes 4KiB --capacity 50,0,2000 --dir without-host";
    assert!(hits(&json(dir.path(), no_host))[2] > 100, "what left the device is on disk");
    let again = json(dir.path(), no_host);
    assert_eq!(number(&again, "/verified_blocks"), hits(&again).iter().sum::<u64>());
    assert_eq!(number(&again, "/verified_blocks"), number(&again, "/blocks"), "all were saved");
    let line = "--synthetic 60 --block-bytes 4KiB --capacity 50,100,2000 --dir kept";
    let (first, second) = (json(dir.path(), line), json(dir.path(), line));
    assert!(hits(&second)[2] > hits(&first)[2] + 100, "{first:#} {second:#}");
    assert_eq!(number(&second, "/verified_blocks"), hits(&second).iter().sum::<u64>());
    let output = run(dir.path(), &line.replace("4KiB", "8KiB"));
    assert_eq!(output.status.code(), Some(1));
    let message = text(&output.stderr);
    assert!(message.contains("block_bytes = 4096, configured is 8192"), "{message}");
    assert_eq!(message.matches("choose another directory").count(), 1, "said once: {message}");
}

/// Ids of another trace name other blocks. Mutation that makes it fail: a block's hash is that of
/// its id alone.
#[test]
fn other_workloads_share_a_directory_too() {
    let dir = temp();
    let line = "--synthetic 60 --block-bytes 4KiB --capacity 50,100,2000 --dir kept --seed";
    for seed in [1, 2, 1] {
        let result = json(dir.path(), &format!("{line} {seed}"));
        for field in ["/corrupt_blocks", "/failed_transfers", "/quarantined_blocks"] {
            assert_eq!(number(&result, field), 0, "{field} of {result:#}");
        }
    }
}

#[test]
fn other_namespaces_share_a_directory_and_no_block() {
    let dir = temp();
    let line = "--synthetic 60 --block-bytes 4KiB --capacity 50,100,2000 --dir kept";
    let first = json(dir.path(), line);
    let other = json(dir.path(), &format!("{line} --namespace other"));
    assert_eq!(other["hits"], first["hits"], "as on an empty disk");
    let second = json(dir.path(), line);
    assert!(hits(&second)[2] > hits(&first)[2] + 100, "{first:#} {second:#}");
    assert_eq!(number(&second, "/failed_transfers"), 0);
}

/// Requests that find almost nothing in an empty cache: long prompts over one common block. In the
/// second half every other one comes back to one of the first half, and asks for more.
fn long_prompts(requests: u64) -> String {
    let ids = |session: u64, len: u64| {
        let own = (1..len).map(|at| format!(", {}", session * 1000 + at));
        format!("[0{}]", own.collect::<String>())
    };
    let line = |at: u64| {
        let (session, len) = match at.checked_sub(requests / 2) {
            Some(late) if late % 2 == 1 => (late, 30),
            _ => (at, 24),
        };
        let (tokens, ids) = (len * 512, ids(session + 1, len));
        format!(
            "{{\"timestamp\": 0, \"input_length\": {tokens}, \"output_length\": 9, \"hash_ids\": {ids}}}\n"
        )
    };
    (0..requests).map(line).collect()
}

/// The runs of the tests below: the disk holds everything, the tiers above it a small part.
const LONG_PROMPTS: &str =
    "--trace long.jsonl --block-bytes 4KiB --capacity 200,400,12000 --dir kept --flush-every 60";

fn first_tenth(json: &Value) -> f64 {
    json["hit_ratio_first_10pct"].as_f64().unwrap()
}

/// Runs `LONG_PROMPTS` again, behind a run that had made durable what the first tenth of the
/// requests asked for.
fn assert_served_from_the_first_request_on(dir: &Path) {
    let json = json(dir, LONG_PROMPTS);
    assert!(first_tenth(&json) >= 0.95, "{json:#}");
    assert_eq!(number(&json, "/verified_blocks"), hits(&json).iter().sum::<u64>(), "{json:#}");
    assert_eq!((number(&json, "/corrupt_blocks"), number(&json, "/failed_transfers")), (0, 0), "{json:#}");
}

#[test]
fn a_second_run_is_served_from_its_first_request_on() {
    let dir = temp();
    std::fs::write(dir.path().join("long.jsonl"), long_prompts(300)).unwrap();
    let first = json(dir.path(), LONG_PROMPTS);
    assert!(first_tenth(&first) <= 0.05, "{first:#}");
    assert_served_from_the_first_request_on(dir.path());
}

#[test]
fn what_was_flushed_survives_kill_9() {
    let dir = temp();
    std::fs::write(dir.path().join("long.jsonl"), long_prompts(300)).unwrap();
    // Again and again, so that it is still at it when it is killed.
    std::fs::write(dir.path().join("longer.jsonl"), long_prompts(300).repeat(20)).unwrap();
    let mut running = Running::start(dir.path(), &LONG_PROMPTS.replace("long.jsonl", "longer.jsonl"));
    let stderr = running.line_with("flushed after 60 requests");
    running.child.kill().unwrap();
    let ended = running.child.wait().unwrap();
    assert_eq!(ended.signal(), Some(9), "it was still running: {ended}");
    let durable: u64 = stderr.split(' ').nth(4).unwrap().parse().unwrap();
    assert!(durable > 60 * 22, "{stderr}");
    assert_served_from_the_first_request_on(dir.path());
}

#[test]
fn planted_faults_are_counted_and_never_served() {
    let dir = temp();
    let line = "--synthetic 60 --block-bytes 4KiB --capacity 50,100,2000 --dir kept";
    let healthy = json(dir.path(), line);
    let slots = slot_file(&dir.path().join("kept"));
    let mut bytes = std::fs::read(&slots).unwrap();
    // One bit in every fourth block.
    for block in bytes.chunks_mut(4 << 12) {
        let middle = block.len() / 2;
        block[middle] ^= 0x10;
    }
    std::fs::write(&slots, bytes).unwrap();

    let output = run(dir.path(), &format!("{line} --json -"));
    assert_eq!(output.status.code(), Some(0), "damage is a miss: {}", text(&output.stderr));
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(number(&json, "/corrupt_blocks"), 0, "{json:#}");
    assert_eq!(number(&json, "/verified_blocks"), hits(&json).iter().sum::<u64>(), "{json:#}");
    assert!(number(&json, "/failed_transfers") > 0 && number(&json, "/quarantined_blocks") > 0, "{json:#}");
    assert!(number(&json, "/blocks") == number(&healthy, "/blocks"), "every request was served");
    let stderr = text(&output.stderr);
    assert!(stderr.contains("corrupt") && stderr.contains("only counted"), "{stderr}");
}

#[test]
fn failures_say_what_to_do() {
    let dir = temp();
    std::fs::write(dir.path().join("bad.jsonl"), format!("{TRACE}{{\"timestamp\": 1}}\n")).unwrap();
    std::fs::write(dir.path().join("t.jsonl"), TRACE).unwrap();
    for (line, status, message) in [
        ("--trace bad.jsonl", 1, "bad.jsonl:4: missing field `input_length`"),
        ("--trace none.jsonl", 1, "cannot read the trace none.jsonl: No such file"),
        ("--synthetic 5 --block-bytes 1000", 2, "not a multiple of 512"),
        ("--trace t.jsonl --report no/such/r.html", 1, "create the directory no/such first"),
        ("--trace t.jsonl --json .", 1, "it is a directory"),
        ("--trace t.jsonl --dir t.jsonl", 1, "name a directory that this process may read and write"),
        ("--trace t.jsonl --capacity 1000000GiB", 2, "device.capacity"),
        ("--synthetic 0", 2, "from 1 to 10000000"),
        ("--trace t.jsonl --policy nothing", 2, "possible values: lru-leaf"),
        ("--trace t.jsonl --dir d --metadata-only", 2, "cannot be used with"),
    ] {
        let output = run(dir.path(), line);
        assert_eq!(output.status.code(), Some(status), "{line}: {}", text(&output.stderr));
        let stderr = text(&output.stderr);
        assert!(stderr.contains(message), "{line}: {stderr}");
        assert!(output.stdout.is_empty(), "{line}");
    }
}

#[test]
fn json_and_report_are_files_and_the_table_stays_on_standard_output() {
    let dir = temp();
    let output = run(dir.path(), "--synthetic 30 --block-bytes 512 --json r.json --report r.html");
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let table = text(&output.stdout);
    assert!(table.contains("hit ratio") && table.contains("report: r.html"), "{table}");
    let json: Value = serde_json::from_slice(&std::fs::read(dir.path().join("r.json")).unwrap()).unwrap();
    assert_eq!(number(&json, "/requests"), 30);
    let html = std::fs::read_to_string(dir.path().join("r.html")).unwrap();
    assert!(html.starts_with("<!doctype html>") && html.contains("<svg"), "{}", &html[..200.min(html.len())]);
    for outside in ["src=", "<link", "@import", "url("] {
        assert!(!html.contains(outside), "the report needs nothing else: {outside}");
    }
}

/// A replay that takes until it is stopped, and the lines of its standard error.
struct Running {
    child: Child,
    lines: std::io::Lines<BufReader<std::process::ChildStderr>>,
}

impl Running {
    fn start(dir: &Path, line: &str) -> Self {
        let mut child = command(dir, line).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stderr.take().unwrap()).lines();
        Self { child, lines }
    }

    /// The first line that has `part`.
    fn line_with(&mut self, part: &str) -> String {
        self.lines.by_ref().map(Result::unwrap).find(|line| line.contains(part)).unwrap()
    }

    fn terminate(&self) {
        let id = self.child.id().to_string();
        assert!(Command::new("kill").arg(&id).status().unwrap().success());
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ended = self.child.kill();
        let _status = self.child.wait();
    }
}

fn get(url: &str) -> String {
    let (address, path) = url.strip_prefix("http://").unwrap().split_once('/').unwrap();
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    write!(stream, "GET /{path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn metrics_answer_during_a_run_and_a_signal_ends_it_cleanly() {
    let dir = temp();
    let line = "--synthetic 100000 --block-bytes 512 --capacity 50,100,2000 --metrics 0";
    let mut running = Running::start(dir.path(), line);
    let url = running.line_with("metrics: http://127.0.0.1:").replace("metrics: ", "");
    let deadline = Instant::now() + DEADLINE;
    loop {
        let answer = get(&url);
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        let offloaded = |line: &str| {
            line.starts_with("kvbm_transfer_blocks_total{path=\"g1_g2\"")
                && line.rsplit(' ').next().is_some_and(|count| count != "0")
        };
        if answer.lines().any(offloaded) {
            break;
        }
        assert!(Instant::now() < deadline, "no block of G1 -> G2 is counted: {answer}");
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "the temporary G3");
    running.terminate();
    let stderr = running.line_with("kvbm: interrupted at request");
    assert!(stderr.ends_with("of 100000"), "{stderr}");
    assert_eq!(running.child.wait().unwrap().code(), Some(1));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "nothing is left behind");
}

#[test]
fn without_arguments_the_demo_runs_through_all_tiers_and_writes_its_report() {
    let dir = temp();
    let output = Command::new(env!("CARGO_BIN_EXE_kvbm"))
        .current_dir(dir.path())
        .env("TMPDIR", dir.path())
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let table = text(&output.stdout);
    for part in ["G1 device", "G2 host", "G3 disk", "G3 -> G1", "corrupt blocks 0, failed transfers 0"] {
        assert!(table.contains(part), "{part}: {table}");
    }
    let left: Vec<_> =
        std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["kvbm-report.html"]);
}

#[cfg(feature = "nats")]
#[test]
fn events_that_nobody_took_are_reported_and_the_replay_is_done_all_the_same() {
    let dir = temp();
    std::fs::write(dir.path().join("t.jsonl"), TRACE).unwrap();
    // Nobody listens on port 9.
    let line =
        "--trace t.jsonl --metadata-only --capacity 40 --events nats://me:word@127.0.0.1:9 --json t.json";
    let output = run(dir.path(), line);
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("of 6 events 6 were not published and 0 are lost"), "{stderr}");
    assert!(!stderr.contains("word"), "{stderr}");
    let json: Value = serde_json::from_slice(&std::fs::read(dir.path().join("t.json")).unwrap()).unwrap();
    assert_eq!((number(&json, "/events/published"), number(&json, "/events/unpublished")), (0, 6));
    assert_eq!(json["events"]["held"], serde_json::json!([6, 0, 0]));
}

#[test]
fn an_unknown_transport_is_named() {
    let dir = temp();
    let output = run(dir.path(), "--events pigeon://coop");
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("there is no transport 'pigeon'; known are nats"));
}
