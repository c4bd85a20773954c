//! From TOML to settings, with the line and column of what is wrong.

use std::ops::Range;

use toml::de::{DeTable, DeValue};

use super::schema::{Key, Section};
use super::value::Raw;
use super::{Config, ConfigError, Origin, nearest::nearest};

/// Reads `text` into `config`. `name` is what messages call the text.
pub(super) fn apply(config: &mut Config, text: &str, name: &str) -> Result<(), ConfigError> {
    let at = |span: Range<usize>| {
        let before = &text[..floor_boundary(text, span.start)];
        let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
        Origin::Text {
            name: name.to_owned(),
            line: before.matches('\n').count() + 1,
            column: before[line_start..].chars().count() + 1,
        }
    };
    let table = DeTable::parse(text).map_err(|error| ConfigError::Syntax {
        at: at(error.span().unwrap_or(0..0)),
        message: error.message().to_owned(),
    })?;
    walk(config, table.get_ref(), "", &at)
}

fn floor_boundary(text: &str, mut index: usize) -> usize {
    index = index.min(text.len());
    while !text.is_char_boundary(index) {
        index -= 1;
    }
    index
}

fn walk(
    config: &mut Config,
    table: &DeTable<'_>,
    prefix: &str,
    at: &impl Fn(Range<usize>) -> Origin,
) -> Result<(), ConfigError> {
    for (name, value) in table {
        let path = if prefix.is_empty() {
            name.get_ref().to_string()
        } else {
            format!("{prefix}.{}", name.get_ref())
        };
        if is_section(&path) {
            let DeValue::Table(inner) = value.get_ref() else {
                return Err(ConfigError::Value {
                    at: at(value.span()),
                    key: path.clone(),
                    value: raw(value.get_ref()).show(),
                    expected: format!("a table: [{path}]"),
                });
            };
            walk(config, inner, &path, at)?;
            continue;
        }
        let Some(key) = Config::key(&path) else {
            return Err(unknown_key(at(name.span()), &path));
        };
        write(config, key, raw(value.get_ref()), || at(value.span()))?;
    }
    Ok(())
}

/// Whether `path` is a section or leads to one (`offload`).
fn is_section(path: &str) -> bool {
    Config::schema().iter().any(|section| {
        section.path().strip_prefix(path).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    })
}

/// The error for a key that is none, naming the nearest key or section.
pub(super) fn unknown_key(at: Origin, key: &str) -> ConfigError {
    let keys = Config::schema().iter().flat_map(Section::keys).map(Key::path);
    let sections = Config::schema().iter().map(Section::path);
    let nearest = nearest(key, keys.chain(sections)).unwrap_or_default().to_owned();
    ConfigError::UnknownKey { at, key: key.chars().take(128).collect(), nearest }
}

/// Gives `key` the value `raw`.
pub(super) fn write(
    config: &mut Config,
    key: &Key,
    raw: Raw<'_>,
    at: impl FnOnce() -> Origin,
) -> Result<(), ConfigError> {
    if (key.write)(config, raw) {
        return Ok(());
    }
    Err(ConfigError::Value {
        at: at(),
        key: key.path().to_owned(),
        value: if key.secret { "(not shown)".to_owned() } else { raw.show() },
        expected: key.expected(),
    })
}

fn raw<'a>(value: &'a DeValue<'_>) -> Raw<'a> {
    match value {
        DeValue::String(text) => Raw::Text(text),
        DeValue::Boolean(value) => Raw::Bool(*value),
        DeValue::Integer(number) => i64::from_str_radix(number.as_str(), number.radix())
            .map_or(Raw::Other("an integer beyond 64 bits"), Raw::Integer),
        DeValue::Float(number) => number.as_str().parse().map_or(Raw::Other("a float"), Raw::Float),
        DeValue::Datetime(_) => Raw::Other("a date or time"),
        DeValue::Array(_) => Raw::Other("an array"),
        DeValue::Table(_) => Raw::Other("a table"),
    }
}
