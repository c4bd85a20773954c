//! `kvbm bench transfer`: every path of a worker beside what the hardware does without it, in one
//! run, interleaved.
//!
//! - Between G1 and G2 the limit is a copy of the same fragments from and to ordinary memory. It
//!   goes by memcpy or by streaming stores, on one thread or several. The limit is the fastest of
//!   all in that round.
//! - Between G2 and G3 it is a bare io_uring loop on the same file, block by block. It has
//!   registered memory, direct I/O, queue depth 32, and a sync as often as the engine commits. A
//!   path from G3 to G1 has the same limit, since it reads the disk. Blocks that go together lie
//!   side by side in the file, in the loop too; in the rows `_scattered` they do not. The engine
//!   sends neighbours in requests of up to 4 MiB and has more blocks under way than the loop. So
//!   for blocks that are small beside that the loop is a comparison, not a limit: the engine may be
//!   faster.
//!
//! - In the rows `_keyed` blocks are signed (`namespace.deployment_secret`), in the rows
//!   `_encrypted` they are encrypted (`disk.encrypt`). Their limit is the same path without a key,
//!   on another engine, in the same round.
//!
//! - In the rows `_threads` and `_nixl` threads or NIXL move the bytes. Their limit is the same
//!   path with the engine that the product chooses, in the same round. They are measured where
//!   `--only` names them.
//! - In the rows `_universal` the device has a region for each layer, tokens before heads, and host
//!   memory has blocks in universal order: every copy converts. Their limit is the same path
//!   without a conversion, from the same device layout, in the same round.
//!
//! Processor time stands beside that of a bare loop that also computes the checksums.
//!
//! What is measured is the transfer engine as it is shipped: plans in, reports out, every byte with
//! its checksum.

mod fixture;
mod limit;
mod load_generator;
mod machine;
mod ring;
mod summary;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, ensure};
use clap::Args;
use kvbm::config::{Bytes, Config};
use kvbm::layout::{AxisOrder, DType};
use kvbm::plan::{Path as Route, Rank};
use kvbm_disk::{DiskEncryption, DiskKeys, EngineMode};
use kvbm_keys::{DeploymentKey, OperatorKey};
use kvbm_transfer::VerifyHost;

use super::Rows;
use crate::args::{Output, WrongUsage};
use crate::interrupt;
use crate::number::{ANY, whole};
use crate::progress::Progress;
use crate::scratch::Scratch;
use fixture::{Disk, DiskWith, Fixture, Order, Shape};
use limit::Copies;
use load_generator::Sample;
use ring::{BareDisk, Checksums, Way};
use summary::Samples;

/// Fragments of a block in device memory.
const DEVICE_FRAGMENTS: u32 = 16;
/// Fragments of a block in host memory that is not contiguous.
const HOST_FRAGMENTS: u32 = 64;
/// More fragments than one system call takes, and their bytes.
const MANY_FRAGMENTS: u32 = 1100;
const MANY_FRAGMENT_BYTES: u64 = 4096;
const BLOCK_BYTES: std::ops::RangeInclusive<u64> = 4096..=256 << 20;
/// Rows of every size, those with a limit in common together, and rows of blocks with many
/// fragments.
const ROWS: [&[&str]; 6] = [
    &["g1_g2"],
    &["g2_g1"],
    &["g2_g3", "g2_g3_fragments", "g1_g3", "g1_g2_g3"],
    &["g3_g2", "g3_g1"],
    &["g2_g3_scattered"],
    &["g3_g2_scattered"],
];
/// Rows whose limit is the same path without a key.
const ROWS_OF_KEYS: [&[&str]; 4] =
    [&["g2_g3_keyed"], &["g3_g2_keyed"], &["g2_g3_encrypted"], &["g3_g2_encrypted"]];
/// Rows whose limit is the same path with the default engine; only where they are named.
const ROWS_OF_ENGINES: [&[&str]; 4] =
    [&["g2_g3_threads"], &["g3_g2_threads"], &["g2_g3_nixl"], &["g3_g2_nixl"]];
/// Rows whose limit is the same path without a conversion.
const ROWS_OF_ORDERS: [&[&str]; 2] = [&["g1_g2_universal"], &["g2_g1_universal"]];
/// Of the benchmark; nothing that it encrypts stays.
const OPERATOR_KEY: &[u8] = b"operator's key of this benchmark";
const ROWS_OF_MANY: [&[&str]; 2] = [&["g2_g3_1100_fragments"], &["g3_g2_1100_fragments"]];

/// Options of `kvbm bench transfer`.
#[derive(Clone, Debug, Args)]
pub struct TransferArgs {
    /// Bytes of a block, several with commas; multiples of 4096.
    #[arg(
        long,
        value_name = "SIZE,..",
        value_delimiter = ',',
        default_value = "64KiB,1MiB,4MiB",
        allow_negative_numbers = true
    )]
    pub sizes: Vec<Bytes>,

    /// Element type of the KV cache, like `fp8_e4m3`, `fp8_e5m2`, int8, bf16, fp16 or fp32; of the
    /// same bytes of a block, narrower ones are more.
    #[arg(long, value_name = "NAME", default_value_t = DType::BF16)]
    pub dtype: DType,

    /// Seconds of each measurement, of which a round of a size has twelve.
    #[arg(long, value_name = "S", default_value_t = 0.5, allow_negative_numbers = true, value_parser = seconds)]
    pub seconds: f64,

    /// Times that each measurement is repeated; medians count.
    #[arg(long, value_name = "N", default_value_t = 5, allow_negative_numbers = true, value_parser = whole::<u32>(1..=100))]
    pub rounds: u32,

    /// Bytes that each measurement goes through, on each tier [default: more than four times the
    /// last cache, and at least 96 blocks].
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true)]
    pub set: Option<Bytes>,

    /// Rows to measure, with commas [default: all but `_threads` and `_nixl`].
    #[arg(long, value_name = "NAME,..", value_delimiter = ',', value_parser = row_names())]
    pub only: Vec<String>,

    /// Of so many blocks that come from host memory one is compared with its checksum; 0 for none
    /// [default: as the product].
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = whole::<u32>(ANY))]
    pub verify_every: Option<u32>,

    /// Directory for the disk tier, on the device to measure; what is written there is removed
    /// afterwards.
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub dir: PathBuf,

    /// Write the rows as JSON; - for standard output (the table goes to standard error then).
    #[arg(long, value_name = "FILE")]
    pub json: Option<Output>,
}

fn row_names() -> clap::builder::PossibleValuesParser {
    ROWS.concat()
        .into_iter()
        .chain(ROWS_OF_KEYS.concat())
        .chain(ROWS_OF_ENGINES.concat())
        .chain(ROWS_OF_ORDERS.concat())
        .chain(ROWS_OF_MANY.concat())
        .collect::<Vec<_>>()
        .into()
}

fn seconds(text: &str) -> Result<f64, String> {
    let in_range = text.parse().ok().filter(|seconds| (0.001..=60.0).contains(seconds));
    in_range.ok_or_else(|| format!("{text}: give seconds from 0.001 to 60"))
}

impl TransferArgs {
    fn verify_host(&self) -> VerifyHost {
        match self.verify_every {
            None => VerifyHost::default(),
            Some(0) => VerifyHost::Never,
            Some(every) => VerifyHost::Sampled(every),
        }
    }

    fn wants(&self, name: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|only| only == name)
    }

    /// Whether one of these rows is named.
    fn names(&self, rows: [&str; 2]) -> bool {
        rows.iter().any(|row| self.only.iter().any(|only| only == row))
    }

    /// Measurements in a round of these rows.
    fn steps(&self, groups: &[&[&str]]) -> usize {
        let paths = groups.iter().map(|names| names.iter().filter(|name| self.wants(name)).count());
        paths.filter(|paths| *paths > 0).map(|paths| paths + 2).sum()
    }
}

/// Measures, and says what was found.
pub fn run(args: &TransferArgs) -> Result<Rows> {
    for size in &args.sizes {
        let bytes = size.get();
        if !BLOCK_BYTES.contains(&bytes) || !bytes.is_multiple_of(4096) {
            let (least, most) = (Bytes(*BLOCK_BYTES.start()), Bytes(*BLOCK_BYTES.end()));
            let problem =
                format!("--sizes {size}: a block has a multiple of 4096 bytes, from {least} to {most}");
            return Err(WrongUsage(problem).into());
        }
    }
    // From here on there is something to clean up.
    interrupt::catch();
    let of_engines = if args.only.is_empty() { 0 } else { args.steps(&ROWS_OF_ENGINES) };
    let of_each_size =
        args.steps(&ROWS) + args.steps(&ROWS_OF_KEYS) + of_engines + args.steps(&ROWS_OF_ORDERS);
    let steps = args.sizes.len() * of_each_size + args.steps(&ROWS_OF_MANY);
    let course = Course {
        args,
        time: Duration::try_from_secs_f64(args.seconds)?,
        progress: Progress::new("measurements", u64::from(args.rounds) * steps as u64),
    };
    let mut samples = Samples::of(args.dtype);
    for size in args.sizes.iter().filter(|_| args.steps(&ROWS) > 0) {
        course.size(size.get(), &mut samples)?;
    }
    for size in args.sizes.iter().filter(|_| args.steps(&ROWS_OF_KEYS) > 0) {
        let key = DeploymentKey::from_secret(b"of the benchmark");
        let with = |keys| DiskWith { keys, ..DiskWith::default() };
        let signed = with(DiskKeys { signing: Some(key), encryption: None });
        course.beside(size.get(), signed, ["g2_g3_keyed", "g3_g2_keyed"], &mut samples)?;
        let encryption = DiskEncryption { key: OperatorKey::parse(OPERATOR_KEY)?, previous: None };
        let encrypted = with(DiskKeys { signing: None, encryption: Some(encryption) });
        course.beside(size.get(), encrypted, ["g2_g3_encrypted", "g3_g2_encrypted"], &mut samples)?;
    }
    for size in &args.sizes {
        course.engines(size.get(), &mut samples)?;
    }
    for size in args.sizes.iter().filter(|_| args.steps(&ROWS_OF_ORDERS) > 0) {
        course.converted(size.get(), &mut samples)?;
    }
    if args.steps(&ROWS_OF_MANY) > 0 {
        course.many_fragments(&mut samples)?;
    }
    course.progress.finish();
    let rows = samples.rows();
    Rows::new(&rows, summary::table(&args.dir, &samples, &rows))
}

/// One measurement of a length of time: a path of a worker, or a limit.
type Step<'a> = Box<dyn Fn(Duration) -> Result<Sample> + 'a>;

/// Paths with a limit in common, measured in turn.
struct Group<'a> {
    limit: Step<'a>,
    /// A loop that moves bytes and computes their checksums, for its processor time.
    bare: Step<'a>,
    paths: Vec<(&'static str, Step<'a>)>,
}

impl<'a> Group<'a> {
    /// Paths to or from a disk.
    fn on_disk(disk: &'a BareDisk, way: Way, paths: Vec<(&'static str, Step<'a>)>) -> Self {
        Self {
            limit: Box::new(move |time| disk.run(way, Checksums::No, time)),
            bare: Box::new(move |time| disk.run(way, Checksums::Yes, time)),
            paths,
        }
    }
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
        let dtype = self.args.dtype;
        let shape = Shape {
            block_bytes,
            dtype,
            device_fragments: DEVICE_FRAGMENTS,
            host_fragments: 1,
            host_order: AxisOrder::Nhd,
            slots,
        };
        let scattered = Shape { device_fragments: HOST_FRAGMENTS, host_fragments: HOST_FRAGMENTS, ..shape };
        // G1 and G2 of both, and what stands for G1 in the limit.
        machine::expect_memory(5 * shape.set_bytes())?;
        let place = Place::new(self.args, shape)?;
        let mut fixtures = [place.fixture(shape, 0)?, place.fixture(scattered, 1)?];
        self.filled(&fixtures, &BareDisk::open(&place.disk, 2, Order::Filled)?, &place, samples)?;
        if self.args.steps(&ROWS[4..]) > 0 {
            let [fixture, _] = &mut fixtures;
            fixture.reorder(0, Order::Scattered)?;
            self.scattered(fixture, &BareDisk::open(&place.disk, 2, Order::Scattered)?, samples)?;
        }
        fixtures.iter().try_for_each(Fixture::check_bytes)
    }

    /// Paths to and from a disk whose slots were handed out in order: blocks that go together lie
    /// side by side.
    fn filled(
        &self,
        fixtures: &[Fixture; 2],
        bare: &BareDisk,
        place: &Place,
        samples: &mut Samples,
    ) -> Result<()> {
        let [fixture, scattered] = fixtures;
        let block_bytes = fixture.shape.block_bytes;
        let copies = &Copies::new(fixture)?;
        samples.note(&place.disk, bare);
        let load =
            |fixture, path| -> Step<'_> { Box::new(move |time| load_generator::run(fixture, path, time)) };
        let copied = |name, path| Group {
            limit: Box::new(move |time| Ok(copies.run(path, time))),
            bare: Box::new(move |time| Ok(copies.run_with_checksums(path, time))),
            paths: vec![(name, load(fixture, path))],
        };
        let groups = [
            copied("g1_g2", Route::G1_G2),
            copied("g2_g1", Route::G2_G1),
            Group::on_disk(
                bare,
                Way::Write,
                vec![
                    ("g2_g3", load(fixture, Route::G2_G3)),
                    ("g2_g3_fragments", load(scattered, Route::G2_G3)),
                    ("g1_g3", load(fixture, Route::G1_G3)),
                    ("g1_g2_g3", Box::new(move |time| load_generator::run_staged(fixture, time))),
                ],
            ),
            Group::on_disk(
                bare,
                Way::Read,
                vec![("g3_g2", load(fixture, Route::G3_G2)), ("g3_g1", load(fixture, Route::G3_G1))],
            ),
        ];
        self.measure(groups, block_bytes, samples)
    }

    /// Paths to and from a disk where every block lies somewhere else, the worst that can be.
    fn scattered(&self, fixture: &Fixture, bare: &BareDisk, samples: &mut Samples) -> Result<()> {
        let group = |way, name, path| {
            Group::on_disk(
                bare,
                way,
                vec![(name, Box::new(move |time| load_generator::run(fixture, path, time)))],
            )
        };
        let groups = [
            group(Way::Write, "g2_g3_scattered", Route::G2_G3),
            group(Way::Read, "g3_g2_scattered", Route::G3_G2),
        ];
        self.measure(groups, fixture.shape.block_bytes, samples)
    }

    /// Paths to and from a disk by other engines than the default one.
    fn engines(&self, block_bytes: u64, samples: &mut Samples) -> Result<()> {
        let rows = ["g2_g3_threads", "g3_g2_threads"];
        if self.args.names(rows) {
            let threads = DiskWith { engine: EngineMode::Threads, ..DiskWith::default() };
            self.beside(block_bytes, threads, rows, samples)?;
        }
        let rows = ["g2_g3_nixl", "g3_g2_nixl"];
        if self.args.names(rows) {
            let slot_io = Some(kvbm::nixl_slot_io(&Config::default(), Rank(0))?);
            let nixl = DiskWith { engine: EngineMode::Custom, slot_io, ..DiskWith::default() };
            self.beside(block_bytes, nixl, rows, samples)?;
        }
        Ok(())
    }

    /// Paths to and from a disk `with` something, beside the same paths of the product's default.
    fn beside(
        &self,
        block_bytes: u64,
        with: DiskWith,
        [write, read]: [&'static str; 2],
        samples: &mut Samples,
    ) -> Result<()> {
        if ![write, read].iter().any(|row| self.args.wants(row)) {
            return Ok(());
        }
        let slots = machine::slots(block_bytes, self.args.set.map(Bytes::get))?;
        let dtype = self.args.dtype;
        let shape = Shape {
            block_bytes,
            dtype,
            device_fragments: DEVICE_FRAGMENTS,
            host_fragments: 1,
            host_order: AxisOrder::Nhd,
            slots,
        };
        machine::expect_memory(4 * shape.set_bytes())?;
        let places = [Place::new(self.args, shape)?, Place::with(self.args, shape, Some(with))?];
        let [plain, other] = [places[0].fixture(shape, 0)?, places[1].fixture(shape, 0)?];
        let bare = &BareDisk::open(&places[0].disk, 1, Order::Filled)?;
        for place in &places {
            samples.note(&place.disk, bare);
        }
        let group = |way, name, path| Group {
            limit: Box::new({
                let plain = &plain;
                move |time| load_generator::run(plain, path, time)
            }),
            ..Group::on_disk(
                bare,
                way,
                vec![(name, {
                    let other = &other;
                    Box::new(move |time| load_generator::run(other, path, time))
                })],
            )
        };
        let groups = [group(Way::Write, write, Route::G2_G3), group(Way::Read, read, Route::G3_G2)];
        self.measure(groups, block_bytes, samples)?;
        [&plain, &other].into_iter().try_for_each(Fixture::check_bytes)
    }

    /// Paths between NHD on the device and universal order in host memory, beside the same paths
    /// between NHD and NHD.
    fn converted(&self, block_bytes: u64, samples: &mut Samples) -> Result<()> {
        let slots = machine::slots(block_bytes, self.args.set.map(Bytes::get))?;
        let dtype = self.args.dtype;
        let host_order = AxisOrder::Nhd;
        let shape = Shape {
            block_bytes,
            dtype,
            device_fragments: DEVICE_FRAGMENTS,
            host_fragments: 1,
            host_order,
            slots,
        };
        let converting = Shape { host_order: AxisOrder::Universal, ..shape };
        machine::expect_memory(5 * shape.set_bytes())?;
        let place = Place::new(self.args, shape)?;
        let [plain, converted] = [place.fixture(shape, 0)?, place.fixture(converting, 1)?];
        let copies = &Copies::new(&plain)?;
        let group = |name, path| Group {
            limit: Box::new({
                let plain = &plain;
                move |time| load_generator::run(plain, path, time)
            }),
            bare: Box::new(move |time| Ok(copies.run_with_checksums(path, time))),
            paths: vec![(name, {
                let converted = &converted;
                Box::new(move |time| load_generator::run(converted, path, time))
            })],
        };
        let groups = [group("g1_g2_universal", Route::G1_G2), group("g2_g1_universal", Route::G2_G1)];
        self.measure(groups, block_bytes, samples)?;
        [&plain, &converted].into_iter().try_for_each(Fixture::check_bytes)
    }

    /// Blocks of more fragments than one system call takes, straight between host memory and disk.
    fn many_fragments(&self, samples: &mut Samples) -> Result<()> {
        let block_bytes = u64::from(MANY_FRAGMENTS) * MANY_FRAGMENT_BYTES;
        let slots = machine::slots(block_bytes, self.args.set.map(Bytes::get))?;
        let (dtype, fragments) = (self.args.dtype, MANY_FRAGMENTS);
        let shape = Shape {
            block_bytes,
            dtype,
            device_fragments: fragments,
            host_fragments: fragments,
            host_order: AxisOrder::Nhd,
            slots,
        };
        machine::expect_memory(2 * shape.set_bytes())?;
        let place = Place::new(self.args, shape)?;
        let fixture = &place.fixture(shape, 0)?;
        let bare = &BareDisk::open(&place.disk, 1, Order::Filled)?;
        samples.note(&place.disk, bare);
        let load = |path| -> Step<'_> { Box::new(move |time| load_generator::run(fixture, path, time)) };
        let groups = [
            Group::on_disk(bare, Way::Write, vec![("g2_g3_1100_fragments", load(Route::G2_G3))]),
            Group::on_disk(bare, Way::Read, vec![("g3_g2_1100_fragments", load(Route::G3_G2))]),
        ];
        self.measure(groups, block_bytes, samples)?;
        fixture.check_bytes()
    }

    fn measure<const N: usize>(
        &self,
        mut groups: [Group<'_>; N],
        block_bytes: u64,
        samples: &mut Samples,
    ) -> Result<()> {
        for Group { paths, .. } in &mut groups {
            paths.retain(|(name, _)| self.args.wants(name));
        }
        for round in 0..self.args.rounds {
            for Group { limit, bare, paths } in groups.iter().filter(|group| !group.paths.is_empty()) {
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
                let bare = step(bare)?;
                for ((name, _), own) in paths.iter().zip(own) {
                    samples.push(name, block_bytes, own, limit, bare);
                }
            }
        }
        Ok(())
    }
}

/// A folder on the disk to measure, with an engine in it.
struct Place {
    disk: Disk,
    verify_host: VerifyHost,
    _scratch: Scratch,
}

impl Place {
    /// Room for three fixtures of `shape`, or two and what the limit writes.
    fn new(args: &TransferArgs, shape: Shape) -> Result<Self> {
        Self::with(args, shape, None)
    }

    fn with(args: &TransferArgs, shape: Shape, with: Option<DiskWith>) -> Result<Self> {
        const BEDS: u32 = 3;
        machine::expect_space(&args.dir, u64::from(BEDS) * shape.set_bytes())?;
        let name = if with.is_some() { "bench-transfer-beside" } else { "bench-transfer" };
        let scratch = Scratch::create(&args.dir, name)?;
        let disk = Disk::open(scratch.path(), shape, BEDS, with.unwrap_or_default())?;
        Ok(Self { disk, verify_host: args.verify_host(), _scratch: scratch })
    }

    fn fixture(&self, shape: Shape, number: u32) -> Result<Fixture> {
        Fixture::new(shape, &self.disk, number, Order::Filled, self.verify_host)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;
    use std::path::Path;

    fn args(dir: &Path, sizes: &[Bytes]) -> TransferArgs {
        TransferArgs {
            sizes: sizes.to_vec(),
            dtype: DType::BF16,
            seconds: 0.001,
            rounds: 2,
            set: Some(Bytes::kib(256)),
            only: Vec::new(),
            verify_every: None,
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
        let paths = ["g1_g2", "g2_g1", "g2_g3", "g2_g3_fragments", "g1_g3", "g1_g2_g3", "g3_g2", "g3_g1"];
        assert_eq!(names[..8], paths);
        let more = [
            "g2_g3_scattered",
            "g3_g2_scattered",
            "g2_g3_keyed",
            "g3_g2_keyed",
            "g2_g3_encrypted",
            "g3_g2_encrypted",
            "g1_g2_universal",
            "g2_g1_universal",
            "g2_g3_1100_fragments",
            "g3_g2_1100_fragments",
        ];
        assert_eq!(names[8..], more);
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
    fn one_row_can_be_measured_alone() {
        let dir = tempfile::tempdir().unwrap();
        let only = vec!["g3_g2".to_owned()];
        let args = TransferArgs { only, verify_every: Some(0), ..args(dir.path(), &[Bytes::kib(64)]) };
        let json: Value = serde_json::from_str(&run(&args).unwrap().json).unwrap();
        let rows = json["rows"].as_array().unwrap();
        assert_eq!(rows.iter().map(|row| row["name"].as_str().unwrap()).collect::<Vec<_>>(), ["g3_g2"]);
    }

    #[test]
    fn other_engines_are_measured_beside_the_default_one_where_they_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let rows = |only: &[&str]| {
            let only = only.iter().map(|row| (*row).to_owned()).collect();
            let measured = run(&TransferArgs { only, rounds: 1, ..args(dir.path(), &[Bytes::kib(64)]) })?;
            let json: Value = serde_json::from_str(&measured.json)?;
            let rows = json["rows"].as_array().into_iter().flatten();
            let names =
                rows.map(|row| row["name"].as_str().unwrap_or_default().to_owned()).collect::<Vec<_>>();
            anyhow::Ok((names, measured.table))
        };
        let (names, table) = rows(&["g2_g3_threads", "g3_g2_threads"]).unwrap();
        assert_eq!(names, ["g2_g3_threads", "g3_g2_threads"]);
        assert!(table.contains("disk engine: threads: configured"), "{table}");
        // Without NIXL its row is an error that says so.
        match rows(&["g3_g2_nixl"]) {
            Ok((names, _)) => assert_eq!(names, ["g3_g2_nixl"]),
            Err(error) => assert!(error.to_string().contains("disk.engine is \"nixl\""), "{error}"),
        }
    }

    #[test]
    fn elements_of_any_width_are_measured() {
        let dir = tempfile::tempdir().unwrap();
        for dtype in [DType::F8E4M3, DType::F8E5M2, DType::I8, DType::F16, DType::F32] {
            let only = ["g1_g2", "g3_g1"].map(str::to_owned).to_vec();
            let args = TransferArgs { only, dtype, rounds: 1, ..args(dir.path(), &[Bytes::kib(64)]) };
            let json: Value = serde_json::from_str(&run(&args).unwrap().json).unwrap();
            for row in json["rows"].as_array().unwrap() {
                assert_eq!(row["dtype"], dtype.name());
                assert!(row["gb_per_s"].as_f64().unwrap() > 0.0, "{dtype}: {row}");
            }
        }
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
