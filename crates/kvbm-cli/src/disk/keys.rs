//! What a key file says, for people and as JSON.

use std::fmt::Write as _;

use kvbm_disk::offline::KeyFileInfo;
use kvbm_disk::{DataKeyInfo, DataKeyState};
use serde_json::{Value, json};

const fn name(state: DataKeyState) -> &'static str {
    match state {
        DataKeyState::Current => "current",
        DataKeyState::Old => "old",
        DataKeyState::Destroyed => "destroyed",
        _ => "unknown",
    }
}

pub(super) fn describe(found: Option<&KeyFileInfo>) -> String {
    let Some(found) = found else { return "  not encrypted\n".to_owned() };
    let operator = found.operator.map_or("no key file".to_owned(), |id| format!("operator's key {id}"));
    let mut text = format!("  encrypted, {operator}, {} damaged entries\n", found.damaged);
    for key in &found.keys {
        let DataKeyInfo { number, id, namespace, state, created, destroyed, blocks } = key;
        let end = match state {
            DataKeyState::Destroyed => format!(", destroyed at {destroyed} with {blocks} blocks"),
            _ => String::new(),
        };
        let _ = writeln!(
            text,
            "    data key {number} {id} of namespace {:08x}: {}, made at {created}{end}",
            namespace.0,
            name(*state)
        );
    }
    text
}

pub(super) fn facts(found: Option<&KeyFileInfo>) -> Value {
    let Some(found) = found else { return Value::Null };
    let key = |key: &DataKeyInfo| {
        json!({
            "number": key.number, "id": key.id.to_string(), "namespace": format!("{:08x}", key.namespace.0),
            "state": name(key.state), "created": key.created, "destroyed": key.destroyed, "blocks": key.blocks,
        })
    };
    json!({
        "operator_key": found.operator.map(|id| id.to_string()), "damaged_entries": found.damaged,
        "keys": found.keys.iter().map(key).collect::<Vec<_>>(),
    })
}
