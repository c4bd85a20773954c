//! Every pair of forms against element-by-element copying, round trips, known bytes, and refused
//! arguments.

use kvbm_kernels::{
    Argument, BlockForm, BlockShape, ChunkOrder, Heads, KernelError, block_to_operational,
    block_to_universal, convert, convert_heads, operational_to_block, operational_to_universal,
    universal_to_block, universal_to_operational,
};
use proptest::prelude::*;

const FORMS: [BlockForm; 5] = [
    BlockForm::Stack(ChunkOrder::Nhd),
    BlockForm::Stack(ChunkOrder::Hnd),
    BlockForm::Operational(ChunkOrder::Nhd),
    BlockForm::Operational(ChunkOrder::Hnd),
    BlockForm::Universal,
];

/// `[nl, no, nh, nt, hd, element bytes]`.
type Dimensions = [usize; 6];

fn shape([nl, no, nh, nt, hd, width]: Dimensions) -> BlockShape {
    BlockShape::new(nl, no, nh, nt, hd, width).expect("small dimensions")
}

/// Flat index over `dimensions`, the last one fastest.
fn flat<const N: usize>(index: [usize; N], dimensions: [usize; N]) -> usize {
    index.iter().zip(dimensions).fold(0, |flat, (i, dimension)| {
        assert!(*i < dimension);
        flat * dimension + i
    })
}

/// Chunk and byte of an element, straight from the table of shapes in the crate's documentation.
fn place(
    form: BlockForm,
    dimensions: Dimensions,
    [layer, outer, head, token, d]: [usize; 5],
) -> (usize, usize) {
    let [nl, no, nh, nt, hd, width] = dimensions;
    let (chunk, element) = match form {
        BlockForm::Stack(ChunkOrder::Nhd) => {
            (flat([layer, outer], [nl, no]), flat([token, head, d], [nt, nh, hd]))
        }
        BlockForm::Stack(ChunkOrder::Hnd) => {
            (flat([layer, outer], [nl, no]), flat([head, token, d], [nh, nt, hd]))
        }
        BlockForm::Operational(ChunkOrder::Nhd) => {
            (0, flat([layer, outer, token, head, d], [nl, no, nt, nh, hd]))
        }
        BlockForm::Operational(ChunkOrder::Hnd) => {
            (0, flat([layer, outer, head, token, d], [nl, no, nh, nt, hd]))
        }
        BlockForm::Universal => (0, flat([head, layer, outer, token, d], [nh, nl, no, nt, hd])),
    };
    (chunk, element * width)
}

fn elements([nl, no, nh, nt, hd, _]: Dimensions) -> impl Iterator<Item = [usize; 5]> {
    (0..nl * no * nh * nt * hd).map(move |mut i| {
        let mut digit = |dimension| {
            let digit = i % dimension;
            i /= dimension;
            digit
        };
        let mut index = [digit(hd), digit(nt), digit(nh), digit(no), digit(nl)];
        index.reverse();
        index
    })
}

/// All chunks of `blocks` blocks, filled so that no two elements look alike for long.
fn filled(form: BlockForm, shape: &BlockShape, blocks: usize, seed: u64) -> Vec<Vec<u8>> {
    let mut state = seed | 1;
    let mut byte = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    let chunk = form.chunk_bytes(shape);
    (0..blocks * form.chunks_per_block(shape)).map(|_| (0..chunk).map(|_| byte()).collect()).collect()
}

fn run(shape: &BlockShape, from: BlockForm, sources: &[Vec<u8>], to: BlockForm) -> Vec<Vec<u8>> {
    let blocks = sources.len() / from.chunks_per_block(shape);
    let mut destinations = filled(to, shape, blocks, 99);
    convert(shape, from, &shared(sources), to, &mut exclusive(&mut destinations)).expect("sound arguments");
    destinations
}

fn shared(chunks: &[Vec<u8>]) -> Vec<&[u8]> {
    chunks.iter().map(Vec::as_slice).collect()
}

fn exclusive(chunks: &mut [Vec<u8>]) -> Vec<&mut [u8]> {
    chunks.iter_mut().map(Vec::as_mut_slice).collect()
}

fn any_dimensions() -> impl Strategy<Value = Dimensions> {
    (
        1..4_usize,
        1..3_usize,
        1..5_usize,
        1..6_usize,
        1..4_usize,
        prop::sample::select(vec![1_usize, 2, 3, 4, 8, 16]),
    )
        .prop_map(|(nl, no, nh, nt, hd, width)| [nl, no, nh, nt, hd, width])
}

proptest! {
    #[test]
    fn conversions_agree_with_copying_element_by_element(
        dimensions in any_dimensions(),
        blocks in 0..3_usize,
        from in prop::sample::select(&FORMS[..]),
        to in prop::sample::select(&FORMS[..]),
        seed in any::<u64>(),
    ) {
        let shape = shape(dimensions);
        let sources = filled(from, &shape, blocks, seed);
        let converted = run(&shape, from, &sources, to);

        let mut expected = filled(to, &shape, blocks, 7);
        let width = dimensions[5];
        for block in 0..blocks {
            for element in elements(dimensions) {
                let (source, read) = place(from, dimensions, element);
                let (destination, write) = place(to, dimensions, element);
                let source = &sources[block * from.chunks_per_block(&shape) + source];
                let destination = &mut expected[block * to.chunks_per_block(&shape) + destination];
                destination[write..write + width].copy_from_slice(&source[read..read + width]);
            }
        }
        prop_assert_eq!(&converted, &expected);
        prop_assert_eq!(run(&shape, to, &converted, from), sources, "the way back");
    }

    #[test]
    fn heads_of_the_universal_form_are_slices(dimensions in any_dimensions(), seed in any::<u64>()) {
        // What two tensor-parallel ranks convert apart is what one converts whole.
        let [nl, no, nh, nt, hd, width] = dimensions;
        let whole = shape([nl, no, nh * 2, nt, hd, width]);
        let half = shape(dimensions);
        let form = BlockForm::Stack(ChunkOrder::Hnd);
        let chunks = filled(form, &whole, 1, seed);
        let universal = run(&whole, form, &chunks, BlockForm::Universal);
        for rank in 0..2 {
            let bytes = half.block_bytes();
            let mine: Vec<Vec<u8>> = chunks.iter().map(|chunk| chunk[rank * chunk.len() / 2..][..chunk.len() / 2].to_vec()).collect();
            let part = run(&half, form, &mine, BlockForm::Universal);
            prop_assert_eq!(&part[0][..], &universal[0][rank * bytes..][..bytes]);
        }
    }
}

proptest! {
    #[test]
    fn slices_of_heads_are_taken_from_and_put_into_larger_blocks(
        dimensions in any_dimensions(),
        before in 0..3_usize,
        behind in 0..3_usize,
        from in prop::sample::select(&FORMS[..]),
        to in prop::sample::select(&FORMS[..]),
        seed in any::<u64>(),
    ) {
        // The slice of what is converted whole is what is converted of the slice.
        let [nl, no, nh, nt, hd, width] = dimensions;
        let part = shape(dimensions);
        let whole = shape([nl, no, before + nh + behind, nt, hd, width]);
        let slice = Heads { first: before, of: before + nh + behind };
        let all = Heads { first: 0, of: nh };
        let sources = filled(from, &whole, 2, seed);
        let universal = run(&whole, from, &sources, BlockForm::Universal);
        let head = part.block_bytes() / nh;
        let expected: Vec<Vec<u8>> =
            universal.iter().map(|block| block[before * head..][..nh * head].to_vec()).collect();

        let mut taken = filled(to, &part, 2, 1);
        convert_heads(&part, (from, slice), &shared(&sources), (to, all), &mut exclusive(&mut taken)).unwrap();
        prop_assert_eq!(run(&part, to, &taken, BlockForm::Universal), expected);

        // Put back over other bytes, only these heads change.
        let mut put = filled(from, &whole, 2, seed ^ 0xFF);
        let mut changed = run(&whole, from, &put, BlockForm::Universal);
        for (block, source) in changed.iter_mut().zip(&universal) {
            let heads = before * head..(before + nh) * head;
            block[heads.clone()].copy_from_slice(&source[heads]);
        }
        convert_heads(&part, (to, all), &shared(&taken), (from, slice), &mut exclusive(&mut put)).unwrap();
        prop_assert_eq!(run(&whole, from, &put, BlockForm::Universal), changed);
    }
}

#[test]
fn a_slice_outside_the_block_is_refused() {
    let part = shape([1, 1, 2, 1, 1, 1]);
    let all = Heads { first: 0, of: 2 };
    let form = BlockForm::Universal;
    for slice in [Heads { first: 2, of: 3 }, Heads { first: usize::MAX, of: 3 }, Heads { first: 0, of: 1 }] {
        let error = convert_heads(&part, (form, slice), &[], (form, all), &mut []).unwrap_err();
        let Heads { first, of } = slice;
        assert_eq!(error, KernelError::Heads { argument: Argument::Sources, first, count: 2, of });
    }
}

#[test]
fn known_bytes() {
    // Two layers, K and V, two heads, two tokens, rows of one byte: layer, outer, head, token as
    // bits 3, 2, 1, 0.
    let shape = shape([2, 2, 2, 2, 1, 1]);
    let nhd = [[0_u8, 2, 1, 3], [4, 6, 5, 7], [8, 10, 9, 11], [12, 14, 13, 15]];
    let hnd = [[0_u8, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]];
    let universal = [0_u8, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15];
    let operational_hnd: [u8; 16] = std::array::from_fn(|i| i as u8);
    let operational_nhd = nhd.as_flattened();

    for (order, stack) in [(ChunkOrder::Nhd, nhd), (ChunkOrder::Hnd, hnd)] {
        let chunks = stack.each_ref().map(|chunk| &chunk[..]);
        let mut out = [0; 16];
        block_to_universal(&shape, order, &chunks, &mut [&mut out]).unwrap();
        assert_eq!(out, universal);

        let mut back = [[0; 4]; 4];
        universal_to_block(&shape, &[&universal], order, &mut back.each_mut().map(|chunk| &mut chunk[..]))
            .unwrap();
        assert_eq!(back, stack);

        let mut out = [0; 16];
        block_to_operational(&shape, &chunks, &mut [&mut out]).unwrap();
        assert_eq!(out, stack.as_flattened());

        let mut back = [[0; 4]; 4];
        operational_to_block(&shape, &[&out], &mut back.each_mut().map(|chunk| &mut chunk[..])).unwrap();
        assert_eq!(back, stack);
    }
    for (order, operational) in [(ChunkOrder::Nhd, operational_nhd), (ChunkOrder::Hnd, &operational_hnd[..])]
    {
        let mut out = [0; 16];
        universal_to_operational(&shape, &[&universal], order, &mut [&mut out]).unwrap();
        assert_eq!(out, operational);
        let mut out = [0; 16];
        operational_to_universal(&shape, order, &[operational], &mut [&mut out]).unwrap();
        assert_eq!(out, universal);
    }
}

#[test]
fn dimensions_are_checked_by_name() {
    for (at, name) in ["nl", "no", "nh", "nt", "hd", "element_bytes"].into_iter().enumerate() {
        let mut d = [1_usize; 6];
        d[at] = 0;
        let error = BlockShape::new(d[0], d[1], d[2], d[3], d[4], d[5]).unwrap_err();
        assert_eq!(error, KernelError::ZeroDimension { dimension: name });
        assert!(error.to_string().starts_with(&format!("{name} is 0")), "{error}");
    }
    let huge = usize::MAX / 2;
    for [nl, nh] in [[huge, 3], [huge, 2], [isize::MAX.unsigned_abs(), 2]] {
        let error = BlockShape::new(nl, 1, nh, 1, 1, 1).unwrap_err();
        assert_eq!(error, KernelError::TooLarge { dimensions: [nl, 1, nh, 1, 1, 1] });
    }
    assert_eq!(
        BlockShape::new(isize::MAX.unsigned_abs(), 1, 1, 1, 1, 1).unwrap().block_bytes(),
        isize::MAX.unsigned_abs()
    );
}

#[test]
fn chunks_are_checked_before_anything_is_written() {
    let shape = shape([2, 2, 1, 3, 1, 2]);
    let (chunk, block) = (vec![1; 6], vec![1; 24]);
    let stack = BlockForm::Stack(ChunkOrder::Hnd);
    let attempt = |sources: &[&[u8]], lengths: &[usize]| {
        let mut destinations: Vec<Vec<u8>> = lengths.iter().map(|length| vec![7; *length]).collect();
        let result = convert(&shape, stack, sources, BlockForm::Universal, &mut exclusive(&mut destinations));
        if result.is_err() {
            assert!(destinations.iter().flatten().all(|byte| *byte == 7), "nothing is written on an error");
        }
        result
    };
    let four = [&chunk[..]; 4];
    assert_eq!(attempt(&four, &[24]), Ok(()));
    assert_eq!(attempt(&[], &[]), Ok(()));

    let argument = Argument::Sources;
    let expected = KernelError::ChunkCount { argument, form: stack, count: 3, per_block: 4 };
    assert_eq!(attempt(&four[..3], &[24]), Err(expected));
    let expected = KernelError::BlockCount { sources: 1, destinations: 2 };
    assert_eq!(attempt(&four, &[24, 24]), Err(expected));

    let wrong = [&chunk[..], &chunk, &chunk, &chunk, &chunk, &block, &chunk, &chunk];
    let error = attempt(&wrong, &[24, 24]).unwrap_err();
    let form = stack;
    assert_eq!(
        error,
        KernelError::ChunkLength { argument, form, block: 1, chunk: 1, length: 24, expected: 6 }
    );
    assert_eq!(
        error.to_string(),
        "sources: chunk 1 of block 1 is 24 bytes long, in stacked HND form it must be 6"
    );
    let (argument, form) = (Argument::Destinations, BlockForm::Universal);
    let expected = KernelError::ChunkLength { argument, form, block: 0, chunk: 0, length: 23, expected: 24 };
    assert_eq!(attempt(&four, &[23]), Err(expected));
}
