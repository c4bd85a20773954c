//! The plots.

use std::collections::BTreeMap;
use std::fmt::Write;

use kvbm::metrics::LatencyBucket;

use super::plot::{Frame, WIDTH, line, rect, svg, text, ticks};
use super::{TIERS, arrow, path_class};
use crate::human::{bytes, count, micros, share};
use crate::summary::{PathFigures, ReplayResult, Timeline};

/// Space left of the axes, for names and numbers.
const LEFT: f64 = 90.0;

/// Shares of hits by tier over the requests, stacked.
pub(super) fn hits(timeline: &Timeline) -> String {
    let frame = Frame { left: 60.0, right: WIDTH - 10.0, top: 10.0, bottom: 270.0 };
    let points = timeline.points();
    let mut out = String::new();
    rect(
        &mut out,
        "miss",
        (frame.left, frame.top),
        (frame.right - frame.left, frame.bottom - frame.top),
        "computed anew",
    );
    // Each point is a step, so that one request is a visible width too.
    let mut below = vec![0.0; points.len()];
    for (tier, (class, name)) in TIERS.iter().enumerate() {
        if points.iter().all(|point| point.hits[tier] == 0) {
            continue;
        }
        let above: Vec<f64> = points
            .iter()
            .zip(&below)
            .map(|(point, below)| below + share(point.hits[tier], point.blocks))
            .collect();
        out += &area(&frame, class, name, &below, &above);
        below = above;
    }
    for percent in [0, 25, 50, 75, 100_u32] {
        let y = frame.y(f64::from(percent) / 100.0);
        line(&mut out, "grid", (frame.left, y), (frame.right, y));
        text(&mut out, frame.left - 8.0, y + 4.0, "end", "", &format!("{percent} %"));
    }
    for tick in ticks(timeline.requests(), 8) {
        let x = frame.x(share(tick, timeline.requests()));
        let anchor = if x > frame.right - 30.0 { "end" } else { "middle" };
        text(&mut out, x, frame.bottom + 20.0, anchor, "", &count(tick));
    }
    text(&mut out, f64::midpoint(frame.left, frame.right), frame.bottom + 42.0, "middle", "", "requests");
    svg(320.0, "Share of blocks found on each tier over the requests", &out)
}

/// The band between two step lines.
fn area(frame: &Frame, class: &str, name: &str, below: &[f64], above: &[f64]) -> String {
    let at = |index: usize| frame.x(index as f64 / above.len() as f64);
    let mut path = String::new();
    for (index, value) in above.iter().enumerate() {
        let command = if index == 0 { 'M' } else { 'L' };
        // Writing to a string cannot fail, here and below.
        let _ = write!(path, "{command}{:.1},{:.1}H{:.1}", at(index), frame.y(*value), at(index + 1));
    }
    for (index, value) in below.iter().enumerate().rev() {
        let _ = write!(path, "L{:.1},{:.1}H{:.1}", at(index + 1), frame.y(*value), at(index));
    }
    format!("<path class=\"{class}\" d=\"{path}Z\"><title>{name}</title></path>\n")
}

/// A histogram of latencies per path, one below the other on one logarithmic axis.
pub(super) fn latencies(result: &ReplayResult) -> String {
    const ROW: f64 = 84.0;
    let rows: Vec<_> = result.latencies.iter().filter(|(_, buckets)| !buckets.is_empty()).collect();
    let all = || rows.iter().flat_map(|(_, buckets)| buckets.iter());
    let low = all().map(|bucket| bucket.from_us.max(0.001)).fold(f64::INFINITY, f64::min).log10().floor();
    let high = all().map(|bucket| bucket.to_us).fold(0.0, f64::max).log10().ceil().max(low + 1.0);
    let bottom = 10.0 + ROW * rows.len() as f64;
    let frame = Frame { left: LEFT, right: WIDTH - 34.0, top: 10.0, bottom };
    let x = |us: f64| frame.x((us.max(0.001).log10() - low) / (high - low));

    let mut out = String::new();
    let mut decade = low;
    while decade <= high {
        let us = 10_f64.powf(decade);
        line(&mut out, "grid", (x(us), frame.top), (x(us), frame.bottom));
        text(&mut out, x(us), frame.bottom + 20.0, "middle", "", &tick_label(us));
        decade += 1.0;
    }
    for (index, (path, buckets)) in rows.iter().enumerate() {
        let row = Frame {
            top: frame.top + ROW * index as f64 + 22.0,
            bottom: frame.top + ROW * (index + 1) as f64,
            ..frame
        };
        histogram(&mut out, &row, path, buckets, &x);
        if let Some(figures) = result.summary.paths.get(*path) {
            percentiles(&mut out, &row, figures, &x);
        }
    }
    svg(bottom + 30.0, "Distribution of latencies of each path", &out)
}

fn tick_label(us: f64) -> String {
    if us < 1.0 { format!("{:.0} ns", us * 1000.0) } else { micros(us) }
}

fn histogram(out: &mut String, row: &Frame, path: &str, buckets: &[LatencyBucket], x: &impl Fn(f64) -> f64) {
    let total: u64 = buckets.iter().map(|bucket| bucket.count).sum();
    let most = buckets.iter().map(|bucket| bucket.count).max().unwrap_or(1);
    text(out, LEFT - 12.0, row.bottom - 6.0, "end", "name", &arrow(path));
    line(out, "grid", (row.left, row.bottom), (row.right, row.bottom));
    for bucket in buckets.iter().filter(|bucket| bucket.count > 0) {
        let (from, to) = (x(bucket.from_us), x(bucket.to_us));
        let top = row.y(share(bucket.count, most));
        let title = format!(
            "{} to {}: {} of {}",
            tick_label(bucket.from_us),
            tick_label(bucket.to_us),
            count(bucket.count),
            count(total)
        );
        rect(out, path_class(path), (from, top), (to - from - 0.6, row.bottom - top), &title);
    }
}

fn percentiles(out: &mut String, row: &Frame, figures: &PathFigures, x: &impl Fn(f64) -> f64) {
    let (p50, p99) = (x(figures.p50_us), x(figures.p99_us));
    for at in [p50, p99] {
        line(out, "mark", (at, row.top - 4.0), (at, row.bottom));
    }
    // Labels stand on the outer sides of the two lines, so that they never meet.
    let top = row.top - 2.0;
    let (anchor, at) = if p50 - 90.0 > row.left { ("end", p50 - 5.0) } else { ("start", p50 + 5.0) };
    if anchor == "end" || p99 - p50 > 100.0 {
        text(out, at, top, anchor, "", &format!("p50 {}", micros(figures.p50_us)));
    }
    let (anchor, at) = if p99 + 90.0 < row.right { ("start", p99 + 5.0) } else { ("end", p99 - 5.0) };
    if anchor == "start" || p99 - p50 > 200.0 {
        text(out, at, top, anchor, "", &format!("p99 {}", micros(figures.p99_us)));
    }
}

/// A bar per path.
pub(super) fn bytes_moved(paths: &BTreeMap<String, PathFigures>) -> String {
    const ROW: f64 = 38.0;
    let rows: Vec<_> = paths.iter().filter(|(_, path)| path.bytes > 0).collect();
    let most = rows.iter().map(|(_, path)| path.bytes).max().unwrap_or(1);
    // Room for the label right of the longest bar.
    let frame = Frame { left: LEFT, right: WIDTH - 240.0, top: 6.0, bottom: 6.0 + ROW * rows.len() as f64 };
    let mut out = String::new();
    for (index, (name, path)) in rows.iter().enumerate() {
        let top = frame.top + ROW * index as f64;
        let to = frame.x(share(path.bytes, most));
        text(&mut out, LEFT - 12.0, top + 20.0, "end", "name", &arrow(name));
        let label = format!("{}, {:.2} GB/s", bytes(path.bytes), path.gb_per_s);
        let title = format!("{}: {} blocks, {label}", arrow(name), count(path.blocks));
        rect(&mut out, path_class(name), (frame.left, top + 3.0), (to - frame.left, ROW - 12.0), &title);
        text(&mut out, to + 8.0, top + 20.0, "start", "", &label);
    }
    svg(frame.bottom + 6.0, "Bytes moved along each path", &out)
}
