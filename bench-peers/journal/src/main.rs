//! The index of our disk tier (`kvbm-disk`: a checksummed log with snapshots, a table in memory)
//! and redb 4.4.0 (copy-on-write B-trees in a file) as the durable index of the same slots, in one
//! run: `cargo xtask bench-peers journal --json FILE`.
//!
//! `insert` makes every slot's block durable in the order of slots, `replace` overwrites every slot
//! once in random order. Ours goes through the whole engine, on a medium whose slot file takes no
//! bytes; redb gets the bare entries, keyed by slot, the best order for a tree, in transactions of
//! as many entries as our commits had in the same run. `recover` opens the index that is left after
//! a shutdown and reads all entries into memory, in order of age; `recover_killed` opens a copy
//! that was made before the shutdown, as `kill -9` leaves it. `size` is taken when every slot was
//! filled once, with redb compacted; `size_replaced` at the end, with neither compacted. `ratio`
//! above 1 means that ours is better. Trust ratios, not absolute figures.

mod blocks;
mod ours;
mod peer;
// As `kvbm bench index` measures it.
#[path = "../../../crates/kvbm-cli/src/bench/index/null_file.rs"]
mod null_file;

use serde_json::{Value, json};
use std::error::Error;
use std::path::{Path, PathBuf};
use std::time::Duration;

type Outcome<T> = Result<T, Box<dyn Error>>;

const USAGE: &str = "usage: bench-peers-journal [--json FILE] [--rounds N] [--entries N] [--dir DIR]\n\n\
  --json FILE  where the rows go (`-`: standard output)\n\
  --rounds N   repetitions of every measurement, 1 to 99 (default 3); the best of each side counts\n\
  --entries N  slots, 1000 to 4000000 (default 1000000)\n\
  --dir DIR    directory on the disk to measure (default: the system's temporary one)\n";

struct Options {
    json: Option<PathBuf>,
    rounds: usize,
    entries: u32,
    dir: PathBuf,
}

fn options(mut args: impl Iterator<Item = String>) -> Result<Options, String> {
    let mut options = Options { json: None, rounds: 3, entries: 1_000_000, dir: std::env::temp_dir() };
    while let Some(name) = args.next() {
        let value = args.next().ok_or(format!("`{name}` needs a value, or is unknown"))?;
        let number = |low: u32, high: u32| {
            let in_range = value.parse().ok().filter(|n| (low..=high).contains(n));
            in_range.ok_or(format!("`{name} {value}`: give a number from {low} to {high}"))
        };
        match name.as_str() {
            "--json" => options.json = Some(value.into()),
            "--rounds" => options.rounds = number(1, 99)? as usize,
            "--entries" => options.entries = number(1_000, 4_000_000)?,
            "--dir" => options.dir = value.into(),
            _ => return Err(format!("unknown option `{name}`")),
        }
    }
    Ok(options)
}

/// What one side took in one round.
struct Round {
    insert: Duration,
    replace: Duration,
    recover: Duration,
    recover_killed: Duration,
    /// On disk, after all slots were filled once.
    bytes: u64,
    /// On disk at the end.
    bytes_replaced: u64,
}

/// Bytes of a file.
fn length(file: &Path) -> Outcome<u64> {
    Ok(std::fs::metadata(file)?.len())
}

fn measure(options: &Options) -> Outcome<(Vec<Round>, Vec<Round>, f64)> {
    let (mut ours, mut theirs, mut per_commit) = (Vec::new(), Vec::new(), 0.0);
    for round in 1..=options.rounds {
        eprintln!("round {round} of {}", options.rounds);
        let folder = tempfile::Builder::new().prefix("bench-journal-").tempdir_in(&options.dir)?;
        let (own, commits) = ours::round(&folder.path().join("ours"), options.entries)?;
        ours.push(own);
        per_commit = f64::from(options.entries) / commits as f64;
        theirs.push(peer::round(folder.path(), options.entries, per_commit.ceil() as u32)?);
    }
    Ok((ours, theirs, per_commit))
}

type Take = fn(&Round) -> Duration;
type Size = (&'static str, fn(&Round) -> u64);

fn rows(entries: u32, ours: &[Round], theirs: &[Round]) -> Vec<Value> {
    let timed: [(&str, Take); 4] = [
        ("insert", |round| round.insert),
        ("replace", |round| round.replace),
        ("recover", |round| round.recover),
        ("recover_killed", |round| round.recover_killed),
    ];
    let best = |rounds: &[Round], of: Take| rounds.iter().map(of).min().unwrap_or_default().as_secs_f64();
    let mut rows: Vec<Value> = timed
        .into_iter()
        .map(|(name, of)| {
            let (own, peer) = (best(ours, of), best(theirs, of));
            let rate = |seconds: f64| f64::from(entries) / seconds;
            json!({
                "name": name, "entries": entries,
                "seconds": own, "peer_seconds": peer,
                "entries_per_s": rate(own), "peer_entries_per_s": rate(peer), "ratio": peer / own,
            })
        })
        .collect();
    let sizes: [Size; 2] = [("size", |round| round.bytes), ("size_replaced", |round| round.bytes_replaced)];
    rows.extend(sizes.into_iter().map(|(name, of)| {
        let least = |rounds: &[Round]| rounds.iter().map(of).min().unwrap_or_default();
        let [own, peer] = [least(ours), least(theirs)].map(|bytes| bytes as f64 / f64::from(entries));
        json!({
            "name": name, "entries": entries,
            "bytes_per_entry": own, "peer_bytes_per_entry": peer, "ratio": peer / own,
        })
    }));
    rows
}

fn run(options: &Options) -> Outcome<()> {
    let (ours, theirs, per_commit) = measure(options)?;
    let rows = rows(options.entries, &ours, &theirs);
    eprintln!("{:16} {:>14} {:>14} {:>8}", "", "ours", "redb", "ratio");
    for row in &rows {
        let figure = |field: &str| row[field].as_f64();
        let (own, peer) = match (figure("entries_per_s"), figure("peer_entries_per_s")) {
            (Some(own), Some(peer)) => (format!("{:.2} M/s", own / 1e6), format!("{:.2} M/s", peer / 1e6)),
            _ => {
                let bytes = |field| format!("{:.1} B", figure(field).unwrap_or(f64::NAN));
                (bytes("bytes_per_entry"), bytes("peer_bytes_per_entry"))
            }
        };
        let name = row["name"].as_str().unwrap_or_default();
        eprintln!("{name:16} {own:>14} {peer:>14} {:>8.2}", figure("ratio").unwrap_or(f64::NAN));
    }
    let report = json!({
        "benchmark": "journal", "peer": "redb 4.4.0", "rounds": options.rounds,
        "entries_per_commit": per_commit, "rows": rows,
    });
    let text = format!("{report:#}\n");
    match options.json.as_deref() {
        None => {}
        Some(file) if file == Path::new("-") => print!("{text}"),
        Some(file) => {
            std::fs::write(file, text).map_err(|error| format!("cannot write {}: {error}", file.display()))?
        }
    }
    Ok(())
}

fn main() {
    let options = options(std::env::args().skip(1)).unwrap_or_else(|error| {
        eprintln!("error: {error}\n\n{USAGE}");
        std::process::exit(2);
    });
    if let Err(error) = run(&options) {
        eprintln!("error: {error}");
        std::process::exit(1);
    }
}
