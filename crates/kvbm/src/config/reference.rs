//! The reference of all settings, and a configuration as TOML: both read off the schema.

use std::fmt::Write;

use super::Config;
use super::schema::{Key, PREFIX, Section};

impl Config {
    /// All settings as Markdown: the content of `docs/config.md`.
    pub fn reference() -> String {
        let defaults = Self::default();
        let mut out = format!(
            "# Configuration\n\n\
             Generated from the schema in `crates/kvbm/src/config/sections.rs`; a test compares the two.\n\n\
             The `{PREFIX}*` variable overrides the TOML file, and the file overrides the default. An unknown key or\n\
             variable is an error that names the nearest known one.\n"
        );
        for section in Self::schema() {
            let _ = write!(out, "\n## {}\n\n{}\n\n", heading(section), section.doc().trim());
            out.push_str("| key | default | values | unit | meaning |\n|---|---|---|---|---|\n");
            for key in section.keys() {
                row(&mut out, key, &defaults);
            }
        }
        out
    }

    /// This configuration as TOML, without secrets and unset settings. What it says parses back to
    /// the same values.
    pub fn to_toml(&self) -> String {
        let mut out = String::new();
        for section in Self::schema() {
            for config in section.each(self) {
                let lead = if out.is_empty() { "" } else { "\n" };
                let _ = writeln!(out, "{lead}{}", heading(section));
                for key in section.keys() {
                    if let Some(value) = key.value(&config) {
                        let _ = writeln!(out, "{} = {value}", name(key));
                    }
                }
            }
        }
        out
    }
}

/// The section as TOML begins it.
fn heading(section: &Section) -> String {
    let path = section.path();
    if section.is_list() { format!("[[{path}]]") } else { format!("[{path}]") }
}

fn name(key: &Key) -> &'static str {
    key.path().rsplit('.').next().unwrap_or_default()
}

fn row(out: &mut String, key: &Key, defaults: &Config) {
    let default = match key.value(defaults) {
        _ if key.is_required() => "**required**".to_owned(),
        Some(value) => format!("`{value}`"),
        None => "not set".to_owned(),
    };
    let _ = writeln!(
        out,
        "| `{}`<br>`{}` | {default} | {} | {} | {} |",
        name(key),
        key.variable(),
        key.expected(),
        key.unit(),
        key.doc().trim(),
    );
}
