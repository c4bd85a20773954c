//! What lies in a slot of a disk, in the words of a journal's header (`docs/formats.md`). By it
//! ranks of another deployment tell which part of the model's blocks they read, and in which order.

use kvbm_layout::{AxisOrder, BlockPart, DType, FullyContiguous, LayoutConfig, LayoutError, OpaqueLayout};
use std::fmt;
use std::ops::Range;
use std::str::FromStr;

/// Slots are aligned for direct I/O.
pub(crate) const SLOT_ALIGNMENT: u64 = 4096;
/// Characters of the model's name that are kept: it is for people.
const MODEL_CHARS: usize = 128;

/// The content of a slot: a rank's part of a block, and the order of its bytes. Its text and
/// [`SlotGeometry::from_str`] are inverse to each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotGeometry {
    /// The model's name, for people: the namespace tag tells models apart.
    pub model: String,
    /// Which rank of how many.
    pub rank: (u32, u32),
    /// The stored order of axes.
    pub order: AxisOrder,
    /// Layers of the rank.
    pub layers: Range<u32>,
    /// Layers of the model.
    pub of_layers: u32,
    /// Tensors of a layer: keys and values.
    pub outer: u32,
    /// Tokens of a block.
    pub tokens: u32,
    /// KV heads of the rank.
    pub heads: Range<u32>,
    /// KV heads of the model.
    pub of_heads: u32,
    /// Elements of a head.
    pub head_dim: u32,
    /// Type of an element.
    pub dtype: DType,
    /// Checksums of a block: 1, over all its bytes.
    pub pieces: u32,
}

impl SlotGeometry {
    /// The rank's part of a block.
    pub fn part(&self) -> BlockPart {
        BlockPart { layers: self.layers.clone(), heads: self.heads.clone() }
    }

    /// A slot as it lies in memory.
    ///
    /// # Errors
    /// There is no such layout.
    pub fn slot(&self) -> Result<FullyContiguous, LayoutError> {
        let (layers, heads) = (self.layers.len() as u32, self.heads.len() as u32);
        let config = LayoutConfig::builder()
            .num_blocks(1)
            .num_layers(layers)
            .outer_dim(self.outer)
            .page_size(self.tokens)
            .inner_dim(heads.saturating_mul(self.head_dim))
            .num_heads(heads)
            .dtype(self.dtype)
            .alignment(SLOT_ALIGNMENT)
            .build()?;
        FullyContiguous::new(config, self.order)
    }

    /// Why blocks of `other` are no blocks of this model, if they are not: the field, what it says
    /// and what it should.
    pub fn differs(&self, other: &Self) -> Option<String> {
        let fields = [
            ("layers of the model", self.of_layers, other.of_layers),
            ("outer", self.outer, other.outer),
            ("tokens", self.tokens, other.tokens),
            ("heads of the model", self.of_heads, other.of_heads),
            ("head_dim", self.head_dim, other.head_dim),
            ("pieces", self.pieces, other.pieces),
        ];
        let differs = fields.into_iter().find(|(_, ours, theirs)| ours != theirs);
        let differs = differs.map(|(name, ours, theirs)| format!("{name} = {theirs}, here {ours}"));
        let dtype =
            (self.dtype != other.dtype).then(|| format!("dtype = {}, here {}", other.dtype, self.dtype));
        differs.or(dtype)
    }
}

impl fmt::Display for SlotGeometry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { model, rank: (rank, ranks), order, layers, of_layers, outer, tokens, .. } = self;
        let Self { heads, of_heads, head_dim, dtype, pieces, .. } = self;
        let model = shown(model);
        write!(
            f,
            "model={model}; rank={rank}/{ranks}; order={order}; layers={}..{}/{of_layers}; outer={outer}; \
             tokens={tokens}; heads={}..{}/{of_heads}; head_dim={head_dim}; dtype={dtype}; pieces={pieces}",
            layers.start, layers.end, heads.start, heads.end,
        )
    }
}

/// The content of a slot whose blocks have no axes: only a rank of the same number of ranks, with
/// the same tensors, can read it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpaqueGeometry {
    /// The model's name, for people.
    pub model: String,
    /// Which rank of how many.
    pub rank: (u32, u32),
    /// Bytes of a block in each tensor.
    pub tensor_bytes: Vec<u32>,
}

impl fmt::Display for OpaqueGeometry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { model, rank: (rank, ranks), tensor_bytes } = self;
        let tensors = tensor_bytes.len();
        let bytes = tensor_bytes.iter().fold(0_u64, |sum, &bytes| sum.saturating_add(bytes.into()));
        let fingerprint = OpaqueLayout::fingerprint(tensor_bytes);
        write!(
            f,
            "model={}; rank={rank}/{ranks}; order=opaque; tensors={tensors}; block_bytes={bytes}; \
             fingerprint={fingerprint:016x}; pieces=1",
            shown(model),
        )
    }
}

/// The content of a slot that holds a block of one of several cache groups.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupsGeometry {
    /// The model's name, for people.
    pub model: String,
    /// Which rank of how many.
    pub rank: (u32, u32),
    /// The stored order of axes, in every group.
    pub order: AxisOrder,
    /// What each group is, in words, without `; `.
    pub groups: Vec<String>,
    /// Tokens of a block.
    pub tokens: u32,
    /// Type of an element, where a group says nothing else.
    pub dtype: DType,
}

impl fmt::Display for GroupsGeometry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { model, rank: (rank, ranks), order, groups, tokens, dtype } = self;
        let text: Vec<u32> = groups.join(", ").bytes().map(u32::from).collect();
        let axes = if *order == AxisOrder::Nhd { String::new() } else { format!(" axes={order};") };
        write!(
            f,
            "model={}; rank={rank}/{ranks}; order=groups;{axes} groups={}; tokens={tokens}; dtype={dtype}; \
             fingerprint={:016x}; pieces=1",
            shown(model),
            groups.len(),
            OpaqueLayout::fingerprint(&text),
        )
    }
}

/// A model's name without what would end the field, or the header.
fn shown(model: &str) -> String {
    model.chars().filter(|c| *c != ';' && !c.is_control()).take(MODEL_CHARS).collect()
}

/// A text that describes no slot.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the geometry of a slot has no usable `{field}`")]
pub struct UnknownGeometry {
    /// The field that is missing or makes no sense.
    pub field: &'static str,
}

impl FromStr for SlotGeometry {
    type Err = UnknownGeometry;

    /// Fields that are not known are skipped.
    fn from_str(text: &str) -> Result<Self, UnknownGeometry> {
        let bad = |field| UnknownGeometry { field };
        let field = |name: &'static str| {
            let mut fields = text.split("; ").filter_map(|field| field.split_once('='));
            fields.find(|(key, _)| *key == name).map(|(_, value)| value).ok_or_else(|| bad(name))
        };
        let number = |name| field(name)?.parse::<u32>().map_err(|_| bad(name));
        let range = |name| {
            let parts = field(name)?.split_once('/').and_then(|(range, whole)| {
                let (start, end) = range.split_once("..")?;
                Some((start.parse().ok()?..end.parse().ok()?, whole.parse().ok()?))
            });
            parts
                .filter(|(part, whole): &(Range<u32>, u32)| !part.is_empty() && part.end <= *whole)
                .ok_or_else(|| bad(name))
        };
        let ((layers, of_layers), (heads, of_heads)) = (range("layers")?, range("heads")?);
        let rank = field("rank")?.split_once('/');
        let rank = rank.and_then(|(rank, ranks)| Some((rank.parse().ok()?, ranks.parse().ok()?)));
        Ok(Self {
            model: field("model")?.to_owned(),
            rank: rank.ok_or_else(|| bad("rank"))?,
            order: field("order")?.parse().map_err(|_| bad("order"))?,
            layers,
            of_layers,
            outer: number("outer")?,
            tokens: number("tokens")?,
            heads,
            of_heads,
            head_dim: number("head_dim")?,
            dtype: field("dtype")?.parse().map_err(|_| bad("dtype"))?,
            pieces: number("pieces")?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "model=llama-3-8b; rank=1/2; order=nhd; layers=0..32/32; outer=2; tokens=16; heads=4..8/8; \
                        head_dim=128; dtype=bf16; pieces=1";

    #[test]
    fn the_text_of_the_format_is_read_and_written() {
        let geometry: SlotGeometry = TEXT.parse().unwrap();
        assert_eq!((geometry.rank, geometry.heads.clone(), geometry.of_heads), ((1, 2), 4..8, 8));
        assert_eq!(geometry.to_string(), TEXT);
        assert_eq!(format!("{TEXT}; more=1").parse(), Ok(geometry.clone()));
        let slot = geometry.slot().unwrap();
        assert_eq!(kvbm_layout::BlockLayout::bytes_per_block(&slot), 32 * 2 * 16 * 4 * 128 * 2);
        let named = SlotGeometry { model: "a;b\n".repeat(99), ..geometry };
        assert_eq!(named.to_string().parse::<SlotGeometry>().unwrap().model, "ab".repeat(64));
    }

    #[test]
    fn opaque_slots_differ_by_ranks_and_by_each_tensor() {
        let geometry = |rank, tensor_bytes: &[u32]| {
            let model = "a;b".to_owned();
            OpaqueGeometry { model, rank, tensor_bytes: tensor_bytes.to_vec() }.to_string()
        };
        let ours = geometry((0, 1), &[64, 32]);
        assert!(
            ours.starts_with("model=ab; rank=0/1; order=opaque; tensors=2; block_bytes=96; fingerprint=")
        );
        for other in [geometry((0, 2), &[64, 32]), geometry((0, 1), &[32, 64]), geometry((0, 1), &[96])] {
            assert_ne!(ours, other);
        }
        assert_eq!(ours.parse::<SlotGeometry>(), Err(UnknownGeometry { field: "layers" }), "it has no axes");
    }

    #[test]
    fn what_describes_no_slot_is_refused_and_named() {
        for (from, to, field) in [
            ("rank=1/2; ", "", "rank"),
            ("order=nhd", "order=sideways", "order"),
            ("0..32/32", "0..33/32", "layers"),
            ("4..8/8", "8..8/8", "heads"),
            ("4..8/8", "8..4/8", "heads"),
            ("tokens=16", "tokens=-1", "tokens"),
            ("dtype=bf16", "dtype=", "dtype"),
            (TEXT, "", "layers"),
        ] {
            let error = TEXT.replacen(from, to, 1).parse::<SlotGeometry>().unwrap_err();
            assert_eq!(error, UnknownGeometry { field });
        }
    }

    #[test]
    fn other_models_differ_and_other_ranks_do_not() {
        let ours: SlotGeometry = TEXT.parse().unwrap();
        let other = |from, to| ours.differs(&TEXT.replacen(from, to, 1).parse().unwrap());
        assert_eq!(other("rank=1/2", "rank=3/4"), None);
        assert_eq!(other("order=nhd", "order=universal"), None);
        assert_eq!(other("4..8/8", "0..2/8"), None);
        assert_eq!(other("4..8/8", "4..8/16").as_deref(), Some("heads of the model = 16, here 8"));
        assert_eq!(other("dtype=bf16", "dtype=f16").as_deref(), Some("dtype = f16, here bf16"));
    }
}
