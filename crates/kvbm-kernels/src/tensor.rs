//! Tensors as frameworks describe them, checked against the form that the caller says they have.

use std::fmt;

use kvbm_layout::DType;

use crate::{Argument, BlockForm, BlockShape, ChunkOrder, KernelError, Operand};

/// A tensor in device memory: a view, as PyTorch has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tensor {
    /// Address of its first element.
    pub address: u64,
    /// Number of its device.
    pub device: u32,
    /// Type of its elements.
    pub dtype: DType,
    /// Elements along each axis.
    pub dims: Vec<u64>,
    /// Elements between neighbours along each axis.
    pub strides: Vec<u64>,
}

impl Operand {
    /// The chunks of blocks as tensors, block by block. A stack is `[nt, nh, hd]` or `[nh, nt,
    /// hd]`. An operational block is `[nl, no, nt * nh * hd]`, a universal one `[nh, nl, no, nt,
    /// hd]`. All must be contiguous, of one type and on one device.
    ///
    /// # Errors
    /// [`KernelError::Tensor`] names the tensor and what of it is wrong, [`KernelError::Device`]
    /// its device. Strides of the other axis order and strides that are not contiguous are
    /// different errors.
    pub fn from_tensors(
        shape: &BlockShape,
        argument: Argument,
        form: BlockForm,
        dtype: DType,
        tensors: &[Tensor],
    ) -> Result<Self, KernelError> {
        let dims = dims_of(shape, form);
        for (index, tensor) in tensors.iter().enumerate() {
            check(shape, argument, form, index, tensor, dtype, &dims)?;
            if tensor.device != tensors[0].device {
                let argument = format!("{argument}, tensor {index}");
                let (found, expected) = (tensor.device, tensors[0].device);
                return Err(KernelError::Device { argument, found, expected });
            }
        }
        let operand = Self::pointers(form, tensors.iter().map(|tensor| tensor.address).collect());
        Ok(tensors.first().map_or(operand.clone(), |first| operand.on_device(first.device)))
    }
}

fn dims_of(shape: &BlockShape, form: BlockForm) -> Vec<u64> {
    let BlockShape { num_layers: nl, num_outer: no, num_heads: nh, num_tokens: nt, .. } = *shape;
    let hd = shape.row_bytes() / shape.element_bytes();
    let dims = match form {
        BlockForm::Stack(ChunkOrder::Nhd) => vec![nt, nh, hd],
        BlockForm::Stack(ChunkOrder::Hnd) => vec![nh, nt, hd],
        BlockForm::Operational(_) => vec![nl, no, nt * nh * hd],
        BlockForm::Universal => vec![nh, nl, no, nt, hd],
    };
    dims.into_iter().map(|dim| dim as u64).collect()
}

fn check(
    shape: &BlockShape,
    argument: Argument,
    form: BlockForm,
    index: usize,
    tensor: &Tensor,
    dtype: DType,
    dims: &[u64],
) -> Result<(), KernelError> {
    let fail = |what, found: &dyn fmt::Debug, expected: &dyn fmt::Debug, rule| {
        let (found, expected) = (format!("{found:?}"), format!("{expected:?}"));
        Err(KernelError::Tensor { argument, index, what, found, expected, rule })
    };
    if u64::from(dtype.width()) != shape.element_bytes() as u64 {
        let rule = "the declared type must be as wide as the shape's elements";
        return fail("bytes of an element", &dtype.width(), &shape.element_bytes(), rule);
    }
    if tensor.dtype != dtype {
        return fail("dtype", &tensor.dtype, &dtype, "convert all tensors of a batch to one type");
    }
    if tensor.dims != dims {
        return fail("shape", &tensor.dims, &dims, "check nl, no, nh, nt, hd and the axis order");
    }
    if tensor.strides.len() != dims.len() {
        return fail("strides", &tensor.strides, &contiguous(dims), "pass a stride for each axis");
    }
    if is_strided(tensor, &contiguous(dims)) {
        return Ok(());
    }
    if let BlockForm::Stack(_) = form {
        // The strides that the same axes have in memory of the other order.
        let other = [dims[2], dims[0] * dims[2], 1];
        if is_strided(tensor, &other) {
            let rule = "these are the strides of the other axis order: declare that order and its shape";
            return fail("strides", &tensor.strides, &contiguous(dims), rule);
        }
    }
    fail("strides", &tensor.strides, &contiguous(dims), "make the tensor contiguous")
}

fn contiguous(dims: &[u64]) -> Vec<u64> {
    let mut strides = vec![1_u64; dims.len()];
    for axis in (1..dims.len()).rev() {
        strides[axis - 1] = strides[axis].saturating_mul(dims[axis]);
    }
    strides
}

/// The stride of an axis with one element means nothing.
fn is_strided(tensor: &Tensor, strides: &[u64]) -> bool {
    tensor.dims.iter().zip(&tensor.strides).zip(strides).all(|((dim, has), wants)| *dim == 1 || has == wants)
}
