//! Frames: the compressed form of a content.
//!
//! ```text
//! offset size
//!      0    1  codec of the planes: 1 LZ4 (block format), 2 Zstandard (a frame)
//!      1    1  width of an element: 1, 2, 4 or 8 bytes
//!      2    6  zero
//!      8    8  length of the content
//!     16    8  CRC-64/NVME of the content
//!     24       chunks: each of 256 KiB of the content, the last of what is left
//! ```
//! A chunk has a plane for each byte of an element: its length (u32), then its bytes, as they are
//! where the length is that of the plane, else compressed. What is left of the content behind the
//! last whole element follows as it is. Behind the last chunk may be zeros, 4095 at most. Integers
//! are little-endian.

use std::fmt;

use crc_fast::{CrcAlgorithm, Digest, checksum};

use crate::Codec;
use crate::entropy::{Decoder, Encoder};
use crate::form::is_lossy;
use crate::planes;

/// Bytes before the chunks.
pub const FRAME_HEADER_BYTES: usize = 24;

/// Of the content: its planes fit into a processor's second-level cache.
const CHUNK: usize = 256 << 10;

/// Zeros that may follow the last chunk.
const MOST_PADDING: usize = 4095;

/// Why bytes are no frame of a content of this length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FrameError {
    /// They end too early.
    #[error("the frame is cut")]
    Cut,
    /// Made by something that this version does not know.
    #[error("codec {codec} with elements of {width} bytes is unknown here; written by a newer version?")]
    Unknown {
        /// Number of the codec.
        codec: u8,
        /// Width of an element.
        width: u8,
    },
    /// Bytes that have to be zero are not.
    #[error("a reserved byte of the frame is not zero")]
    Reserved,
    /// The frame is of a longer or a shorter content.
    #[error("its content has {stored} bytes, {asked} were asked for")]
    Length {
        /// By the frame.
        stored: u64,
        /// By the caller.
        asked: u64,
    },
    /// A plane is longer than it can be, or does not open to its length.
    #[error("a plane of the frame does not decompress")]
    Plane,
    /// More follows than what belongs to it.
    #[error("bytes follow the frame")]
    Trailing,
    /// What came out is not what went in.
    #[error("the checksum of the decompressed content does not match")]
    Checksum,
    /// It is lossy, and of another form than the caller's contents, which may be exact.
    #[error("it is lossy (codes {lossy} of numbers {element}), which contents of this namespace are not")]
    Lossy {
        /// Number of the codes.
        lossy: u8,
        /// Number of the element type.
        element: u8,
    },
    /// A code or a scale that nothing encodes to.
    #[error("a code of the frame is out of range")]
    Code,
    /// The codec got no memory.
    #[error("no memory for the codec")]
    Memory,
}

/// Makes frames. It keeps its tables from one to the next.
pub struct Compressor {
    encoder: Encoder,
    planes: Vec<u8>,
}

impl Compressor {
    /// With the default level.
    ///
    /// # Errors
    /// [`FrameError::Memory`].
    pub fn new(codec: Codec) -> Result<Self, FrameError> {
        Self::with_level(codec, Codec::DEFAULT_LEVEL)
    }

    /// Another level of Zstandard; LZ4 has one.
    ///
    /// # Errors
    /// [`FrameError::Memory`].
    pub fn with_level(codec: Codec, level: i32) -> Result<Self, FrameError> {
        let encoder = Encoder::new(codec, level).ok_or(FrameError::Memory)?;
        Ok(Self { encoder, planes: Vec::new() })
    }

    /// The frame of a content whose elements have `width` bytes; of elements of another width than
    /// 1, 2, 4 or 8 as of bytes. Where the width is not given, the content tells. `None` where the
    /// frame would not be a thirty-second shorter than the content, at least.
    pub fn frame(&mut self, content: &[u8], width: Option<u32>) -> Option<Vec<u8>> {
        let width = width.map_or_else(|| planes::width_of(content), |width| width as usize);
        let width = if matches!(width, 2 | 4 | 8) { width } else { 1 };
        let most = content.len() - content.len() / 32;
        let mut frame = Vec::with_capacity(most);
        frame.extend_from_slice(&[self.encoder.codec() as u8, width as u8, 0, 0, 0, 0, 0, 0]);
        frame.extend_from_slice(&(content.len() as u64).to_le_bytes());
        frame.extend_from_slice(&content_sum(content).to_le_bytes());
        for chunk in content.chunks(CHUNK) {
            self.add(chunk, width, &mut frame);
            if frame.len() >= most {
                return None;
            }
        }
        // An empty content has no shorter form.
        (frame.len() < most).then_some(frame)
    }

    pub(crate) fn codec(&self) -> Codec {
        self.encoder.codec()
    }

    fn add(&mut self, chunk: &[u8], width: usize, frame: &mut Vec<u8>) {
        let (elements, rest) = chunk.split_at(chunk.len() / width * width);
        self.planes.resize(elements.len(), 0);
        planes::split(elements, width, &mut self.planes);
        for plane in self.planes.chunks_exact((elements.len() / width).max(1)) {
            let at = frame.len();
            frame.extend_from_slice(&[0; 4]);
            // What saves less than a sixteenth is not worth the time to open it.
            let most = plane.len() - plane.len() / 16;
            frame.resize(at + 4 + most, 0);
            let length =
                self.encoder.compress(plane, &mut frame[at + 4..]).filter(|length| *length < plane.len());
            frame.truncate(at + 4 + length.unwrap_or(0));
            if length.is_none() {
                frame.extend_from_slice(plane);
            }
            let length = (frame.len() - at - 4) as u32;
            frame[at..at + 4].copy_from_slice(&length.to_le_bytes());
        }
        frame.extend_from_slice(rest);
    }
}

/// Opens frames. It keeps its tables from one to the next.
#[derive(Default)]
pub struct Expander {
    decoder: Decoder,
    planes: Vec<u8>,
}

impl Expander {
    /// Fills `content` with what the frame was made of.
    ///
    /// # Errors
    /// [`FrameError`]: `content` is unspecified then.
    pub fn open(&mut self, frame: &[u8], content: &mut [u8]) -> Result<(), FrameError> {
        let (header, mut rest) = frame.split_first_chunk::<FRAME_HEADER_BYTES>().ok_or(FrameError::Cut)?;
        let (codec, width, zeros) = (header[0], header[1], &header[2..8]);
        if is_lossy(codec) {
            return Err(FrameError::Lossy { lossy: codec, element: width });
        }
        let known = Codec::from_id(codec).filter(|_| matches!(width, 1 | 2 | 4 | 8));
        let known = known.ok_or(FrameError::Unknown { codec, width })?;
        if zeros != [0; 6] {
            return Err(FrameError::Reserved);
        }
        let (stored, asked) = (number(&header[8..16]), content.len() as u64);
        if stored != asked {
            return Err(FrameError::Length { stored, asked });
        }
        for chunk in content.chunks_mut(CHUNK) {
            rest = self.chunk(known, usize::from(width), rest, chunk)?;
        }
        if !is_padding(rest) {
            return Err(FrameError::Trailing);
        }
        if number(&header[16..24]) == content_sum(content) { Ok(()) } else { Err(FrameError::Checksum) }
    }

    /// Opens a chunk. What follows it.
    fn chunk<'a>(
        &mut self,
        codec: Codec,
        width: usize,
        mut bytes: &'a [u8],
        chunk: &mut [u8],
    ) -> Result<&'a [u8], FrameError> {
        let (elements, last) = chunk.split_at_mut(chunk.len() / width * width);
        self.planes.resize(elements.len(), 0);
        for plane in self.planes.chunks_exact_mut((elements.len() / width).max(1)) {
            let (length, rest) = bytes.split_first_chunk::<4>().ok_or(FrameError::Cut)?;
            let length = u32::from_le_bytes(*length) as usize;
            if length > plane.len() {
                return Err(FrameError::Plane);
            }
            let (stored, rest) = rest.split_at_checked(length).ok_or(FrameError::Cut)?;
            bytes = rest;
            if length == plane.len() {
                plane.copy_from_slice(stored);
            } else if !self.decoder.open(codec, stored, plane) {
                return Err(FrameError::Plane);
            }
        }
        planes::join(&self.planes, width, elements);
        let (stored, rest) = bytes.split_at_checked(last.len()).ok_or(FrameError::Cut)?;
        last.copy_from_slice(stored);
        Ok(rest)
    }
}

impl fmt::Debug for Compressor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Compressor").field(&self.encoder.codec()).finish()
    }
}

impl fmt::Debug for Expander {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Expander")
    }
}

/// Whether bytes may follow a frame.
pub(crate) fn is_padding(rest: &[u8]) -> bool {
    rest.len() <= MOST_PADDING && rest.iter().all(|byte| *byte == 0)
}

/// The checksum of a content that comes in parts.
pub(crate) struct ContentSum(Digest);

impl ContentSum {
    pub(crate) fn new() -> Self {
        Self(Digest::new(CrcAlgorithm::Crc64Nvme))
    }

    pub(crate) fn update(&mut self, part: &[u8]) {
        self.0.update(part);
    }

    pub(crate) fn finish(&self) -> u64 {
        self.0.finalize()
    }
}

pub(crate) fn content_sum(content: &[u8]) -> u64 {
    checksum(CrcAlgorithm::Crc64Nvme, content)
}

pub(crate) fn number(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Numbers about one, of which the upper bytes take few values.
    fn content(bytes: usize, width: usize, mut state: u64) -> Vec<u8> {
        let mut random = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as u8
        };
        let byte = |at: usize| {
            let is_upper = at % width == width - 1;
            // In runs, which LZ4 needs.
            if is_upper { 0x3c + u8::from((at / 64).is_multiple_of(3)) * (random() % 5) } else { random() }
        };
        (0..bytes).map(byte).collect()
    }

    fn opened(frame: &[u8], bytes: usize) -> Result<Vec<u8>, FrameError> {
        let mut content = vec![0; bytes];
        Expander::default().open(frame, &mut content).map(|()| content)
    }

    #[test]
    fn contents_of_all_widths_and_several_chunks_become_shorter_and_come_back() {
        for codec in Codec::ALL {
            let mut compressor = Compressor::new(codec).unwrap();
            let mut expander = Expander::default();
            for width in [1, 2, 4] {
                for bytes in [4096, CHUNK, CHUNK + 1, 2 * CHUNK + 4099] {
                    let content = content(bytes, width, 5);
                    let frame = compressor.frame(&content, (width > 1).then_some(width as u32));
                    let frame = frame.unwrap_or_else(|| panic!("{codec}, width {width}, {bytes} bytes"));
                    assert!(frame.len() < content.len());
                    let mut opened = vec![1; bytes];
                    expander.open(&frame, &mut opened).unwrap();
                    assert!(opened == content, "{codec}, width {width}, {bytes} bytes");
                }
            }
        }
    }

    #[test]
    fn what_does_not_become_shorter_has_no_frame() {
        let noise: Vec<u8> = content(70_000, 1 << 30, 9);
        for codec in Codec::ALL {
            for bytes in [0, 1, 20, 70_000] {
                assert!(
                    Compressor::new(codec).unwrap().frame(&noise[..bytes], Some(2)).is_none(),
                    "{codec} {bytes}"
                );
            }
        }
    }

    #[test]
    fn a_frame_says_what_is_wrong_with_it() {
        let frame = Compressor::new(Codec::Zstd).unwrap().frame(&content(5000, 2, 1), Some(2)).unwrap();
        let changed = |at: usize, byte: u8| {
            let mut frame = frame.clone();
            frame[at] = byte;
            opened(&frame, 5000).unwrap_err()
        };
        assert_eq!(changed(0, 3), FrameError::Unknown { codec: 3, width: 2 });
        assert_eq!(changed(1, 3), FrameError::Unknown { codec: 2, width: 3 });
        assert_eq!(changed(2, 1), FrameError::Reserved);
        assert_eq!(changed(16, frame[16] ^ 1), FrameError::Checksum);
        assert_eq!(changed(27, 1), FrameError::Plane);
        let plane = 28 + 2500 + 4;
        assert_eq!(changed(plane, frame[plane] ^ 1), FrameError::Plane, "the magic of Zstandard");
        assert_eq!(opened(&frame, 4999), Err(FrameError::Length { stored: 5000, asked: 4999 }));
        assert_eq!(opened(&frame[..23], 5000), Err(FrameError::Cut));
        assert_eq!(opened(&frame[..frame.len() - 1], 5000), Err(FrameError::Cut));
        let longer = |bytes: &[u8]| opened(&[&frame[..], bytes].concat(), 5000);
        assert!(longer(&[0; 4095]).is_ok());
        assert_eq!(longer(&[0; 4096]), Err(FrameError::Trailing));
        assert_eq!(longer(&[1]), Err(FrameError::Trailing));
    }

    /// A frame of a few bytes that says to be of very many: the caller's length counts.
    #[test]
    fn a_bomb_fills_what_it_was_given_and_no_more() {
        let zeros = vec![0; 1 << 20];
        for codec in Codec::ALL {
            let frame = Compressor::new(codec).unwrap().frame(&zeros, Some(2));
            let mut frame = frame.unwrap_or_else(|| panic!("{codec}: zeros become shorter"));
            assert!(frame.len() < 1 << 14, "{codec}: {}", frame.len());
            assert_eq!(opened(&frame, 4096), Err(FrameError::Length { stored: 1 << 20, asked: 4096 }));
            frame[8..16].copy_from_slice(&4096_u64.to_le_bytes());
            assert_eq!(opened(&frame, 4096), Err(FrameError::Plane), "{codec}");
        }
    }

    proptest! {
        #[test]
        fn any_content_comes_back(bytes in prop::collection::vec(0..6_u8, 0..3000), width in 0..9_u32, zstd in any::<bool>()) {
            let codec = if zstd { Codec::Zstd } else { Codec::Lz4 };
            if let Some(frame) = Compressor::new(codec).unwrap().frame(&bytes, (width > 0).then_some(width)) {
                prop_assert!(frame.len() < bytes.len());
                prop_assert_eq!(opened(&frame, bytes.len()), Ok(bytes));
            }
        }

        #[test]
        fn a_changed_bit_is_noticed(bit in 0..40_000_usize, width in 1..3_u32) {
            let content = content(6000, 2, 3);
            let frame = Compressor::new(Codec::Zstd).unwrap().frame(&content, Some(width * 2)).unwrap();
            let mut changed = frame.clone();
            changed[bit / 8 % frame.len()] ^= 1 << (bit % 8);
            // Bits of Zstandard's own header may not matter.
            if let Ok(opened) = opened(&changed, content.len()) {
                prop_assert_eq!(opened, content);
            }
        }
    }
}
