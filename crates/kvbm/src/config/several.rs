//! Settings that hold several values: one text with commas, or what TOML has for it.

use std::fmt::Display;
use std::path::PathBuf;

use super::value::{Raw, Setting, quoted};
use kvbm_layout::OpaqueLayout;

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

/// A program with its arguments, which runs without a shell.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CommandLine(Vec<String>);

impl CommandLine {
    /// The program, then its arguments; nothing where there is no command.
    pub fn as_slice(&self) -> &[String] {
        &self.0
    }
}

impl<S: Into<String>> FromIterator<S> for CommandLine {
    fn from_iter<I: IntoIterator<Item = S>>(words: I) -> Self {
        Self(words.into_iter().map(Into::into).collect())
    }
}

impl Setting for CommandLine {
    fn expected() -> String {
        "a program and its arguments as an array, or as a text with blanks between them".into()
    }

    fn read(raw: Raw<'_>) -> Option<Self> {
        if let Raw::Array(array) = raw {
            return array.iter().map(|value| String::read(Raw::of(value.get_ref()))).collect();
        }
        Some(String::read(raw)?.split_whitespace().collect())
    }

    fn show(&self) -> Option<String> {
        let words: Vec<_> = self.0.iter().map(|word| quoted(word)).collect();
        Some(format!("[{}]", words.join(", ")))
    }
}

/// Parameters by name, as a library documents them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Parameters(Vec<(String, String)>);

impl Parameters {
    /// Names and values, in the order in which they were given; those of a table by name.
    pub fn as_slice(&self) -> &[(String, String)] {
        &self.0
    }

    fn checked(parameters: impl Iterator<Item = Option<(String, String)>>) -> Option<Self> {
        let parameters: Vec<_> = parameters.collect::<Option<_>>()?;
        let is_usable = |text: &str| !text.contains(['\0', ';']);
        let is_good = |(name, value): &(String, String)| {
            !name.is_empty() && !name.contains('=') && is_usable(name) && is_usable(value)
        };
        parameters.iter().all(is_good).then_some(Self(parameters))
    }
}

impl<N: Into<String>, V: Into<String>> FromIterator<(N, V)> for Parameters {
    fn from_iter<I: IntoIterator<Item = (N, V)>>(parameters: I) -> Self {
        Self(parameters.into_iter().map(|(name, value)| (name.into(), value.into())).collect())
    }
}

impl Setting for Parameters {
    fn expected() -> String {
        "NAME=VALUE with semicolons between them, or a table of texts and whole numbers".into()
    }

    fn read(raw: Raw<'_>) -> Option<Self> {
        if let Raw::Table(table) = raw {
            return Self::checked(table.iter().map(|(name, value)| {
                let value = match Raw::of(value.get_ref()) {
                    Raw::Integer(number) => number.to_string(),
                    value => String::read(value)?,
                };
                Some((name.get_ref().to_string(), value))
            }));
        }
        let text = String::read(raw)?;
        let parts = text.split(';').filter(|part| !part.trim().is_empty());
        Self::checked(parts.map(|part| {
            let (name, value) = part.split_once('=')?;
            Some((name.trim().to_owned(), value.trim().to_owned()))
        }))
    }

    fn show(&self) -> Option<String> {
        let parts: Vec<_> = self.0.iter().map(|(name, value)| format!("{name}={value}")).collect();
        Some(quoted(&parts.join(";")))
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

/// The NUMA node of each rank's host memory, or one of all; `4x0,4x1` stands for four ranks on node
/// 0 and four on node 1.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RankNodes(TensorBytes);

impl RankNodes {
    /// How many nodes are named.
    pub fn count(&self) -> usize {
        self.0.as_slice().len()
    }

    /// The node of a rank.
    pub fn of(&self, rank: usize) -> Option<u32> {
        match self.0.as_slice() {
            [all] => Some(*all),
            nodes => nodes.get(rank).copied(),
        }
    }
}

impl Display for RankNodes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

impl Setting for RankNodes {
    fn expected() -> String {
        "node numbers with commas between them or as an array, such as \"4x0,4x1\": four ranks on node 0, four on node 1".into()
    }

    fn read(raw: Raw<'_>) -> Option<Self> {
        TensorBytes::read(raw).map(Self)
    }

    fn show(&self) -> Option<String> {
        self.0.show()
    }
}

/// Bytes of a block in each of several tensors; `64x32768` stands for 64 tensors of 32768 bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TensorBytes(Vec<u32>);

impl TensorBytes {
    /// More than a layout can have; nothing longer is read.
    const MAX_READ: usize = 2 * OpaqueLayout::MAX_TENSORS;

    /// The tensors, in their order.
    pub fn as_slice(&self) -> &[u32] {
        &self.0
    }

    /// `32768`, or `64x32768`.
    fn read_run(&mut self, text: &str) -> Option<()> {
        let (count, bytes) = text.split_once('x').unwrap_or(("1", text));
        let count: usize = count.trim().parse().ok()?;
        let bytes: u32 = bytes.trim().parse().ok()?;
        // Nothing that is read may take more memory than it could ever be used for.
        if count > Self::MAX_READ - self.0.len().min(Self::MAX_READ) {
            return None;
        }
        self.0.extend(std::iter::repeat_n(bytes, count));
        Some(())
    }
}

impl FromIterator<u32> for TensorBytes {
    fn from_iter<I: IntoIterator<Item = u32>>(tensors: I) -> Self {
        Self(tensors.into_iter().collect())
    }
}

impl Display for TensorBytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let run = |run: &[u32]| match run {
            [bytes] => bytes.to_string(),
            run => format!("{}x{}", run.len(), run[0]),
        };
        f.write_str(&self.0.chunk_by(|a, b| a == b).map(run).collect::<Vec<_>>().join(","))
    }
}

impl Setting for TensorBytes {
    fn expected() -> String {
        "bytes with commas between them or as an array, such as \"64x32768,1024\": 64 tensors of 32768 bytes, one of 1024".into()
    }

    fn read(raw: Raw<'_>) -> Option<Self> {
        let mut tensors = Self::default();
        match raw {
            Raw::Array(array) => {
                for value in array {
                    match Raw::of(value.get_ref()) {
                        Raw::Integer(bytes) => tensors.0.push(bytes.try_into().ok()?),
                        Raw::Text(run) => tensors.read_run(run)?,
                        _ => return None,
                    }
                }
            }
            Raw::Integer(bytes) => tensors.0.push(bytes.try_into().ok()?),
            _ => {
                let text = String::read(raw)?;
                let mut runs = text.split(',').filter(|_| !text.trim().is_empty());
                runs.try_for_each(|run| tensors.read_run(run))?;
            }
        }
        Some(tensors)
    }

    fn show(&self) -> Option<String> {
        Some(quoted(&self.to_string()))
    }
}
