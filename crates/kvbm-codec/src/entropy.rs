//! The compressors of planes.

use std::fmt;
use std::str::FromStr;

use zstd_safe::{CCtx, CParameter, DCtx};

/// What compresses planes. A frame says which one did.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Codec {
    /// LZ4: fast to open, compresses repetitions alone.
    Lz4 = 1,
    /// Zstandard: also codes frequent bytes in fewer bits.
    Zstd = 2,
}

impl Codec {
    /// Each of them.
    pub const ALL: [Self; 2] = [Self::Lz4, Self::Zstd];

    /// The level that is used where none is asked for. Higher ones find more repetitions, of which
    /// blocks have few.
    pub const DEFAULT_LEVEL: i32 = 1;

    pub(crate) fn from_id(id: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|codec| *codec as u8 == id)
    }
}

impl fmt::Display for Codec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Lz4 => "lz4",
            Self::Zstd => "zstd",
        })
    }
}

impl FromStr for Codec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|codec| codec.to_string() == text);
        found.ok_or_else(|| format!("unknown codec '{text}': use lz4 or zstd"))
    }
}

/// Compresses planes, one after the other.
pub(crate) enum Encoder {
    /// Room for the longest that it can make of a plane: it asks for that.
    Lz4(Vec<u8>),
    Zstd(CCtx<'static>),
}

impl Encoder {
    /// `None` where there is no memory for its tables.
    pub(crate) fn new(codec: Codec, level: i32) -> Option<Self> {
        Some(match codec {
            Codec::Lz4 => Self::Lz4(Vec::new()),
            Codec::Zstd => {
                let mut context = CCtx::try_create()?;
                // A level beyond the range is cut to it.
                context.set_parameter(CParameter::CompressionLevel(level)).ok()?;
                Self::Zstd(context)
            }
        })
    }

    pub(crate) fn codec(&self) -> Codec {
        match self {
            Self::Lz4(_) => Codec::Lz4,
            Self::Zstd(_) => Codec::Zstd,
        }
    }

    /// Bytes written; `None` where they do not fit.
    pub(crate) fn compress(&mut self, plane: &[u8], out: &mut [u8]) -> Option<usize> {
        match self {
            Self::Lz4(room) => {
                room.resize(lz4_flex::block::get_maximum_output_size(plane.len()), 0);
                let length = lz4_flex::block::compress_into(plane, room).ok()?;
                out.get_mut(..length)?.copy_from_slice(&room[..length]);
                Some(length)
            }
            Self::Zstd(context) => context.compress2(out, plane).ok(),
        }
    }
}

/// Opens planes, one after the other.
#[derive(Default)]
pub(crate) struct Decoder {
    zstd: Option<DCtx<'static>>,
}

impl Decoder {
    /// Fills `out`; `false` where the bytes are none that were made of so long a plane.
    pub(crate) fn open(&mut self, codec: Codec, bytes: &[u8], out: &mut [u8]) -> bool {
        let opened = match codec {
            Codec::Lz4 => lz4_flex::block::decompress_into(bytes, out).ok(),
            Codec::Zstd => {
                if self.zstd.is_none() {
                    self.zstd = DCtx::try_create();
                }
                self.zstd.as_mut().and_then(|context| context.decompress(out, bytes).ok())
            }
        };
        opened == Some(out.len())
    }
}
