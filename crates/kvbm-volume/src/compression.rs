//! Whether objects are compressed, with loss or without, and what came of it.

/// Whether blocks are compressed before they are written to a volume. What is there is read in any
/// case. Without the feature `compress` nothing is compressed, and compressed objects are misses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum VolumeCompression {
    /// They are not.
    #[default]
    Off,
    /// With LZ4: fast, and little shorter.
    Lz4,
    /// With Zstandard, level 1.
    Zstd,
    /// With Zstandard, while that makes the volume faster by what is measured.
    Auto,
}

/// How blocks are shortened with loss before they are written: a short code in place of each
/// number, and a scale for 32 of them. A deployment that does so has a namespace of its own, for
/// what comes back is not what was written. A block with a number that is not finite is stored
/// exactly.
///
/// Without the feature `compress` all blocks are, and lossy objects are misses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LossyTerms {
    /// What numbers become.
    pub codes: LossyCodes,
    /// What they are, by cache group. Blocks of other groups are stored exactly.
    pub numbers: Vec<LossyNumbers>,
}

/// What the numbers of a lossy block become.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LossyCodes {
    /// 8-bit floating point with 3 bits of mantissa.
    Fp8E4m3,
    /// Whole numbers of 8 bits.
    Int8,
    /// Whole numbers of 4 bits.
    Int4,
}

/// What the numbers of a block are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LossyNumbers {
    /// bfloat16.
    Bf16,
    /// IEEE half precision.
    F16,
    /// IEEE single precision.
    F32,
}

#[cfg(feature = "compress")]
impl LossyTerms {
    /// By cache group.
    pub(crate) fn forms(&self) -> Vec<kvbm_codec::LossyForm> {
        use kvbm_codec::{Element, Lossy, LossyForm};

        let lossy = match self.codes {
            LossyCodes::Fp8E4m3 => Lossy::Fp8E4m3,
            LossyCodes::Int8 => Lossy::Int8,
            LossyCodes::Int4 => Lossy::Int4,
        };
        let form = |numbers: &LossyNumbers| {
            let element = match numbers {
                LossyNumbers::Bf16 => Element::Bf16,
                LossyNumbers::F16 => Element::F16,
                LossyNumbers::F32 => Element::F32,
            };
            LossyForm { lossy, element }
        };
        self.numbers.iter().map(form).collect()
    }
}

/// What compression did to the blocks of a volume.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CompressionStats {
    /// Whether new objects are compressed now, with loss or without.
    pub compresses: bool,
    /// Bytes of blocks that were written.
    pub written: u64,
    /// Bytes that they take, without headers.
    pub written_stored: u64,
    /// Bytes of blocks that were read.
    pub read: u64,
    /// Bytes that they were stored in, without headers.
    pub read_stored: u64,
}
