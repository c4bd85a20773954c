//! What options of calls mean: loads, audits, tiers.

use crate::errors::{Error, Result};
use crate::fence::Fence;
use crate::integers::seconds;
use kvbm::plan::deadline_after;
use kvbm::{Comparison, Elements, LoadOptions, Tier, TierMask};
use std::time::Instant;

/// So many seconds from now.
pub(crate) fn deadline(timeout: f64) -> Result<Instant> {
    Ok(deadline_after(Instant::now(), seconds(timeout)?))
}

/// When a load begins and ends.
pub(crate) fn load_options(
    after: Option<&Fence>,
    timeout: Option<f64>,
    by_layer: bool,
) -> Result<LoadOptions> {
    let mut options = LoadOptions::default();
    if by_layer {
        options = options.by_layer();
    }
    if let Some(fence) = Fence::of_manager(after)? {
        options = options.after(fence);
    }
    if let Some(timeout) = timeout {
        options = options.until(deadline(timeout)?);
    }
    Ok(options)
}

/// How an audit compares.
pub(crate) fn comparison(elements: &str, tolerance: f64) -> Result<Comparison> {
    let elements = match elements {
        "bytes" => Elements::Bytes,
        "float32" => Elements::F32,
        "float16" => Elements::F16,
        "bfloat16" => Elements::BF16,
        _ => {
            let text = format!("elements {elements:?}: give 'float32', 'float16', 'bfloat16' or 'bytes'");
            return Err(Error::argument(text));
        }
    };
    if !(0.0..=1000.0).contains(&tolerance) {
        return Err(Error::argument(format!("tolerance {tolerance}: give a number from 0 to 1000")));
    }
    Ok(Comparison { elements, tolerance_ppm: (tolerance * 1e6).round() as u32 })
}

/// A tier by its name.
pub(crate) fn tier_of(name: &str) -> Result<Tier> {
    name.parse().map_err(|error| Error::argument(format!("tier {name:?}: {error}")))
}

/// Tiers whose blocks are pinned, by their names.
pub(crate) fn pinnable(names: &[String]) -> Result<TierMask> {
    let tier = |name: &String| match tier_of(name)? {
        Tier::G2 => Ok(Tier::G2),
        Tier::G3 => Ok(Tier::G3),
        _ => Err(Error::argument(format!(
            "tier {name:?}: the engine's own blocks and those of volumes are not pinned; give 'g2' or 'g3'"
        ))),
    };
    let tiers = names.iter().map(tier).collect::<Result<TierMask>>()?;
    if tiers.is_empty() {
        return Err(Error::argument("no tier is named: give 'g2', 'g3' or both"));
    }
    Ok(tiers)
}
