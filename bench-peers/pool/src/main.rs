//! Our block bookkeeping (`kvbm-pool`, `kvbm-tokens`) and the strongest public peer's
//! (`kvbm-logical`, `dynamo-tokens` 1.6.1, default back end) on the same generated workloads in one
//! run: `cargo xtask bench-peers pool --json FILE`.
//!
//! Repetitions of the two sides alternate, each goes first in every other round, and rows give
//! medians. Figures of one thread are thread CPU time; those of two threads are wall time. `ratio`
//! above 1 means that ours is better. Trust ratios, not absolute figures.

mod clock;
mod heap;
mod manager;
mod ours;
mod peer;
mod plot;
mod requests;
mod rows;
mod side;
mod tokens;

use clock::median;
use kvbm_pool::{Hazard, PolicyKind};
use ours::Ours;
use peer::{BackEnd, Peer};
use rows::Full;
use serde_json::{Value, json};
use side::Side;

#[global_allocator]
static HEAP: heap::Counting = heap::Counting;

const USAGE: &str = "usage: bench-peers-pool [--json FILE] [--rounds N] [--blocks N] [--only GROUPS] [--with FILE] [--plot FILE]\n\n\
  --json FILE    where the rows go (`-`: standard output)\n\
  --rounds N     repetitions of every measurement, 1 to 99 (default 5)\n\
  --blocks N     blocks of the large pool, 20000 to 4000000 (default 1000000: the rows' names mean that)\n\
  --only GROUPS  measures these alone, of: hash,heap,match,fill,small,large,default,backends,manager,requests (or none)\n\
  --with FILE    rows that are not measured now are those of this earlier report\n\
  --plot FILE    draws the ratios as an SVG\n  \
  --table FILE   writes all rows as a table in Markdown\n";

/// Measures one of the groups.
type Rows = fn(&mut Table, &Options);

/// What is measured together.
const GROUPS: [&str; 11] =
    ["hash", "heap", "match", "fill", "small", "large", "default", "backends", "manager", "requests", "none"];

struct Options {
    json: Option<String>,
    rounds: usize,
    blocks: usize,
    only: Vec<String>,
    with: Option<String>,
    plot: Option<String>,
    table: Option<String>,
}

impl Options {
    fn wants(&self, group: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|only| only == group)
    }
}

fn options(mut args: impl Iterator<Item = String>) -> Result<Options, String> {
    let mut options = Options {
        json: None,
        rounds: 5,
        blocks: 1_000_000,
        only: Vec::new(),
        with: None,
        plot: None,
        table: None,
    };
    while let Some(name) = args.next() {
        let value = args.next().ok_or(format!("`{name}` needs a value, or is unknown"))?;
        let number = |low: usize, high: usize| {
            let in_range = value.parse().ok().filter(|n| (low..=high).contains(n));
            in_range.ok_or(format!("`{name} {value}`: give a number from {low} to {high}"))
        };
        match name.as_str() {
            "--json" => options.json = Some(value),
            "--with" => options.with = Some(value),
            "--plot" => options.plot = Some(value),
            "--table" => options.table = Some(value),
            "--only" => {
                options.only = value.split(',').map(str::to_owned).collect();
                if let Some(unknown) = options.only.iter().find(|name| !GROUPS.contains(&name.as_str())) {
                    return Err(format!("`--only {unknown}`: give some of {}", GROUPS.join(",")));
                }
            }
            "--rounds" => options.rounds = number(1, 99)?,
            "--blocks" => options.blocks = number(20_000, 4_000_000)?,
            _ => return Err(format!("unknown option `{name}`")),
        }
    }
    Ok(options)
}

/// The rows as they come.
#[derive(Default)]
struct Table {
    rows: Vec<Value>,
}

impl Table {
    fn row(&mut self, name: &str, unit: &str, ours: f64, peer: Option<f64>, ratio: Option<f64>) {
        let cell = |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{value:.3}"));
        eprintln!("{name:26} {unit:14} {:>12} {:>12} {:>9}", cell(Some(ours)), cell(peer), cell(ratio));
        self.rows.push(json!({ "name": name, "unit": unit, "ours": ours, "peer": peer, "ratio": ratio }));
    }

    /// More is better.
    fn rate(&mut self, name: &str, ours: Vec<f64>, peer: Vec<f64>) {
        let (ours, peer) = (median(ours), median(peer));
        self.row(name, "M/s", ours, Some(peer), Some(ours / peer));
    }

    /// Less is better.
    fn time(&mut self, name: &str, ours: Vec<f64>, peer: Vec<f64>) {
        let (ours, peer) = (median(ours), median(peer));
        self.row(name, "us", ours, Some(peer), Some(peer / ours));
    }
}

impl Table {
    /// Adds the rows of an earlier report that were not measured now.
    fn take_over(&mut self, file: &str) -> Result<(), Box<dyn std::error::Error>> {
        let earlier: Value = serde_json::from_str(&std::fs::read_to_string(file)?)?;
        let rows = earlier["rows"].as_array().ok_or(format!("`{file}` has no rows"))?;
        for row in rows {
            if !self.rows.iter().any(|known| known["name"] == row["name"]) {
                self.rows.push(row.clone());
            }
        }
        Ok(())
    }
}

/// Both sides in turn, `rounds` times; each goes first in every other round.
fn alternate(rounds: usize, mut ours: impl FnMut() -> f64, mut peer: impl FnMut() -> f64) -> [Vec<f64>; 2] {
    let mut times = [Vec::new(), Vec::new()];
    for round in 0..rounds {
        for side in [round % 2, (round + 1) % 2] {
            times[side].push(if side == 0 { ours() } else { peer() });
        }
    }
    times
}

fn fill<S: Side>(capacity: usize) -> f64 {
    let (_, seconds) = Full::fill(S::new(capacity), capacity, rows::BATCH);
    capacity as f64 / seconds / 1e6
}

fn filling(table: &mut Table, options: &Options) {
    let [a, b] = alternate(options.rounds, || fill::<Ours>(options.blocks), || fill::<Peer>(options.blocks));
    table.rate("fill_1m", a, b);
}

fn full<S: Side>(capacity: usize) -> Full<S> {
    Full::fill(S::new(capacity), capacity, rows::BATCH).0
}

fn full_of(policy: PolicyKind, capacity: usize) -> Full<Ours> {
    Full::fill(Ours::with_policy(capacity, policy), capacity, rows::BATCH).0
}

fn small(table: &mut Table, options: &Options) {
    for (name, capacity) in [("churn_10k", 10_000), ("churn_100k", options.blocks.min(100_000))] {
        let (mut ours, mut peer) = (full::<Ours>(capacity), full::<Peer>(capacity));
        let [a, b] = alternate(options.rounds, || ours.churn(200_000), || peer.churn(200_000));
        table.rate(name, a, b);
    }
}

fn large(table: &mut Table, options: &Options) {
    let (rounds, large) = (options.rounds, options.blocks);
    let (mut ours, mut peer) = (full::<Ours>(large), full::<Peer>(large));
    let [a, b] = alternate(rounds, || ours.churn(large / 2), || peer.churn(large / 2));
    table.rate("churn_1m", a, b);
    for at_once in [1, 32, 1024] {
        let [a, b] = alternate(rounds, || ours.evict(at_once, 100_000), || peer.evict(at_once, 100_000));
        table.rate(&format!("evict_{at_once}_1m"), a, b);
    }
    let [a, b] = alternate(rounds, || ours.single(100_000), || peer.single(100_000));
    table.rate("single_block_1m", a, b);
    let [a, b] = alternate(rounds, || ours.miss(), || peer.miss());
    table.time("miss_128_1m", a, b);
    table.row("lock_hold_p999_us", "us", ours.hold(50_000), None, None);
    ours.churn(large / 10);
    let (a, b) = (ours.allocations(100_000), peer.allocations(100_000));
    table.row("allocs_per_block", "calls/block", a, Some(b), (a > 0.0).then(|| b / a));
}

/// The policy that ships as the default.
const DEFAULT: PolicyKind = PolicyKind::Hazard;

fn default_policy(table: &mut Table, options: &Options) {
    let (rounds, large) = (options.rounds, options.blocks);
    let (mut ours, mut peer) = (full_of(DEFAULT, large), full::<Peer>(large));
    let [a, b] = alternate(rounds, || ours.churn(large / 2), || peer.churn(large / 2));
    table.rate("churn_1m_default", a, b);
    let [a, b] = alternate(rounds, || ours.evict(1024, 100_000), || peer.evict(1024, 100_000));
    table.rate("evict_1024_1m_default", a, b);
    table.row("lock_hold_p999_us_default", "us", ours.hold(50_000), None, None);
    table.row("history_bytes", "bytes", Hazard::HISTORY_BYTES as f64, None, None);
}

/// The peer's other back ends, beside the policy of ours that orders blocks as they do.
fn back_ends(table: &mut Table, options: &Options) {
    for (suffix, back_end) in BackEnd::OTHERS {
        let new = || Peer::with_back_end(options.blocks, back_end);
        let mut ours = full::<Ours>(options.blocks);
        let mut peer = Full::fill(new(), options.blocks, rows::BATCH).0;
        let blocks = options.blocks / 2;
        let [a, b] = alternate(options.rounds, || ours.churn(blocks), || peer.churn(blocks));
        table.rate(&format!("churn_1m{suffix}"), a, b);
        drop((ours, peer));
        let matching = |_| {
            let ours = rows::matching(Ours::new(options.blocks), options.blocks, rows::BATCH);
            (ours, rows::matching(new(), options.blocks, rows::BATCH))
        };
        let (ours, peer): (Vec<_>, Vec<_>) = (0..options.rounds.min(3)).map(matching).unzip();
        matching_rows(suffix, &ours, &peer, table);
    }
}

/// From the tokens of a prompt to its cached prefix.
fn answers(table: &mut Table, options: &Options) {
    let (ours, peer) = (Ours::new(options.blocks), Peer::new(options.blocks));
    let [a, b] = alternate(options.rounds, || rows::answer(&ours), || rows::answer(&peer));
    table.time("answer_8k_tokens", a, b);
}

fn matches(table: &mut Table, options: &Options) {
    answers(table, options);
    // As prompts are registered, and as decoding does it: then no two blocks of a chain lie side by
    // side.
    for (suffix, at_once) in [("", rows::BATCH), ("_one_by_one", 1)] {
        let matching = |policy| {
            let side = Ours::with_policy(options.blocks, policy);
            rows::matching(side, options.blocks, at_once)
        };
        let (mut ours, mut default, mut peer) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..options.rounds.min(3) {
            ours.push(matching(PolicyKind::LruLeaf));
            default.push(matching(DEFAULT));
            peer.push(rows::matching(Peer::new(options.blocks), options.blocks, at_once));
        }
        matching_rows(suffix, &ours, &peer, table);
        matching_rows(&format!("_default{suffix}"), &default, &peer, table);
    }
}

fn matching_rows(suffix: &str, ours: &[rows::Matching], peer: &[rows::Matching], table: &mut Table) {
    let mut row = |name: &str, value: fn(&rows::Matching) -> f64| {
        let [a, b] = [ours, peer].map(|side| side.iter().map(value).collect());
        table.time(&format!("{name}{suffix}"), a, b);
    };
    row("match_cached_10k_1m", |matching| matching.cached);
    row("match_active_10k_1m", |matching| matching.active);
    row("drop_10k_1m", |matching| matching.dropped);
}

fn heap_rows(table: &mut Table, options: &Options) {
    let peer = rows::heap_bytes(options.blocks, || Peer::new(options.blocks));
    let ours = rows::heap_bytes(options.blocks, || Ours::with_policy(options.blocks, DEFAULT));
    table.row("heap_bytes_per_block", "bytes", ours, Some(peer), Some(peer / ours));
    let ours = rows::heap_bytes(options.blocks, || Ours::new(options.blocks));
    table.row("heap_bytes_per_block_lru_leaf", "bytes", ours, Some(peer), Some(peer / ours));
}

/// Prompts of 131,072 tokens. Rows without a suffix but that of the page size: each is dropped
/// before the next comes, in an ordinary process, which is how the peer was measured first.
/// `_reused`: when the next has come, so that the peer's heap is never given back. `_live`: when as
/// many others have come as a pool of so many blocks of 16 tokens holds.
fn hashing(table: &mut Table, options: &Options) -> Result<(), Box<dyn std::error::Error>> {
    const TOKENS: u32 = 131_072;
    let live = (options.blocks * 16 / TOKENS as usize).max(1);
    for (per_block, live, suffix) in
        [(16, 0, ""), (64, 0, "_64"), (256, 0, "_256"), (16, 1, "_reused"), (16, live, "_live")]
    {
        let rates = tokens::rates(tokens::Case { tokens: TOKENS, per_block, live, rounds: options.rounds })?;
        for (name, ours) in [("hash_default", rates.default), ("hash_xxh3", rates.xxh3)] {
            let name = format!("{name}{suffix}");
            table.row(&name, "M tokens/s", ours, Some(rates.peer), Some(ours / rates.peer));
        }
    }
    Ok(())
}

/// The rows as a table in Markdown.
fn markdown(rows: &[Value]) -> String {
    let cell = |value: &Value| match value.as_f64() {
        None => "-".to_owned(),
        Some(value) if value.abs() >= 100.0 => format!("{value:.0}"),
        Some(value) => format!("{value:.2}"),
    };
    let mut out = String::from("| row | unit | ours | peer | ratio |\n|---|---|---|---|---|\n");
    for row in rows {
        let [name, unit] = ["name", "unit"].map(|field| row[field].as_str().unwrap_or_default());
        let [ours, peer, ratio] = ["ours", "peer", "ratio"].map(|field| cell(&row[field]));
        out += &format!("| `{name}` | {unit} | {ours} | {peer} | {ratio} |\n");
    }
    out
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1).peekable();
    if args.next_if(|first| first == tokens::PROCESS).is_some() {
        return tokens::process(&args.next().unwrap_or_default());
    }
    let options = match options(args) {
        Ok(options) => options,
        Err(error) => {
            eprint!("error: {error}\n\n{USAGE}");
            std::process::exit(2);
        }
    };
    eprintln!("{:26} {:14} {:>12} {:>12} {:>9}", "row", "unit", Ours::name(), Peer::name(), "ratio");
    let mut table = Table::default();
    if options.wants("hash") {
        hashing(&mut table, &options)?;
    }
    let groups: [(&str, Rows); 8] = [
        ("heap", heap_rows),
        ("match", matches),
        ("fill", filling),
        ("small", small),
        ("large", large),
        ("default", default_policy),
        ("backends", back_ends),
        ("manager", manager::rows),
    ];
    for (name, measure) in groups {
        if options.wants(name) {
            measure(&mut table, &options);
        }
    }
    // The last one, so that all others are reported where its rows cannot be.
    let failed = if options.wants("requests") { requests::rows(&mut table, &options).err() } else { None };
    if let Some(file) = &options.with {
        table.take_over(file)?;
    }
    let report = json!({
        "rows": table.rows,
        "rounds": options.rounds,
        "blocks": options.blocks,
        "batch": rows::BATCH,
        "peer": "kvbm-logical 1.6.1, dynamo-tokens 1.6.1",
        "profile": option_env!("BENCH_PROFILE").unwrap_or("release"),
    });
    match options.json.as_deref() {
        Some("-") => println!("{report:#}"),
        Some(file) => std::fs::write(file, format!("{report:#}\n"))?,
        None => {}
    }
    if let Some(file) = &options.plot {
        std::fs::write(file, plot::svg(&table.rows))?;
    }
    if let Some(file) = &options.table {
        std::fs::write(file, markdown(&table.rows))?;
    }
    if let Some(error) = failed {
        eprintln!("error: {error}");
        std::process::exit(1);
    }
    Ok(())
}
