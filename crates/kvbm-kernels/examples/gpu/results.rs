//! Files of results: `{"rows": [{"name": ...}, ...]}`.

use std::path::Path;

use serde_json::{Value, json};

use crate::Failure;

pub(crate) fn read(file: &Path) -> Result<Vec<Value>, Failure> {
    let text = std::fs::read_to_string(file).map_err(|error| format!("{}: {error}", file.display()))?;
    let mut value: Value =
        serde_json::from_str(&text).map_err(|error| format!("{}: {error}", file.display()))?;
    match value["rows"].take() {
        Value::Array(rows) => Ok(rows),
        _ => Err(format!("{}: it has no rows", file.display()).into()),
    }
}

pub(crate) fn write(file: &Path, rows: &[Value]) -> Result<(), Failure> {
    let text = serde_json::to_string_pretty(&json!({ "rows": rows }))? + "\n";
    std::fs::write(file, text).map_err(|error| format!("{}: {error}", file.display()).into())
}

/// Adds a row that says how something went.
pub(crate) fn note(file: &Path, name: &str, ok: bool, text: &str) -> Result<(), Failure> {
    let mut rows = if file.exists() { read(file)? } else { Vec::new() };
    rows.push(json!({ "name": name, "passed": ok, "detail": text }));
    write(file, &rows)
}
