//! How each type of setting is read and shown.

use std::borrow::Cow;
use std::fmt::{Display, Write};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use kvbm_layout::DType;
use toml::Spanned;
use toml::de::{DeArray, DeTable, DeValue};

use super::units::{Bytes, Capacity};

/// A value as it was written, before its key gives it a type.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Raw<'a> {
    /// A TOML integer.
    Integer(i64),
    /// A TOML float.
    Float(f64),
    /// A TOML boolean.
    Bool(bool),
    /// A TOML string.
    Text(&'a str),
    /// Text without a type: an environment variable.
    Bare(&'a str),
    /// A TOML array.
    Array(&'a DeArray<'a>),
    /// A TOML table.
    Table(&'a DeTable<'a>),
    /// Anything else, by the name of its TOML type.
    Other(&'a str),
}

impl<'a> Raw<'a> {
    /// A value of a TOML file.
    pub(crate) fn of(value: &'a DeValue<'a>) -> Self {
        match value {
            DeValue::String(text) => Self::Text(text),
            DeValue::Boolean(value) => Self::Bool(*value),
            DeValue::Integer(number) => i64::from_str_radix(number.as_str(), number.radix())
                .map_or(Self::Other("an integer beyond 64 bits"), Self::Integer),
            DeValue::Float(number) => number.as_str().parse().map_or(Self::Other("a float"), Self::Float),
            DeValue::Datetime(_) => Self::Other("a date or time"),
            DeValue::Array(array) => Self::Array(array),
            DeValue::Table(table) => Self::Table(table),
        }
    }

    /// The value as a message shows it: strings in quotes, cut to 64 characters.
    pub(crate) fn show(&self) -> String {
        match self {
            Self::Integer(value) => value.to_string(),
            Self::Float(value) => value.to_string(),
            Self::Bool(value) => value.to_string(),
            Self::Text(text) | Self::Bare(text) => quoted(&cut(text)),
            Self::Array(array) => {
                let values = array.iter().map(|value| Raw::of(value.get_ref()).show());
                cut(&format!("[{}]", values.collect::<Vec<_>>().join(", ")))
            }
            Self::Table(table) => {
                let pair = |(name, value): (&Spanned<Cow<'_, str>>, &Spanned<DeValue<'_>>)| {
                    format!("{} = {}", name.get_ref(), Raw::of(value.get_ref()).show())
                };
                cut(&format!("{{ {} }}", table.iter().map(pair).collect::<Vec<_>>().join(", ")))
            }
            Self::Other(kind) => format!("({kind})"),
        }
    }
}

/// The first 64 characters.
fn cut(text: &str) -> String {
    text.chars().take(64).collect()
}

/// A type that a setting can have.
pub(crate) trait Setting: Sized {
    /// Whether the value must not appear in messages.
    const SECRET: bool = false;

    /// What a value looks like, for messages and the reference: continues "expected ...".
    fn expected() -> String;

    /// The value, or nothing if it is not one of this type.
    fn read(raw: Raw<'_>) -> Option<Self>;

    /// The value in TOML; nothing if it is not set.
    fn show(&self) -> Option<String>;

    /// Whether this is the value of a required key that nobody set.
    fn is_unset(&self) -> bool {
        self.show().is_none()
    }

    /// The value of a whole number.
    fn number(&self) -> Option<u64> {
        None
    }
}

/// A TOML basic string.
pub(crate) fn quoted(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 2);
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\t' => out.push_str("\\t"),
            c if c.is_control() => {
                // Writing to a string cannot fail.
                let _ = write!(out, "\\u{:04X}", u32::from(c));
            }
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

fn from_text<T: std::str::FromStr>(raw: Raw<'_>) -> Option<T> {
    match raw {
        Raw::Text(text) | Raw::Bare(text) => text.trim().parse().ok(),
        _ => None,
    }
}

macro_rules! whole_number {
    ($($type:ty)*) => {$(
        impl Setting for $type {
            fn expected() -> String {
                format!("a whole number from 0 to {}", <$type>::MAX.min(i64::MAX as $type))
            }

            fn read(raw: Raw<'_>) -> Option<Self> {
                match raw {
                    Raw::Integer(value) => value.try_into().ok(),
                    Raw::Bare(text) => text.trim().replace('_', "").parse().ok(),
                    _ => None,
                }
            }

            fn show(&self) -> Option<String> {
                Some(self.to_string())
            }

            fn is_unset(&self) -> bool {
                *self == 0
            }

            fn number(&self) -> Option<u64> {
                Some((*self).into())
            }
        }
    )*};
}
whole_number!(u32 u64);

impl Setting for f64 {
    fn expected() -> String {
        "a number".into()
    }

    fn read(raw: Raw<'_>) -> Option<Self> {
        let value = match raw {
            Raw::Float(value) => value,
            Raw::Integer(value) => value as f64,
            Raw::Bare(text) => text.trim().parse().ok()?,
            _ => return None,
        };
        value.is_finite().then_some(value)
    }

    fn show(&self) -> Option<String> {
        Some(format!("{self:?}"))
    }
}

impl Setting for bool {
    fn expected() -> String {
        "true or false".into()
    }

    fn read(raw: Raw<'_>) -> Option<Self> {
        match raw {
            Raw::Bool(value) => Some(value),
            Raw::Bare(text) => text.trim().to_ascii_lowercase().parse().ok(),
            _ => None,
        }
    }

    fn show(&self) -> Option<String> {
        Some(self.to_string())
    }
}

impl Setting for String {
    fn expected() -> String {
        "text".into()
    }

    fn read(raw: Raw<'_>) -> Option<Self> {
        match raw {
            Raw::Text(text) | Raw::Bare(text) => Some(text.to_owned()),
            _ => None,
        }
    }

    fn show(&self) -> Option<String> {
        Some(quoted(self))
    }

    fn is_unset(&self) -> bool {
        self.is_empty()
    }
}

impl Setting for PathBuf {
    fn expected() -> String {
        "a path".into()
    }

    fn read(raw: Raw<'_>) -> Option<Self> {
        String::read(raw).filter(|path| !path.is_empty() && !path.contains('\0')).map(Self::from)
    }

    fn show(&self) -> Option<String> {
        Some(quoted(&self.to_string_lossy()))
    }
}

impl Setting for SocketAddr {
    fn expected() -> String {
        "an address such as \"127.0.0.1:9401\"".into()
    }

    fn read(raw: Raw<'_>) -> Option<Self> {
        from_text(raw)
    }

    fn show(&self) -> Option<String> {
        Some(quoted(&self.to_string()))
    }
}

/// A setting that may be absent; in TOML it is left out.
impl<T: Setting> Setting for Option<T> {
    const SECRET: bool = T::SECRET;

    fn expected() -> String {
        T::expected()
    }

    fn read(raw: Raw<'_>) -> Option<Self> {
        T::read(raw).map(Some)
    }

    fn show(&self) -> Option<String> {
        self.as_ref().and_then(T::show)
    }
}

/// Text, or bytes of a caller's, that are never shown: not by `Debug`, not in messages, not by
/// [`Config::to_toml`](super::Config::to_toml).
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Vec<u8>);

impl Secret {
    /// Keeps `secret`.
    pub fn new(secret: impl Into<Vec<u8>>) -> Self {
        Self(secret.into())
    }

    /// The content of a file that belongs to this user, or to root, and that no other user reads;
    /// blanks and line ends around it do not count.
    ///
    /// # Errors
    /// What is wrong with the file. An empty one is refused, and one of more than 4096 bytes.
    pub fn from_file(path: &std::path::Path) -> std::io::Result<Self> {
        const MOST_BYTES: u64 = 4096;
        let bytes = kvbm_link::private_file::read(path, MOST_BYTES + 1)?;
        let secret = bytes.trim_ascii();
        if secret.is_empty() || bytes.len() as u64 > MOST_BYTES {
            return Err(std::io::Error::other("a secret has 1 to 4096 bytes: use `openssl rand -hex 32`"));
        }
        Ok(Self(secret.to_vec()))
    }

    /// The bytes.
    pub fn expose(&self) -> &[u8] {
        &self.0
    }

    /// The text; what is none is replaced.
    pub fn text(&self) -> std::borrow::Cow<'_, str> {
        String::from_utf8_lossy(&self.0)
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret(..)")
    }
}

impl Setting for Secret {
    const SECRET: bool = true;

    fn expected() -> String {
        "text (never shown)".into()
    }

    fn read(raw: Raw<'_>) -> Option<Self> {
        String::read(raw).filter(|text| !text.is_empty()).map(Self::new)
    }

    fn show(&self) -> Option<String> {
        None
    }
}

impl Setting for Bytes {
    fn expected() -> String {
        "a size such as \"8MiB\"; 0 for none".into()
    }

    fn read(raw: Raw<'_>) -> Option<Self> {
        match raw {
            Raw::Integer(bytes) => u64::try_from(bytes).ok().map(Self),
            raw => from_text(raw),
        }
    }

    fn show(&self) -> Option<String> {
        Some(if self.0 == 0 { "0".into() } else { quoted(&self.to_string()) })
    }
}

impl Setting for Capacity {
    fn expected() -> String {
        "a number of blocks, or a size such as \"8GiB\"; 0 for none".into()
    }

    fn read(raw: Raw<'_>) -> Option<Self> {
        match raw {
            Raw::Integer(blocks) => u32::try_from(blocks).ok().map(|n| super::Blocks(n).into()),
            raw => from_text(raw),
        }
    }

    fn show(&self) -> Option<String> {
        Some(match self {
            Self::Blocks(blocks) => blocks.0.to_string(),
            Self::Bytes(bytes) => quoted(&bytes.to_string()),
        })
    }

    fn is_unset(&self) -> bool {
        self.is_none()
    }
}

impl Setting for DType {
    fn expected() -> String {
        let names: Vec<_> = Self::ALL.iter().map(|dtype| quoted(dtype.name())).collect();
        format!("one of {} (torch names too)", names.join(", "))
    }

    fn read(raw: Raw<'_>) -> Option<Self> {
        from_text(raw)
    }

    fn show(&self) -> Option<String> {
        Some(quoted(self.name()))
    }
}

const DURATIONS: [(&str, u64); 5] = [
    ("us", 1_000),
    ("ms", 1_000_000),
    ("s", 1_000_000_000),
    ("min", 60_000_000_000),
    ("h", 3_600_000_000_000),
];

/// A duration is a whole number with a unit; a number alone is refused, for it could be seconds or
/// milliseconds.
impl Setting for Duration {
    fn expected() -> String {
        "a duration such as \"250ms\" or \"30s\" (us, ms, s, min, h)".into()
    }

    fn read(raw: Raw<'_>) -> Option<Self> {
        let (Raw::Text(text) | Raw::Bare(text)) = raw else { return None };
        let text = text.trim();
        let end = text.find(|c: char| !c.is_ascii_digit())?;
        let (_, nanos) = DURATIONS.iter().find(|(unit, _)| *unit == text[end..].trim())?;
        text[..end].parse::<u64>().ok()?.checked_mul(*nanos).map(Self::from_nanos)
    }

    fn show(&self) -> Option<String> {
        let nanos = u64::try_from(self.as_nanos()).unwrap_or(u64::MAX);
        let exact = DURATIONS[..3].iter().rev().find(|(_, unit)| nanos.is_multiple_of(*unit));
        let (name, unit) = exact.unwrap_or(&DURATIONS[0]);
        Some(quoted(&format!("{}{name}", nanos / unit)))
    }
}

/// Reads one of a fixed set of words.
pub(crate) fn read_choice<T: Copy>(raw: Raw<'_>, choices: &[(T, &str)]) -> Option<T> {
    let (Raw::Text(text) | Raw::Bare(text)) = raw else { return None };
    let text = text.trim();
    choices.iter().find(|(_, name)| name.eq_ignore_ascii_case(text)).map(|(value, _)| *value)
}

/// "one of ..." for messages.
pub(crate) fn expected_choice(names: &[impl Display]) -> String {
    match names {
        [only] => format!("\"{only}\""),
        names => {
            let names: Vec<_> = names.iter().map(|name| format!("\"{name}\"")).collect();
            format!("one of {}", names.join(", "))
        }
    }
}

/// A setting that takes one of a few words.
macro_rules! choice {
    ($(#[$meta:meta])* $name:ident { $($(#[$variant_meta:meta])* $variant:ident = $text:literal,)+ }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum $name { $($(#[$variant_meta])* $variant,)+ }

        impl $name {
            /// Every choice, with its name.
            pub const ALL: &[(Self, &'static str)] = &[$((Self::$variant, $text),)+];

            /// The name in files and variables.
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $text,)+ }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.as_str())
            }
        }

        impl $crate::config::value::Setting for $name {
            fn expected() -> String {
                $crate::config::value::expected_choice(&[$($text),+])
            }

            fn read(raw: $crate::config::value::Raw<'_>) -> Option<Self> {
                $crate::config::value::read_choice(raw, Self::ALL)
            }

            fn show(&self) -> Option<String> {
                Some($crate::config::value::quoted(self.as_str()))
            }
        }
    };
}
pub(crate) use choice;
