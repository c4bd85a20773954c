//! The report of a replay: one HTML file with plots, without anything from elsewhere.

mod charts;
mod plot;

use std::fmt::Write;

use crate::human::{bytes, count, micros, percent, share};
use crate::summary::ReplayResult;

const STYLE: &str = include_str!("style.css");

/// The tiers: class of their colour, and name.
const TIERS: [(&str, &str); 4] =
    [("g1", "G1 device"), ("g2", "G2 host"), ("g3", "G3 disk"), ("g4", "G4 volumes")];

/// The whole page.
pub fn render(result: &ReplayResult) -> String {
    let workload = escape(&result.workload);
    let mut out = format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>kvbm replay: {workload}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n\
         <h1>kvbm replay</h1>\n<p>{workload}</p>\n"
    );
    out += &cards(result);
    section(
        &mut out,
        "Hits by tier",
        "Where the blocks of each request were found, in the order of the requests.",
        &(key(result) + &charts::hits(&result.timeline)),
    );
    if result.latencies.values().any(|buckets| !buckets.is_empty()) {
        section(
            &mut out,
            "Latency",
            "From submission of a transfer to its completion; logarithmic scale. Lines mark the median and the 99th percentile.",
            &charts::latencies(result),
        );
    }
    if result.summary.paths.values().any(|path| path.bytes > 0) {
        section(
            &mut out,
            "Bytes moved",
            "Along each path, with the rate while the path was in use.",
            &charts::bytes_moved(&result.summary.paths),
        );
    }
    section(&mut out, "Figures", "", &(tier_table(result) + &path_table(result)));
    out += "</body>\n</html>\n";
    out
}

fn section(out: &mut String, title: &str, text: &str, body: &str) {
    let text = if text.is_empty() { String::new() } else { format!("<p>{text}</p>\n") };
    // Writing to a string cannot fail, here and below.
    let _ = write!(out, "<h2>{title}</h2>\n{text}{body}");
}

fn cards(result: &ReplayResult) -> String {
    let summary = &result.summary;
    let rate = if summary.wall_s > 0.0 { summary.blocks as f64 / summary.wall_s } else { 0.0 };
    let zero = |n: u64| if n == 0 { "good" } else { "bad" };
    let mut out = String::from("<div class=\"cards\">\n");
    for (value, name, class) in [
        (percent(summary.hit_ratio), "hit ratio", ""),
        (count(summary.requests), "requests", ""),
        (count(summary.blocks), "blocks", ""),
        (count(rate as u64), "blocks per second", ""),
        (format!("{:.2} s", summary.wall_s), "wall time", ""),
        (count(summary.verified_blocks), "blocks verified", ""),
        (count(summary.verified_onboarded_blocks), "of them onboarded", ""),
        (count(summary.corrupt_blocks), "blocks corrupt", zero(summary.corrupt_blocks)),
        (count(summary.failed_transfers), "transfers failed", zero(summary.failed_transfers)),
        (count(summary.quarantined_blocks), "slots quarantined", zero(summary.quarantined_blocks)),
        (count(summary.offload_dropped), "offloads dropped", ""),
    ] {
        let _ = writeln!(out, "<div class=\"card {class}\"><b>{value}</b><span>{name}</span></div>");
    }
    out + "</div>\n"
}

/// Which colour is which tier.
fn key(result: &ReplayResult) -> String {
    let hits = result.summary.hits.by_tier();
    let mut out = String::from("<div class=\"key\">");
    for ((class, name), hits) in TIERS.iter().zip(hits) {
        if hits > 0 {
            let _ = write!(out, "<span><i style=\"background:var(--{class})\"></i>{name}</span>");
        }
    }
    out + "<span><i style=\"background:var(--miss)\"></i>computed anew</span></div>\n"
}

fn table(header: &[&str], rows: &[Vec<String>]) -> String {
    let mut out = String::from("<div class=\"scroll\"><table><tr>");
    for name in header {
        let _ = write!(out, "<th>{name}</th>");
    }
    out += "</tr>\n";
    for row in rows {
        out += "<tr>";
        for cell in row {
            let _ = write!(out, "<td>{}</td>", escape(cell));
        }
        out += "</tr>\n";
    }
    out + "</table></div>\n"
}

fn tier_table(result: &ReplayResult) -> String {
    let summary = &result.summary;
    let evictions = [summary.evictions.g1, summary.evictions.g2, summary.evictions.g3];
    let rows: Vec<_> = (0..3)
        .filter(|tier| summary.capacity[*tier] > 0)
        .map(|tier| {
            let hits = summary.hits.by_tier()[tier];
            vec![
                TIERS[tier].1.to_owned(),
                count(summary.capacity[tier]),
                count(hits),
                percent(share(hits, summary.blocks)),
                count(evictions[tier]),
            ]
        })
        .collect();
    table(&["tier", "capacity in blocks", "hits", "of all blocks", "evictions"], &rows)
}

fn path_table(result: &ReplayResult) -> String {
    let rows: Vec<_> = result
        .summary
        .paths
        .iter()
        .map(|(name, path)| {
            vec![
                arrow(name),
                count(path.blocks),
                bytes(path.bytes),
                format!("{:.2}", path.gb_per_s),
                micros(path.p50_us),
                micros(path.p99_us),
            ]
        })
        .collect();
    if rows.is_empty() {
        return String::new();
    }
    table(&["path", "blocks", "bytes", "GB/s", "p50", "p99"], &rows)
}

/// `g1_g2` as `G1 → G2`.
fn arrow(path: &str) -> String {
    path.replace('_', " \u{2192} ").to_uppercase()
}

/// The class of the colour of a path: that of the tier below.
fn path_class(path: &str) -> &'static str {
    let lowest = TIERS.iter().rev().find(|(class, _)| path.contains(class));
    lowest.map_or("g1", |(class, _)| class)
}

/// Text as HTML.
fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::summary::{Evictions, PathFigures, Summary, Timeline};
    use kvbm::metrics::LatencyHistogram;
    use std::time::Duration;

    /// A replay that looks like a real one.
    fn example() -> ReplayResult {
        let mut timeline = Timeline::new(3000);
        let mut rng = crate::rng::Rng::new(1);
        let mut hits = [0; 4];
        for index in 0..3000 {
            let warm = index.min(900) / 30;
            let request = [rng.below(12), rng.below(warm + 1) / 2, rng.below(warm + 1), 0];
            timeline.record(index, 60, request);
            for (sum, n) in hits.iter_mut().zip(request) {
                *sum += n;
            }
        }
        let mut result = ReplayResult {
            workload: "made-up <multi-turn> workload, seed 0".into(),
            summary: Summary {
                requests: 3000,
                blocks: 180_000,
                hits: hits.into(),
                hit_ratio: hits.iter().sum::<u64>() as f64 / 180_000.0,
                verified_blocks: hits.iter().sum(),
                wall_s: 4.2,
                evictions: Evictions { g1: 150_000, g2: 90_000, g3: 4000 },
                policy: "lru-leaf".into(),
                capacity: [1000, 4000, 16_000],
                ..Summary::default()
            },
            timeline,
            ..ReplayResult::default()
        };
        for (path, us, blocks) in
            [("g1_g2", 20, 160_000), ("g2_g1", 35, 30_000), ("g2_g3", 900, 90_000), ("g3_g1", 400, 40_000)]
        {
            let histogram = LatencyHistogram::default();
            for _ in 0..2000 {
                let tail = if rng.one_in(50) { 20 } else { 1 };
                histogram.record(Duration::from_nanos(
                    us * 1000 * tail / 2 + rng.below(us * 1000) + rng.below(us * 800),
                ));
            }
            let summary = histogram.summary();
            let figures = PathFigures {
                blocks,
                bytes: blocks << 16,
                gb_per_s: 65.0 / us as f64,
                p50_us: summary.p50_us,
                p99_us: summary.p99_us,
            };
            result.summary.paths.insert(path.into(), figures);
            result.latencies.insert(path.into(), histogram.distribution());
        }
        result
    }

    #[test]
    fn the_report_is_one_file_with_all_plots() {
        let html = render(&example());
        if let Some(path) = std::env::var_os("KEEP_REPORT") {
            std::fs::write(path, &html).unwrap();
        }
        assert_eq!(html.matches("<svg").count(), 3);
        assert!(html.contains("made-up &lt;multi-turn&gt; workload"));
        for foreign in ["http:", "https:", "src=", "@import", "url(", "<script"] {
            assert!(!html.contains(foreign), "{foreign} in the report");
        }
        for wrong in ["NaN", "inf", "-0.0\""] {
            assert!(!html.contains(wrong), "{wrong} in the report");
        }
        for path in ["G1 \u{2192} G2", "G3 \u{2192} G1"] {
            assert!(html.contains(path), "{path}");
        }
        for tag in ["svg", "g", "div", "table", "tr", "h2", "p"] {
            let open = html.matches(&format!("<{tag}>")).count() + html.matches(&format!("<{tag} ")).count();
            assert_eq!(open, html.matches(&format!("</{tag}>")).count(), "{tag}");
        }
    }

    #[test]
    fn a_replay_without_bytes_has_a_report_too() {
        let mut result = example();
        result.latencies.clear();
        result.summary.paths.clear();
        assert_eq!(render(&result).matches("<svg").count(), 1);
        let empty = render(&ReplayResult::default());
        assert!(!empty.contains("NaN"), "{empty}");
    }
}
