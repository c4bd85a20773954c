//! Results as one HTML file: tables, and a plot of each conversion over the size.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde_json::Value;

use crate::{Failure, Options, results};

/// The plot: pixels, and the sizes and ratios that its edges stand for.
const WIDTH: f64 = 900.0;
const HEIGHT: f64 = 420.0;
const MARGIN: f64 = 50.0;
const SIZES: [f64; 2] = [17.0, 30.0];
const COLOURS: [&str; 10] = [
    "#1b6ca8", "#d1495b", "#2e8b57", "#edae49", "#6a4c93", "#008891", "#b5651d", "#7a7a7a", "#c2185b",
    "#33691e",
];

pub(crate) fn run(options: &Options) -> Result<(), Failure> {
    let mut rows = Vec::new();
    for file in &options.json {
        rows.extend(results::read(file)?);
    }
    let html = options.html.as_ref().ok_or("--html FILE is missing")?;
    std::fs::write(html, page(&rows)).map_err(|error| format!("{}: {error}", html.display()).into())
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

fn page(rows: &[Value]) -> String {
    let mut out = String::from(
        "<!doctype html><meta charset=utf-8><title>kvbm on a GPU</title><style>body{font:14px sans-serif;margin:2em}\
         td,th{padding:2px 12px;text-align:right}td:first-child,th:first-child{text-align:left}.failed{color:#c00}</style>\
         <h1>kvbm on a GPU</h1>",
    );
    // Writing to a string cannot fail, here and below.
    let _ = write!(out, "<h2>Checks</h2><table><tr><th>check<th>result<th>cases<th>detail");
    for row in rows.iter().filter(|row| row["passed"].is_boolean()) {
        let passed = row["passed"] == true;
        let result = if passed { "ok" } else { "FAILED" };
        let class = if passed { "" } else { " class=failed" };
        let (cases, name) = (&row["cases"], row["name"].as_str().unwrap_or_default());
        let detail = row["device"].as_str().or(row["detail"].as_str()).unwrap_or_default();
        let cases = cases.as_u64().map_or(String::new(), |cases| cases.to_string());
        let (name, detail) = (escaped(name), escaped(&detail.chars().take(200).collect::<String>()));
        let _ = write!(out, "<tr{class}><td>{name}<td>{result}<td>{cases}<td>{detail}");
    }
    let _ = write!(out, "</table><h2>Conversions over a device copy of the same size</h2>{}", plot(rows));
    let _ = write!(out, "<h2>Rates</h2><table><tr><th>name<th>KiB<th>us<th>GB/s<th>of its limit<th>slowdown");
    for row in rows.iter().filter(|row| row["gb_per_s"].is_number()) {
        let number = |key: &str| row[key].as_f64();
        let percent =
            |key: &str| number(key).map_or(String::new(), |ratio| format!("{:.1} %", 100.0 * ratio));
        let _ = write!(
            out,
            "<tr><td>{}<td>{:.0}<td>{:.1}<td>{:.1}<td>{}<td>{}",
            escaped(row["name"].as_str().unwrap_or_default()),
            number("bytes").unwrap_or(0.0) / 1024.0,
            number("us").unwrap_or(0.0),
            number("gb_per_s").unwrap_or(0.0),
            percent("of_limit"),
            percent("slowdown"),
        );
    }
    out + "</table>\n"
}

fn plot(rows: &[Value]) -> String {
    let mut lines: BTreeMap<&str, Vec<(f64, f64)>> = BTreeMap::new();
    for row in rows {
        if let (Some(name), Some(size), Some(ratio)) =
            (row["name"].as_str(), row["size"].as_f64(), row["of_device_copy"].as_f64())
            && !name.contains('/')
        {
            lines.entry(name).or_default().push((size.max(1.0).log2(), ratio));
        }
    }
    let x = |log: f64| MARGIN + (log - SIZES[0]) / (SIZES[1] - SIZES[0]) * (WIDTH - 2.0 * MARGIN);
    let y = |ratio: f64| HEIGHT - MARGIN - ratio.clamp(0.0, 1.2) / 1.2 * (HEIGHT - 2.0 * MARGIN);
    let mut out = format!("<svg width={WIDTH} height={} font-size=12>", HEIGHT + 20.0 * lines.len() as f64);
    for tenth in [0.0, 0.6, 0.85, 1.0] {
        let _ = write!(
            out,
            "<line x1={MARGIN} x2={} y1={y} y2={y} stroke=#ccc /><text x=5 y={y}>{:.0} %</text>",
            WIDTH - MARGIN,
            100.0 * tenth,
            y = y(tenth)
        );
    }
    for log in [17, 20, 23, 26, 29, 30] {
        let bytes = 1_u64 << log;
        let label = if log < 20 { format!("{} KiB", bytes >> 10) } else { format!("{} MiB", bytes >> 20) };
        let _ =
            write!(out, "<text x={} y={}>{label}</text>", x(f64::from(log)) - 20.0, HEIGHT - MARGIN + 18.0);
    }
    for (at, (name, points)) in lines.iter().enumerate() {
        let colour = COLOURS[at % COLOURS.len()];
        let places: Vec<String> =
            points.iter().map(|(log, ratio)| format!("{:.1},{:.1}", x(*log), y(*ratio))).collect();
        let _ = write!(
            out,
            "<polyline fill=none stroke={colour} stroke-width=2 points=\"{}\" />\
             <text x={MARGIN} y={} fill={colour}>{}</text>",
            places.join(" "),
            HEIGHT + 20.0 * at as f64,
            escaped(name)
        );
    }
    out + "</svg>"
}
