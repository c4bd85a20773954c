//! Conversions between the forms of a block, on tensors in host memory.

#![expect(clippy::needless_pass_by_value, reason = "what Python arguments become")]

use crate::errors::{Error, Result};
use crate::guard::detached;
use crate::view::{Place, TensorView};
use kvbm::kernels::{Argument, BlockForm, BlockShape, ChunkOrder, Operand, Tensor, convert};
use kvbm::layout::DType;
use pyo3::prelude::*;

/// One side of a conversion.
struct Side {
    argument: Argument,
    form: BlockForm,
    tensors: Vec<Py<TensorView>>,
}

/// Where a tensor of a side lies: its first byte and its length.
#[derive(Clone, Copy)]
struct Bytes {
    start: usize,
    length: usize,
}

/// Converts blocks from the form `from_form` to the form `to_form`: each of `"nhd"`, `"hnd"` (a
/// tensor for each layer and outer part), `"operational_nhd"`, `"operational_hnd"`, `"universal"`
/// (a tensor for each block). `shape` is `[layers, outer, heads, tokens, elements]`.
#[pyfunction]
pub(crate) fn convert_blocks(
    py: Python<'_>,
    shape: [usize; 5],
    from_form: &str,
    sources: Vec<Bound<'_, PyAny>>,
    to_form: &str,
    destinations: Vec<Bound<'_, PyAny>>,
) -> PyResult<()> {
    let sources = side(Argument::Sources, from_form, &sources)?;
    let destinations = side(Argument::Destinations, to_form, &destinations)?;
    let Some(first) = sources.tensors.first().or(destinations.tensors.first()) else { return Ok(()) };
    let dtype = first.get().dtype;
    let [nl, no, nh, nt, hd] = shape;
    let shape = BlockShape::new(nl, no, nh, nt, hd, dtype.width()).map_err(Error::from)?;
    let read = sources.check(&shape, first.get())?;
    let written = destinations.check(&shape, first.get())?;
    check_apart(&read, &written)?;
    let (from, to) = (sources.form, destinations.form);
    detached(py, move || {
        // SAFETY: the arguments keep the tensors until this call returns, each tensor is contiguous
        // and as long as the check said, and the caller promises that nobody writes them meanwhile.
        let slice = |bytes: &Bytes| unsafe {
            std::slice::from_raw_parts(std::ptr::with_exposed_provenance::<u8>(bytes.start), bytes.length)
        };
        // SAFETY: as above; no tensor that is written shares bytes with another one.
        let slice_mut = |bytes: &Bytes| unsafe {
            std::slice::from_raw_parts_mut(
                std::ptr::with_exposed_provenance_mut::<u8>(bytes.start),
                bytes.length,
            )
        };
        let read: Vec<&[u8]> = read.iter().map(slice).collect();
        let mut written: Vec<&mut [u8]> = written.iter().map(slice_mut).collect();
        Ok(convert(&shape, from, &read, to, &mut written)?)
    })
}

fn side(argument: Argument, form: &str, tensors: &[Bound<'_, PyAny>]) -> PyResult<Side> {
    let form = match form {
        "nhd" => BlockForm::Stack(ChunkOrder::Nhd),
        "hnd" => BlockForm::Stack(ChunkOrder::Hnd),
        "operational_nhd" => BlockForm::Operational(ChunkOrder::Nhd),
        "operational_hnd" => BlockForm::Operational(ChunkOrder::Hnd),
        "universal" => BlockForm::Universal,
        _ => return Err(Error::argument(format!("order {form:?}: give 'nhd' or 'hnd'")).into()),
    };
    let view = |(at, tensor): (usize, &Bound<'_, PyAny>)| {
        TensorView::from_any(tensor, &format!("{argument}, tensor {at}"))
    };
    let tensors = tensors.iter().enumerate().map(view).collect::<PyResult<_>>()?;
    Ok(Side { argument, form, tensors })
}

impl Side {
    /// Checks every tensor: place, type, shape, strides. Where they lie.
    fn check(&self, shape: &BlockShape, first: &TensorView) -> Result<Vec<Bytes>> {
        let argument = self.argument;
        let mut described = Vec::with_capacity(self.tensors.len());
        for (at, view) in self.tensors.iter().enumerate() {
            let view = view.get();
            let refuse = |text: String| Err(Error::argument(format!("{argument}, tensor {at}: {text}")));
            if view.place != Place::Host {
                return refuse(format!(
                    "{} of shape {:?} in memory of {}: these conversions run on the CPU; give tensors in host memory",
                    view.dtype, view.shape, view.place
                ));
            }
            if view.dtype != first.dtype {
                return refuse(format!(
                    "{}, expected {}: give all tensors of a conversion one type",
                    view.dtype, first.dtype
                ));
            }
            if view.is_read_only && matches!(argument, Argument::Destinations) {
                return refuse("read-only memory: give memory that can be written".to_owned());
            }
            described.push(Tensor {
                address: view.address as u64,
                device: 0,
                dtype: carrier(view)?,
                dims: view.shape.clone(),
                strides: view.strides.clone(),
            });
        }
        // The types were compared above: what is left is shape and strides.
        Operand::from_tensors(shape, argument, self.form, carrier(first)?, &described)?;
        let length = self.form.chunk_bytes(shape);
        Ok(self.tensors.iter().map(|view| Bytes { start: view.get().address, length }).collect())
    }
}

/// A type as wide as that of the tensor: conversions move elements as they are.
fn carrier(view: &TensorView) -> Result<DType> {
    match view.dtype.width() {
        1 => Ok(DType::U8),
        2 => Ok(DType::U16),
        4 => Ok(DType::U32),
        8 => Ok(DType::U64),
        _ => Err(Error::argument(format!("{}: elements of 1, 2, 4 or 8 bytes are supported", view.dtype))),
    }
}

/// Refuses tensors that are written and share bytes with another one.
fn check_apart(read: &[Bytes], written: &[Bytes]) -> Result<()> {
    let read = read.iter().enumerate().map(|(at, bytes)| (bytes, false, at));
    let written = written.iter().enumerate().map(|(at, bytes)| (bytes, true, at));
    let mut all: Vec<_> = read.chain(written).collect();
    all.sort_by_key(|(bytes, ..)| bytes.start);
    // The end of what begins before, of all tensors and of those that are written.
    let (mut any, mut any_written) = (0, 0);
    for (bytes, is_written, at) in all {
        let side = if is_written { Argument::Destinations } else { Argument::Sources };
        if bytes.start < any_written || (is_written && bytes.start < any) {
            let text = format!(
                "{side}, tensor {at}: it shares bytes with another tensor, one of which is written; give each destination memory of its own"
            );
            return Err(Error::argument(text));
        }
        let end = bytes.start.saturating_add(bytes.length);
        any = any.max(end);
        if is_written {
            any_written = any_written.max(end);
        }
    }
    Ok(())
}
