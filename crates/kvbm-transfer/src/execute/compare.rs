//! Comparing what is at both ends of a route, instead of copying.

use super::copy::{Route, refused, regions};
use kvbm_device::{CopyBatch, DeviceError, Direction, Event, HostBuffer, Stream};
use kvbm_layout::CopyPlan;
use kvbm_plan::{Comparison, Elements};
use kvbm_storage::RegionBytes;
use std::fmt;

/// Most bytes of a device's blocks that are brought to the host together.
const MOST_BYTES: u64 = 16 << 20;

/// Two blocks that are not equal.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Difference {
    /// Elements that differ.
    elements: u64,
    /// Elements of the block.
    of: u64,
    /// First byte of the first one, counted over the runs of the block.
    first_byte: u64,
    /// The largest difference of two numbers; NaN where one is no number, or bytes were compared.
    largest: f64,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { elements, of, first_byte, largest } = *self;
        write!(
            f,
            "the stored block is not the computed one: {elements} of {of} elements differ, the first at byte {first_byte}"
        )?;
        if largest.is_nan() { Ok(()) } else { write!(f, ", by at most {largest:.3e}") }
    }
}

/// The differences of the runs of a block, one after the other.
struct Runs {
    comparison: Comparison,
    bytes: u64,
    found: Difference,
}

impl Runs {
    fn new(comparison: Comparison) -> Self {
        let found = Difference { elements: 0, of: 0, first_byte: 0, largest: 0.0 };
        Self { comparison, bytes: 0, found }
    }

    fn add(&mut self, stored: &[u8], computed: &[u8]) {
        let Comparison { elements, tolerance_ppm } = self.comparison;
        let tolerance = f64::from(tolerance_ppm) / 1e6;
        let width = match elements {
            Elements::F32 => 4,
            Elements::F16 | Elements::BF16 => 2,
            Elements::Bytes => 1,
        };
        let width = if stored.len().is_multiple_of(width) { width } else { 1 };
        self.found.of += (stored.len() / width) as u64;
        if stored != computed {
            let is_exact = tolerance_ppm == 0 || width == 1;
            let floor = if is_exact { 0.0 } else { root_mean_square(stored, width, elements) };
            for (index, (one, other)) in
                stored.chunks_exact(width).zip(computed.chunks_exact(width)).enumerate()
            {
                if one == other {
                    continue;
                }
                let [a, b] = [one, other].map(|bytes| number(bytes, elements));
                let apart = if is_exact { f64::NAN } else { (a - b).abs() };
                let most = tolerance * a.abs().max(b.abs()).max(floor);
                // What is no number, or infinite, is not near anything.
                let is_near = apart.is_finite() && apart <= most;
                if !is_near {
                    self.differs((index * width) as u64, apart);
                }
            }
        }
        self.bytes += stored.len() as u64;
    }

    fn differs(&mut self, at: u64, apart: f64) {
        if self.found.elements == 0 {
            self.found.first_byte = self.bytes + at;
        }
        self.found.elements += 1;
        self.found.largest = if apart.is_nan() { apart } else { self.found.largest.max(apart) };
    }

    fn end(self) -> Result<(), Difference> {
        if self.found.elements == 0 { Ok(()) } else { Err(self.found) }
    }
}

/// The root mean square of the numbers that are finite.
fn root_mean_square(bytes: &[u8], width: usize, elements: Elements) -> f64 {
    let numbers = bytes.chunks_exact(width).map(|bytes| number(bytes, elements));
    let finite = numbers.filter(|number| number.is_finite());
    let (count, sum) = finite.fold((0_u64, 0.0), |(count, sum), number| (count + 1, sum + number * number));
    if count == 0 { 0.0 } else { (sum / count as f64).sqrt() }
}

/// The number in these bytes; NaN where they are none.
fn number(bytes: &[u8], elements: Elements) -> f64 {
    match (elements, bytes) {
        (Elements::F32, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]).into(),
        (Elements::BF16, &[a, b]) => f32::from_le_bytes([0, 0, a, b]).into(),
        (Elements::F16, &[a, b]) => half(u16::from_le_bytes([a, b])),
        _ => f64::NAN,
    }
}

fn half(bits: u16) -> f64 {
    let sign = if bits & 0x8000 == 0 { 1.0 } else { -1.0 };
    let (exponent, fraction) = (i32::from(bits >> 10 & 0x1f), f64::from(bits & 0x3ff));
    match exponent {
        0 => sign * fraction * 2_f64.powi(-24),
        0x1f if fraction == 0.0 => sign * f64::INFINITY,
        0x1f => f64::NAN,
        _ => sign * (1.0 + fraction / 1024.0) * 2_f64.powi(exponent - 15),
    }
}

/// Compares a block at the source with one at the destination, both in host memory.
pub(super) fn on_host(
    route: &Route,
    plan: &CopyPlan,
    from: u32,
    to: u32,
    comparison: Comparison,
) -> Result<Result<(), Difference>, DeviceError> {
    let (mut runs, mut computed) = (Runs::new(comparison), Vec::new());
    for run in plan.runs(from, to).map_err(|error| refused(&error))? {
        let Some((RegionBytes::Host(src), RegionBytes::Host(dst))) =
            regions(route, run.src_region, run.dst_region)
        else {
            return Err(not_on_host());
        };
        computed.resize(run.len as usize, 0);
        // SAFETY: the engine's block is copied out by address, as an offload copies it: the leader
        // counts nothing that changed meanwhile.
        unsafe { dst.read_at(run.dst_offset, &mut computed) }?;
        // SAFETY: the claim of the plan on a slot of host memory, or the lease of a slot of the
        // staging ring, keeps writers away from the source.
        let stored = unsafe { src.bytes(run.src_offset, run.len) }?;
        runs.add(stored, &computed);
    }
    Ok(runs.end())
}

/// Blocks of a device on their way to the host, where they are compared.
pub(super) struct Fetched {
    comparison: Comparison,
    scratch: HostBuffer,
}

impl Fetched {
    /// Blocks that may be fetched together.
    pub(super) fn most(plan: &CopyPlan) -> usize {
        usize::try_from(MOST_BYTES / plan.bytes_per_block().max(1)).unwrap_or(usize::MAX).max(1)
    }

    /// Fetches the destinations `slots` of a route; they can be compared after the event.
    pub(super) fn start(
        stream: &dyn Stream,
        route: &Route,
        plan: &CopyPlan,
        slots: &[(u32, u32)],
        comparison: Comparison,
    ) -> Result<(Self, Event), DeviceError> {
        let scratch = HostBuffer::zeroed(plan.bytes_per_block() as usize * slots.len());
        let runs = plan.num_runs() as usize * slots.len();
        let mut copies = CopyBatch::with_capacity(Direction::DeviceToHost, runs);
        let mut at = 0;
        for &(from, to) in slots {
            for run in plan.runs(from, to).map_err(|error| refused(&error))? {
                let Some((_, RegionBytes::Device(dst))) = regions(route, run.src_region, run.dst_region)
                else {
                    return Err(not_on_host());
                };
                copies.push_device_to_host(dst, run.dst_offset, &scratch, at, run.len)?;
                at += run.len;
            }
        }
        let event = stream.copy(copies).map_err(|rejected| rejected.error)?;
        Ok((Self { comparison, scratch }, event))
    }

    /// Compares block `index` of those that were fetched; the fetch is over.
    pub(super) fn compare(
        &self,
        route: &Route,
        plan: &CopyPlan,
        index: usize,
        (from, to): (u32, u32),
    ) -> Result<Result<(), Difference>, DeviceError> {
        let mut runs = Runs::new(self.comparison);
        let mut at = plan.bytes_per_block() * index as u64;
        for run in plan.runs(from, to).map_err(|error| refused(&error))? {
            let Some((RegionBytes::Host(src), _)) = regions(route, run.src_region, run.dst_region) else {
                return Err(not_on_host());
            };
            // SAFETY: the claim of the plan, or the lease of a slot of the ring, keeps writers away
            // from the source.
            let stored = unsafe { src.bytes(run.src_offset, run.len) }?;
            // SAFETY: the copy into the scratch buffer is over, and nobody else knows it.
            let computed = unsafe { self.scratch.bytes(at, run.len) }?;
            runs.add(stored, computed);
            at += run.len;
        }
        Ok(runs.end())
    }
}

fn not_on_host() -> DeviceError {
    let operation = "a comparison of blocks whose stored copy is not in host memory";
    DeviceError::Unsupported { device: "kvbm-transfer".into(), operation }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn differences(elements: Elements, tolerance_ppm: u32, pair: [&[u8]; 2]) -> Option<Difference> {
        let mut runs = Runs::new(Comparison { elements, tolerance_ppm });
        runs.add(pair[0], pair[1]);
        runs.end().err()
    }

    fn f32s(numbers: &[f32]) -> Vec<u8> {
        numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
    }

    #[test]
    fn a_tolerance_is_of_the_number_or_of_what_numbers_around_it_are() {
        let stored = f32s(&[1.0, -2.0, 0.0, 100.0]);
        let with = |at: usize, number: f32| {
            let mut numbers = [1.0, -2.0, 0.0, 100.0];
            numbers[at] = number;
            differences(Elements::F32, 10_000, [&stored, &f32s(&numbers)])
        };
        assert_eq!(with(0, 1.0), None);
        // The root mean square is 50: an error of 0.5 may be that of a sum of such numbers.
        assert_eq!((with(0, 1.49), with(2, -0.49), with(3, 100.9)), (None, None, None));
        let found = with(2, 0.6).unwrap();
        assert_eq!((found.elements, found.of, found.first_byte), (1, 4, 8));
        assert!((found.largest - 0.6).abs() < 1e-6, "{found}");
        assert!(with(1, 2.0).is_some() && with(3, 102.0).is_some());
        for wrong in [f32::NAN, f32::INFINITY] {
            assert!(with(1, wrong).is_some(), "{wrong}");
        }
        assert!(with(1, f32::NAN).unwrap().to_string().ends_with("the first at byte 4"));
    }

    #[test]
    fn equal_bytes_are_equal_and_without_a_tolerance_nothing_else_is() {
        let nan = f32s(&[f32::NAN, 1.0]);
        assert_eq!(differences(Elements::F32, 1000, [&nan, &nan]), None);
        let near = f32s(&[f32::NAN, 1.000_001]);
        assert_eq!(differences(Elements::F32, 1000, [&nan, &near]), None);
        assert!(differences(Elements::F32, 0, [&nan, &near]).is_some());
        let found = differences(Elements::Bytes, 1_000_000, [b"abcd", b"abed"]).unwrap();
        assert_eq!((found.elements, found.of, found.first_byte), (1, 4, 2));
        assert!(differences(Elements::F32, 1_000_000, [b"abc", b"abd"]).is_some(), "no whole numbers");
    }

    #[test]
    fn halves_are_numbers() {
        let of = |bits: u16, elements| number(&bits.to_le_bytes(), elements);
        for (bits, expected) in [(0x3c00, 1.0), (0xc000, -2.0), (0x7bff, 65504.0), (0x0001, 2_f64.powi(-24))]
        {
            assert!((of(bits, Elements::F16) - expected).abs() < f64::EPSILON, "{bits:04x}");
        }
        assert!(of(0x7c00, Elements::F16).is_infinite() && of(0x7e00, Elements::F16).is_nan());
        assert!((of(0x3f80, Elements::BF16) - 1.0).abs() < f64::EPSILON);
        let (one, near, far) = ([0x80, 0x3f], [0x81, 0x3f], [0x80, 0xbf]);
        assert_eq!(differences(Elements::BF16, 10_000, [&one, &near]), None);
        assert!(differences(Elements::BF16, 10_000, [&one, &far]).is_some());
    }

    #[test]
    fn runs_count_together() {
        let mut runs = Runs::new(Comparison { elements: Elements::Bytes, tolerance_ppm: 0 });
        runs.add(b"same", b"same");
        runs.add(b"other", b"othes");
        runs.add(b"x", b"y");
        let found = runs.end().unwrap_err();
        assert_eq!((found.elements, found.of, found.first_byte), (2, 10, 8));
    }
}
