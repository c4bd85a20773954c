//! From measurements to rows: medians, and the worst size of each path.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

use kvbm::layout::DType;
use serde::Serialize;

use super::fixture::Disk;
use super::load_generator::Sample;
use super::ring::BareDisk;
use crate::human;
use crate::table::Table;

/// A path at its worst size.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Row {
    /// The path.
    pub name: String,
    /// Element type of the blocks.
    pub dtype: &'static str,
    /// The size of blocks at which the path falls furthest behind its limit.
    pub block_bytes: u64,
    /// Bytes (10^9) per second there.
    pub gb_per_s: f64,
    /// What the hardware does without the engine, there.
    pub limit_gb_per_s: f64,
    /// The one over the other.
    pub ratio: f64,
    /// Processor time of all threads for 10^9 bytes, at the size where that is highest.
    pub cpu_ms_per_gb: f64,
    /// Every size.
    pub sizes: Vec<Size>,
}

/// A path at one size.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Size {
    /// Bytes of a block.
    pub block_bytes: u64,
    /// Bytes (10^9) per second.
    pub gb_per_s: f64,
    /// The same of the limit.
    pub limit_gb_per_s: f64,
    /// The one over the other.
    pub ratio: f64,
    /// Processor time for 10^9 bytes.
    pub cpu_ms_per_gb: f64,
    /// The same of a bare loop that computes checksums too.
    pub bare_cpu_ms_per_gb: f64,
}

/// Measurements of a path by the bytes of a block: its own, its limit's, and those of a bare loop
/// with checksums.
type BySize = BTreeMap<u64, Vec<[Sample; 3]>>;

/// All measurements.
#[derive(Default)]
pub(super) struct Samples {
    /// Element type of the blocks.
    dtype: &'static str,
    /// In the order in which they were first measured.
    paths: Vec<(String, BySize)>,
    notes: Vec<String>,
}

impl Samples {
    /// Of blocks with elements of this type.
    pub(super) fn of(dtype: DType) -> Self {
        Self { dtype: dtype.name(), ..Self::default() }
    }

    /// The path moved `own` beside `limit`, and a loop with checksums moved `bare`.
    pub(super) fn push(&mut self, name: &str, block_bytes: u64, own: Sample, limit: Sample, bare: Sample) {
        let index = self.paths.iter().position(|(known, _)| known == name).unwrap_or_else(|| {
            self.paths.push((name.to_owned(), BTreeMap::new()));
            self.paths.len() - 1
        });
        self.paths[index].1.entry(block_bytes).or_default().push([own, limit, bare]);
    }

    /// Says what was measured, for people.
    pub(super) fn note(&mut self, disk: &Disk, bare: &BareDisk) {
        let chosen = disk.engine.info().engine;
        let notes = [
            format!("disk engine: {}: {}", chosen.kind, chosen.reason),
            format!("limit of disk paths: {}", bare.describe()),
            "limit of memory paths: the same fragments by memcpy or streaming stores, on 1 to all threads, the fastest"
                .to_owned(),
            "bare CPU: the same by a loop that only moves and computes checksums".to_owned(),
        ];
        for note in notes {
            if !self.notes.contains(&note) {
                self.notes.push(note);
            }
        }
    }

    /// A row for each path.
    pub(super) fn rows(&self) -> Vec<Row> {
        let row = |(name, sizes): &(String, BySize)| {
            let sizes: Vec<Size> = sizes.iter().map(|(bytes, samples)| size(*bytes, samples)).collect();
            let worst = *sizes.iter().min_by(|a, b| a.ratio.total_cmp(&b.ratio))?;
            let cpu_ms_per_gb = sizes.iter().map(|size| size.cpu_ms_per_gb).fold(0.0, f64::max);
            let Size { block_bytes, gb_per_s, limit_gb_per_s, ratio, .. } = worst;
            Some(Row {
                name: name.clone(),
                dtype: self.dtype,
                block_bytes,
                gb_per_s,
                limit_gb_per_s,
                ratio,
                cpu_ms_per_gb,
                sizes,
            })
        };
        self.paths.iter().filter_map(row).collect()
    }
}

fn size(block_bytes: u64, samples: &[[Sample; 3]]) -> Size {
    let of = |side: usize, figure: fn(Sample) -> f64| {
        let mut figures: Vec<f64> = samples.iter().map(|pair| figure(pair[side])).collect();
        median(&mut figures)
    };
    let (gb_per_s, limit_gb_per_s) = (of(0, Sample::gb_per_s), of(1, Sample::gb_per_s));
    Size {
        block_bytes,
        gb_per_s,
        limit_gb_per_s,
        ratio: gb_per_s / limit_gb_per_s,
        cpu_ms_per_gb: of(0, Sample::cpu_ms_per_gb),
        bare_cpu_ms_per_gb: of(2, Sample::cpu_ms_per_gb),
    }
}

/// The middle one; of two, the lower. 0 of none.
fn median(figures: &mut [f64]) -> f64 {
    figures.sort_unstable_by(f64::total_cmp);
    figures.get(figures.len().saturating_sub(1) / 2).copied().unwrap_or(0.0)
}

/// Every path at every size.
pub(super) fn table(dir: &Path, samples: &Samples, rows: &[Row]) -> String {
    let mut table = Table::new(["path", "block", "GB/s", "limit", "of it", "CPU ms/GB", "bare CPU"]);
    for row in rows {
        for size in &row.sizes {
            table.row([
                row.name.clone(),
                human::bytes(size.block_bytes),
                format!("{:.2}", size.gb_per_s),
                format!("{:.2}", size.limit_gb_per_s),
                human::percent(size.ratio),
                format!("{:.1}", size.cpu_ms_per_gb),
                format!("{:.1}", size.bare_cpu_ms_per_gb),
            ]);
        }
    }
    let mut text = format!("disk tier in {}\n", dir.display());
    for note in &samples.notes {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{note}");
    }
    text + "\n" + &table.render()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn sample(gb: u64, millis: u64, cpu: u64) -> Sample {
        Sample {
            bytes: gb * 1_000_000_000,
            time: Duration::from_millis(millis),
            cpu: Duration::from_millis(cpu),
        }
    }

    #[test]
    fn a_row_is_the_worst_size_in_the_median() {
        let mut samples = Samples::default();
        for (own, limit) in [(1000, 1000), (500, 400), (9999, 800)] {
            samples.push("g1_g2", 4096, sample(1, own, 5), sample(1, limit, 3), sample(1, limit, 4));
        }
        samples.push("g1_g2", 8192, sample(2, 1000, 80), sample(4, 1000, 3), sample(4, 1000, 8));
        let rows = samples.rows();
        assert_eq!(rows.len(), 1);
        let row = &rows[0];
        assert_eq!((row.name.as_str(), row.block_bytes, row.sizes.len()), ("g1_g2", 8192, 2));
        let close =
            |found: f64, expected: f64| assert!((found - expected).abs() < 1e-9, "{found} {expected}");
        close(row.ratio, 0.5);
        close(row.cpu_ms_per_gb, 40.0);
        close(row.sizes[0].bare_cpu_ms_per_gb, 4.0);
        close(row.sizes[0].gb_per_s, 1.0);
        close(row.sizes[0].limit_gb_per_s, 1.25);
        close(row.sizes[0].ratio, 0.8);
        let text = table(Path::new("d"), &samples, &rows);
        assert!(text.contains("g1_g2") && text.contains("80.0 %"), "{text}");
    }
}
