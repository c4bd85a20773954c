//! Everything that a device does for kvbm, compared with the CPU.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvbm_device::{CopyBatch, CudaStream, Device, Direction, HostBuffer, SharedVia, Stream, conformance};
use kvbm_kernels::{Backend, BlockForm, ChunkOrder, Conversion, Heads, Piece};
use serde_json::{Value, json};

use crate::blocks::{Blocks, Dims, FORMS, Random, expected, shape_of, soon};
use crate::{Failure, Gpu, Options, results};

const NHD: BlockForm = BlockForm::Stack(ChunkOrder::Nhd);

type Check = fn(&Gpu, &Options) -> Result<u64, Failure>;

const CHECKS: [(&str, Check); 9] = [
    ("conformance", |gpu, _| {
        let device = gpu.device.clone();
        conformance::run(&|| Arc::new(device.clone()));
        Ok(conformance::CHECKS.len() as u64)
    }),
    ("every_conversion", every_conversion),
    ("latents_and_one_byte_elements", latents_and_one_byte_elements),
    ("fused_copy_roundtrip", fused_copy_roundtrip),
    ("head_slices", head_slices),
    ("pairs_of_unequal_sizes", pairs_of_unequal_sizes),
    ("transfers_beside_compute", transfers_beside_compute),
    ("memory_shared_by_descriptor", memory_shared_by_descriptor),
    ("soak", soak),
];

/// Runs all checks; whether all passed.
pub(crate) fn run(gpu: &Gpu, options: &Options) -> Result<bool, Failure> {
    let info = gpu.device.info();
    let (major, minor) = gpu.device.compute_capability()?;
    let driver = gpu.device.driver();
    let mut rows: Vec<Value> = vec![json!({
        "name": "device", "passed": true, "device": info.name, "bytes": info.total_bytes, "driver": driver.version(),
        "compute_capability": format!("{major}.{minor}"), "batches": driver.has_batch_copies(),
    })];
    let mut all = true;
    for (name, check) in CHECKS {
        let start = Instant::now();
        let result = catch_unwind(AssertUnwindSafe(|| check(gpu, options)));
        let result = result.unwrap_or_else(|_| Err("it panicked; see above".into()));
        let seconds = start.elapsed().as_secs_f64();
        let (passed, cases, detail) = match result {
            Ok(cases) => (cases > 0, cases, String::new()),
            Err(error) => (false, 0, error.to_string()),
        };
        all &= passed;
        println!(
            "{} {name}: {cases} cases in {seconds:.1} s {detail}",
            if passed { "ok    " } else { "FAILED" }
        );
        rows.push(json!({
            "name": name, "passed": passed, "cases": cases, "seconds": seconds, "detail": detail,
        }));
        results::write(options.file()?, &rows)?;
    }
    Ok(all)
}

/// A stream of the device, and the CUDA stream behind it.
fn with_stream<T>(gpu: &Gpu, run: impl FnOnce(&CudaStream) -> Result<T, Failure>) -> Result<T, Failure> {
    let opened = gpu.device.create_stream("check")?;
    run(CudaStream::of(&*opened).ok_or("not a CUDA stream")?)
}

fn all_heads(dims: Dims) -> Heads {
    Heads { first: 0, of: dims[2] }
}

/// Converts random bytes and compares everything that the destination holds afterwards.
fn one_conversion(
    gpu: &Gpu,
    stream: &CudaStream,
    (from, to): (BlockForm, BlockForm),
    dims: Dims,
    count: usize,
    backend: Backend,
    random: &mut Random,
) -> Result<(), Failure> {
    let shape = shape_of(dims)?;
    let (source, target) = (Blocks::new(gpu, from, dims, count)?, Blocks::new(gpu, to, dims, count)?);
    let bytes = random.bytes(source.memory.len() as usize);
    let before = vec![0xEE; bytes.len()];
    source.upload(stream, &bytes)?;
    target.upload(stream, &before)?;
    let by_table = random.below(2) == 1;
    let operand = |blocks: &Blocks| if by_table { blocks.pointers() } else { blocks.operand() };
    let conversion = Conversion::new(shape, operand(&source), operand(&target))?;
    // SAFETY: the memory is held until it was downloaded behind the conversion.
    unsafe { gpu.converter.convert(stream, &conversion, backend) }?;
    let heads = all_heads(dims);
    let wanted = expected(&shape, (&source, heads, &bytes), (&target, heads, &before))?;
    if target.download(stream)? == wanted {
        return Ok(());
    }
    Err(format!("{from} to {to}, {dims:?}, {count} blocks, {backend}: other bytes than the CPU's").into())
}

fn random_dims(random: &mut Random) -> Dims {
    let hd = [1, 3, 8, 36, 64, 80, 128, 576][random.below(8)];
    let (nl, no) = (1 + random.below(4), 1 + random.below(2));
    [nl, no, 1 + random.below(9), 1 + random.below(33), hd, 1 << random.below(4)]
}

fn every_conversion(gpu: &Gpu, options: &Options) -> Result<u64, Failure> {
    let rounds = if options.quick { 1 } else { 12 };
    let mut random = Random(1);
    let mut cases = 0;
    with_stream(gpu, |stream| {
        for from in FORMS {
            for to in FORMS {
                for round in 0..rounds {
                    let backend = match round % 4 {
                        2 if gpu.converter.capabilities().batches => Backend::Batch,
                        3 => Backend::Async,
                        _ => Backend::Kernel,
                    };
                    let (dims, count) = (random_dims(&mut random), 1 + random.below(3));
                    one_conversion(gpu, stream, (from, to), dims, count, backend, &mut random)?;
                    cases += 1;
                }
            }
        }
        Ok(cases)
    })
}

/// Shapes of models: a latent (MLA) in two widths of elements, and heads of FP8.
fn latents_and_one_byte_elements(gpu: &Gpu, options: &Options) -> Result<u64, Failure> {
    let (mut random, mut cases) = (Random(6), 0);
    let layers = if options.quick { 2 } else { 61 };
    let shapes = [[layers, 1, 1, 64, 576, 2], [layers, 1, 1, 64, 576, 1], [layers, 2, 8, 16, 128, 1]];
    with_stream(gpu, |stream| {
        for dims in shapes {
            for from in FORMS {
                for to in FORMS {
                    for backend in [Backend::Kernel, Backend::Auto] {
                        one_conversion(gpu, stream, (from, to), dims, 3, backend, &mut random)?;
                        cases += 1;
                    }
                }
            }
        }
        Ok(cases)
    })
}

/// Stack to universal, to page-locked host memory, back, and to a stack again.
fn fused_copy_roundtrip(gpu: &Gpu, options: &Options) -> Result<u64, Failure> {
    let mut random = Random(2);
    let rounds = if options.quick { 2 } else { 20 };
    let move_bytes = |stream: &CudaStream, blocks: &Blocks, host: &HostBuffer, direction| {
        let mut batch = CopyBatch::new(direction);
        match direction {
            Direction::HostToDevice => {
                batch.push_host_to_device(host, 0, &blocks.memory, 0, host.len())?;
            }
            _ => batch.push_device_to_host(&blocks.memory, 0, host, 0, host.len())?,
        }
        let event = stream.copy(batch).map_err(|refused| refused.error)?;
        Ok::<_, Failure>(event)
    };
    with_stream(gpu, |stream| {
        for round in 0..rounds {
            let order = [ChunkOrder::Nhd, ChunkOrder::Hnd][round % 2];
            let (dims, count) = ([1 + random.below(4), 2, 8, 16, 128, 2], 1 + random.below(8));
            let (shape, form, heads) = (shape_of(dims)?, BlockForm::Stack(order), all_heads(dims));
            let stack = Blocks::new(gpu, form, dims, count)?;
            let universal = Blocks::new(gpu, BlockForm::Universal, dims, count)?;
            let bytes = random.bytes(stack.memory.len() as usize);
            let host = HostBuffer::zeroed(bytes.len());
            let pinned = gpu.device.register_host(host.region().clone())?;
            stack.upload(stream, &bytes)?;
            let out = Conversion::new(shape, stack.operand(), universal.operand())?;
            // SAFETY: the memory is held to the end of the round, which waits for all of it.
            unsafe { gpu.converter.convert(stream, &out, Backend::Auto) }?;
            move_bytes(stream, &universal, &host, Direction::DeviceToHost)?.wait(soon())?;
            let blank = vec![0; bytes.len()];
            let wanted = expected(&shape, (&stack, heads, &bytes), (&universal, heads, &blank))?;
            let mut arrived = vec![0; bytes.len()];
            // SAFETY: the only copy that writes to the memory is over, and no other one is
            // submitted.
            unsafe { host.region().read_at(0, &mut arrived) }?;
            if arrived != wanted {
                return Err(format!("round {round}: the universal form is wrong").into());
            }
            stream.fill(&universal.memory, 0, universal.memory.len(), 0)?;
            stream.fill(&stack.memory, 0, stack.memory.len(), 0)?;
            move_bytes(stream, &universal, &host, Direction::HostToDevice)?;
            let back = Conversion::new(shape, universal.operand(), stack.operand())?;
            // SAFETY: as above.
            unsafe { gpu.converter.convert(stream, &back, Backend::Auto) }?;
            if stack.download(stream)? != bytes {
                return Err(format!("round {round}: the round trip changed bytes").into());
            }
            drop(pinned);
        }
        Ok(rounds as u64)
    })
}

/// What one rank of a tensor-parallel group takes of universal blocks of all heads, and gives back.
fn head_slices(gpu: &Gpu, _: &Options) -> Result<u64, Failure> {
    let mut random = Random(3);
    with_stream(gpu, |stream| {
        for (first, count) in [(0, 8), (0, 4), (4, 4), (2, 2), (7, 1), (3, 5)] {
            let (whole, part) = ([3, 2, 8, 16, 128, 2], [3, 2, count, 16, 128, 2]);
            let shape = shape_of(part)?;
            let universal = Blocks::new(gpu, BlockForm::Universal, whole, 2)?;
            let stack = Blocks::new(gpu, NHD, part, 2)?;
            let heads = Heads { first, of: 8 };
            for out in [true, false] {
                let (from, to) = if out { (&universal, &stack) } else { (&stack, &universal) };
                let side = |blocks: &Blocks, sliced: bool| {
                    if sliced { blocks.operand().heads(heads) } else { blocks.operand() }
                };
                let (source, before) =
                    (random.bytes(from.memory.len() as usize), random.bytes(to.memory.len() as usize));
                from.upload(stream, &source)?;
                to.upload(stream, &before)?;
                let conversion = Conversion::new(shape, side(from, out), side(to, !out))?;
                // SAFETY: the memory is held until it was downloaded behind the conversion.
                unsafe { gpu.converter.convert(stream, &conversion, Backend::Auto) }?;
                let (read, written) = if out { (heads, all_heads(part)) } else { (all_heads(part), heads) };
                let wanted = expected(&shape, (from, read, &source), (to, written, &before))?;
                if to.download(stream)? != wanted {
                    return Err(format!("heads {first}..+{count} of 8, out: {out}: wrong bytes").into());
                }
            }
        }
        Ok(12)
    })
}

fn pairs_of_unequal_sizes(gpu: &Gpu, options: &Options) -> Result<u64, Failure> {
    let mut random = Random(4);
    let rounds = if options.quick { 3 } else { 60 };
    with_stream(gpu, |stream| {
        for round in 0..rounds {
            let longest = [3, 40, 300, 100_000][round % 4];
            let dims = [1, 1, 1, 1, 1 << 21, 1];
            let source = Blocks::new(gpu, BlockForm::Universal, dims, 1)?;
            let target = Blocks::new(gpu, BlockForm::Universal, dims, 1)?;
            let (bytes, mut wanted) = (random.bytes(1 << 21), vec![0xEE; 1 << 21]);
            source.upload(stream, &bytes)?;
            target.upload(stream, &wanted)?;
            let (mut pieces, mut from, mut to) = (Vec::new(), 0, 0);
            loop {
                let len = 1 + random.below(longest);
                from += random.below(40);
                to += random.below(40);
                if from.max(to) + len > 1 << 21 || pieces.len() == 5000 {
                    break;
                }
                wanted[to..to + len].copy_from_slice(&bytes[from..from + len]);
                let at = |blocks: &Blocks, offset: usize| blocks.memory.address() + offset as u64;
                pieces.push(Piece { from: at(&source, from), to: at(&target, to), bytes: len as u64 });
                (from, to) = (from + len, to + len);
            }
            // SAFETY: the memory is held until it was downloaded behind the copies.
            unsafe { gpu.converter.copy_pairs(stream, &pieces, Backend::Kernel) }?;
            if target.download(stream)? != wanted {
                return Err(format!("{} pairs of up to {longest} bytes: wrong bytes", pieces.len()).into());
            }
        }
        Ok(rounds as u64)
    })
}

/// Conversions and copies are right while another stream keeps the multiprocessors and the memory
/// busy.
fn transfers_beside_compute(gpu: &Gpu, options: &Options) -> Result<u64, Failure> {
    let stop = AtomicBool::new(false);
    let busy = gpu.device.create_stream("compute")?;
    let scratch = gpu.device.allocate(if options.quick { 1 << 20 } else { 256 << 20 }, 256)?;
    std::thread::scope(|scope| {
        let compute = scope.spawn(|| -> Result<u64, Failure> {
            let mut rounds = 0;
            while !stop.load(Ordering::Relaxed) {
                for byte in 0..15 {
                    busy.fill(&scratch, 0, scratch.len(), byte)?;
                }
                busy.fill(&scratch, 0, scratch.len(), 15)?.wait(soon())?;
                rounds += 1;
            }
            Ok(rounds)
        });
        let checked = with_stream(gpu, |stream| {
            let mut random = Random(5);
            let rounds = if options.quick { 4 } else { 100 };
            for _ in 0..rounds {
                let dims = [4, 2, 8, 16, 128, 2];
                one_conversion(
                    gpu,
                    stream,
                    (NHD, BlockForm::Universal),
                    dims,
                    4,
                    Backend::Auto,
                    &mut random,
                )?;
            }
            Ok(rounds)
        });
        stop.store(true, Ordering::Relaxed);
        let computed = compute.join().map_err(|_| "the compute thread panicked")??;
        if computed == 0 { Err("nothing was computed".into()) } else { checked }
    })
}

/// Memory that is mapped twice shows the same bytes.
fn memory_shared_by_descriptor(gpu: &Gpu, _: &Options) -> Result<u64, Failure> {
    let memory = gpu.device.allocate_shareable(1 << 20, false)?;
    let shared = gpu.device.share(&memory)?;
    let SharedVia::Descriptor(_) = &shared.via else { return Err("another kind of handle".into()) };
    // SAFETY: `memory` outlives it.
    let twin = unsafe { gpu.device.open_shared(&shared) }?;
    with_stream(gpu, |stream| {
        stream.fill(&memory, 0, 1 << 20, 0x5A)?;
        let mut host = HostBuffer::zeroed(1 << 20);
        let mut batch = CopyBatch::new(Direction::DeviceToHost);
        batch.push_device_to_host(&twin, 0, &host, 0, 1 << 20)?;
        stream.copy(batch).map_err(|refused| refused.error)?.wait(soon())?;
        let same = host.exclusive_bytes()?.iter().all(|byte| *byte == 0x5A);
        if same { Ok(1) } else { Err("the two mappings differ".into()) }
    })
}

/// Random conversions on three streams for a while, each compared.
fn soak(gpu: &Gpu, options: &Options) -> Result<u64, Failure> {
    let time = if options.quick { Duration::from_millis(500) } else { Duration::from_secs(options.seconds) };
    let (end, done) = (Instant::now() + time, AtomicU64::new(0));
    let worker = |thread: u64| {
        let mut random = Random(100 + thread);
        with_stream(gpu, |stream| {
            while Instant::now() < end {
                let forms = (FORMS[random.below(5)], FORMS[random.below(5)]);
                let (dims, count) = (random_dims(&mut random), 1 + random.below(6));
                one_conversion(gpu, stream, forms, dims, count, Backend::Auto, &mut random)?;
                done.fetch_add(1, Ordering::Relaxed);
            }
            Ok(())
        })
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..3).map(|thread| scope.spawn(move || worker(thread))).collect();
        threads
            .into_iter()
            .try_for_each(|thread| thread.join().unwrap_or_else(|_| Err("a thread panicked".into())))
    })?;
    Ok(done.into_inner())
}
