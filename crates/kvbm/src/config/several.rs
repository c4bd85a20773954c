//! Settings that hold several values: one text with commas, or what TOML has for it.

use std::fmt::Display;
use std::path::PathBuf;

use super::value::{Raw, Setting, quoted};

/// Paths, in an order that matters. None of them has a comma.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Paths(Vec<PathBuf>);

impl Paths {
    /// The paths.
    pub fn as_slice(&self) -> &[PathBuf] {
        &self.0
    }
}

impl<P: Into<PathBuf>> FromIterator<P> for Paths {
    fn from_iter<I: IntoIterator<Item = P>>(paths: I) -> Self {
        Self(paths.into_iter().map(Into::into).collect())
    }
}

impl Setting for Paths {
    fn expected() -> String {
        "paths, with commas between them or as an array".into()
    }

    fn read(raw: Raw<'_>) -> Option<Self> {
        if let Raw::Array(array) = raw {
            let path = |raw| PathBuf::read(raw).filter(|path| !path.to_string_lossy().contains(','));
            return array.iter().map(|value| path(Raw::of(value.get_ref()))).collect::<Option<_>>().map(Self);
        }
        let text = String::read(raw)?;
        let parts = text.split(',').map(str::trim).filter(|_| !text.trim().is_empty());
        parts.map(|part| PathBuf::read(Raw::Bare(part))).collect::<Option<_>>().map(Self)
    }

    fn show(&self) -> Option<String> {
        let names: Vec<_> = self.0.iter().map(|path| path.to_string_lossy()).collect();
        Some(quoted(&names.join(",")))
    }
}

/// Tenants by name, each with its share of the tiers.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TenantShares(Vec<(String, f64)>);

impl TenantShares {
    /// The tenants, in the order in which they were given; those of a table by name.
    pub fn as_slice(&self) -> &[(String, f64)] {
        &self.0
    }
}

impl<N: Into<String>> FromIterator<(N, f64)> for TenantShares {
    fn from_iter<I: IntoIterator<Item = (N, f64)>>(tenants: I) -> Self {
        Self(tenants.into_iter().map(|(name, share)| (name.into(), share)).collect())
    }
}

impl Display for TenantShares {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let parts: Vec<_> = self.0.iter().map(|(name, share)| format!("{name}={share}")).collect();
        f.write_str(&parts.join(","))
    }
}

impl std::str::FromStr for TenantShares {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::read(Raw::Bare(text)).ok_or_else(|| format!("give {}", Self::EXAMPLE))
    }
}

impl TenantShares {
    const EXAMPLE: &str = "tenants with their shares, such as \"acme=0.5,beta=0.25\"";
}

impl Setting for TenantShares {
    fn expected() -> String {
        format!("{}, or a table of them", Self::EXAMPLE)
    }

    fn read(raw: Raw<'_>) -> Option<Self> {
        if let Raw::Table(table) = raw {
            let tenants = table.iter().map(|(name, share)| {
                Some((name.get_ref().to_string(), f64::read(Raw::of(share.get_ref()))?))
            });
            return tenants.collect::<Option<_>>().map(Self);
        }
        let text = String::read(raw)?;
        let parts = text.split(',').filter(|_| !text.trim().is_empty());
        let tenant = |part: &str| {
            let (name, share) = part.split_once('=')?;
            Some((name.trim().to_owned(), share.trim().parse().ok()?))
        };
        parts.map(tenant).collect::<Option<_>>().map(Self)
    }

    fn show(&self) -> Option<String> {
        Some(quoted(&self.to_string()))
    }
}
