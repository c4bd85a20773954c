//! Our prefix index (`KvIndex` of `kvbm-events`) and the strongest public peer's three
//! (`dynamo-kv-router` 1.6.1) on the same generated workload in one run:
//! `cargo xtask bench-peers index --json FILE`.
//!
//! `store_1` takes events of one block, as kvbm tells them (`KvIndex::apply`); `store_16` takes
//! events of sixteen blocks of a chain, as engines tell them (`KvIndex::store`), the same for all.
//! Every worker holds every block: sequences of 128 blocks, eight of which share their first 32.
//! Figures are of one thread's CPU time and end when every update is applied. Every event owns one
//! piece of heap memory, made outside the clock and freed inside it, on both sides. `ratio`
//! compares ours with the best of the peer's three; above 1 means that ours is better. Trust
//! ratios, not absolute figures.

mod clock;
mod heap;
mod ours;
mod peer;
mod workload;

use clock::median;
use dynamo_kv_router::{ConcurrentRadixTreeCompressed, RadixTree};
use peer::{Chains, Indexer, Positional};
use serde_json::{Map, Value, json};
use workload::Workload;

#[global_allocator]
static HEAP: heap::Counting = heap::Counting;

const USAGE: &str = "usage: bench-peers-index [--json FILE] [--rounds N] [--blocks N] [--workers N]\n\n\
  --json FILE  where the rows go (`-`: standard output)\n\
  --rounds N   repetitions of every measurement, 1 to 99 (default 3)\n\
  --blocks N   blocks that each worker holds, 1000 to 4000000 (default 1000000: the rows' names mean that)\n\
  --workers N  workers of the rows with many, 2 to 64 (default 16: the rows' names mean that)\n";

struct Options {
    json: Option<String>,
    rounds: usize,
    blocks: usize,
    workers: usize,
}

fn options(mut args: impl Iterator<Item = String>) -> Result<Options, String> {
    let mut options = Options { json: None, rounds: 3, blocks: 1_000_000, workers: 16 };
    while let Some(name) = args.next() {
        let value = args.next().ok_or(format!("`{name}` needs a value, or is unknown"))?;
        let number = |low: usize, high: usize| {
            let in_range = value.parse().ok().filter(|n| (low..=high).contains(n));
            in_range.ok_or(format!("`{name} {value}`: give a number from {low} to {high}"))
        };
        match name.as_str() {
            "--json" => options.json = Some(value),
            "--rounds" => options.rounds = number(1, 99)?,
            "--blocks" => options.blocks = number(1_000, 4_000_000)?,
            "--workers" => options.workers = number(2, 64)?,
            _ => return Err(format!("unknown option `{name}`")),
        }
    }
    Ok(options)
}

/// What one index has shown, by the name of the row.
#[derive(Default)]
struct Figures(Vec<(String, Vec<f64>)>);

impl Figures {
    fn note(&mut self, name: impl Into<String>, value: f64) {
        let name = name.into();
        match self.0.iter_mut().find(|(known, _)| *known == name) {
            Some((_, values)) => values.push(value),
            None => self.0.push((name, vec![value])),
        }
    }

    fn median(&self, name: &str) -> f64 {
        let values = self.0.iter().find(|(known, _)| known == name).map_or(Vec::new(), |(_, v)| v.clone());
        median(values)
    }
}

/// Bytes per (block, worker) of what `build` leaves behind, counted at the allocator, beside what
/// it returns.
fn with_bytes<T>(work: &Workload, build: impl FnOnce() -> T) -> (T, f64) {
    heap::count(true);
    let before = heap::live_bytes();
    let built = build();
    let bytes = heap::live_bytes() - before;
    heap::count(false);
    (built, bytes as f64 / work.holdings() as f64)
}

const QUERIES: usize = 300_000;

/// One round of ours.
fn round_ours(work: &Workload, suffix: &str, figures: &mut Figures) {
    let chains = ours::Chains::new(work);
    for per_event in [1, 16] {
        let (index, seconds) = chains.store(work, per_event);
        figures.note(format!("store_{per_event}{suffix}"), work.holdings() as f64 / seconds / 1e6);
        if per_event == 1 {
            let seconds = ours::find(work, &chains, &index, QUERIES);
            figures.note(format!("find_128{suffix}"), QUERIES as f64 / seconds / 1e6);
        }
    }
}

/// One round of a peer.
fn round_peer<I: Indexer>(work: &Workload, chains: &Chains, suffix: &str, figures: &mut Figures) {
    for per_event in [1, 16] {
        let (index, seconds) = I::store(work, chains, per_event);
        figures.note(format!("store_{per_event}{suffix}"), work.holdings() as f64 / seconds / 1e6);
        if per_event == 1 {
            let seconds = index.find(work, chains, QUERIES);
            figures.note(format!("find_128{suffix}"), QUERIES as f64 / seconds / 1e6);
        }
    }
}

fn bytes_peer<I: Indexer>(work: &Workload, chains: &Chains, suffix: &str, figures: &mut Figures) {
    let (_index, bytes) = with_bytes(work, || I::store(work, chains, 1).0);
    figures.note(format!("index_bytes{suffix}"), bytes);
}

const SIDES: [&str; 4] = ["ours", RadixTree::NAME, Positional::NAME, ConcurrentRadixTreeCompressed::NAME];

fn measure(options: &Options) -> [Figures; 4] {
    let mut figures: [Figures; 4] = Default::default();
    for (workers, suffix) in [(1, "_1_worker"), (options.workers, "")] {
        let work = Workload::new(options.blocks, workers);
        let chains = Chains::new(&work);
        for round in 1..=options.rounds {
            eprintln!("{workers} workers, round {round} of {}", options.rounds);
            // Another one goes first in each round: the first pays for a cold cache.
            for turn in 0..figures.len() {
                let side = (round + turn) % figures.len();
                let figures = &mut figures[side];
                match side {
                    0 => round_ours(&work, suffix, figures),
                    1 => round_peer::<RadixTree>(&work, &chains, suffix, figures),
                    2 => round_peer::<Positional>(&work, &chains, suffix, figures),
                    _ => round_peer::<ConcurrentRadixTreeCompressed>(&work, &chains, suffix, figures),
                }
            }
        }
        let of_ours = ours::Chains::new(&work);
        let (_index, bytes) = with_bytes(&work, || of_ours.store(&work, 1).0);
        figures[0].note(format!("index_bytes{suffix}"), bytes);
        bytes_peer::<RadixTree>(&work, &chains, suffix, &mut figures[1]);
        bytes_peer::<Positional>(&work, &chains, suffix, &mut figures[2]);
        bytes_peer::<ConcurrentRadixTreeCompressed>(&work, &chains, suffix, &mut figures[3]);
    }
    figures
}

fn rows(options: &Options, figures: &[Figures; 4]) -> Vec<Value> {
    eprintln!(
        "{:22} {:>12} {}",
        "",
        "ours",
        SIDES[1..].iter().map(|s| format!("{s:>22}")).collect::<String>()
    );
    let mut rows = Vec::new();
    for suffix in ["_1_worker", ""] {
        for (name, unit) in [
            ("store_1", "M blocks/s"),
            ("store_16", "M blocks/s"),
            ("find_128", "M queries/s"),
            ("index_bytes", "bytes per (block, worker)"),
        ] {
            let name = format!("{name}{suffix}");
            let values: Vec<f64> = figures.iter().map(|side| side.median(&name)).collect();
            let less_is_better = name.starts_with("index_bytes");
            let best =
                values[1..].iter().copied().reduce(|a, b| if less_is_better { a.min(b) } else { a.max(b) });
            let best = best.unwrap_or(f64::NAN);
            let ratio = if less_is_better { best / values[0] } else { values[0] / best };
            let cells: String = values[1..].iter().map(|value| format!("{value:>22.3}")).collect();
            eprintln!("{name:22} {:>12.3} {cells}  {unit}, {ratio:.2} x the best", values[0]);
            let mut row = Map::new();
            row.insert("name".into(), json!(name));
            row.insert("unit".into(), json!(unit));
            row.insert("workers".into(), json!(if suffix.is_empty() { options.workers } else { 1 }));
            row.extend(SIDES.iter().zip(&values).map(|(side, value)| ((*side).to_owned(), json!(value))));
            row.insert("best_peer".into(), json!(best));
            row.insert("ratio".into(), json!(ratio));
            rows.push(Value::Object(row));
        }
    }
    rows
}

fn main() {
    let options = options(std::env::args().skip(1)).unwrap_or_else(|error| {
        eprintln!("error: {error}\n\n{USAGE}");
        std::process::exit(2);
    });
    let figures = measure(&options);
    let report = json!({
        "benchmark": "index",
        "blocks": options.blocks,
        "workers": options.workers,
        "rounds": options.rounds,
        "rows": rows(&options, &figures),
    });
    let text = format!("{report:#}\n");
    match options.json.as_deref() {
        None => {}
        Some("-") => print!("{text}"),
        Some(file) => std::fs::write(file, text).unwrap_or_else(|error| {
            eprintln!("error: cannot write {file}: {error}");
            std::process::exit(1);
        }),
    }
}
