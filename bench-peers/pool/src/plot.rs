//! The ratios as a picture: a bar for each row that has one, on a logarithmic scale, and a mark
//! where the project asks for at least so much.

use serde_json::Value;
use std::fmt::Write;

/// What is asked for, as a ratio to the peer.
const AT_LEAST: [(&str, f64); 10] = [
    ("churn_1m", 6.0),
    ("churn_1m_default", 3.0),
    ("churn_1m_reuse_default", 3.0),
    ("fill_1m", 6.0),
    ("match_cached_10k_1m", 15.0),
    ("match_active_10k_1m", 5.0),
    ("churn_10k", 5.0),
    ("hash_default", 0.8),
    ("hash_default_live", 0.8),
    ("hash_default_reused", 0.8),
];

const LEFT: f64 = 260.0;
const WIDTH: f64 = 420.0;
const ROW: f64 = 22.0;
/// The ends of the scale.
const FROM: f64 = 0.1;
const TO: f64 = 100.0;

fn x(ratio: f64) -> f64 {
    LEFT + (ratio.clamp(FROM, TO) / FROM).log10() / (TO / FROM).log10() * WIDTH
}

/// An SVG of the rows that compare with the peer.
pub fn svg(rows: &[Value]) -> String {
    let ratio = |row: &Value| Some((row["name"].as_str()?.to_owned(), row["ratio"].as_f64()?));
    let bars: Vec<_> = rows.iter().filter_map(ratio).collect();
    let height = ROW * (bars.len() + 3) as f64;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"760\" height=\"{height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"760\" height=\"{height}\" fill=\"white\"/>\n\
         <text x=\"{LEFT}\" y=\"16\">times the peer (right of 1 is better); marks: at least</text>\n"
    );
    for tick in [0.1, 1.0, 10.0, 100.0] {
        let (at, bottom) = (x(tick), height - ROW);
        let _ = writeln!(
            out,
            "<line x1=\"{at:.1}\" y1=\"24\" x2=\"{at:.1}\" y2=\"{bottom}\" stroke=\"#ccc\"/>\n\
             <text x=\"{at:.1}\" y=\"{}\" text-anchor=\"middle\">{tick}</text>",
            bottom + 16.0
        );
    }
    for (index, (name, ratio)) in bars.iter().enumerate() {
        let y = 30.0 + ROW * index as f64;
        let (from, to) = (x(1.0).min(x(*ratio)), x(1.0).max(x(*ratio)));
        let colour = if *ratio >= 1.0 { "#4a7ebb" } else { "#c0504d" };
        let _ = writeln!(
            out,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{name}</text>\n\
             <rect x=\"{from:.1}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"14\" fill=\"{colour}\"/>\n\
             <text x=\"{:.1}\" y=\"{:.1}\">{ratio:.1}</text>",
            LEFT - 8.0,
            y + 11.0,
            to - from,
            to + 4.0,
            y + 11.0
        );
        if let Some((_, least)) = AT_LEAST.iter().find(|(known, _)| known == name) {
            let at = x(*least);
            let _ = writeln!(
                out,
                "<line x1=\"{at:.1}\" y1=\"{:.1}\" x2=\"{at:.1}\" y2=\"{:.1}\" stroke=\"black\" \
                 stroke-width=\"2\"/>",
                y - 3.0,
                y + 17.0
            );
        }
    }
    out.push_str("</svg>\n");
    out
}
