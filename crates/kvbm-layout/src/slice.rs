//! Which part of every block a rank holds, and which part of a block a copy moves.

use std::ops::Range;

/// Who holds the same heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Holders {
    /// This rank alone.
    One,
    /// `ranks` ranks; `writer`, the lowest of them, is the one that writes them to lower tiers.
    Several {
        /// The rank that writes.
        writer: u32,
        /// Ranks that hold these heads.
        ranks: u32,
    },
}

/// The KV heads of one tensor-parallel rank.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct HeadSlice {
    /// Heads of the whole model that this rank holds; never empty.
    pub heads: Range<u32>,
    /// Whether other ranks hold them too.
    pub holders: Holders,
}

impl HeadSlice {
    /// True if `rank`, the rank this slice was made for, is the one that writes these heads.
    pub fn is_writer(&self, rank: u32) -> bool {
        match self.holders {
            Holders::One => true,
            Holders::Several { writer, .. } => writer == rank,
        }
    }
}

/// A tensor-parallel shape that makes no sense.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("tensor parallelism: {field} = {value}: {rule}")]
pub struct SliceError {
    /// The argument at fault.
    pub field: &'static str,
    /// Its value.
    pub value: u32,
    /// The rule it breaks.
    pub rule: String,
}

/// The heads of `rank` when `num_heads` KV heads are spread over `tp_size` ranks.
///
/// With at least as many heads as ranks, rank `r` holds heads `r * H / T .. (r + 1) * H / T`. So
/// counts differ by at most one when `T` does not divide `H`. With fewer heads than ranks, rank `r`
/// holds head `r * H / T`, as engines do, and the lowest rank of those that hold a head writes it.
/// MLA has one head, which all ranks hold.
///
/// # Errors
/// `num_heads` or `tp_size` 0, or `rank` not below `tp_size`.
pub fn slice_for_rank(num_heads: u32, tp_size: u32, rank: u32) -> Result<HeadSlice, SliceError> {
    let bad = |field, value, rule: String| Err(SliceError { field, value, rule });
    if num_heads == 0 {
        return bad("num_heads", 0, "must be at least 1 (MLA has 1)".to_owned());
    }
    if tp_size == 0 {
        return bad("tp_size", 0, "must be at least 1".to_owned());
    }
    if rank >= tp_size {
        return bad("rank", rank, format!("must be below tp_size ({tp_size})"));
    }
    let (heads, ranks, rank64) = (u64::from(num_heads), u64::from(tp_size), u64::from(rank));
    // Every quotient is at most num_heads, or at most tp_size: the casts lose nothing.
    if heads >= ranks {
        let first = (rank64 * heads / ranks) as u32;
        let end = ((rank64 + 1) * heads / ranks) as u32;
        return Ok(HeadSlice { heads: first..end, holders: Holders::One });
    }
    let head = rank64 * heads / ranks;
    // Ranks r with r * H / T == head: from ceil(head * T / H) to before ceil((head + 1) * T / H).
    let first_rank = |head: u64| (head * ranks).div_ceil(heads) as u32;
    let (writer, end) = (first_rank(head), first_rank(head + 1));
    let head = head as u32;
    let holders = match end - writer {
        1 => Holders::One,
        ranks => Holders::Several { writer, ranks },
    };
    Ok(HeadSlice { heads: head..head + 1, holders })
}

/// A range that has the same length on both sides but may start elsewhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Span {
    /// First index in the source layout.
    pub src: u32,
    /// First index in the destination layout.
    pub dst: u32,
    /// How many.
    pub len: u32,
}

/// Whether a copy moves opaque planes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Planes {
    /// Keys, values and all planes; both layouts must have the same planes.
    #[default]
    All,
    /// Keys and values only; the caller moves the planes otherwise.
    Skip,
    /// Keys, values and these planes; both layouts must have the same planes.
    Some {
        /// First plane.
        first: u32,
        /// How many, at least 1.
        count: u32,
    },
}

/// The part of a block that a copy moves. The default is everything, and then both layouts must
/// have the same layers and heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Selection {
    /// Layers, by their index in each layout; `None`: all.
    pub layers: Option<Span>,
    /// Heads, by their index in each layout; `None`: all.
    pub heads: Option<Span>,
    /// Opaque planes.
    pub planes: Planes,
}

impl Selection {
    /// Everything.
    pub fn all() -> Self {
        Self::default()
    }

    /// Only these layers.
    #[must_use]
    pub fn layers(mut self, src: u32, dst: u32, len: u32) -> Self {
        self.layers = Some(Span { src, dst, len });
        self
    }

    /// Only these heads.
    #[must_use]
    pub fn heads(mut self, src: u32, dst: u32, len: u32) -> Self {
        self.heads = Some(Span { src, dst, len });
        self
    }

    /// Of the opaque planes `count` from `first` on.
    #[must_use]
    pub fn planes(mut self, first: u32, count: u32) -> Self {
        self.planes = Planes::Some { first, count };
        self
    }

    /// Keys and values without the opaque planes.
    #[must_use]
    pub fn without_planes(mut self) -> Self {
        self.planes = Planes::Skip;
        self
    }
}

/// The part of every block that one rank holds, in layers and heads of the whole group.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct BlockPart {
    /// Layers of the group (pipeline parallelism).
    pub layers: Range<u32>,
    /// Heads of the model (tensor parallelism).
    pub heads: Range<u32>,
}

impl BlockPart {
    /// What a copy from a rank with the part `self` to a rank with the part `dst` has to move;
    /// `None` if they share nothing.
    pub fn overlap(&self, dst: &Self) -> Option<Selection> {
        let layers = overlap(&self.layers, &dst.layers)?;
        let heads = overlap(&self.heads, &dst.heads)?;
        Some(Selection { layers: Some(layers), heads: Some(heads), planes: Planes::All })
    }
}

fn overlap(src: &Range<u32>, dst: &Range<u32>) -> Option<Span> {
    let start = src.start.max(dst.start);
    let len = src.end.min(dst.end).checked_sub(start).filter(|&len| len > 0)?;
    Some(Span { src: start - src.start, dst: start - dst.start, len })
}
