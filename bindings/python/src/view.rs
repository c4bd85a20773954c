//! A view of memory that somebody else owns.

use crate::errors::{Error, Result};
use pyo3::prelude::*;
use std::fmt;
use std::str::FromStr;

/// A view of memory that somebody else owns: where it lies, what it holds, and what keeps it alive.
///
/// `Tensor.of(tensor)` takes whatever speaks DLPack: torch, numpy, CuPy, JAX. The constructor takes
/// an address. Strides count elements, as torch's do.
#[pyclass(module = "kvbm_rs", frozen, name = "Tensor")]
#[derive(Debug)]
pub(crate) struct TensorView {
    pub(crate) address: usize,
    pub(crate) place: Place,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<u64>,
    pub(crate) strides: Vec<u64>,
    pub(crate) is_read_only: bool,
    /// An object that keeps the memory, or a tensor that was lent by DLPack.
    pub(crate) owner: Py<PyAny>,
}

/// Where memory lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Host,
    /// A device of the CUDA driver, by its number.
    Cuda(u32),
}

/// Type of elements, as DLPack numbers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Dtype {
    pub(crate) code: u8,
    pub(crate) bits: u8,
}

/// Types by their code and bits.
const NAMES: [(u8, u8, &str); 17] = [
    (0, 8, "int8"),
    (0, 16, "int16"),
    (0, 32, "int32"),
    (0, 64, "int64"),
    (1, 8, "uint8"),
    (1, 16, "uint16"),
    (1, 32, "uint32"),
    (1, 64, "uint64"),
    (2, 16, "float16"),
    (2, 32, "float32"),
    (2, 64, "float64"),
    (4, 16, "bfloat16"),
    (6, 8, "bool"),
    (10, 8, "float8_e4m3fn"),
    (11, 8, "float8_e4m3fnuz"),
    (12, 8, "float8_e5m2"),
    (13, 8, "float8_e5m2fnuz"),
];

impl Dtype {
    /// Bytes of an element.
    pub(crate) fn width(self) -> usize {
        usize::from(self.bits) / 8
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match NAMES.iter().find(|(code, bits, _)| (*code, *bits) == (self.code, self.bits)) {
            Some((_, _, name)) => f.write_str(name),
            None => write!(f, "DLPack type {} of {} bits", self.code, self.bits),
        }
    }
}

impl FromStr for Dtype {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let name = text.strip_prefix("torch.").unwrap_or(text);
        let found = NAMES.iter().find(|(_, _, known)| *known == name);
        found.map(|&(code, bits, _)| Self { code, bits }).ok_or_else(|| {
            let known: Vec<_> = NAMES.iter().map(|(_, _, name)| *name).collect();
            Error::argument(format!("dtype {text:?}: known are {}", known.join(", ")))
        })
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("cpu"),
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

impl FromStr for Place {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let ordinal = text.strip_prefix("cuda:").map(str::parse);
        match (text, ordinal) {
            ("cpu", _) => Ok(Self::Host),
            (_, Some(Ok(ordinal))) => Ok(Self::Cuda(ordinal)),
            _ => Err(Error::argument(format!("device {text:?}: give 'cpu', or 'cuda:0' and so on"))),
        }
    }
}

impl TensorView {
    /// Checks what a description must obey: the bytes end inside the address space.
    ///
    /// # Errors
    /// The text says what is wrong; whoever calls this names the tensor.
    pub(crate) fn checked(self) -> Result<Self> {
        let Self { address, dtype, shape, strides, .. } = &self;
        if dtype.bits == 0 || !dtype.bits.is_multiple_of(8) {
            return Err(Error::argument(format!("elements of {} bits: give whole bytes", dtype.bits)));
        }
        if shape.len() != strides.len() {
            let text = format!("{} strides for the shape {shape:?}: give one for each axis", strides.len());
            return Err(Error::argument(text));
        }
        if *address == 0 && !shape.contains(&0) {
            return Err(Error::argument("address 0: give the address of the first element"));
        }
        let end = self.bytes().and_then(|bytes| (*address as u64).checked_add(bytes));
        if end.is_none_or(|end| end > isize::MAX as u64) && self.place == Place::Host || end.is_none() {
            let text = format!("shape {shape:?} and strides {strides:?} reach beyond the address space");
            return Err(Error::argument(text));
        }
        Ok(self)
    }

    /// Bytes from the first element to the end of the last one; 0 where there is none.
    fn bytes(&self) -> Option<u64> {
        if self.shape.contains(&0) {
            return Some(0);
        }
        let mut last = 0_u64;
        for (size, stride) in self.shape.iter().zip(&self.strides) {
            last = last.checked_add((size - 1).checked_mul(*stride)?)?;
        }
        last.checked_add(1)?.checked_mul(self.dtype.width() as u64)
    }
}

/// Strides of elements that lie one behind the other, the last axis first.
pub(crate) fn c_order(shape: &[u64]) -> Vec<u64> {
    let mut strides = vec![1_u64; shape.len()];
    for axis in (1..shape.len()).rev() {
        strides[axis - 1] = strides[axis].saturating_mul(shape[axis].max(1));
    }
    strides
}
