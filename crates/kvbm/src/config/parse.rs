//! From TOML to settings, with the line and column of what is wrong.

use std::ops::Range;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::schema::{Key, List, Section};
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
        if let Some(list) = list_of(&path) {
            for entry in entries(value, &path, at)? {
                let mut alone = Config::default();
                walk(&mut alone, entry, &path, at)?;
                // Also where it says nothing: that it has no URI is for `validate` to say.
                (list.append)(config, alone);
            }
            continue;
        }
        if is_section(&path) {
            let DeValue::Table(inner) = value.get_ref() else {
                return Err(no_table(value, &path, format!("a table: [{path}]"), at));
            };
            walk(config, inner, &path, at)?;
            continue;
        }
        let Some(key) = Config::key(&path) else {
            return Err(unknown_key(at(name.span()), &path));
        };
        write(config, key, Raw::of(value.get_ref()), || at(value.span()))?;
    }
    Ok(())
}

/// How the section is taken apart, where there may be several of it.
fn list_of(path: &str) -> Option<List> {
    Config::schema().iter().find(|section| section.path() == path)?.list
}

/// The tables of a section that there may be several of.
fn entries<'t, 'i>(
    value: &'t Spanned<DeValue<'i>>,
    path: &str,
    at: &impl Fn(Range<usize>) -> Origin,
) -> Result<Vec<&'t DeTable<'i>>, ConfigError> {
    let wrong = |value| no_table(value, path, format!("a table [{path}], or several [[{path}]]"), at);
    match value.get_ref() {
        DeValue::Table(one) => Ok(vec![one]),
        DeValue::Array(several) => several
            .iter()
            .map(|entry| match entry.get_ref() {
                DeValue::Table(one) => Ok(one),
                _ => Err(wrong(entry)),
            })
            .collect(),
        _ => Err(wrong(value)),
    }
}

fn no_table(
    value: &Spanned<DeValue<'_>>,
    path: &str,
    expected: String,
    at: &impl Fn(Range<usize>) -> Origin,
) -> ConfigError {
    // What stands where a section belongs may hold the section's secrets.
    let value_shown = match Raw::of(value.get_ref()) {
        Raw::Text(_) | Raw::Bare(_) => "(a string)".to_owned(),
        Raw::Array(_) => "(an array)".to_owned(),
        Raw::Table(_) => "(a table)".to_owned(),
        plain => plain.show(),
    };
    ConfigError::Value { at: at(value.span()), key: path.to_owned(), value: value_shown, expected }
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
