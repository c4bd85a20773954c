//! The extension module `kvbm_rs._core`.
//!
//! **Knows:** the facade, and Python's objects. **Must never know:** any engine. What an engine
//! calls stands in the Python package beside this crate.
//!
//! Rules that every module follows:
//! - What waits, copies, joins or frees runs without the GIL (`guard::detached`).
//! - No thread of kvbm takes the GIL. Logs wait in a bounded ring (`logs`) until Python drains
//!   it.
//! - No panic reaches Python: `guard` turns it into `kvbm_rs.InternalError`.
//! - An object is used only in the process that made it (`guard::Process`).
//!
//! # Modules
//! A module uses only modules in rows below its own, and only those in its third column.
//!
//! | module | what it is | uses |
//! |---|---|---|
//! | `node_server` | `NodeServer`: the daemon that keeps a cache for engines | `config`, `status`, `closable`, `integers`, `guard`, `errors` |
//! | `node_mover` | `NodeMover`: copies for a rank of such an engine | `node_engine`, `layout`, `cuda`, `closable`, `integers`, `guard`, `errors` |
//! | `node_engine` | `NodeEngine`: the scheduler of such an engine | `fence`, `loads`, `sequence`, `layout`, `cuda`, `closable`, `integers`, `guard`, `errors` |
//! | `worker` | `Worker`: a rank for another process | `loads`, `layout`, `cuda`, `config`, `closable`, `integers`, `guard`, `errors` |
//! | `manager` | `KvBlockManager` | `status`, `options`, `fence`, `loads`, `parked`, `events`, `sequence`, `layout`, `cuda`, `config`, `logs`, `closable`, `integers`, `guard`, `errors` |
//! | `kernels` | conversions between the forms of a block | `tensor`, `view`, `guard`, `errors` |
//! | `status` | how a manager stands | - |
//! | `options` | what options of calls mean | `fence`, `integers`, `errors` |
//! | `fence` | `Fence`: a point of the engine's work | `errors` |
//! | `loads` | look-ups, loads and offloads as Python sees them | `errors` |
//! | `parked` | `Parked`: blocks of a preempted request | `guard`, `errors` |
//! | `events` | `Events` and `KvIndex` | `sequence`, `guard`, `errors` |
//! | `sequence` | `Namespace`, `TokenSequence`, `ExternalSequence` | `config`, `integers`, `errors` |
//! | `layout` | `Layout`: the engine's blocks | `tensor`, `view`, `cuda`, `errors` |
//! | `tensor` | `Tensor` as Python makes and reads it | `dlpack`, `view`, `errors` |
//! | `dlpack` | tensors of other frameworks | `view`, `errors` |
//! | `view` | a view of memory that somebody else owns | `errors` |
//! | `cuda` | the engine's device and its events | `errors` |
//! | `config` | `Config` | `errors` |
//! | `logs` | the ring of log records | - |
//! | `closable` | what an object of Python holds until it is closed | `guard`, `errors` |
//! | `integers` | tokens, ids and times out of Python's numbers | `errors` |
//! | `guard` | calls without the GIL, without panics, in the right process | `errors` |
//! | `errors` | from errors of kvbm to exceptions | - |

mod closable;
mod config;
mod cuda;
mod dlpack;
mod errors;
mod events;
mod fence;
mod guard;
mod integers;
mod kernels;
mod layout;
mod loads;
mod logs;
mod manager;
mod node_engine;
mod node_mover;
mod node_server;
mod options;
mod parked;
mod sequence;
mod status;
mod tensor;
mod view;
mod worker;

use pyo3::prelude::*;

/// The module: types, and no thread.
#[pymodule]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    logs::install();
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<config::Config>()?;
    module.add_class::<sequence::Namespace>()?;
    module.add_class::<sequence::TokenSequence>()?;
    module.add_class::<sequence::ExternalSequence>()?;
    module.add_class::<view::TensorView>()?;
    module.add_class::<layout::Layout>()?;
    module.add_class::<loads::Ticket>()?;
    module.add_class::<loads::FinishedLoad>()?;
    module.add_class::<loads::FinishedPlan>()?;
    module.add_class::<loads::OffloadStarted>()?;
    module.add_class::<parked::Parked>()?;
    module.add_class::<manager::KvBlockManager>()?;
    module.add_class::<fence::Fence>()?;
    module.add_class::<node_engine::NodeEngine>()?;
    module.add_class::<node_mover::NodeMover>()?;
    module.add_class::<node_server::NodeServer>()?;
    module.add_class::<worker::Worker>()?;
    module.add_class::<events::Events>()?;
    module.add_class::<events::Event>()?;
    module.add_class::<events::Gap>()?;
    module.add_class::<events::KvIndex>()?;
    module.add_function(wrap_pyfunction!(kernels::convert_blocks, module)?)?;
    module.add_function(wrap_pyfunction!(logs::drain_logs, module)?)?;
    module.add_function(wrap_pyfunction!(logs::wait_logs, module)?)?;
    module.add_function(wrap_pyfunction!(logs::set_log_level, module)?)?;
    module.add_function(wrap_pyfunction!(guard::_panic_for_tests, module)?)?;
    Ok(())
}
