//! What the samples of a soak say, and a page that shows them.

use serde_json::{Value, json};
use std::fmt::Write;

/// Size of a chart.
const WIDTH: f64 = 480.0;
const HEIGHT: f64 = 120.0;

/// Samples of one thing, and their change.
#[derive(Debug)]
pub(crate) struct Trend {
    name: String,
    samples: Vec<f64>,
    /// Median of the second quarter, behind the warm-up, and of the last one. A mean would also
    /// say how many samples fell into moments in which an engine had just lost its daemon.
    before: f64,
    after: f64,
}

/// A trend for each series.
pub(crate) fn trends(series: &Value) -> Vec<Trend> {
    let named = series.as_object().into_iter().flatten();
    named
        .map(|(name, samples)| {
            let samples = samples.as_array().into_iter().flatten();
            let samples: Vec<f64> = samples.map(|sample| sample.as_f64().unwrap_or(f64::NAN)).collect();
            let quarter = samples.len() / 4;
            let before = median(samples.get(quarter..2 * quarter).unwrap_or_default());
            let after = median(samples.get(samples.len() - quarter..).unwrap_or_default());
            Trend { name: name.clone(), before, after, samples }
        })
        .collect()
}

/// The median of samples; of none it is no number.
fn median(samples: &[f64]) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}

impl Trend {
    /// Growth between the two quarters, as a share of the first, or of 1 where that is less.
    fn change(&self) -> f64 {
        (self.after - self.before) / self.before.max(1.0)
    }

    /// Whether the values grew by no more than `share`. Values that shrink are no leak. No samples
    /// are not flat: their median is no number.
    pub(crate) fn is_flat(&self, share: f64) -> bool {
        self.change() <= share
    }

    pub(crate) fn line(&self, share: f64) -> String {
        let verdict = if self.is_flat(share) { "flat" } else { "GREW" };
        let Self { name, before, after, .. } = self;
        format!("{name:28} {before:14.1} {after:14.1} {:+7.2} %  {verdict}", self.change() * 100.0)
    }

    pub(crate) fn to_json(&self, share: f64) -> Value {
        let change = (self.change() * 1e5).round() / 1e5;
        let flat = self.is_flat(share);
        json!({ "name": self.name, "before": self.before, "after": self.after, "change": change, "flat": flat })
    }

    /// The samples as a line in SVG.
    fn chart(&self) -> String {
        let most = self.samples.iter().copied().fold(1.0, f64::max);
        let step = WIDTH / (self.samples.len().max(2) - 1) as f64;
        let mut points = String::new();
        for (at, sample) in self.samples.iter().enumerate() {
            let _ = write!(points, "{:.1},{:.1} ", at as f64 * step, HEIGHT * (1.0 - sample / most));
        }
        format!(
            "<figure><figcaption>{}, from 0 to {most}</figcaption><svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
             width=\"{WIDTH}\" height=\"{HEIGHT}\"><polyline fill=\"none\" stroke=\"#2563eb\" points=\"{points}\"/>\
             </svg></figure>\n",
            self.name
        )
    }
}

/// A page with a row and a chart for each series.
pub(crate) fn page(summary: &Value, trends: &[Trend], share: f64) -> String {
    let mut page = String::from(
        "<!doctype html><meta charset=\"utf-8\"><title>kvbm soak</title>\n\
         <style>body{font:14px sans-serif;margin:2em}figure{display:inline-block;margin:1em}\
         svg{border:1px solid #ccc}pre{background:#f4f4f4;padding:1em}</style>\n<h1>kvbm soak</h1>\n<pre>",
    );
    for key in ["seconds", "accidents", "verified", "wrong_bytes", "hangs", "leaked_slots"] {
        let _ = writeln!(page, "{key:28} {}", summary[key]);
    }
    for trend in trends {
        let _ = writeln!(page, "{}", trend.line(share));
    }
    page.push_str("</pre>\n");
    page.extend(trends.iter().map(Trend::chart));
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_growth_behind_the_warm_up_counts() {
        let warm: Vec<u64> = (0..40).map(|at| if at < 10 { at } else { 100 }).collect();
        let leak: Vec<u64> = (0..40).map(|at| 100 + at).collect();
        let dips: Vec<u64> = (0..40).map(|at| if at % 7 == 0 && at < 20 { 5 } else { 100 }).collect();
        let found =
            trends(&json!({ "dips": dips, "leak": leak, "none": [], "warm": warm, "zero": vec![0; 40] }));
        let flat: Vec<_> = found.iter().map(|trend| (trend.name.as_str(), trend.is_flat(0.02))).collect();
        assert_eq!(flat, [("dips", true), ("leak", false), ("none", false), ("warm", true), ("zero", true)]);
        assert!(page(&json!({ "seconds": 7 }), &found, 0.02).contains("<polyline"));
    }
}
