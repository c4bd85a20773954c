//! The summary of a replay as text for people.

use std::fmt::Write;

use crate::human::{bytes, count, micros, percent, share};
use crate::summary::{ReplayResult, Summary};

/// Rows of cells under a header; the first column is aligned left, the others right.
pub struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table with these columns.
    pub fn new<const N: usize>(header: [&str; N]) -> Self {
        Self { rows: vec![header.map(str::to_owned).to_vec()] }
    }

    /// Adds a row.
    pub fn row<const N: usize>(&mut self, cells: [String; N]) {
        self.rows.push(cells.into());
    }

    /// The lines, indented by two spaces.
    pub fn render(&self) -> String {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let widths: Vec<usize> = (0..columns)
            .map(|column| {
                self.rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max()
            })
            .map(Option::unwrap_or_default)
            .collect();
        let mut out = String::new();
        for (index, row) in self.rows.iter().enumerate() {
            let mut line = String::from("  ");
            for (column, (cell, width)) in row.iter().zip(&widths).enumerate() {
                let pad = " ".repeat(width - cell.chars().count());
                line +=
                    &if column == 0 { [cell, pad.as_str()].concat() } else { ["  ", &pad, cell].concat() };
            }
            out += line.trim_end();
            out.push('\n');
            if index == 0 {
                let rule: usize = widths.iter().sum::<usize>() + 2 * columns.saturating_sub(1);
                out += &["  ", &"-".repeat(rule), "\n"].concat();
            }
        }
        out
    }
}

/// The whole summary.
pub fn render(result: &ReplayResult) -> String {
    let summary = &result.summary;
    let mut out = first_line(result);
    out += &tiers(result);
    out.push('\n');
    if summary.paths.values().any(|path| path.blocks > 0) {
        out += &paths(result);
        out.push('\n');
    }
    out += &correctness(summary);
    if !summary.tenants.is_empty() {
        out.push('\n');
        out += &tenants(result);
        out.push('\n');
    }
    out += &events_and_disk(summary);
    if result.left_out > 0 {
        // Writing to a string cannot fail, here and below.
        let _ = writeln!(
            out,
            "{} blocks did not fit into G1 together with the rest of their request and were left out",
            count(result.left_out)
        );
    }
    out
}

fn first_line(result: &ReplayResult) -> String {
    let ReplayResult { workload, summary, .. } = result;
    let seconds = summary.wall_s;
    let rate = if seconds > 0.0 { summary.blocks as f64 / seconds } else { 0.0 };
    format!(
        "{workload}: {} requests, {} blocks in {seconds:.2} s ({} blocks/s), policy {}\n\n",
        count(summary.requests),
        count(summary.blocks),
        count(rate as u64),
        summary.policy,
    )
}

/// What was found, what of it was verified, and what went wrong.
fn correctness(summary: &Summary) -> String {
    let mut out = String::new();
    let _ = writeln!(
        out,
        "hit ratio {} (first 10 %: {}); {} blocks onboarded, {} verified ({} of them onboarded)",
        percent(summary.hit_ratio),
        percent(summary.hit_ratio_first_10pct),
        count(summary.onboarded_blocks),
        count(summary.verified_blocks),
        count(summary.verified_onboarded_blocks),
    );
    let _ = writeln!(
        out,
        "corrupt blocks {}, failed transfers {}, quarantined blocks {}, offloads dropped {}",
        count(summary.corrupt_blocks),
        count(summary.failed_transfers),
        count(summary.quarantined_blocks),
        count(summary.offload_dropped),
    );
    out
}

/// What was published and what was written to G3; nothing where that is nothing.
fn events_and_disk(summary: &Summary) -> String {
    let mut out = String::new();
    if let Some(events) = &summary.events {
        let _ = writeln!(
            out,
            "events published {}, lost {}, left {}; source {}",
            count(events.published),
            count(events.lost),
            count(events.unpublished),
            events.source,
        );
    }
    if let Some(hits) = summary.g3.hits_per_gib_written {
        let written = bytes(summary.g3.bytes_written);
        // Where only the books are kept no bytes move.
        let books_only = summary.paths.get("g2_g3").is_some_and(|path| path.bytes == 0);
        let would = if books_only { "would be " } else { "" };
        let _ = writeln!(out, "{written} {would}written to G3: {hits:.1} hits per GiB");
    }
    out
}

fn tenants(result: &ReplayResult) -> String {
    let mut table = Table::new(["tenant", "share", "requests", "hit ratio", "G1", "G2", "G3"]);
    for (name, tenant) in &result.summary.tenants {
        let on = |blocks| count(u64::from(blocks));
        table.row([
            name.clone(),
            percent(tenant.share),
            count(tenant.requests),
            percent(tenant.hit_ratio),
            on(tenant.g1.blocks),
            on(tenant.g2.blocks),
            on(tenant.g3.blocks),
        ]);
    }
    table.render()
}

fn tiers(result: &ReplayResult) -> String {
    let summary = &result.summary;
    let mut table = Table::new(["tier", "capacity", "hits", "of all blocks", "evictions"]);
    let evictions = [summary.evictions.g1, summary.evictions.g2, summary.evictions.g3];
    let names = ["G1 device", "G2 host", "G3 disk"];
    for (tier, name) in names.into_iter().enumerate() {
        let hits = summary.hits.by_tier()[tier];
        if summary.capacity[tier] == 0 && hits == 0 {
            continue;
        }
        table.row([
            name.to_owned(),
            count(summary.capacity[tier]),
            count(hits),
            percent(share(hits, summary.blocks)),
            count(evictions[tier]),
        ]);
    }
    if summary.hits.g4 > 0 {
        let hits = summary.hits.g4;
        table.row([
            "G4 volumes".into(),
            String::new(),
            count(hits),
            percent(share(hits, summary.blocks)),
            String::new(),
        ]);
    }
    table.render()
}

fn paths(result: &ReplayResult) -> String {
    let mut table = Table::new(["path", "blocks", "bytes", "GB/s", "p50", "p99"]);
    for (name, path) in &result.summary.paths {
        table.row([
            name.replace('_', " -> ").to_uppercase(),
            count(path.blocks),
            bytes(path.bytes),
            format!("{:.2}", path.gb_per_s),
            micros(path.p50_us),
            micros(path.p99_us),
        ]);
    }
    table.render()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::summary::{DiskWrites, Evictions, PathFigures, Summary};

    #[test]
    fn the_summary_is_a_table() {
        let mut summary = Summary {
            requests: 1000,
            blocks: 24_000,
            hits: [6000, 3000, 1000, 0].into(),
            hit_ratio: 10.0 / 24.0,
            hit_ratio_first_10pct: 0.05,
            onboarded_blocks: 4000,
            verified_blocks: 10_000,
            verified_onboarded_blocks: 4_000,
            wall_s: 2.0,
            evictions: Evictions { g1: 9000, g2: 5000, g3: 0 },
            g3: DiskWrites::new(4 << 30, 1000),
            policy: "lru-leaf".into(),
            capacity: [1000, 4000, 16_000],
            ..Summary::default()
        };
        let path =
            PathFigures { blocks: 3000, bytes: 3000 << 16, gb_per_s: 7.5, p50_us: 12.0, p99_us: 1500.0 };
        summary.paths.insert("g2_g1".into(), path);
        let text = render(&ReplayResult {
            workload: "t.jsonl".into(),
            summary,
            left_out: 3,
            ..ReplayResult::default()
        });
        let expected = "\
t.jsonl: 1,000 requests, 24,000 blocks in 2.00 s (12,000 blocks/s), policy lru-leaf

  tier       capacity   hits  of all blocks  evictions
  ----------------------------------------------------
  G1 device     1,000  6,000         25.0 %      9,000
  G2 host       4,000  3,000         12.5 %      5,000
  G3 disk      16,000  1,000          4.2 %          0

  path      blocks    bytes  GB/s    p50     p99
  ----------------------------------------------
  G2 -> G1   3,000  188 MiB  7.50  12 us  1.5 ms

hit ratio 41.7 % (first 10 %: 5.0 %); 4,000 blocks onboarded, 10,000 verified (4,000 of them onboarded)
corrupt blocks 0, failed transfers 0, quarantined blocks 0, offloads dropped 0
4 GiB written to G3: 250.0 hits per GiB
3 blocks did not fit into G1 together with the rest of their request and were left out
";
        assert_eq!(text, expected, "{text}");
    }
}
