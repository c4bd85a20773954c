//! The form in which settings are declared: one declaration makes the struct, its defaults, the
//! TOML key, the `KVBM_*` variable and the row of the reference.

use std::borrow::Cow;

use super::Config;
use super::value::Raw;

/// One setting: everything that parsing, the environment and the reference need to know of it.
#[derive(Clone, Copy)]
pub struct Key {
    pub(super) path: &'static str,
    pub(super) doc: &'static str,
    pub(super) unit: &'static str,
    pub(super) required: bool,
    pub(super) secret: bool,
    pub(super) expected: fn() -> String,
    /// The least and the greatest value of a whole number, where its type allows more.
    pub(super) range: Option<(u64, u64)>,
    pub(super) number: fn(&Config) -> Option<u64>,
    /// Writes the value; `false` if it is none of this key's type.
    pub(super) write: fn(&mut Config, Raw<'_>) -> bool,
    /// The value in TOML, if it is set and no secret.
    pub(super) show: fn(&Config) -> Option<String>,
    pub(super) is_unset: fn(&Config) -> bool,
}

impl Key {
    /// The key with its section, as in TOML: `host.capacity`.
    pub const fn path(&self) -> &'static str {
        self.path
    }

    /// What the setting does.
    pub const fn doc(&self) -> &'static str {
        self.doc
    }

    /// The unit of the value; empty where the value names its own or has none.
    pub const fn unit(&self) -> &'static str {
        self.unit
    }

    /// Whether it has no default.
    pub const fn is_required(&self) -> bool {
        self.required
    }

    /// The environment variable: `KVBM_HOST_CAPACITY`.
    pub fn variable(&self) -> String {
        format!("{PREFIX}{}", self.path.to_ascii_uppercase().replace('.', "_"))
    }

    /// What values it takes, such as "true or false".
    pub fn expected(&self) -> String {
        match self.range {
            Some((min, max)) => format!("a whole number from {min} to {max}"),
            None => (self.expected)(),
        }
    }

    /// The value in `config`, if it is set and outside the range of this key.
    pub(super) fn out_of_range(&self, config: &Config) -> Option<(u64, (u64, u64))> {
        if self.required && (self.is_unset)(config) {
            return None;
        }
        let (range, value) = (self.range?, (self.number)(config)?);
        (value < range.0 || value > range.1).then_some((value, range))
    }

    /// The value in `config`, in TOML; nothing if it is not set or secret.
    pub fn value(&self, config: &Config) -> Option<String> {
        (self.show)(config)
    }
}

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Key").field("path", &self.path).finish_non_exhaustive()
    }
}

/// What all environment variables of kvbm begin with.
pub(super) const PREFIX: &str = "KVBM_";

/// Settings that belong together.
#[derive(Clone, Copy, Debug)]
pub struct Section {
    pub(super) path: &'static str,
    pub(super) doc: &'static str,
    pub(super) keys: &'static [Key],
    /// Set where there may be several of it.
    pub(super) list: Option<List>,
}

/// How a section that there may be several of, like `[[volume]]`, is taken apart: its keys speak of
/// the first one.
#[derive(Clone, Copy, Debug)]
pub(super) struct List {
    /// Each of them, as the first one of a configuration.
    pub(super) split: fn(&Config) -> Vec<Config>,
    /// Adds the first one of the second configuration to the first configuration.
    pub(super) append: fn(&mut Config, Config),
}

impl Section {
    /// The name of the TOML table: `offload.g1_g2`.
    pub const fn path(&self) -> &'static str {
        self.path
    }

    /// What the settings are about.
    pub const fn doc(&self) -> &'static str {
        self.doc
    }

    /// The settings, in the order of the reference.
    pub const fn keys(&self) -> &'static [Key] {
        self.keys
    }

    /// Whether there may be several of it: `[[volume]]`. Keys and variables speak of the first one.
    pub const fn is_list(&self) -> bool {
        self.list.is_some()
    }

    /// A configuration for each time that this section is there, whose keys speak of that one.
    pub(super) fn each<'a>(&self, config: &'a Config) -> Vec<Cow<'a, Config>> {
        match self.list {
            None => vec![Cow::Borrowed(config)],
            Some(list) => (list.split)(config).into_iter().map(Cow::Owned).collect(),
        }
    }
}

/// The keys of a section whose struct exists: `section_keys!(PATH, DOC, |config| PLACE, { /// doc
/// field: Type [unit] (required)? (, MIN to MAX)?; })`; `PLACE; MUTABLE PLACE` where these differ.
macro_rules! section_keys {
    ($path:literal, $sdoc:expr, |$config:ident| $place:expr, $keys:tt) => {
        $crate::config::schema::section_keys!($path, $sdoc, |$config| $place; $place, $keys)
    };
    ($path:literal, $sdoc:expr, |$config:ident| $place:expr; $mutable:expr, {
        $( $(#[doc = $doc:literal])+ $field:ident : $type:ty, [$unit:literal] $($required:ident)? $(, $min:literal to $max:expr)? ; )+
    }) => {
        $crate::config::schema::Section {
            path: $path,
            doc: $sdoc,
            list: None,
            keys: &[$(
                $crate::config::schema::Key {
                    path: concat!($path, ".", stringify!($field)),
                    doc: concat!($($doc),+),
                    unit: $unit,
                    required: $crate::config::schema::is_required!($($required)?),
                    secret: <$type as $crate::config::value::Setting>::SECRET,
                    expected: <$type as $crate::config::value::Setting>::expected,
                    range: $crate::config::schema::range!($($min, $max)?),
                    number: |$config| $crate::config::value::Setting::number(&$place.$field),
                    write: |$config, raw| match <$type as $crate::config::value::Setting>::read(raw) {
                        Some(value) => {
                            $mutable.$field = value;
                            true
                        }
                        None => false,
                    },
                    show: |$config| $crate::config::value::Setting::show(&$place.$field),
                    is_unset: |$config| $crate::config::value::Setting::is_unset(&$place.$field),
                },
            )+],
        }
    };
}
pub(super) use section_keys;

macro_rules! is_required {
    () => {
        false
    };
    (required) => {
        true
    };
}
pub(super) use is_required;

macro_rules! range {
    () => {
        None
    };
    ($min:literal, $max:expr) => {
        Some(($min, $max))
    };
}
pub(super) use range;

/// A section with the struct that holds it: public fields, `Default`, and the constant `SECTION`.
macro_rules! section {
    ($(#[doc = $sdoc:literal])+ $name:ident, $path:literal, |$config:ident| $place:expr $(; $mutable:expr)?, {
        $( $(#[doc = $doc:literal])+ $field:ident : $type:ty = $default:expr, [$unit:literal] $($required:ident)? $(, $min:literal to $max:expr)? ; )+
    }) => {
        $(#[doc = $sdoc])+
        #[derive(Clone, Debug, PartialEq)]
        pub struct $name {
            $( $(#[doc = $doc])+ pub $field: $type, )+
        }

        impl Default for $name {
            fn default() -> Self {
                Self { $($field: $default,)+ }
            }
        }

        impl $name {
            pub(super) const SECTION: $crate::config::schema::Section =
                $crate::config::schema::section_keys!($path, concat!($($sdoc),+), |$config| $place $(; $mutable)?, {
                    $( $(#[doc = $doc])+ $field: $type, [$unit] $($required)? $(, $min to $max)? ; )+
                });
        }
    };
}
pub(super) use section;
