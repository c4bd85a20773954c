//! Whether objects are compressed, and what came of it.

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

/// What compression did to the blocks of a volume.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CompressionStats {
    /// Whether new objects are compressed now.
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
