//! `kvbm bench transfer`: every path of a worker beside what the hardware does without it, in one run, interleaved.
//!
//! - Between G1 and G2 the limit is a memcpy of the same fragments on one thread, from and to ordinary memory. What as many
//!   threads as help would copy is told beside it.
//! - Between G2 and G3 it is a bare io_uring loop on the same file: registered memory, direct I/O, queue depth 32, and a sync
//!   as often as the engine commits. A path from G3 to G1 has the same limit, since it reads the disk.
//!
//! What is measured is the transfer engine as it is shipped: plans in, reports out, every byte with its checksum.

mod bed;
mod limit;
mod machine;
mod pump;
mod ring;
mod summary;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Result, ensure};
use clap::Args;
use kvbm::config::Bytes;
use kvbm::plan::Path as Route;

use super::Rows;
use crate::args::Output;
use crate::interrupt;
use crate::progress::Progress;
use crate::scratch::Scratch;
use bed::{Bed, Disk, Shape};
use limit::Copies;
use pump::Sample;
use ring::{BareDisk, Way};
use summary::Samples;

/// Fragments of a block in device memory.
const DEVICE_FRAGMENTS: u32 = 16;
/// Fragments of a block in host memory that is not contiguous.
const HOST_FRAGMENTS: u32 = 64;
/// More fragments than one system call takes, and their bytes.
const MANY_FRAGMENTS: u32 = 1100;
const MANY_FRAGMENT_BYTES: u64 = 4096;
const BLOCK_BYTES: std::ops::RangeInclusive<u64> = 4096..=256 << 20;
/// Measurements in a round of a size, and in one with many fragments.
const STEPS: usize = 10;
const STEPS_OF_MANY: usize = 4;

/// Options of `kvbm bench transfer`.
#[derive(Clone, Debug, Args)]
pub struct TransferArgs {
    /// Bytes of a block, several with commas; multiples of 4096.
    #[arg(long, value_name = "SIZE,..", value_delimiter = ',', default_value = "64KiB,1MiB,4MiB")]
    pub sizes: Vec<Bytes>,

    /// Seconds of each measurement, of which a round of a size has ten.
    #[arg(long, value_name = "S", default_value_t = 0.5, value_parser = seconds)]
    pub seconds: f64,

    /// Times that each measurement is repeated; medians count.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub rounds: u32,

    /// Bytes that each measurement goes through, on each tier [default: more than four times the last cache, and at least 96 blocks].
    #[arg(long, value_name = "SIZE")]
    pub set: Option<Bytes>,

    /// Directory for the disk tier, on the device to measure; what is written there is removed afterwards.
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub dir: PathBuf,

    /// Write the rows as JSON; - for standard output (the table goes to standard error then).
    #[arg(long, value_name = "FILE")]
    pub json: Option<Output>,
}

fn seconds(text: &str) -> Result<f64, String> {
    let in_range = text.parse().ok().filter(|seconds| (0.001..=60.0).contains(seconds));
    in_range.ok_or_else(|| format!("{text}: give seconds from 0.001 to 60"))
}

/// Measures, and says what was found.
pub fn run(args: &TransferArgs) -> Result<Rows> {
    for size in &args.sizes {
        let bytes = size.get();
        ensure!(
            BLOCK_BYTES.contains(&bytes) && bytes.is_multiple_of(4096),
            "--sizes {size}: a block has a multiple of 4096 bytes, from {} to {}",
            BLOCK_BYTES.start(),
            BLOCK_BYTES.end()
        );
    }
    // From here on there is something to clean up.
    interrupt::catch();
    let steps = STEPS * args.sizes.len() + STEPS_OF_MANY;
    let course = Course {
        args,
        time: Duration::from_secs_f64(args.seconds),
        progress: Progress::new("measurements", u64::from(args.rounds) * steps as u64),
    };
    let mut samples = Samples::default();
    for size in &args.sizes {
        course.size(size.get(), &mut samples)?;
    }
    course.many_fragments(&mut samples)?;
    course.progress.finish();
    let rows = samples.rows();
    Rows::new(&rows, summary::table(&args.dir, &samples, &rows))
}

/// One measurement of a length of time: a path of a worker, or a limit.
type Step<'a> = Box<dyn Fn(Duration) -> Result<Sample> + 'a>;

/// Paths with a limit in common, measured in turn.
struct Group<'a> {
    limit: Step<'a>,
    paths: Vec<(&'static str, Step<'a>)>,
}

/// What all measurements share.
struct Course<'a> {
    args: &'a TransferArgs,
    time: Duration,
    progress: Progress,
}

impl Course<'_> {
    /// All paths with blocks of `block_bytes`.
    fn size(&self, block_bytes: u64, samples: &mut Samples) -> Result<()> {
        let slots = machine::slots(block_bytes, self.args.set.map(Bytes::get))?;
        let shape = Shape { block_bytes, device_fragments: DEVICE_FRAGMENTS, host_fragments: 1, slots };
        let scattered = Shape { device_fragments: HOST_FRAGMENTS, host_fragments: HOST_FRAGMENTS, ..shape };
        // G1 and G2 of both, and what stands for G1 in the limit.
        machine::expect_memory(5 * shape.set_bytes())?;
        let place = Place::new(&self.args.dir, shape)?;
        let [bed, scattered] = [&place.bed(shape, 0)?, &place.bed(scattered, 1)?];
        let copies = &Copies::new(bed)?;
        let bare = &BareDisk::open(&place.disk, 2)?;
        samples.note(&place.disk, bare);
        for (name, path) in [("g1_g2", Route::G1_G2), ("g2_g1", Route::G2_G1)] {
            samples.note_all_cores(name, block_bytes, copies.on_all_cores(path));
        }
        let pump = |bed, path| -> Step<'_> { Box::new(move |time| pump::run(bed, path, time)) };
        let copy = |path| -> Step<'_> { Box::new(move |time| Ok(copies.run(path, time))) };
        let disk = |way| -> Step<'_> { Box::new(move |time| bare.run(way, time)) };
        let groups = [
            Group { limit: copy(Route::G1_G2), paths: vec![("g1_g2", pump(bed, Route::G1_G2))] },
            Group { limit: copy(Route::G2_G1), paths: vec![("g2_g1", pump(bed, Route::G2_G1))] },
            Group {
                limit: disk(Way::Write),
                paths: vec![
                    ("g2_g3", pump(bed, Route::G2_G3)),
                    ("g2_g3_fragments", pump(scattered, Route::G2_G3)),
                ],
            },
            Group {
                limit: disk(Way::Read),
                paths: vec![("g3_g2", pump(bed, Route::G3_G2)), ("g3_g1", pump(bed, Route::G3_G1))],
            },
        ];
        self.measure(&groups, block_bytes, samples)?;
        bed.check_bytes()
    }

    /// Blocks of more fragments than one system call takes, straight between host memory and disk.
    fn many_fragments(&self, samples: &mut Samples) -> Result<()> {
        let block_bytes = u64::from(MANY_FRAGMENTS) * MANY_FRAGMENT_BYTES;
        let slots = machine::slots(block_bytes, self.args.set.map(Bytes::get))?;
        let shape =
            Shape { block_bytes, device_fragments: MANY_FRAGMENTS, host_fragments: MANY_FRAGMENTS, slots };
        machine::expect_memory(2 * shape.set_bytes())?;
        let place = Place::new(&self.args.dir, shape)?;
        let bed = &place.bed(shape, 0)?;
        let bare = &BareDisk::open(&place.disk, 1)?;
        samples.note(&place.disk, bare);
        let pump = |path| -> Step<'_> { Box::new(move |time| pump::run(bed, path, time)) };
        let disk = |way| -> Step<'_> { Box::new(move |time| bare.run(way, time)) };
        let groups = [
            Group { limit: disk(Way::Write), paths: vec![("g2_g3_1100_fragments", pump(Route::G2_G3))] },
            Group { limit: disk(Way::Read), paths: vec![("g3_g2_1100_fragments", pump(Route::G3_G2))] },
        ];
        self.measure(&groups, block_bytes, samples)?;
        bed.check_bytes()
    }

    fn measure(&self, groups: &[Group<'_>], block_bytes: u64, samples: &mut Samples) -> Result<()> {
        for round in 0..self.args.rounds {
            for Group { limit, paths } in groups {
                ensure!(!interrupt::asked(), "stopped: nothing was kept");
                let step = |step: &Step<'_>| {
                    self.progress.advance(1);
                    step(self.time)
                };
                // Every second round the other way round: neither side always comes first.
                let (limit, own) = if round % 2 == 0 {
                    let limit = step(limit)?;
                    (limit, paths.iter().map(|(_, path)| step(path)).collect::<Result<Vec<_>>>()?)
                } else {
                    let own = paths.iter().rev().map(|(_, path)| step(path)).collect::<Result<Vec<_>>>()?;
                    (step(limit)?, own.into_iter().rev().collect())
                };
                for ((name, _), own) in paths.iter().zip(own) {
                    samples.push(name, block_bytes, own, limit);
                }
            }
        }
        Ok(())
    }
}

/// A folder on the disk to measure, with an engine in it.
struct Place {
    disk: Disk,
    _scratch: Scratch,
}

impl Place {
    /// Room for three beds of `shape`, or two and what the limit writes.
    fn new(dir: &Path, shape: Shape) -> Result<Self> {
        const BEDS: u32 = 3;
        machine::expect_space(dir, u64::from(BEDS) * shape.set_bytes())?;
        let scratch = Scratch::create(dir, "bench-transfer")?;
        Ok(Self { disk: Disk::open(scratch.path(), shape, BEDS)?, _scratch: scratch })
    }

    fn bed(&self, shape: Shape, number: u32) -> Result<Bed> {
        Bed::new(shape, &self.disk, number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    fn args(dir: &Path, sizes: &[Bytes]) -> TransferArgs {
        TransferArgs {
            sizes: sizes.to_vec(),
            seconds: 0.001,
            rounds: 2,
            set: Some(Bytes::kib(256)),
            dir: dir.to_owned(),
            json: None,
        }
    }

    #[test]
    fn every_path_is_measured_beside_its_limit() {
        let dir = tempfile::tempdir().unwrap();
        let rows = run(&args(dir.path(), &[Bytes::kib(64), Bytes::kib(128)])).unwrap();
        let json: Value = serde_json::from_str(&rows.json).unwrap();
        let found = json["rows"].as_array().unwrap();
        let names: Vec<&str> = found.iter().map(|row| row["name"].as_str().unwrap()).collect();
        let paths = ["g1_g2", "g2_g1", "g2_g3", "g2_g3_fragments", "g3_g2", "g3_g1"];
        assert_eq!(names[..6], paths);
        assert_eq!(names[6..], ["g2_g3_1100_fragments", "g3_g2_1100_fragments"]);
        for row in found {
            let number = |field: &str| row[field].as_f64().unwrap();
            assert!(number("gb_per_s") > 0.0 && number("limit_gb_per_s") > 0.0, "{row}");
            assert!((number("gb_per_s") / number("limit_gb_per_s") - number("ratio")).abs() < 1e-9, "{row}");
            let sizes = row["sizes"].as_array().unwrap();
            let worst = sizes.iter().map(|size| size["ratio"].as_f64().unwrap()).fold(f64::MAX, f64::min);
            assert!((worst - number("ratio")).abs() < 1e-9, "{row}");
        }
        assert_eq!(found[0]["sizes"].as_array().unwrap().len(), 2);
        assert!(rows.table.contains("limit of disk paths"), "{}", rows.table);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "nothing stays behind");
    }

    #[test]
    fn sizes_that_cannot_be_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        for size in [Bytes::kib(2), Bytes::kib(6), Bytes::gib(1)] {
            let error = run(&args(dir.path(), &[size])).unwrap_err().to_string();
            assert!(error.contains("multiple of 4096"), "{error}");
        }
    }
}
