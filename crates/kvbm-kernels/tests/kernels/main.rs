//! The kernels, run without a device: their source as C++ and the PTX that is shipped, in both
//! orders of threads, against formulas of its own.

mod cases;
mod cuda;
mod driver;
mod memory;
mod program;
mod ptx;

use std::collections::BTreeMap;

use cases::{Case, Placement, Random, Side};
use kvbm_kernels::{
    BlockForm, BlockShape, ChunkOrder, Conversion, DeviceLimits, Kernel, Operand, block_to_universal,
};
use memory::{Executor, Memory};
use program::Program;
use ptx::Machine;

/// Small grids take several pieces of work each, large ones a piece each.
fn limits(random: &mut Random) -> DeviceLimits {
    let max_grid = random.pick(&[1, 2, 7, i32::MAX.unsigned_abs()]);
    DeviceLimits { multiprocessors: random.pick(&[1, 4, 132]), max_grid }
}

fn random_cases(executor: &mut impl Executor, count: usize, seed: u64) {
    let mut random = Random(seed);
    let mut taken: BTreeMap<&str, usize> = BTreeMap::new();
    for _ in 0..count {
        let case = random.case();
        let limits = limits(&mut random);
        *taken.entry(cases::run(&case, limits, &mut random, executor)).or_default() += 1;
    }
    println!("{count} cases: {taken:?}");
    for kernel in Kernel::ALL.iter().filter(|kernel| !matches!(kernel, Kernel::Pairs)) {
        assert!(taken.contains_key(kernel.name()), "no case takes {}: {taken:?}", kernel.name());
    }
}

#[test]
fn conversions_of_all_shapes_as_cpp() {
    let Some(mut program) = Program::start(&[]) else { return };
    random_cases(&mut program, 4000, 0x5EED);
}

#[test]
fn real_shapes_as_cpp() {
    let Some(mut program) = Program::start(&[]) else { return };
    let mut random = Random(3);
    let mut kernels = Vec::new();
    for (hd, width, expected) in [(128, 2, "kvbm_rows_16"), (80, 1, "kvbm_rows_16"), (36, 2, "kvbm_tiles_8")]
    {
        for order in [ChunkOrder::Nhd, ChunkOrder::Hnd] {
            let side = |form| Side { form, placement: Placement::Pointers, skew: 0, around: (0, 0) };
            let from = side(BlockForm::Stack(order));
            let to = side(BlockForm::Universal);
            let shape = [4, 2, 8, 16, hd, width];
            for (from, to, reverse) in [(from, to, false), (to, from, true)] {
                let case = Case { shape, blocks: 2, from, to, reverse };
                let kernel = cases::run(&case, DeviceLimits::default(), &mut random, &mut program);
                if order == ChunkOrder::Nhd {
                    assert_eq!(kernel, expected, "{case:?}");
                }
                kernels.push(kernel);
            }
        }
    }
    assert_eq!(kernels.len(), 12);
}

#[test]
fn pairs_of_unequal_sizes_as_cpp() {
    let Some(mut program) = Program::start(&[]) else { return };
    let mut random = Random(11);
    for round in 0..150 {
        let longest = [3, 40, 300, 100_000][round % 4];
        let limits = limits(&mut random);
        let count = 1 + random.below(40);
        let result = cases::run_pairs(count, longest, limits, &mut random, &mut program);
        assert_eq!(result, Ok(()), "{count} pairs of up to {longest} bytes");
    }
}

/// An address sanitizer around every access: each segment is an allocation of exactly its length.
#[test]
fn no_access_outside_under_the_address_sanitizer() {
    let Some(mut program) = Program::start(&["-fsanitize=address"]) else { return };
    random_cases(&mut program, 1000, 0xA5A);
    let mut random = Random(12);
    for _ in 0..30 {
        let limits = limits(&mut random);
        assert_eq!(cases::run_pairs(20, 5000, limits, &mut random, &mut program), Ok(()));
    }
}

/// What is changed, what it is changed to, and with which sanitizer it has to be found.
const MUTATIONS: [(&str, &str, &str, &[&str]); 4] = [
    ("no-barrier", "__syncthreads();", "", &[]),
    (
        "one-word-more",
        "rest < job.tile ? rest : job.tile);\n    const u32 row",
        "job.tile);\n    const u32 row",
        &["-fsanitize=address"],
    ),
    ("edges", "if (begin + k >= 0 && begin + k < (s32)written) *(T*)", "*(T*)", &["-fsanitize=address"]),
    ("skew", "(skew & 7) == 0", "(skew & 3) == 0", &[]),
];

#[test]
fn broken_kernels_are_found() {
    for (name, find, replace, sanitizers) in MUTATIONS {
        let name = format!("kernels-{name}");
        let Some(mut program) = Program::start_mutated(&name, find, replace, sanitizers) else { return };
        let mut random = Random(0xBAD);
        let found = (0..400).any(|_| {
            let case = random.case();
            let limits = limits(&mut random);
            cases::attempt(&case, limits, &mut random, &mut program).1.is_err()
        });
        assert!(found, "{name}: 400 cases did not see it");
    }
}

#[test]
fn conversions_by_the_shipped_ptx() {
    let mut machine = Machine::shipped();
    random_cases(&mut machine, 160, 0x97C);
    println!("{} instructions", machine.steps);
    assert!(machine.steps > 1_000_000);
}

#[test]
fn pairs_by_the_shipped_ptx() {
    let mut machine = Machine::shipped();
    let mut random = Random(13);
    for longest in [3, 40, 300, 40_000] {
        let limits = limits(&mut random);
        let result = cases::run_pairs(16, longest, limits, &mut random, &mut machine);
        assert_eq!(result, Ok(()), "pairs of up to {longest} bytes");
    }
}

/// Blocks, layers and outer parts further apart than 32 bits can say, on memory that has nothing in
/// between.
#[test]
fn distances_beyond_32_bits_by_the_shipped_ptx() {
    const GIB: u64 = 1 << 30;
    const FAR: u64 = 0x00F7_6B76_0000_0000;
    for (hd, kernel) in [(128, "kvbm_rows_16"), (9, "kvbm_tiles_2"), (4, "kvbm_tiles_8")] {
        let shape = BlockShape::new(2, 2, 3, 16, hd, 2).expect("a small shape");
        let stack = BlockForm::Stack(ChunkOrder::Nhd);
        let (chunk, block) = (stack.chunk_bytes(&shape), shape.block_bytes());
        let places = (0..8_u64).map(|at| (at / 4, at / 2 % 2, at % 2));
        let chunk_at = |(b, l, o): (u64, u64, u64)| FAR + b * 5 * GIB + l * 11 * GIB + o * 23 * GIB;
        let mut chunks: Vec<_> = places.map(|place| (chunk_at(place), place)).collect();
        chunks.sort_unstable();
        let mut memory = Memory::default();
        let mut random = Random(21);
        let mut stacks = vec![Vec::new(); 8];
        for (address, (b, l, o)) in chunks {
            memory.allocate_at(address, chunk, 0);
            let bytes = memory.at(address, chunk).expect("allocated");
            bytes.fill_with(|| (random.next() >> 56) as u8);
            stacks[(b * 4 + l * 2 + o) as usize] = bytes.to_vec();
        }
        let universals = [FAR + 100 * GIB, FAR + 107 * GIB];
        for address in universals {
            memory.allocate_at(address, block, 0);
        }
        let from = Operand::strided_stack(ChunkOrder::Nhd, FAR, 2, [5 * GIB, 11 * GIB, 23 * GIB]);
        let to = Operand::strided(BlockForm::Universal, universals[0], 2, 7 * GIB);
        let conversion = Conversion::new(shape, from, to).expect("sound arguments");
        let launch = conversion.launch(DeviceLimits::default(), 0, 0).expect("small").expect("two blocks");
        assert_eq!(launch.kernel.name(), kernel);
        assert_eq!(Machine::shipped().run(&launch, &mut memory, false), Ok(()));

        let sources: Vec<&[u8]> = stacks.iter().map(Vec::as_slice).collect();
        let mut expected = vec![vec![0; block]; 2];
        let mut slices: Vec<&mut [u8]> = expected.iter_mut().map(Vec::as_mut_slice).collect();
        block_to_universal(&shape, ChunkOrder::Nhd, &sources, &mut slices).expect("sound arguments");
        for (address, expected) in universals.into_iter().zip(&expected) {
            assert!(memory.at(address, block).expect("allocated") == expected, "{kernel} at {address:#x}");
        }
    }
}

#[test]
fn broken_ptx_is_found() {
    for (find, replace) in [
        ("bar.sync", "// bar.sync"),
        ("ld.shared.u32", "ld.shared.u16"),
        ("st.shared.u16", "st.shared.u8"),
        ("setp.ge.u32", "setp.gt.u32"),
    ] {
        let ptx = Machine::shipped().ptx().replace(find, replace);
        let mut machine = Machine::of(ptx);
        let mut random = Random(0xBAD);
        let found = (0..400).any(|_| {
            let case = random.case();
            cases::attempt(&case, DeviceLimits::default(), &mut random, &mut machine).1.is_err()
        });
        assert!(found, "400 cases do not see `{replace}` for `{find}`");
    }
}
