//! Rates beside what the device reaches in the same run: a device copy of the same size, one large
//! page-locked copy.

use std::time::Duration;

use kvbm_device::{
    CopyBatch, CopyEngine, CudaStream, Device, DeviceMemory, Direction, HostBuffer, PinnedHost, Stream,
};
use kvbm_kernels::{Backend, BlockForm, ChunkOrder, Conversion, Heads, Piece};
use serde_json::{Value, json};

use crate::blocks::{Blocks, Dims, Random, shape_of, soon};
use crate::{Failure, Gpu, Options, results};

const NHD: BlockForm = BlockForm::Stack(ChunkOrder::Nhd);
const HND: BlockForm = BlockForm::Stack(ChunkOrder::Hnd);
const UNIVERSAL: BlockForm = BlockForm::Universal;
const OPERATIONAL: BlockForm = BlockForm::Operational(ChunkOrder::Nhd);

/// A block of 128 KiB, and one of 2 MiB: Llama 3 8B with 16 tokens.
const SMALL: Dims = [2, 2, 8, 16, 128, 2];
const LARGE: Dims = [32, 2, 8, 16, 128, 2];

/// What is measured.
struct Bench<'a> {
    gpu: &'a Gpu,
    stream: &'a CudaStream,
    quick: bool,
    /// Written before what is measured, so that all of that is queued when the device begins with
    /// it.
    ahead: DeviceMemory,
    rows: Vec<Value>,
}

type Part = fn(&mut Bench<'_>) -> Result<(), Failure>;

/// Measures everything and writes it after each part.
pub(crate) fn run(gpu: &Gpu, options: &Options) -> Result<(), Failure> {
    let opened = gpu.device.create_stream("bench")?;
    let stream = CudaStream::of(&*opened).ok_or("not a CUDA stream")?;
    let quick = options.quick;
    let ahead = gpu.device.allocate(if quick { 64 << 10 } else { 256 << 20 }, 256)?;
    let mut bench = Bench { gpu, stream, quick, ahead, rows: Vec::new() };
    let parts = [
        ("conversions", (|bench| bench.conversions()) as Part),
        ("host copies", |bench| bench.host_copies()),
        ("scattered blocks", |bench| bench.scattered()),
        ("compute beside offload", |bench| bench.beside_offload()),
    ];
    for (name, part) in parts {
        println!("{name} ...");
        part(&mut bench)?;
        results::write(options.file()?, &bench.rows)?;
    }
    Ok(())
}

impl Bench<'_> {
    /// Seconds of one operation on the device: the median of several rounds of many.
    fn seconds(&self, bytes: u64, operation: &dyn Fn() -> Result<(), Failure>) -> Result<f64, Failure> {
        let (rounds, times) = if self.quick { (1, 2) } else { (7, ((1 << 30) / bytes.max(1)).clamp(4, 24)) };
        operation()?;
        let mut all = Vec::new();
        for _ in 0..rounds {
            for _ in 0..if self.quick { 1 } else { 8 } {
                self.stream.fill(&self.ahead, 0, self.ahead.len(), 0)?;
            }
            let start = self.stream.mark()?;
            for _ in 0..times {
                operation()?;
            }
            all.push(self.stream.mark()?.since(&start, soon())?.as_secs_f64() / times as f64);
        }
        all.sort_by(f64::total_cmp);
        Ok(all[all.len() / 2].max(1e-9))
    }

    fn row(&mut self, name: &str, bytes: u64, seconds: f64, of: Option<f64>, more: &Value) {
        let rate = bytes as f64 / seconds / 1e9;
        let mut row = json!({ "name": name, "bytes": bytes, "us": seconds * 1e6, "gb_per_s": rate });
        if let Some(limit) = of {
            row["of_limit"] = json!(rate / limit);
        }
        for (key, value) in more.as_object().into_iter().flatten() {
            row[key] = value.clone();
        }
        let ratio = of.map_or(String::new(), |limit| format!("{:6.1} %", 100.0 * rate / limit));
        println!("  {name:<44} {:>8} KiB {rate:9.1} GB/s {ratio}", bytes >> 10);
        self.rows.push(row);
    }

    fn device_copy(&self, from: &DeviceMemory, to: &DeviceMemory) -> Result<f64, Failure> {
        let bytes = from.len();
        self.seconds(bytes, &|| {
            let mut batch = CopyBatch::new(Direction::DeviceToDevice);
            batch.push_device_to_device(from, 0, to, 0, bytes)?;
            self.stream.copy_by(batch, CopyEngine::Single).map_err(|refused| refused.error)?;
            Ok(())
        })
    }

    /// Bytes read and written per second, over those of a device copy.
    fn conversions(&mut self) -> Result<(), Failure> {
        let blocks: &[usize] = if self.quick { &[0, 1] } else { &[0, 1, 4, 16, 32, 128, 512] };
        for &count in blocks {
            let (dims, count) = if count == 0 { (SMALL, 1) } else { (LARGE, count) };
            let shape = shape_of(dims)?;
            let bytes = (shape.block_bytes() * count) as u64;
            let moved = 2 * bytes;
            let plain = [
                Blocks::new(self.gpu, UNIVERSAL, dims, count)?,
                Blocks::new(self.gpu, UNIVERSAL, dims, count)?,
            ];
            let copy = self.device_copy(&plain[0].memory, &plain[1].memory)?;
            let limit = moved as f64 / copy / 1e9;
            self.row("device_copy", moved, copy, None, &json!({ "size": bytes }));
            drop(plain);
            let pairs = [
                ("nhd_to_universal", NHD, UNIVERSAL),
                ("universal_to_nhd", UNIVERSAL, NHD),
                ("hnd_to_universal", HND, UNIVERSAL),
                ("universal_to_hnd", UNIVERSAL, HND),
                ("nhd_to_operational", NHD, OPERATIONAL),
                ("operational_to_nhd", OPERATIONAL, NHD),
                ("universal_to_operational", UNIVERSAL, OPERATIONAL),
                ("operational_to_universal", OPERATIONAL, UNIVERSAL),
            ];
            for (name, from, to) in pairs {
                let (from, to) =
                    (Blocks::new(self.gpu, from, dims, count)?, Blocks::new(self.gpu, to, dims, count)?);
                for (suffix, by_table) in [("", false), ("/pointers", true)] {
                    let operand = |side: &Blocks| if by_table { side.pointers() } else { side.operand() };
                    let conversion = Conversion::new(shape, operand(&from), operand(&to))?;
                    let seconds = self.convert(moved, &conversion)?;
                    let size =
                        json!({ "size": bytes, "of_device_copy": moved as f64 / seconds / 1e9 / limit });
                    self.row(&format!("{name}{suffix}"), moved, seconds, Some(limit), &size);
                }
            }
            self.slices(dims, count, limit)?;
        }
        Ok(())
    }

    fn convert(&self, bytes: u64, conversion: &Conversion) -> Result<f64, Failure> {
        self.seconds(bytes, &|| {
            // SAFETY: who measures holds the memory until the mark behind it was passed.
            unsafe { self.gpu.converter.convert(self.stream, conversion, Backend::Kernel) }?;
            Ok(())
        })
    }

    /// A quarter of the heads, as one rank of four takes them.
    fn slices(&mut self, dims: Dims, count: usize, limit: f64) -> Result<(), Failure> {
        let part = [dims[0], dims[1], dims[2] / 4, dims[3], dims[4], dims[5]];
        let shape = shape_of(part)?;
        let moved = 2 * (shape.block_bytes() * count) as u64;
        let (whole, stack) =
            (Blocks::new(self.gpu, UNIVERSAL, dims, count)?, Blocks::new(self.gpu, NHD, part, count)?);
        let heads = Heads { first: dims[2] / 4, of: dims[2] };
        for (name, out) in [("universal_heads_to_nhd", true), ("nhd_to_universal_heads", false)] {
            let sliced = || whole.operand().heads(heads);
            let conversion = if out {
                Conversion::new(shape, sliced(), stack.operand())?
            } else {
                Conversion::new(shape, stack.operand(), sliced())?
            };
            let seconds = self.convert(moved, &conversion)?;
            let size = json!({ "size": moved / 2, "of_device_copy": moved as f64 / seconds / 1e9 / limit });
            self.row(name, moved, seconds, Some(limit), &size);
        }
        Ok(())
    }

    fn pinned(&self) -> Result<(PinnedHost, DeviceMemory), Failure> {
        let len = if self.quick { 4 << 20 } else { 512 << 20 };
        let host = HostBuffer::zeroed(len);
        let start = std::time::Instant::now();
        let pinned = self.gpu.device.register_host(host.region().clone())?;
        println!("  pinned {} MiB in {:.0} ms", len >> 20, start.elapsed().as_secs_f64() * 1e3);
        Ok((pinned, self.gpu.device.allocate(len as u64, 256)?))
    }

    fn host_copy(
        &self,
        (host, memory): &(PinnedHost, DeviceMemory),
        direction: Direction,
        pieces: &[[u64; 3]],
        engine: CopyEngine,
    ) -> Result<f64, Failure> {
        let bytes = pieces.iter().map(|piece| piece[2]).sum();
        self.seconds(bytes, &|| {
            let mut batch = CopyBatch::with_capacity(direction, pieces.len());
            for [on_host, on_device, len] in pieces {
                match direction {
                    Direction::HostToDevice => {
                        batch.push_host_to_device(host.region(), *on_host, memory, *on_device, *len)?;
                    }
                    _ => batch.push_device_to_host(memory, *on_device, host.region(), *on_host, *len)?,
                }
            }
            self.stream.copy_by(batch, engine).map_err(|refused| refused.error)?;
            Ok(())
        })
    }

    /// The peak: one large copy of page-locked memory.
    fn host_copies(&mut self) -> Result<(), Failure> {
        let ends = self.pinned()?;
        for (name, direction) in DIRECTIONS {
            let len = ends.1.len();
            let seconds = self.host_copy(&ends, direction, &[[0, 0, len]], CopyEngine::Single)?;
            self.row(&format!("{name}/peak"), len, seconds, None, &Value::Null);
        }
        Ok(())
    }

    fn peak(&self, name: &str) -> f64 {
        let row = self.rows.iter().find(|row| row["name"] == format!("{name}/peak"));
        row.and_then(|row| row["gb_per_s"].as_f64()).unwrap_or(f64::NAN)
    }

    /// Blocks at random places, whole and in 64 fragments, by each way of copying, over the peak.
    fn scattered(&mut self) -> Result<(), Failure> {
        const MIB: u64 = 1 << 20;
        let ends = self.pinned()?;
        let mut random = Random(9);
        let batches = self.gpu.converter.capabilities().batches;
        for (block, fragments) in [(MIB, 1), (4 * MIB, 1), (MIB, 16), (MIB, 64), (MIB, 256), (128 << 10, 16)]
        {
            let slots = ends.1.len() / block;
            let count = slots.min(64);
            let mut places: Vec<u64> = (0..slots).collect();
            for at in (1..places.len()).rev() {
                places.swap(at, random.below(at + 1));
            }
            let len = block / fragments;
            // Blocks are whole on the host; on the device, fragment f of all blocks lies together,
            // as an engine has layers.
            let piece = |index: u64| {
                let (at, fragment) = (places[(index / fragments) as usize], index % fragments);
                [(index / fragments) * block + fragment * len, fragment * slots * len + at * len, len]
            };
            let pieces: Vec<[u64; 3]> = (0..count * fragments).map(piece).collect();
            let bytes = count * block;
            for (name, direction) in DIRECTIONS {
                let peak = self.peak(name);
                let label = |way: &str| format!("{name}/{}K x {fragments}/{way}", block >> 10);
                let engines = [(CopyEngine::Batch, "batch"), (CopyEngine::Single, "async")];
                for (engine, way) in engines.into_iter().filter(|(_, way)| *way != "batch" || batches) {
                    let seconds = self.host_copy(&ends, direction, &pieces, engine)?;
                    self.row(&label(way), bytes, seconds, Some(peak), &json!({ "fragment": len }));
                }
                if fragments > 1 {
                    let seconds = self.by_kernel(&ends, direction, &pieces, bytes)?;
                    self.row(&label("kernel"), bytes, seconds, Some(peak), &json!({ "fragment": len }));
                }
            }
        }
        Ok(())
    }

    /// Fragments gathered by a kernel, the blocks copied whole; or the other way round.
    fn by_kernel(
        &self,
        (host, memory): &(PinnedHost, DeviceMemory),
        direction: Direction,
        pieces: &[[u64; 3]],
        bytes: u64,
    ) -> Result<f64, Failure> {
        let staging = self.gpu.device.allocate(bytes, 256)?;
        let pairs: Vec<Piece> = pieces
            .iter()
            .map(|[on_host, on_device, len]| {
                let (staged, scattered) = (staging.address() + on_host, memory.address() + on_device);
                match direction {
                    Direction::HostToDevice => Piece { from: staged, to: scattered, bytes: *len },
                    _ => Piece { from: scattered, to: staged, bytes: *len },
                }
            })
            .collect();
        self.seconds(bytes, &|| {
            let mut batch = CopyBatch::new(direction);
            let into_device = direction == Direction::HostToDevice;
            if into_device {
                batch.push_host_to_device(host.region(), 0, &staging, 0, bytes)?;
                self.stream.copy(batch).map_err(|refused| refused.error)?;
                batch = CopyBatch::new(direction);
            }
            // SAFETY: who measures holds the memory until the mark behind it was passed.
            unsafe { self.gpu.converter.copy_pairs(self.stream, &pairs, Backend::Kernel) }?;
            if !into_device {
                batch.push_device_to_host(&staging, 0, host.region(), 0, bytes)?;
                self.stream.copy(batch).map_err(|refused| refused.error)?;
            }
            Ok(())
        })
    }

    /// How much longer a stream that is bound by memory takes while copies to and from the host
    /// saturate the link.
    fn beside_offload(&mut self) -> Result<(), Failure> {
        let (dims, count) = if self.quick { (SMALL, 1) } else { (LARGE, 32) };
        let shape = shape_of(dims)?;
        let (from, to) =
            (Blocks::new(self.gpu, NHD, dims, count)?, Blocks::new(self.gpu, UNIVERSAL, dims, count)?);
        let conversion = Conversion::new(shape, from.operand(), to.operand())?;
        let moved = 2 * from.memory.len();
        let alone = self.convert(moved, &conversion)?;
        let (pinned, memory) = self.pinned()?;
        let half = memory.len() / 2;
        let (out, into) = (self.gpu.device.create_stream("d2h")?, self.gpu.device.create_stream("h2d")?);
        let mut last = Vec::new();
        for _ in 0..if self.quick { 2 } else { 60 } {
            let mut batch = CopyBatch::new(Direction::DeviceToHost);
            batch.push_device_to_host(&memory, 0, pinned.region(), 0, half)?;
            last.push(out.copy(batch).map_err(|refused| refused.error)?);
            let mut batch = CopyBatch::new(Direction::HostToDevice);
            batch.push_host_to_device(pinned.region(), half, &memory, half, half)?;
            last.push(into.copy(batch).map_err(|refused| refused.error)?);
        }
        let beside = self.convert(moved, &conversion)?;
        // Otherwise it was measured beside nothing.
        let saturated = last.last().is_some_and(|event| event.query() == kvbm_device::EventStatus::Pending);
        for event in last {
            event.wait(soon() + Duration::from_secs(60))?;
        }
        let more = json!({ "slowdown": beside / alone - 1.0, "saturated_throughout": saturated });
        self.row("compute_alone", moved, alone, None, &Value::Null);
        self.row("compute_beside_offload", moved, beside, Some(moved as f64 / alone / 1e9), &more);
        Ok(())
    }
}

const DIRECTIONS: [(&str, Direction); 2] =
    [("d2h", Direction::DeviceToHost), ("h2d", Direction::HostToDevice)];
