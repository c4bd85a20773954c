//! Tensors of other frameworks through DLPack, the exchange format of array libraries.
//!
//! A producer hands a capsule with a pointer to its description of a tensor. Whoever takes the
//! tensor renames the capsule and calls the producer's deleter once, when it needs the memory no
//! more. Everything in the description is checked before it is used.

use crate::errors::{Error, Result};
use crate::view::{Dtype, Place, TensorView, c_order};
use pyo3::exceptions::PyTypeError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict};
use std::ffi::{CStr, c_void};

/// The newest version that this module reads; a producer may hand an older form.
const VERSION: (u32, u32) = (1, 1);

/// Most axes of a tensor.
const MOST_AXES: usize = 64;

const READ_ONLY: u64 = 1;

const HOST: i32 = 1;
const CUDA: i32 = 2;
/// Host memory that CUDA has page-locked.
const CUDA_HOST: i32 = 3;
const CUDA_MANAGED: i32 = 13;

/// `DLTensor`.
#[repr(C)]
struct Description {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

/// `DLManagedTensor`.
#[repr(C)]
struct Managed {
    tensor: Description,
    manager: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
}

/// `DLManagedTensorVersioned`.
#[repr(C)]
struct Versioned {
    major: u32,
    minor: u32,
    manager: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
    flags: u64,
    tensor: Description,
}

/// A form of capsule: its name, and its name when somebody has taken the tensor.
struct Form {
    name: &'static CStr,
    used: &'static CStr,
}

const PLAIN: Form = Form { name: c"dltensor", used: c"used_dltensor" };
const VERSIONED: Form = Form { name: c"dltensor_versioned", used: c"used_dltensor_versioned" };

/// A tensor that a producer lent. Gives it back when it is dropped.
#[pyclass(module = "kvbm_rs", frozen)]
struct Lent(Pointer);

#[derive(Clone, Copy)]
enum Pointer {
    Plain(*mut Managed),
    Versioned(*mut Versioned),
}

// SAFETY: the pointer is used in `lend`, under the GIL, and in `drop`, which calls the producer's
// deleter under the GIL: DLPack asks for no more of a consumer in another thread.
unsafe impl Send for Lent {}
// SAFETY: nothing is read through a shared reference.
unsafe impl Sync for Lent {}

impl Drop for Lent {
    fn drop(&mut self) {
        let pointer = self.0;
        // Where the interpreter has ended, the memory goes with the process.
        let _given_back = Python::try_attach(|_py| match pointer {
            Pointer::Plain(managed) => {
                // SAFETY: the capsule was ours alone since it was renamed, and this is the only
                // call of the deleter.
                if let Some(delete) = unsafe { (*managed).deleter } {
                    // SAFETY: as above; the deleter takes the pointer that it came with.
                    unsafe { delete(managed) };
                }
            }
            Pointer::Versioned(managed) => {
                // SAFETY: as above.
                if let Some(delete) = unsafe { (*managed).deleter } {
                    // SAFETY: as above.
                    unsafe { delete(managed) };
                }
            }
        });
    }
}

/// A view of a tensor of another framework.
///
/// # Errors
/// The producer's own, or what of its description cannot be used.
pub(crate) fn view_of(object: &Bound<'_, PyAny>) -> PyResult<TensorView> {
    let py = object.py();
    let Ok(lend) = object.getattr("__dlpack__") else {
        let name = object.get_type().name()?;
        let text = format!(
            "{name} has no __dlpack__: give a tensor of torch, numpy or the like, or a Tensor with an address"
        );
        return Err(Error::argument(text).into());
    };
    let place = place_of(object)?;
    let arguments = PyDict::new(py);
    arguments.set_item("max_version", VERSION)?;
    if let Place::Cuda(_) = place {
        // Whoever uses the view orders the work: a fence stands behind what the engine submitted.
        arguments.set_item("stream", -1)?;
    }
    let capsule = match lend.call((), Some(&arguments)) {
        // A producer of before DLPack 1.0 knows no version.
        Err(error) if error.is_instance_of::<PyTypeError>(py) => {
            arguments.del_item("max_version")?;
            lend.call((), Some(&arguments))
        }
        answer => answer,
    };
    let capsule = capsule.map_err(|error| {
        let why = error.value(py).to_string();
        Error::argument(format!("its __dlpack__ refuses: {why}; give a detached, dense tensor"))
    })?;
    let view = take(&capsule)?;
    if view.place != place {
        let text = format!("its __dlpack_device__ says {place}, its capsule {}", view.place);
        return Err(Error::argument(text).into());
    }
    Ok(view)
}

fn place_of(object: &Bound<'_, PyAny>) -> PyResult<Place> {
    let (device_type, device_id): (i32, i32) = object.call_method0("__dlpack_device__")?.extract()?;
    Ok(place(device_type, device_id)?)
}

fn place(device_type: i32, device_id: i32) -> Result<Place> {
    match (device_type, u32::try_from(device_id)) {
        (HOST | CUDA_HOST, _) => Ok(Place::Host),
        (CUDA | CUDA_MANAGED, Ok(ordinal)) => Ok(Place::Cuda(ordinal)),
        _ => Err(Error::argument(format!(
            "memory of DLPack device type {device_type}, number {device_id}: give host memory or that of a CUDA device"
        ))),
    }
}

/// Takes the tensor out of a capsule.
fn take(capsule: &Bound<'_, PyAny>) -> PyResult<TensorView> {
    let py = capsule.py();
    let refused =
        || Error::argument("its __dlpack__ returned no capsule with a tensor, or one that was taken");
    let capsule = capsule.cast::<PyCapsule>().map_err(|_| refused())?;
    let object = capsule.as_ptr();
    let form = [VERSIONED, PLAIN].into_iter().find(|form| {
        // SAFETY: the object is a capsule, under the GIL; the name is a constant.
        unsafe { ffi::PyCapsule_IsValid(object, form.name.as_ptr()) != 0 }
    });
    let form = form.ok_or_else(refused)?;
    // SAFETY: as above.
    let pointer = unsafe { ffi::PyCapsule_GetPointer(object, form.name.as_ptr()) };
    let is_versioned = form.name == VERSIONED.name;
    if is_versioned {
        // SAFETY: the name of the capsule says what it points to, and its first fields are the
        // version, whatever follows in another version.
        let [major, minor] = unsafe { pointer.cast::<[u32; 2]>().read() };
        if major != VERSION.0 {
            let text = format!("DLPack {major}.{minor}: versions 0 and 1 are known");
            return Err(Error::argument(text).into());
        }
    }
    // SAFETY: as above: the capsule is alive, and the name is a constant.
    if unsafe { ffi::PyCapsule_SetName(object, form.used.as_ptr()) } != 0 {
        return Err(PyErr::fetch(py));
    }
    // From here on the tensor is given back, whatever becomes of this.
    let lent = if is_versioned { Pointer::Versioned(pointer.cast()) } else { Pointer::Plain(pointer.cast()) };
    let owner = Py::new(py, Lent(lent))?;
    let (description, flags) = match lent {
        // SAFETY: the name of the capsule said what it points to, and `owner` has not given it
        // back.
        Pointer::Plain(managed) => (unsafe { &raw const (*managed).tensor }, 0),
        Pointer::Versioned(managed) => {
            // SAFETY: as above.
            let flags = unsafe { (*managed).flags };
            // SAFETY: as above.
            (unsafe { &raw const (*managed).tensor }, flags)
        }
    };
    // SAFETY: as above; nobody changes the description while it is lent.
    let description = unsafe { &*description };
    // SAFETY: a producer's description has as many sizes and strides as axes.
    let view = unsafe { read(description, flags & READ_ONLY != 0, owner.into_any()) };
    Ok(view?)
}

/// # Safety
/// `shape` and `strides` of the description point to as many numbers as it has axes, or are null.
unsafe fn read(from: &Description, is_read_only: bool, owner: Py<PyAny>) -> Result<TensorView> {
    let axes = usize::try_from(from.ndim).ok().filter(|axes| *axes <= MOST_AXES);
    let axes =
        axes.ok_or_else(|| Error::argument(format!("{} axes: 0 to {MOST_AXES} are known", from.ndim)))?;
    if from.lanes != 1 {
        return Err(Error::argument(format!("elements of {} lanes: give elements of one", from.lanes)));
    }
    if axes > 0 && from.shape.is_null() {
        return Err(Error::argument(format!("{axes} axes and no shape")));
    }
    let numbers = |numbers: *mut i64, what: &str| {
        let positive = |at: usize| {
            // SAFETY: there are as many numbers as axes.
            let place = unsafe { numbers.add(at) };
            // SAFETY: as above.
            let number = unsafe { place.read() };
            u64::try_from(number).map_err(|_| {
                Error::argument(format!("{what} {number} of axis {at}: negative ones are not supported"))
            })
        };
        (0..axes).map(positive).collect::<Result<Vec<u64>>>()
    };
    let shape = numbers(from.shape, "size")?;
    let strides = if from.strides.is_null() { c_order(&shape) } else { numbers(from.strides, "stride")? };
    let start = (from.data.expose_provenance() as u64).checked_add(from.byte_offset);
    let address = start.and_then(|start| usize::try_from(start).ok());
    let address = address.ok_or_else(|| {
        Error::argument(format!("a byte offset of {}: it ends outside the address space", from.byte_offset))
    })?;
    let (place, dtype) =
        (place(from.device_type, from.device_id)?, Dtype { code: from.code, bits: from.bits });
    Ok(TensorView { address, place, dtype, shape, strides, is_read_only, owner })
}
