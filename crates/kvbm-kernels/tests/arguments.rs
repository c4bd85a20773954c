//! Every wrong argument is an error that names it, before anything is launched.

use kvbm_kernels::{
    Argument, BlockForm, BlockShape, ChunkOrder, Conversion, DeviceLimits, Heads, KernelError, Operand,
    PairCopies, Piece, Tensor,
};
use kvbm_layout::DType;

const NHD: BlockForm = BlockForm::Stack(ChunkOrder::Nhd);
const UNIVERSAL: BlockForm = BlockForm::Universal;
const PAGE: u64 = 1 << 12;

/// 2 layers, keys and values, 4 heads, 8 tokens, rows of 8 elements of 2 bytes: chunks of 512,
/// blocks of 2048 bytes.
fn shape() -> BlockShape {
    BlockShape::new(2, 2, 4, 8, 8, 2).expect("a small shape")
}

fn pages(form: BlockForm, from: u64, count: u64) -> Operand {
    Operand::pointers(form, (from..from + count).map(|page| page * PAGE).collect())
}

fn refused(from: Operand, to: Operand) -> String {
    Conversion::new(shape(), from, to).expect_err("it must be refused").to_string()
}

#[test]
fn counts_addresses_and_overlap_are_checked_by_argument() {
    let good = || (pages(NHD, 1, 8), pages(UNIVERSAL, 20, 2));
    assert!(Conversion::new(shape(), good().0, good().1).is_ok());
    assert!(Conversion::new(shape(), pages(NHD, 1, 0), pages(UNIVERSAL, 1, 0)).unwrap().blocks() == 0);

    let error = refused(pages(NHD, 1, 7), good().1);
    assert!(error.starts_with("sources: 7 chunks, but each block in stacked NHD form has 4"), "{error}");
    let error = refused(good().0, pages(UNIVERSAL, 20, 3));
    assert_eq!(error, "sources are 2 blocks, destinations 3; pass as many of each");
    let error = refused(good().0, Operand::pointers(UNIVERSAL, vec![20 * PAGE, 0]));
    assert_eq!(error, "destinations: chunk 0 of block 1 is at address 0x0; it must not be null");
    let error = refused(good().0, Operand::pointers(UNIVERSAL, vec![20 * PAGE, 30 * PAGE + 1]));
    assert!(error.contains("chunk 0 of block 1") && error.contains("multiple of the element"), "{error}");
    let error = refused(good().0, Operand::pointers(UNIVERSAL, vec![20 * PAGE, u64::MAX - 1023]));
    assert!(error.contains("outside the address space"), "{error}");
}

#[test]
fn memory_that_is_written_twice_or_read_meanwhile_is_found() {
    let to = |addresses: [u64; 2]| Operand::pointers(UNIVERSAL, addresses.to_vec());
    let from = || pages(NHD, 1, 8);
    for (what, addresses) in [
        ("the same twice", [20 * PAGE, 20 * PAGE]),
        ("the end of another", [20 * PAGE, 20 * PAGE + 2046]),
        ("a source", [3 * PAGE, 20 * PAGE]),
        ("just before a source", [20 * PAGE, 3 * PAGE - 2]),
    ] {
        let error = Conversion::new(shape(), from(), to(addresses)).unwrap_err();
        assert!(matches!(error, KernelError::Overlap { .. }), "{what}: {error}");
    }
    assert!(Conversion::new(shape(), from(), to([20 * PAGE, 20 * PAGE + 2048])).is_ok(), "side by side");
    let twice = Operand::pointers(NHD, [pages_of(1, 4), pages_of(1, 4)].concat());
    assert!(
        Conversion::new(shape(), twice, to([20 * PAGE, 21 * PAGE])).is_ok(),
        "a source may be read twice"
    );
}

fn pages_of(from: u64, count: u64) -> Vec<u64> {
    (from..from + count).map(|page| page * PAGE).collect()
}

#[test]
fn strides_heads_and_devices_are_checked_by_argument() {
    let to = || Operand::strided(UNIVERSAL, PAGE, 2, 2048);
    let from = |strides| Operand::strided_stack(ChunkOrder::Nhd, 100 * PAGE, 2, strides);
    assert!(Conversion::new(shape(), from([2048, 1024, 512]), to()).is_ok());
    assert!(Conversion::new(shape(), from([512, 2048, 1024]), to()).is_ok(), "block by block within a layer");
    for (strides, name) in [
        ([2047, 1024, 512], "block_stride is 2047"),
        ([2048, 1024, 510], "outer_stride is 510"),
        ([2048, 1022, 512], "layer_stride is 1022"),
        ([u64::MAX - 1, 1024, 512], "block_stride is 18446744073709551614"),
    ] {
        let error = refused(from(strides), to());
        assert!(error.starts_with("sources: ") && error.contains(name), "{error}");
    }
    let error = refused(from([2048, 1024, 512]), Operand::strided(UNIVERSAL, PAGE, 2, 2046));
    assert!(error.starts_with("destinations: block_stride is 2046 bytes"), "{error}");

    let error = refused(from([2048, 1024, 512]), to().heads(Heads { first: 5, of: 8 }));
    assert!(error.starts_with("destinations: heads 5..+4 of a block of 8"), "{error}");
    let error = refused(from([2048, 1024, 512]), to().heads(Heads { first: usize::MAX, of: 8 }));
    assert!(error.contains("the slice must lie inside"), "{error}");
    let error = refused(from([2048, 1024, 512]).on_device(1), to().on_device(0));
    assert!(error.starts_with("destinations: device 0, but 1 is needed"), "{error}");
}

fn tensors(form: BlockForm, count: u64) -> Vec<Tensor> {
    let (dims, strides) = match form {
        BlockForm::Stack(ChunkOrder::Nhd) => (vec![8, 4, 8], vec![32, 8, 1]),
        BlockForm::Stack(ChunkOrder::Hnd) => (vec![4, 8, 8], vec![64, 8, 1]),
        BlockForm::Operational(_) => (vec![2, 2, 256], vec![512, 256, 1]),
        BlockForm::Universal => (vec![4, 2, 2, 8, 8], vec![256, 128, 64, 8, 1]),
    };
    let tensor = |page| Tensor {
        address: page * PAGE,
        device: 3,
        dtype: DType::BF16,
        dims: dims.clone(),
        strides: strides.clone(),
    };
    (1..=count).map(tensor).collect()
}

fn operand(form: BlockForm, tensors: &[Tensor]) -> Result<Operand, KernelError> {
    Operand::from_tensors(&shape(), Argument::Sources, form, DType::BF16, tensors)
}

#[test]
fn tensors_of_every_form_are_taken() {
    for form in [
        NHD,
        BlockForm::Stack(ChunkOrder::Hnd),
        BlockForm::Operational(ChunkOrder::Nhd),
        BlockForm::Operational(ChunkOrder::Hnd),
        UNIVERSAL,
    ] {
        let count = if matches!(form, BlockForm::Stack(_)) { 4 } else { 1 };
        let operand = operand(form, &tensors(form, count)).unwrap();
        assert_eq!(operand.device(), Some(3), "{form}");
        let to = Operand::strided(UNIVERSAL, 1 << 20, 1, 2048);
        assert_eq!(Conversion::new(shape(), operand, to).unwrap().blocks(), 1, "{form}");
    }
}

#[test]
fn tensors_that_are_not_what_was_declared_are_named() {
    let with = |change: &dyn Fn(&mut Tensor)| {
        let mut tensors = tensors(NHD, 4);
        change(&mut tensors[2]);
        operand(NHD, &tensors).unwrap_err().to_string()
    };
    let error = with(&|tensor| tensor.dtype = DType::F16);
    assert!(error.starts_with("sources: tensor 2: dtype") && error.contains("one type"), "{error}");
    let error = with(&|tensor| tensor.device = 0);
    assert!(error.starts_with("sources, tensor 2: device 0, but 3 is needed"), "{error}");
    let error = with(&|tensor| tensor.dims = vec![8, 4, 16]);
    assert!(error.contains("tensor 2: shape [8, 4, 16], expected [8, 4, 8]"), "{error}");
    let error = with(&|tensor| tensor.strides = vec![64, 8, 1]);
    assert!(error.contains("tensor 2: strides [64, 8, 1]") && error.contains("contiguous"), "{error}");
    // Memory in HND order, permuted to look like NHD: a view that a reader of bytes must not
    // believe.
    let error = with(&|tensor| tensor.strides = vec![8, 64, 1]);
    assert!(error.contains("strides of the other axis order"), "{error}");
    let error = with(&|tensor| tensor.strides = vec![32, 8]);
    assert!(error.contains("pass a stride for each axis"), "{error}");
    let wide = Operand::from_tensors(&shape(), Argument::Destinations, NHD, DType::F32, &tensors(NHD, 4));
    let error = wide.unwrap_err().to_string();
    assert!(error.starts_with("destinations: tensor 0: bytes of an element 4, expected 2"), "{error}");
}

#[test]
fn the_stride_of_a_single_element_means_nothing() {
    let one_head = BlockShape::new(2, 2, 1, 8, 8, 2).unwrap();
    let tensor = Tensor {
        address: PAGE,
        device: 0,
        dtype: DType::BF16,
        dims: vec![8, 1, 8],
        strides: vec![8, 777, 1],
    };
    let tensors = vec![tensor; 4];
    assert!(Operand::from_tensors(&one_head, Argument::Sources, NHD, DType::BF16, &tensors).is_ok());
}

#[test]
fn pairs_are_checked_by_number() {
    let pair = |from, to, bytes| Piece { from, to, bytes };
    let error = PairCopies::new(&[pair(PAGE, 2 * PAGE, 1), pair(PAGE, 0, 1)]).unwrap_err().to_string();
    assert!(error.starts_with("pair 1: 1 bytes at 0x0 (destination)"), "{error}");
    let error = PairCopies::new(&[pair(u64::MAX, PAGE, 2)]).unwrap_err().to_string();
    assert!(error.starts_with("pair 0: 2 bytes at 0xffffffffffffffff (source)"), "{error}");
    let huge = [pair(PAGE, PAGE, u64::MAX - PAGE), pair(PAGE, PAGE, u64::MAX - PAGE)];
    assert!(matches!(PairCopies::new(&huge).unwrap_err(), KernelError::TooMuch { .. }));
    let nothing = PairCopies::new(&[pair(0, 0, 0)]).unwrap();
    assert_eq!(nothing.launch(DeviceLimits::default(), PAGE), None);
}

#[test]
fn what_is_too_much_for_one_launch_is_reported() {
    // 2^31 words of 16 bytes in one chunk.
    let large = BlockShape::new(1, 1, 1 << 10, 1 << 14, 1 << 10, 2).unwrap();
    let from = Operand::strided(NHD, 1 << 40, 1, large.block_bytes() as u64);
    let to = Operand::strided(UNIVERSAL, 1 << 41, 1, large.block_bytes() as u64);
    let conversion = Conversion::new(large, from, to).unwrap();
    let error = conversion.launch(DeviceLimits::default(), 0, 0).unwrap_err().to_string();
    assert!(error.starts_with("words of a chunk is 2147483648"), "{error}");
}
