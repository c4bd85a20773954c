//! Conversions to run, and what must come of them: element by element, by formulas of its own.

use kvbm_kernels::{
    Argument, BlockForm, BlockShape, ChunkOrder, Conversion, DeviceLimits, Heads, Launch, Operand,
    PairCopies, Piece,
};

use crate::memory::{Executor, Memory};

pub(crate) const FORMS: [BlockForm; 5] = [
    BlockForm::Stack(ChunkOrder::Nhd),
    BlockForm::Stack(ChunkOrder::Hnd),
    BlockForm::Operational(ChunkOrder::Nhd),
    BlockForm::Operational(ChunkOrder::Hnd),
    BlockForm::Universal,
];

/// Where a side's chunks lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Placement {
    /// Each in an allocation of its own.
    Pointers,
    /// Every so many bytes in one allocation, this many bytes left free between blocks.
    Strided { gap: usize },
    /// For stacks: layer by layer, in a layer block by block, with gaps.
    ByLayer { gap: usize },
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Side {
    pub(crate) form: BlockForm,
    pub(crate) placement: Placement,
    /// Bytes behind a multiple of 4096 that allocations start at.
    pub(crate) skew: u64,
    /// Heads of its blocks before and behind those that are converted.
    pub(crate) around: (usize, usize),
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Case {
    /// `[nl, no, nh, nt, hd, bytes of an element]`
    pub(crate) shape: [usize; 6],
    pub(crate) blocks: usize,
    pub(crate) from: Side,
    pub(crate) to: Side,
    pub(crate) reverse: bool,
}

/// A small generator: the same cases every time.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    pub(crate) fn below(&mut self, end: usize) -> usize {
        (self.next() >> 33) as usize % end
    }

    pub(crate) fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }

    fn side(&mut self, width: usize) -> Side {
        let form = self.pick(&FORMS);
        let gap = width * self.pick(&[0, 0, 1, 3, 16]);
        let placement = match (self.below(3), form) {
            (0, _) => Placement::Strided { gap },
            (1, BlockForm::Stack(_)) => Placement::ByLayer { gap },
            _ => Placement::Pointers,
        };
        let skew = (width * self.pick(&[0, 0, 1, 2, 5])) as u64;
        let around = self.pick(&[(0, 0), (0, 0), (0, 1), (2, 0), (1, 2)]);
        Side { form, placement, skew, around }
    }

    pub(crate) fn case(&mut self) -> Case {
        let width = self.pick(&[1, 2, 4, 8]);
        let hd = self.pick(&[1, 2, 3, 5, 8, 9, 16, 24, 64, 72, 80, 128]);
        let shape = [
            1 + self.below(3),
            1 + self.below(2),
            self.pick(&[1, 2, 3, 4, 5, 7, 8]),
            self.pick(&[1, 2, 3, 5, 8, 13, 16, 33]),
            hd,
            width,
        ];
        Case {
            shape,
            blocks: 1 + self.below(3),
            from: self.side(width),
            to: self.side(width),
            reverse: self.below(2) == 1,
        }
    }
}

/// Row (layer, outer, head, token) in a block of these dimensions: its chunk, and its number there.
fn row_of(form: BlockForm, [nl, no, nh, nt]: [usize; 4], [l, o, h, t]: [usize; 4]) -> (usize, usize) {
    let nhd = t * nh + h;
    let hnd = h * nt + t;
    match form {
        BlockForm::Stack(ChunkOrder::Nhd) => (l * no + o, nhd),
        BlockForm::Stack(ChunkOrder::Hnd) => (l * no + o, hnd),
        BlockForm::Operational(ChunkOrder::Nhd) => (0, (l * no + o) * nt * nh + nhd),
        BlockForm::Operational(ChunkOrder::Hnd) => (0, (l * no + o) * nt * nh + hnd),
        BlockForm::Universal => (0, ((h * nl + l) * no + o) * nt + t),
    }
}

/// A side in memory: its operand and the address of each chunk.
struct Placed {
    operand: Operand,
    chunks: Vec<u64>,
}

fn place(case: &Case, side: &Side, memory: &mut Memory, byte: u8) -> Placed {
    let [nl, no, nh, nt, hd, width] = case.shape;
    let of = nh + side.around.0 + side.around.1;
    let separate = matches!(side.form, BlockForm::Stack(_));
    let (layers, outers) = if separate { (nl, no) } else { (1, 1) };
    let bytes = nl * no * of * nt * hd * width / (layers * outers);
    let places = |memory: &mut Memory, [block, layer, outer]: [usize; 3], len| {
        let base = memory.allocate(len, side.skew, byte);
        let chunks = (0..case.blocks * layers * outers).map(|chunk| {
            let (b, l, o) = (chunk / (layers * outers), chunk / outers % layers, chunk % outers);
            base + (b * block + l * layer + o * outer) as u64
        });
        (base, chunks.collect())
    };
    let blocks = case.blocks as u64;
    let (operand, chunks) = match side.placement {
        Placement::Pointers => {
            let chunks: Vec<u64> =
                (0..case.blocks * layers * outers).map(|_| memory.allocate(bytes, side.skew, byte)).collect();
            (Operand::pointers(side.form, chunks.clone()), chunks)
        }
        Placement::Strided { gap } => {
            let strides = [layers * outers * bytes + gap, outers * bytes, bytes];
            // No gap behind the last one: reading on would leave the allocation.
            let (base, chunks) = places(memory, strides, case.blocks * strides[0] - gap);
            (Operand::strided(side.form, base, blocks, strides[0] as u64), chunks)
        }
        Placement::ByLayer { gap } => {
            let BlockForm::Stack(order) = side.form else { unreachable!("only stacks lie by layer") };
            let block = bytes + gap;
            let strides = [block, outers * case.blocks * block, case.blocks * block];
            let (base, chunks) = places(memory, strides, layers * strides[1] - gap);
            (Operand::strided_stack(order, base, blocks, strides.map(|stride| stride as u64)), chunks)
        }
    };
    Placed { operand: operand.heads(Heads { first: side.around.0, of }), chunks }
}

/// A conversion in memory, ready to run, and what memory must be afterwards.
pub(crate) struct Prepared {
    pub(crate) conversion: Conversion,
    pub(crate) memory: Memory,
    pub(crate) expected: Memory,
}

impl Prepared {
    pub(crate) fn new(case: &Case, random: &mut Random) -> Self {
        let mut memory = Memory::default();
        let from = place(case, &case.from, &mut memory, 0);
        for segment in &mut memory.segments {
            segment.bytes.fill_with(|| (random.next() >> 56) as u8);
        }
        let to = place(case, &case.to, &mut memory, 0xEE);
        let [nl, no, nh, nt, hd, width] = case.shape;
        let shape = BlockShape::new(nl, no, nh, nt, hd, width).expect("a small shape");
        let conversion = Conversion::new(shape, from.operand, to.operand).expect("sound arguments");
        let mut expected = memory.clone();
        let row = hd * width;
        let address = |side: &Side, chunks: &[u64], b: usize, at: [usize; 4]| {
            let (before, behind) = side.around;
            let dims = [nl, no, nh + before + behind, nt];
            let (chunk, index) = row_of(side.form, dims, [at[0], at[1], at[2] + before, at[3]]);
            chunks[b * chunks.len() / case.blocks + chunk] + (index * row) as u64
        };
        for index in 0..case.blocks * nl * no * nh * nt {
            let at = [index / (nt * nh * no) % nl, index / (nt * nh) % no, index / nt % nh, index % nt];
            let b = index / (nt * nh * no * nl);
            let read = address(&case.from, &from.chunks, b, at);
            let written = address(&case.to, &to.chunks, b, at);
            let bytes = expected.at(read, row).expect("a source row").to_vec();
            expected.at(written, row).expect("a destination row").copy_from_slice(&bytes);
        }
        Self { conversion, memory, expected }
    }

    /// The launch, its tables put into memory.
    pub(crate) fn launch(&mut self, limits: DeviceLimits) -> Launch {
        let from = self.memory.table(self.conversion.table(Argument::Sources));
        let to = self.memory.table(self.conversion.table(Argument::Destinations));
        self.conversion.launch(limits, from, to).expect("a small conversion").expect("some blocks")
    }

    /// Whether memory is what it must be, bytes that nothing may touch included.
    pub(crate) fn check(&self) -> Result<(), String> {
        same(&self.memory, &self.expected)
    }
}

fn same(memory: &Memory, expected: &Memory) -> Result<(), String> {
    for (at, (found, expected)) in memory.segments.iter().zip(&expected.segments).enumerate() {
        if let Some(byte) = found.bytes.iter().zip(&expected.bytes).position(|(a, b)| a != b) {
            return Err(format!("segment {at} differs at byte {byte} of {}", expected.bytes.len()));
        }
    }
    Ok(())
}

/// Runs a case: which kernel it took, and whether memory is right afterwards.
pub(crate) fn attempt(
    case: &Case,
    limits: DeviceLimits,
    random: &mut Random,
    executor: &mut impl Executor,
) -> (&'static str, Result<(), String>) {
    let mut prepared = Prepared::new(case, random);
    let launch = prepared.launch(limits);
    let result = executor.run(&launch, &mut prepared.memory, case.reverse).and_then(|()| prepared.check());
    (launch.kernel.name(), result)
}

/// Runs a case that has to come out right; which kernel it took.
pub(crate) fn run(
    case: &Case,
    limits: DeviceLimits,
    random: &mut Random,
    executor: &mut impl Executor,
) -> &'static str {
    let (kernel, result) = attempt(case, limits, random, executor);
    assert_eq!(result, Ok(()), "{kernel}: {case:?}");
    kernel
}

/// Pairs of all lengths and alignments; whether memory is right afterwards.
pub(crate) fn run_pairs(
    count: usize,
    longest: usize,
    limits: DeviceLimits,
    random: &mut Random,
    executor: &mut impl Executor,
) -> Result<(), String> {
    let mut memory = Memory::default();
    let mut pieces = Vec::new();
    for pair in 0..count {
        let bytes = if pair % 7 == 3 { 0 } else { 1 + random.below(longest) };
        let from = memory.allocate(bytes, random.below(40) as u64, 0);
        let at = memory.segments.len() - 1;
        memory.segments[at].bytes.fill_with(|| (random.next() >> 56) as u8);
        let to = memory.allocate(bytes, random.below(40) as u64, 0xEE);
        pieces.push(Piece { from, to, bytes: bytes as u64 });
    }
    let mut expected = memory.clone();
    for pair in expected.segments.chunks_exact_mut(2) {
        let (from, to) = pair.split_at_mut(1);
        to[0].bytes.copy_from_slice(&from[0].bytes);
    }
    let copies = PairCopies::new(&pieces).expect("sound pairs");
    let table = memory.table(copies.table());
    let launch = copies.launch(limits, table).expect("something to copy");
    let reverse = random.below(2) == 1;
    executor.run(&launch, &mut memory, reverse).and_then(|()| same(&memory, &expected))
}
