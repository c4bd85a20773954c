//! `Tensor`: a view of memory as Python makes and reads it.

use crate::dlpack;
use crate::errors::{Error, Result};
use crate::view::{TensorView, c_order};
use pyo3::prelude::*;

impl TensorView {
    /// What an argument is a view of: a `Tensor`, or what speaks DLPack. `what` names it in
    /// errors, unless it is empty.
    pub(crate) fn from_any(object: &Bound<'_, PyAny>, what: &str) -> PyResult<Py<Self>> {
        if let Ok(view) = object.cast_exact::<Self>() {
            return Ok(view.clone().unbind());
        }
        let view = dlpack::view_of(object).and_then(|view| Ok(view.checked()?));
        match view {
            Ok(view) => Py::new(object.py(), view),
            Err(error) => {
                let text = error.value(object.py()).to_string();
                let separator = if what.is_empty() { "" } else { ": " };
                Err(Error::argument(format!("{what}{separator}{text}")).into())
            }
        }
    }
}

#[pymethods]
impl TensorView {
    /// The elements at `address`, which stay there while `owner` lives. Without `strides` they lie
    /// in C order.
    ///
    /// Whoever calls this promises that the address is right: kvbm reads and writes there.
    #[new]
    #[pyo3(signature = (address, shape, *, dtype, owner, strides = None, device = "cpu"))]
    fn new(
        address: usize,
        shape: Vec<u64>,
        dtype: &str,
        owner: Py<PyAny>,
        strides: Option<Vec<u64>>,
        device: &str,
    ) -> Result<Self> {
        let strides = strides.unwrap_or_else(|| c_order(&shape));
        let (place, dtype) = (device.parse()?, dtype.parse()?);
        Self { address, place, dtype, shape, strides, is_read_only: false, owner }.checked()
    }

    /// A view of whatever speaks DLPack. A `Tensor` is returned as it is.
    #[staticmethod]
    fn of(tensor: &Bound<'_, PyAny>) -> PyResult<Py<Self>> {
        Self::from_any(tensor, "")
    }

    /// Where the first element lies.
    #[getter]
    fn address(&self) -> usize {
        self.address
    }

    /// Elements along each axis.
    #[getter]
    fn shape(&self) -> Vec<u64> {
        self.shape.clone()
    }

    /// Elements from one to its neighbour along each axis.
    #[getter]
    fn strides(&self) -> Vec<u64> {
        self.strides.clone()
    }

    /// Type of the elements, such as `"bfloat16"`.
    #[getter]
    fn dtype(&self) -> String {
        self.dtype.to_string()
    }

    /// `"cpu"`, or `"cuda:0"` and so on.
    #[getter]
    fn device(&self) -> String {
        self.place.to_string()
    }

    /// Whether its owner refuses writes.
    #[getter]
    fn read_only(&self) -> bool {
        self.is_read_only
    }

    fn __repr__(&self) -> String {
        let Self { address, place, dtype, shape, strides, .. } = self;
        format!("Tensor({shape:?} of {dtype} at {address:#x} of {place}, strides {strides:?})")
    }
}
