//! Tokens, block ids and times out of lists, tuples, arrays, buffers and numbers.

use crate::errors::{Error, Kind, Result};
use kvbm::BlockId;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyTuple};
use std::time::Duration;

/// Non-negative integers below 2^32. `what` names them in errors.
///
/// Lists and tuples are read one by one. Everything else needs the buffer protocol and one
/// dimension: numpy arrays, `array.array`, `memoryview`, CPU tensors by `.numpy()`. Their bytes are
/// copied once. (The stable ABI of Python 3.10 has no buffer functions, so a `memoryview` object
/// makes the copy.)
pub(crate) fn u32s(object: &Bound<'_, PyAny>, what: &str) -> PyResult<Vec<u32>> {
    if let Ok(list) = object.cast::<PyList>() {
        return list.iter().map(|item| one(&item, what)).collect();
    }
    if let Ok(tuple) = object.cast::<PyTuple>() {
        return tuple.iter().map(|item| one(&item, what)).collect();
    }
    let py = object.py();
    let Ok(view) = py.import("builtins")?.getattr("memoryview")?.call1((object,)) else {
        return object.try_iter()?.map(|item| one(&item?, what)).collect();
    };
    let dimensions: usize = view.getattr("ndim")?.extract()?;
    if dimensions != 1 {
        let text = format!("{what}: a buffer of {dimensions} dimensions; give one dimension");
        return Err(Error::argument(text).into());
    }
    let format: String = view.getattr("format")?.extract()?;
    let bytes = view.call_method0("tobytes")?;
    Ok(decode(bytes.cast::<PyBytes>()?.as_bytes(), &format, what)?)
}

fn one(item: &Bound<'_, PyAny>, what: &str) -> PyResult<u32> {
    item.extract().map_err(|_| {
        let shown = item.repr().map_or_else(|_| "?".to_owned(), |repr| repr.to_string());
        Error::argument(format!("{what}: {shown} is not an integer from 0 to 4294967295")).into()
    })
}

/// The integers of a buffer in native byte order.
fn decode(bytes: &[u8], format: &str, what: &str) -> Result<Vec<u32>> {
    let code = format.trim_start_matches(['@', '=', if cfg!(target_endian = "little") { '<' } else { '>' }]);
    macro_rules! each {
        ($type:ty) => {
            bytes
                .chunks_exact(size_of::<$type>())
                .map(|chunk| {
                    let value = <$type>::from_ne_bytes(chunk.try_into().unwrap_or_default());
                    u32::try_from(value).map_err(|_| {
                        Error::argument(format!("{what}: {value} is not an integer from 0 to 4294967295"))
                    })
                })
                .collect()
        };
    }
    match code {
        "b" => each!(i8),
        "B" => each!(u8),
        "h" => each!(i16),
        "H" => each!(u16),
        "i" => each!(i32),
        "I" => each!(u32),
        "l" | "q" if size_of::<std::ffi::c_long>() == 8 || code == "q" => each!(i64),
        "L" | "Q" if size_of::<std::ffi::c_long>() == 8 || code == "Q" => each!(u64),
        "l" => each!(i32),
        "L" => each!(u32),
        _ => Err(Error::new(
            Kind::Argument,
            format!("{what}: a buffer of elements {format:?}; give integers, such as numpy's int32 or int64"),
        )),
    }
}

/// Block ids out of a list or a buffer.
pub(crate) fn block_ids(ids: &Bound<'_, PyAny>) -> PyResult<Vec<BlockId>> {
    Ok(u32s(ids, "block ids")?.into_iter().map(BlockId).collect())
}

/// The same of each cache group.
pub(crate) fn block_ids_of_groups(ids: &[Bound<'_, PyAny>]) -> PyResult<Vec<Vec<BlockId>>> {
    ids.iter().map(block_ids).collect()
}

/// A time to wait, of seconds: a day at most, so that a deadline can be computed.
pub(crate) fn seconds(timeout: f64) -> Result<Duration> {
    const LONGEST: Duration = Duration::from_secs(24 * 3600);
    let timeout = Duration::try_from_secs_f64(timeout);
    timeout
        .map(|timeout| timeout.min(LONGEST))
        .map_err(|error| Error::argument(format!("timeout: {error}; give seconds, 0 or more")))
}

/// A time that something is kept for, out of seconds.
pub(crate) fn duration(seconds: f64) -> Result<Duration> {
    Duration::try_from_secs_f64(seconds)
        .map_err(|error| Error::argument(format!("seconds = {seconds}: {error}; give 0 or more")))
}
