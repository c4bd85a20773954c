//! Cache groups: layers of a model that cache alike.

use std::fmt;
use std::str::FromStr;

use super::value::{Raw, Setting, quoted};
use super::{Config, ModelConfig};
use kvbm_layout::{DType, HeadSlice, Holders, OpaqueLayout, slice_for_rank};
use kvbm_plan::{GroupId, GroupKind, Rank};

/// What one layer of a group keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayerContent {
    /// Keys and values, or a latent, of each token of a block.
    Kv {
        /// KV heads over all ranks (1 for MLA).
        num_kv_heads: u32,
        /// Elements of one head.
        head_dim: u32,
        /// 2 for keys and values, 1 for MLA.
        outer_dim: u32,
        /// Element type; `None`: that of the model.
        dtype: Option<DType>,
    },
    /// A state of the layer after the block's last token.
    State {
        /// Its bytes, over all ranks.
        bytes: u32,
    },
    /// Bytes without axes, of whatever kind: the layers are the engine's tensors, each bound to a
    /// tensor of an [`OpaqueLayout`].
    Opaque {
        /// A tensor's bytes of a block, on each rank.
        rank_bytes: u32,
    },
}

/// Layers that cache alike: they have blocks of their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheGroup {
    /// Which blocks of a prefix the layers need.
    pub kind: GroupKind,
    /// Number of layers.
    pub layers: u32,
    /// What each of them keeps.
    pub content: LayerContent,
    /// Scales of quantised tokens, beside them in the block.
    pub scales: Option<Scales>,
}

/// Scales of keys and values, which travel with their block: part of each layer of it, behind the
/// tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scales {
    /// What has one scale in each tensor (keys, values) of a layer.
    pub per: ScaledPart,
    /// Type of a scale.
    pub dtype: DType,
}

/// What one scale is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScaledPart {
    /// The block, on each rank.
    Block,
    /// Each KV head.
    Head,
    /// Each token of each KV head.
    Token,
}

impl ScaledPart {
    const ALL: [(Self, &'static str); 3] =
        [(Self::Block, "block"), (Self::Head, "head"), (Self::Token, "token")];
}

/// A text that says nothing of scales.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "scales `{text}`: give block, head or token, and if need be a type, such as token:f16 (f32 by default)"
)]
pub struct UnknownScales {
    /// What was given.
    pub text: String,
}

impl FromStr for Scales {
    type Err = UnknownScales;

    /// Takes `head` or `head:f32`.
    fn from_str(text: &str) -> Result<Self, UnknownScales> {
        let (part, dtype) = text.split_once(':').unwrap_or((text, "f32"));
        let known = ScaledPart::ALL.into_iter().find(|(_, name)| *name == part);
        let scales = known.and_then(|(per, _)| Some(Self { per, dtype: dtype.parse().ok()? }));
        scales.ok_or_else(|| UnknownScales { text: text.chars().take(64).collect() })
    }
}

impl Scales {
    /// Bytes in a layer of a block of a rank with so many heads.
    pub(crate) fn layer_bytes(self, page_size: u32, heads: u32, outer_dim: u32) -> u32 {
        let scales = match self.per {
            ScaledPart::Block => 1,
            ScaledPart::Head => heads,
            ScaledPart::Token => heads.saturating_mul(page_size),
        };
        scales.saturating_mul(outer_dim).saturating_mul(self.dtype.width())
    }
}

impl fmt::Display for Scales {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = ScaledPart::ALL.iter().find(|(part, _)| *part == self.per).map_or("", |(_, name)| name);
        write!(f, "{name}:{}", self.dtype)
    }
}

impl CacheGroup {
    /// Layers whose tokens, if they keep any, have no scales.
    pub const fn new(kind: GroupKind, layers: u32, content: LayerContent) -> Self {
        Self { kind, layers, content, scales: None }
    }

    /// Blocks at the end of a prefix that the group needs; `None` for all of them.
    pub fn blocks_needed(&self, page_size: u32) -> Option<usize> {
        match self.kind {
            GroupKind::Full => None,
            GroupKind::SlidingWindow(tokens) => Some(tokens.div_ceil(page_size.max(1)) as usize),
            GroupKind::State => Some(1),
        }
    }

    /// Bytes of a block on one of `ranks` ranks.
    pub(crate) fn rank_bytes(&self, page_size: u32, model: DType, ranks: u32) -> u64 {
        let (factors, scales) = match self.content {
            LayerContent::Kv { num_kv_heads, head_dim, outer_dim, dtype } => {
                let heads = (num_kv_heads / ranks.max(1)).max(1);
                let scales = self.scales.map_or(0, |scales| scales.layer_bytes(page_size, heads, outer_dim));
                ([page_size, heads, head_dim, outer_dim, dtype.unwrap_or(model).width()], scales)
            }
            LayerContent::State { .. } => ([self.rank_state_bytes(ranks), 1, 1, 1, 1], 0),
            LayerContent::Opaque { rank_bytes } => ([rank_bytes, 1, 1, 1, 1], 0),
        };
        let layer = factors.into_iter().fold(1, |bytes: u64, factor| bytes.saturating_mul(factor.into()));
        layer.saturating_add(scales.into()).saturating_mul(self.layers.into())
    }

    /// Bytes of a layer's state on one of `ranks` ranks; 0 where tokens are kept.
    pub(crate) fn rank_state_bytes(&self, ranks: u32) -> u32 {
        match self.content {
            LayerContent::State { bytes } => bytes.div_ceil(ranks.max(1)),
            LayerContent::Kv { .. } | LayerContent::Opaque { .. } => 0,
        }
    }

    fn read(text: &str) -> Option<Self> {
        let mut words = text.split_whitespace();
        let kind = words.next()?;
        let (kind, window) = kind.split_once('=').map_or((kind, None), |(kind, value)| (kind, Some(value)));
        let kind = match (kind, window) {
            ("full", None) => GroupKind::Full,
            ("window", Some(tokens)) => GroupKind::SlidingWindow(tokens.parse().ok()?),
            ("state", None) => GroupKind::State,
            _ => return None,
        };
        let (mut numbers, mut type_of, mut scales) = ([None; 6], None, None);
        for word in words {
            let (name, value) = word.split_once('=')?;
            if name == "scales" && scales.is_none() {
                scales = Some(value.parse().ok()?);
                continue;
            }
            if name == "dtype" && type_of.is_none() {
                type_of = Some(value.parse().ok()?);
                continue;
            }
            let at = Self::NUMBERS.iter().position(|known| *known == name)?;
            if numbers[at].replace(value.parse().ok()?).is_some() {
                return None;
            }
        }
        let [layers, heads, head_dim, outer, bytes, rank_bytes] = numbers;
        let has_axes = (heads, head_dim, outer, type_of) != (None, None, None, None) || scales.is_some();
        let content = match (kind, bytes, rank_bytes, type_of) {
            (GroupKind::State, Some(bytes), None, _) if !has_axes => LayerContent::State { bytes },
            (_, None, Some(rank_bytes), _) if !has_axes => LayerContent::Opaque { rank_bytes },
            (GroupKind::State, ..) | (_, Some(_), ..) | (_, _, Some(_), _) => return None,
            (_, None, None, dtype) => LayerContent::Kv {
                num_kv_heads: heads?,
                head_dim: head_dim?,
                outer_dim: outer.unwrap_or(2),
                dtype,
            },
        };
        Some(Self { kind, layers: layers?, content, scales })
    }

    const NUMBERS: [&str; 6] = ["layers", "heads", "head_dim", "outer", "bytes", "rank_bytes"];
}

/// As it is read.
impl fmt::Display for CacheGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} layers={}", self.kind, self.layers)?;
        match self.content {
            LayerContent::State { bytes } => write!(f, " bytes={bytes}"),
            LayerContent::Opaque { rank_bytes } => write!(f, " rank_bytes={rank_bytes}"),
            LayerContent::Kv { num_kv_heads, head_dim, outer_dim, dtype } => {
                write!(f, " heads={num_kv_heads} head_dim={head_dim} outer={outer_dim}")?;
                dtype.map_or(Ok(()), |dtype| write!(f, " dtype={dtype}"))
            }
        }?;
        self.scales.map_or(Ok(()), |scales| write!(f, " scales={scales}"))
    }
}

/// The cache groups of a model, by [`GroupId`]; empty for a model whose layers are alike.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CacheGroups(Vec<CacheGroup>);

impl CacheGroups {
    /// Most groups of a model.
    pub const MAX: usize = 32;

    /// The groups.
    pub fn as_slice(&self) -> &[CacheGroup] {
        &self.0
    }
}

impl FromIterator<CacheGroup> for CacheGroups {
    fn from_iter<I: IntoIterator<Item = CacheGroup>>(groups: I) -> Self {
        Self(groups.into_iter().collect())
    }
}

impl fmt::Display for CacheGroups {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let groups: Vec<_> = self.0.iter().map(ToString::to_string).collect();
        f.write_str(&groups.join(", "))
    }
}

impl Setting for CacheGroups {
    fn expected() -> String {
        "groups with commas between them or as an array, such as \"window=1024 layers=10 heads=16 head_dim=128\", \
         \"state layers=4 bytes=311296\" or \"full layers=2 rank_bytes=65536\""
            .into()
    }

    fn read(raw: Raw<'_>) -> Option<Self> {
        if let Raw::Array(array) = raw {
            let group = |raw| String::read(raw).and_then(|text| CacheGroup::read(&text));
            return array
                .iter()
                .map(|value| group(Raw::of(value.get_ref())))
                .collect::<Option<_>>()
                .map(Self);
        }
        let text = String::read(raw)?;
        let groups = text.split(',').filter(|_| !text.trim().is_empty());
        groups.map(CacheGroup::read).collect::<Option<_>>().map(Self)
    }

    fn show(&self) -> Option<String> {
        Some(quoted(&self.to_string()))
    }
}

impl ModelConfig {
    /// Whether the model has cache groups of its own.
    pub fn has_groups(&self) -> bool {
        !self.groups.as_slice().is_empty()
    }

    /// The cache groups, by [`GroupId`]: one Full group where the layers are alike.
    pub fn cache_groups(&self) -> Vec<CacheGroup> {
        if self.has_groups() {
            return self.groups.as_slice().to_vec();
        }
        let content = LayerContent::Kv {
            num_kv_heads: self.num_kv_heads,
            head_dim: self.head_dim,
            outer_dim: self.outer_dim,
            dtype: None,
        };
        vec![CacheGroup::new(GroupKind::Full, self.num_layers, content)]
    }
}

impl ModelConfig {
    /// A group by its id; the first one for an id that there is not.
    pub(crate) fn cache_group(&self, group: GroupId) -> CacheGroup {
        let groups = self.cache_groups();
        groups.get(usize::from(group.0)).copied().unwrap_or(groups[0])
    }

    /// Whether blocks have heads that another number of ranks can divide anew: those of one group
    /// that keeps tokens without scales.
    pub(crate) fn has_heads(&self) -> bool {
        let of_tokens = || {
            let group = self.cache_group(GroupId(0));
            matches!(group.content, LayerContent::Kv { .. }) && group.scales.is_none()
        };
        !self.is_opaque() && self.groups.as_slice().len() <= 1 && of_tokens()
    }

    /// Layers that a transfer of a block between G1 and G2 can move one by one: tensors, where
    /// these have no axes. 1 with several cache groups, and where scales are a part of the block.
    pub(crate) fn separable_layers(&self) -> u32 {
        match (self.is_opaque(), self.has_heads()) {
            (true, _) => u32::try_from(self.opaque_tensors.as_slice().len()).unwrap_or(u32::MAX),
            (false, true) => self.cache_group(GroupId(0)).layers,
            (false, false) => 1,
        }
    }

    /// Whether another number of ranks can divide the blocks of all groups anew: they keep tokens,
    /// without scales.
    #[cfg(feature = "worker")]
    pub(crate) fn divides_anew(&self) -> bool {
        let has_heads =
            |group: &CacheGroup| matches!(group.content, LayerContent::Kv { .. }) && group.scales.is_none();
        !self.is_opaque() && self.cache_groups().iter().all(has_heads)
    }

    /// Of `ranks` ranks the one that writes what `rank` holds to storage that they share: the first
    /// that holds the same bytes of every group. Heads are replicated where there are more ranks
    /// than heads; the latent of MLA is one head. Of tensors without axes the model says how many
    /// ranks have the same. Parts of a state are each rank's own.
    pub(crate) fn writer(&self, rank: u32, ranks: u32) -> u32 {
        let of_replicas = rank - rank % self.replicas.max(1);
        if self.is_opaque() {
            return of_replicas;
        }
        let of_group = |group: CacheGroup| match group.content {
            LayerContent::Kv { num_kv_heads, .. } => match slice_for_rank(num_kv_heads, ranks, rank) {
                Ok(HeadSlice { holders: Holders::Several { writer, .. }, .. }) => writer,
                _ => rank,
            },
            LayerContent::Opaque { .. } => of_replicas,
            LayerContent::State { .. } => rank,
        };
        // Ranks with the same head follow each other: who is in one row with the largest of these
        // in every group has its bytes.
        self.cache_groups().into_iter().map(of_group).max().unwrap_or(rank)
    }

    /// What tells the groups of a model from those of another; empty for layers that are alike.
    pub(crate) fn groups_fingerprint(&self) -> String {
        if !self.has_groups() {
            return String::new();
        }
        let text: Vec<u32> = self.groups.to_string().bytes().map(u32::from).collect();
        format!("{} groups, {:016x}", self.groups.as_slice().len(), OpaqueLayout::fingerprint(&text))
    }
}

impl Config {
    /// Bytes of one rank's slice of a block of each cache group, without padding. A slot of a tier
    /// holds a block of any of them.
    pub fn group_block_bytes(&self) -> Vec<u64> {
        let model = &self.model;
        if model.is_opaque() {
            return vec![self.rank_block_bytes()];
        }
        let (page, ranks) = (model.page_size, self.parallelism.tensor_parallel);
        model.cache_groups().iter().map(|group| group.rank_bytes(page, model.dtype, ranks)).collect()
    }

    /// The rank that writes what `rank` holds to G3 and G4: itself, or the first rank that holds
    /// the same bytes of every block (MLA, more ranks than KV heads).
    pub fn writer_of(&self, rank: Rank) -> Rank {
        Rank(self.model.writer(u32::from(rank.0), self.parallelism.tensor_parallel) as u16)
    }

    /// Ranks that write to G3 and G4: together they hold each byte of a block once.
    pub fn writers(&self) -> impl Iterator<Item = Rank> + '_ {
        self.ranks().filter(|rank| self.writer_of(*rank) == *rank)
    }

    /// The rank that writes what `rank` holds to G2, where one process has all ranks: itself, or
    /// [`writer_of`](Self::writer_of) it.
    pub fn host_writer_of(&self, rank: Rank) -> Rank {
        // Every rank of a node reads from its peers into slots of its own.
        if self.host.one_copy && !self.remote.enabled { self.writer_of(rank) } else { rank }
    }

    /// All ranks.
    pub(crate) fn ranks(&self) -> impl Iterator<Item = Rank> + use<> {
        (0..self.parallelism.tensor_parallel.min(u32::from(u16::MAX)) as u16).map(Rank)
    }

    /// The ids of the cache groups.
    #[cfg(feature = "worker")]
    pub(crate) fn group_ids(&self) -> impl Iterator<Item = GroupId> + use<> {
        (0..self.model.groups.as_slice().len().max(1) as u16).map(GroupId)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_read_as_they_are_shown() {
        let text = "window=1024 layers=5 heads=16 head_dim=128 outer=2 dtype=f8_e4m3, \
                    full layers=1 heads=1 head_dim=576 outer=1, state layers=4 bytes=311296, \
                    state layers=4 rank_bytes=4096, window=31 layers=3 rank_bytes=100";
        let groups = CacheGroups::read(Raw::Bare(text)).unwrap();
        assert_eq!(groups.to_string(), text.split_whitespace().collect::<Vec<_>>().join(" "));
        let [window, latent, state, opaque_state, opaque_window] = groups.as_slice() else {
            panic!("{groups}")
        };
        assert_eq!(opaque_state.rank_bytes(16, DType::BF16, 4), 4 * 4096, "bytes of each rank");
        assert_eq!((opaque_state.blocks_needed(16), opaque_window.blocks_needed(16)), (Some(1), Some(2)));
        assert_eq!(window.kind, GroupKind::SlidingWindow(1024));
        assert_eq!(window.blocks_needed(16), Some(64));
        assert_eq!(window.rank_bytes(16, DType::BF16, 2), 5 * 2 * 16 * 8 * 128);
        assert_eq!(latent.rank_bytes(16, DType::BF16, 4), 16 * 576 * 2, "each rank has the latent");
        assert_eq!(state.rank_bytes(16, DType::BF16, 4), 4 * 77_824);
        assert_eq!((latent.blocks_needed(16), state.blocks_needed(16)), (None, Some(1)));
    }

    #[test]
    fn what_is_no_group_is_refused() {
        for text in [
            "half layers=1 heads=1 head_dim=1",
            "window layers=1 heads=1 head_dim=1",
            "full layers=1 heads=1",
            "full layers=1 layers=2 heads=1 head_dim=1",
            "full layers=1 heads=1 head_dim=1 bytes=3",
            "state layers=1",
            "state layers=1 bytes=1 heads=1",
            "state layers=1 bytes=1 rank_bytes=1",
            "full layers=1 heads=1 head_dim=1 rank_bytes=3",
            "full layers=1 rank_bytes=3 dtype=bf16",
            "state layers=1 bytes=1 dtype=bf16",
            "full layers=-1 heads=1 head_dim=1",
            "full layers=1 heads=1 head_dim=1,,",
        ] {
            assert_eq!(CacheGroups::read(Raw::Bare(text)), None, "{text}");
        }
    }
}
