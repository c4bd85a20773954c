//! Reports of long runs as JSON.

use anyhow::Context;
use serde_json::Value;
use std::path::Path;

/// Writes a report to `file`; to standard output where there is none, or for `-`.
pub(crate) fn deliver(file: Option<&Path>, report: &Value) -> anyhow::Result<()> {
    let text = serde_json::to_string_pretty(report)?;
    match file {
        Some(file) if file != Path::new("-") => {
            std::fs::write(file, text + "\n").with_context(|| format!("cannot write {}", file.display()))
        }
        _ => {
            println!("{text}");
            Ok(())
        }
    }
}
