//! What can be wrong with a configuration.

use std::fmt;
use std::path::PathBuf;

/// Where a setting was written.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Origin {
    /// A file or other text, at a line and column counted from 1.
    Text {
        /// Name of the file, as it was given.
        name: String,
        /// Line, from 1.
        line: usize,
        /// Column in characters, from 1.
        column: usize,
    },
    /// An environment variable.
    Variable(String),
    /// A call of [`Config::set`](super::Config::set).
    Call,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Text { name, line, column } => write!(f, "{name}:{line}:{column}"),
            Self::Variable(name) => write!(f, "environment variable {name}"),
            Self::Call => f.write_str("setting"),
        }
    }
}

/// A configuration that cannot be used: what, where, its value, and what would be right.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration file {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The text is not TOML.
    #[error("{at}: not valid TOML: {message}")]
    Syntax {
        /// Where it stops being TOML.
        at: Origin,
        /// What the parser expected.
        message: String,
    },
    /// There is no such key.
    #[error("{at}: unknown key '{key}'; the nearest known one is '{nearest}' (all keys: docs/config.md)")]
    UnknownKey {
        /// Where.
        at: Origin,
        /// The key as written, with its section.
        key: String,
        /// The known key that looks most like it.
        nearest: String,
    },
    /// There is no such `KVBM_*` variable.
    #[error(
        "environment variable {name} is not known; the nearest known one is {nearest} \
         (all variables: docs/config.md)"
    )]
    UnknownVariable {
        /// The variable.
        name: String,
        /// The known variable that looks most like it.
        nearest: String,
    },
    /// A server over HTTP that would serve strangers, or lacks a setting.
    #[error("{section}.{source}")]
    Http {
        /// Its section.
        section: &'static str,
        /// What is wrong.
        source: crate::http::HttpError,
    },
    /// A value that its key cannot take.
    #[error("{at}: {key} = {value}: expected {expected}")]
    Value {
        /// Where.
        at: Origin,
        /// The key with its section.
        key: String,
        /// The value as written; secrets are not shown.
        value: String,
        /// What the key takes.
        expected: String,
    },
    /// A key that has no default is not set.
    #[error("{key} is not set: {doc} Set it in the file or by {variable}")]
    Missing {
        /// The key with its section.
        key: &'static str,
        /// What the key is.
        doc: &'static str,
        /// Its environment variable.
        variable: String,
    },
    /// A value that contradicts a rule or another key.
    #[error("{key} = {value}: {rule}")]
    Rule {
        /// The key with its section.
        key: &'static str,
        /// Its value.
        value: String,
        /// The rule, and what to do.
        rule: String,
    },
}
