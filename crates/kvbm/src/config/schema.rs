//! The form in which settings are declared: one declaration makes the struct, its defaults, the TOML key, the `KVBM_*` variable
//! and the row of the reference.

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
        (self.expected)()
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
}

/// The keys of a section whose struct exists: `section_keys!(PATH, DOC, |config| PLACE, { /// doc  field: Type [unit] (required)?, })`.
macro_rules! section_keys {
    ($path:literal, $sdoc:expr, |$config:ident| $place:expr, {
        $( $(#[doc = $doc:literal])+ $field:ident : $type:ty, [$unit:literal] $($required:ident)? ; )+
    }) => {
        $crate::config::schema::Section {
            path: $path,
            doc: $sdoc,
            keys: &[$(
                $crate::config::schema::Key {
                    path: concat!($path, ".", stringify!($field)),
                    doc: concat!($($doc),+),
                    unit: $unit,
                    required: $crate::config::schema::is_required!($($required)?),
                    secret: <$type as $crate::config::value::Setting>::SECRET,
                    expected: <$type as $crate::config::value::Setting>::expected,
                    write: |$config, raw| match <$type as $crate::config::value::Setting>::read(raw) {
                        Some(value) => {
                            $place.$field = value;
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

/// A section with the struct that holds it: public fields, `Default`, and the constant `SECTION`.
macro_rules! section {
    ($(#[doc = $sdoc:literal])+ $name:ident, $path:literal, |$config:ident| $place:expr, {
        $( $(#[doc = $doc:literal])+ $field:ident : $type:ty = $default:expr, [$unit:literal] $($required:ident)? ; )+
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
                $crate::config::schema::section_keys!($path, concat!($($sdoc),+), |$config| $place, {
                    $( $(#[doc = $doc])+ $field: $type, [$unit] $($required)? ; )+
                });
        }
    };
}
pub(super) use section;
