//! The `KVBM_*` variables.

use std::ffi::OsString;

use super::nearest::nearest;
use super::parse::write;
use super::schema::{PREFIX, Section};
use super::value::Raw;
use super::{Config, ConfigError, Origin};

/// Variables of ours that are no settings: they are read where they are used.
const ELSEWHERE: [&str; 4] = ["KVBM_CUDA_DRIVER", "KVBM_NATS_SERVER", "KVBM_RECORD", "KVBM_RECORD_LIMIT"];

/// Applies every variable whose name begins with `KVBM_`; others are not looked at.
pub(super) fn apply(
    config: &mut Config,
    variables: impl IntoIterator<Item = (OsString, OsString)>,
) -> Result<(), ConfigError> {
    let keys: Vec<_> =
        Config::schema().iter().flat_map(Section::keys).map(|key| (key.variable(), key)).collect();
    // In the order of names, so that the same environment always gives the same first error.
    let mut ours: Vec<_> = variables
        .into_iter()
        .filter_map(|(name, value)| {
            let name = name.into_string().ok().filter(|name| name.starts_with(PREFIX))?;
            if ELSEWHERE.contains(&name.as_str()) {
                return None;
            }
            Some((name, value))
        })
        .collect();
    ours.sort();
    for (name, value) in ours {
        let Some((_, key)) = keys.iter().find(|(variable, _)| *variable == name) else {
            let known = keys.iter().map(|(variable, _)| variable.as_str());
            let nearest = nearest(&name, known).unwrap_or_default().to_owned();
            return Err(ConfigError::UnknownVariable { name: name.chars().take(128).collect(), nearest });
        };
        let raw = value.to_str().map_or(Raw::Other("not UTF-8"), Raw::Bare);
        write(config, key, raw, || Origin::Variable(name.clone()))?;
    }
    Ok(())
}
