//! `kvbm bench compression`: how much shorter blocks become, and what that costs a core.
//!
//! The ratio depends on the content, so it is asked for: `--kv` names a file of blocks as they lie
//! in host memory or in an object. Without it the elements are random numbers of a normal
//! distribution, which says what the codecs do, and nothing of a model. The settings of
//! `volumes.lossy` have errors too. Then the blocks go over links of several bandwidths, with each
//! setting of `volumes.compress`.

mod link;
mod lossy;

use anyhow::{Context, Result, ensure};
use clap::Args;
use kvbm::layout::DType;
use kvbm_codec::{Codec, Compressor, Expander, FrameError, LossyForm, lossy_frame};
use serde::Serialize;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::Rows;
use crate::args::Output;
use crate::human;
use crate::number::whole;
use crate::progress::Progress;
use crate::table::Table;

/// Levels of Zstandard that are compared; the first is the one that volumes use.
const LEVELS: [i32; 4] = [1, -5, -1, 3];
/// Bytes of what is made up.
const MADE_UP: usize = 16 << 20;

/// Options of `kvbm bench compression`.
#[derive(Clone, Debug, Args)]
pub struct CompressionArgs {
    /// File of blocks, one behind the other; not set: random numbers.
    #[arg(long, value_name = "FILE")]
    pub kv: Option<PathBuf>,

    /// Type of its elements.
    #[arg(long, value_name = "NAME", default_value_t = DType::BF16)]
    pub dtype: DType,

    /// Bytes of a block, 4096 to 1 GiB; what is left at the end of the file is left out.
    #[arg(long, value_name = "BYTES", default_value_t = 131_072, allow_negative_numbers = true, value_parser = whole::<usize>(4096..=1 << 30))]
    pub block_bytes: usize,

    /// Bandwidths of links, in 10^6 bytes a second.
    #[arg(long, value_name = "MB", value_delimiter = ',', default_values_t = [500, 2000, 6000], allow_negative_numbers = true, value_parser = whole::<u32>(1..=1_000_000))]
    pub link_mb_per_s: Vec<u32>,

    /// Times that each codec is measured; the fastest counts.
    #[arg(long, value_name = "N", default_value_t = 3, allow_negative_numbers = true, value_parser = whole::<u32>(1..=100))]
    pub rounds: u32,

    /// Write the rows as JSON; - for standard output (the table goes to standard error then).
    #[arg(long, value_name = "FILE")]
    pub json: Option<Output>,
}

/// One codec with its level, over planes of bytes or over blocks as they are.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// `zstd 1 planes` and the like.
    pub name: String,
    /// Type of the elements.
    pub dtype: String,
    /// Whether the content was made up.
    pub made_up: bool,
    /// Bytes before, for each byte after.
    pub ratio: f64,
    /// Blocks that became so much shorter that they would be stored compressed.
    pub compressed_blocks: usize,
    /// Blocks.
    pub blocks: usize,
    /// One core compresses so many bytes of blocks a second, in 10^9.
    pub compress_gb_per_s: f64,
    /// One core opens so many bytes of blocks a second, in 10^9.
    pub decompress_gb_per_s: f64,
    /// A link below this bandwidth is written faster by one core that compresses, in 10^9 bytes a
    /// second.
    pub write_gain_below_gb_per_s: f64,
    /// A link below this bandwidth is read faster by one core that opens.
    pub read_gain_below_gb_per_s: f64,
    /// Of a lossy one, how far from the numbers what comes back is.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub errors: Option<lossy::Errors>,
}

/// A codec, or a link.
#[derive(Clone, Debug, Serialize)]
#[serde(untagged)]
enum Found {
    Codec(Row),
    Link(link::LinkRow),
}

/// Measures, and says what was found.
pub fn run(args: &CompressionArgs) -> Result<Rows> {
    let content = content(args)?;
    let blocks: Vec<&[u8]> = content.chunks_exact(args.block_bytes).collect();
    ensure!(!blocks.is_empty(), "less than a block of {} bytes: see --block-bytes", args.block_bytes);
    let width = args.dtype.width();
    let planes = [(width, "planes"), (1, "as is")].into_iter().take(if width > 1 { 2 } else { 1 });
    let zstd = LEVELS.map(|level| (Codec::Zstd, level));
    let codecs = zstd.into_iter().chain([(Codec::Lz4, Codec::DEFAULT_LEVEL)]);
    let all: Vec<_> = planes.flat_map(|planes| codecs.clone().map(move |codec| (planes, codec))).collect();
    let lossy = lossy::ways(args.dtype)?;
    let progress = Progress::new("codecs", (all.len() + lossy.len()) as u64);
    let mut rows = Vec::new();
    for ((width, shown), (codec, level)) in all {
        let level_shown = if codec == Codec::Zstd { format!(" {level}") } else { String::new() };
        let name = format!("{codec}{level_shown} {shown}");
        let way = Way::Exact(Compressor::with_level(codec, level)?, width);
        rows.push(row(args, name, &blocks, &measure(&blocks, way, args.rounds)?));
        progress.advance(1);
    }
    for (name, way) in lossy {
        rows.push(row(args, name, &blocks, &measure(&blocks, way, args.rounds)?));
        progress.advance(1);
    }
    progress.finish();
    let links = args.link_mb_per_s.iter().map(|mb| link::measure(&blocks, *mb));
    let links = links.collect::<Result<Vec<_>>>()?;
    let table = table(args, &rows, &links);
    let rows = rows.into_iter().map(Found::Codec).chain(links.into_iter().map(Found::Link));
    Rows::new(&rows.collect::<Vec<_>>(), table)
}

fn content(args: &CompressionArgs) -> Result<Vec<u8>> {
    if let Some(file) = &args.kv {
        return std::fs::read(file).with_context(|| format!("{} cannot be read", file.display()));
    }
    ensure!(
        matches!(args.dtype, DType::BF16 | DType::F16 | DType::F32),
        "random numbers of {} cannot be made up: give a file with --kv",
        args.dtype.name()
    );
    Ok(normal(args.dtype, MADE_UP.next_multiple_of(args.block_bytes)))
}

/// Numbers of a normal distribution, nearly: the sum of twelve.
fn normal(dtype: DType, bytes: usize) -> Vec<u8> {
    let mut state = 1_u64;
    let mut number = || {
        let mut sum = -6.0_f32;
        for _ in 0..12 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            sum += (state >> 40) as f32 / (1 << 24) as f32;
        }
        sum
    };
    let width = dtype.width() as usize;
    let mut content = Vec::with_capacity(bytes);
    while content.len() + width <= bytes {
        let bits = number().to_bits();
        match dtype {
            DType::F32 => content.extend_from_slice(&bits.to_le_bytes()),
            DType::F16 => content.extend_from_slice(&half(bits).to_le_bytes()),
            _ => content.extend_from_slice(&((bits >> 16) as u16).to_le_bytes()),
        }
    }
    content.resize(bytes, 0);
    content
}

/// Half precision of a number below 65504, cut; too small ones are zero.
fn half(bits: u32) -> u16 {
    let (sign, exponent) = ((bits >> 16) as u16 & 0x8000, (bits >> 23 & 0xff) as u16);
    let mantissa = (bits >> 13) as u16 & 0x3ff;
    // Their exponents count from 127 and from 15.
    exponent
        .checked_sub(112)
        .filter(|exponent| *exponent > 0)
        .map_or(sign, |exponent| sign | exponent << 10 | mantissa)
}

/// How a block is made shorter.
enum Way {
    /// Without loss, of elements of so many bytes.
    Exact(Compressor, u32),
    /// With loss, and without loss after that where there is a compressor.
    Lossy(LossyForm, Option<Compressor>),
}

impl Way {
    fn frame(&mut self, block: &[u8]) -> Option<Vec<u8>> {
        match self {
            Self::Exact(compressor, width) => compressor.frame(block, Some(*width)),
            Self::Lossy(form, packer) => lossy_frame(*form, block, packer.as_mut()),
        }
    }

    fn open(&self, expander: &mut Expander, frame: &[u8], block: &mut [u8]) -> Result<(), FrameError> {
        match self {
            Self::Exact(..) => expander.open(frame, block),
            Self::Lossy(form, _) => expander.open_lossy(*form, frame, block),
        }
    }
}

struct Measured {
    compressed_blocks: usize,
    errors: Option<lossy::Errors>,
    stored: usize,
    compress: Duration,
    decompress: Duration,
}

fn measure(blocks: &[&[u8]], mut way: Way, rounds: u32) -> Result<Measured> {
    let mut best: Option<Measured> = None;
    let mut expander = Expander::default();
    let mut opened = vec![0; blocks[0].len()];
    for _ in 0..rounds {
        let (mut compress, mut decompress) = (Duration::ZERO, Duration::ZERO);
        let (mut stored, mut compressed_blocks, mut errors) = (0, 0, lossy::Sums::default());
        for block in blocks {
            let began = Instant::now();
            let frame = way.frame(block);
            compress += began.elapsed();
            stored += frame.as_ref().map_or(block.len(), Vec::len);
            let began = Instant::now();
            // What is not compressed is read where it goes.
            let Some(frame) = frame else { continue };
            compressed_blocks += 1;
            way.open(&mut expander, &frame, &mut opened)?;
            decompress += began.elapsed();
            match way {
                Way::Exact(..) => ensure!(opened == *block, "a block does not come back"),
                Way::Lossy(form, _) => errors.add(form.element, block, &opened),
            }
        }
        let errors = matches!(way, Way::Lossy(..)).then(|| errors.errors());
        let found = Measured { compressed_blocks, errors, stored, compress, decompress };
        best = Some(match best {
            None => found,
            Some(best) => Measured {
                compress: best.compress.min(compress),
                decompress: best.decompress.min(decompress),
                ..found
            },
        });
    }
    best.context("no rounds")
}

fn row(args: &CompressionArgs, name: String, blocks: &[&[u8]], measured: &Measured) -> Row {
    let bytes = (blocks.len() * args.block_bytes) as f64;
    let kept = measured.stored as f64 / bytes;
    // Nanoseconds for a byte.
    let each = |time: Duration| time.as_secs_f64() * 1e9 / bytes;
    let (compress, decompress) = (each(measured.compress), each(measured.decompress));
    let below = |each: f64| if each > 0.0 { (1.0 - kept) / each } else { 0.0 };
    Row {
        name,
        dtype: args.dtype.name().to_owned(),
        made_up: args.kv.is_none(),
        ratio: 1.0 / kept,
        compressed_blocks: measured.compressed_blocks,
        blocks: blocks.len(),
        compress_gb_per_s: 1.0 / compress,
        decompress_gb_per_s: if decompress > 0.0 { 1.0 / decompress } else { 0.0 },
        write_gain_below_gb_per_s: below(compress),
        read_gain_below_gb_per_s: below(decompress),
        errors: measured.errors,
    }
}

fn table(args: &CompressionArgs, rows: &[Row], links: &[link::LinkRow]) -> String {
    let mut codecs = Table::new([
        "",
        "ratio",
        "compress",
        "open",
        "write gain below",
        "read gain below",
        "mean error",
        "largest",
    ]);
    let share = |share: f64| format!("{:.2} %", 100.0 * share);
    let speed = |gb_per_s: f64| format!("{gb_per_s:.2} GB/s");
    for row in rows {
        codecs.row([
            row.name.clone(),
            format!("{:.3}", row.ratio),
            speed(row.compress_gb_per_s),
            speed(row.decompress_gb_per_s),
            speed(row.write_gain_below_gb_per_s),
            speed(row.read_gain_below_gb_per_s),
            row.errors.map_or(String::new(), |errors| share(errors.mean_error)),
            row.errors.map_or(String::new(), |errors| share(errors.largest_error)),
        ]);
    }
    let mut over =
        Table::new(["link", "write: off", "zstd", "auto", "read: off", "zstd", "auto", "auto compresses"]);
    for row in links {
        let chosen = if row.auto_compresses { "yes" } else { "no" };
        let [off, zstd, auto] = row.write_gb_per_s.map(speed);
        let written = [format!("{} MB/s", row.link_mb_per_s), off, zstd, auto];
        let [off, zstd, auto] = row.read_gb_per_s.map(speed);
        let [link, write_off, write_zstd, write_auto] = written;
        over.row([link, write_off, write_zstd, write_auto, off, zstd, auto, chosen.to_owned()]);
    }
    let what = match &args.kv {
        Some(file) => format!("of {}", file.display()),
        None => "of random numbers, normally distributed: no model's".to_owned(),
    };
    format!(
        "{} blocks of {}, {}, {what}; one core, best of {} rounds\n\n{}\n{}",
        rows.first().map_or(0, |row| row.blocks),
        human::bytes(args.block_bytes as u64),
        args.dtype.name(),
        args.rounds,
        codecs.render(),
        over.render()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_precision_has_the_numbers_that_it_can_have() {
        for (number, bits) in [(1.0_f32, 0x3c00), (-2.0, 0xc000), (0.1, 0x2e66), (0.0, 0), (1e-8, 0)] {
            assert_eq!(half(number.to_bits()), bits, "{number}");
        }
    }
}
