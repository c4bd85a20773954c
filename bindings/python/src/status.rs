//! How a manager stands, as Python sees it.

use kvbm::{ShutdownReport, Status};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Tiers and their blocks, the volumes' ids, and whether the disk is down.
pub(crate) fn status_of<'py>(py: Python<'py>, status: &Status) -> PyResult<Bound<'py, PyDict>> {
    let tiers = PyDict::new(py);
    for tier in &status.tiers {
        let of_tier = PyDict::new(py);
        of_tier.set_item("capacity", tier.capacity)?;
        of_tier.set_item("free", tier.free)?;
        of_tier.set_item("arriving", tier.arriving)?;
        of_tier.set_item("active", tier.active)?;
        of_tier.set_item("inactive", tier.inactive)?;
        of_tier.set_item("quarantined", tier.quarantined)?;
        of_tier.set_item("transfer_pins", tier.transfer_pins)?;
        tiers.set_item(tier.tier.as_str(), of_tier)?;
    }
    let out = PyDict::new(py);
    out.set_item("tiers", tiers)?;
    let volumes: Vec<_> = status.volumes.iter().map(|volume| volume.descriptor.id.0).collect();
    out.set_item("volumes", volumes)?;
    out.set_item("disk_down", status.disk_down)?;
    out.set_item("disk_failure", status.disk_failure.as_ref().map(ToString::to_string))?;
    out.set_item("shut_down", status.shut_down)?;
    Ok(out)
}

/// What a manager that was shut down could not save, in words; `None` where there is nothing.
pub(crate) fn lost(report: &ShutdownReport) -> Option<String> {
    let mut parts = Vec::new();
    if report.not_saved > 0 {
        parts.push(format!("{} blocks were not saved", report.not_saved));
    }
    if !report.drained {
        parts.push("copies to lower tiers did not end in time".to_owned());
    }
    if let Some(error) = &report.flush_error {
        parts.push(format!("the disk may lack the blocks that were written last: {error}"));
    }
    (!parts.is_empty()).then(|| parts.join("; "))
}
