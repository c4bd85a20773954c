//! Lossy frames: numbers as short codes, which come back as numbers near them.
//!
//! ```text
//! offset size
//!      0    1  codes: 16 fp8 e4m3, 17 int8, 18 int4
//!      1    1  numbers: 1 bf16, 2 f16, 3 f32
//!      2    1  body: 0 as it is, 1 in a frame of LZ4, 2 of Zstandard, with elements of a byte
//!      3    5  zero
//!      8    8  length of the content
//!     16    8  CRC-64/NVME of the content as it comes back
//!     24       body
//! ```
//! The body has a scale for each 32 numbers, the last of what is left (a byte: exponent of two,
//! plus 130). Then it has the code of each number; two codes of int4 share a byte, the first in its
//! lower half. Behind it may be zeros, 4095 at most.

use crate::form::is_lossy;
use crate::frame::{ContentSum, content_sum, is_padding, number};
use crate::{Codec, Compressor, Expander, FRAME_HEADER_BYTES, FrameError, LossyForm, quantise};

/// Of a content: what is decoded at a time to be summed. A multiple of every piece.
const CHUNK: usize = 64 << 10;

/// The lossy frame of a content, its body compressed by `packer` where there is one and it becomes
/// shorter. `None` means that the content is stored as it is. That is so where it has a number that
/// is not finite or that no code comes near. It is also so where it is not one of whole numbers,
/// and where the frame would not be shorter.
///
/// The frame of what comes back from a frame has the same codes.
pub fn lossy_frame(form: LossyForm, content: &[u8], packer: Option<&mut Compressor>) -> Option<Vec<u8>> {
    let (scales, codes) = quantise::body_bytes(form, content.len())?;
    let mut frame = vec![0; FRAME_HEADER_BYTES + scales + codes];
    if frame.len() >= content.len() {
        return None;
    }
    let (_, body) = frame.split_at_mut(FRAME_HEADER_BYTES);
    let (scales, codes) = body.split_at_mut(scales);
    if !quantise::encode(form, content, scales, codes) {
        return None;
    }
    let sum = sum_of_decoded(form, scales, codes, content.len())?;
    let packed = packer.and_then(|packer| Some((packer.codec() as u8, packer.frame(body, Some(1))?)));
    let mut codec = 0;
    if let Some((packer, packed)) = packed {
        codec = packer;
        frame.truncate(FRAME_HEADER_BYTES);
        frame.extend_from_slice(&packed);
    }
    frame[..3].copy_from_slice(&[form.lossy as u8, form.element as u8, codec]);
    frame[8..16].copy_from_slice(&(content.len() as u64).to_le_bytes());
    frame[16..24].copy_from_slice(&sum.to_le_bytes());
    Some(frame)
}

/// The checksum of what readers will have, by what they do; `None` where they could not.
fn sum_of_decoded(form: LossyForm, scales: &[u8], codes: &[u8], content: usize) -> Option<u64> {
    let mut sum = ContentSum::new();
    let mut decoded = vec![0; content.min(CHUNK)];
    let (each_scales, each_codes) = quantise::body_bytes(form, CHUNK)?;
    let mut left = content;
    for (scales, codes) in scales.chunks(each_scales).zip(codes.chunks(each_codes)) {
        let decoded = &mut decoded[..left.min(CHUNK)];
        left -= decoded.len();
        if !quantise::decode(form, scales, codes, decoded) {
            return None;
        }
        sum.update(decoded);
    }
    Some(sum.finish())
}

/// Whether a frame took time to compress: of a lossy one, its body.
pub fn is_compressed(frame: &[u8]) -> bool {
    match frame {
        [first, _, codec, ..] if is_lossy(*first) => *codec != 0,
        _ => true,
    }
}

impl Expander {
    /// Fills `content` with what comes back from a frame: of this lossy form, or of none.
    ///
    /// # Errors
    /// [`FrameError`]: `content` is unspecified then.
    pub fn open_lossy(
        &mut self,
        form: LossyForm,
        frame: &[u8],
        content: &mut [u8],
    ) -> Result<(), FrameError> {
        let (header, body) = frame.split_first_chunk::<FRAME_HEADER_BYTES>().ok_or(FrameError::Cut)?;
        if !is_lossy(header[0]) {
            return self.open(frame, content);
        }
        let (lossy, element, codec) = (header[0], header[1], header[2]);
        if (lossy, element) != (form.lossy as u8, form.element as u8) {
            return Err(FrameError::Lossy { lossy, element });
        }
        if header[3..8] != [0; 5] {
            return Err(FrameError::Reserved);
        }
        let (stored, asked) = (number(&header[8..16]), content.len() as u64);
        let lengths = quantise::body_bytes(form, content.len()).filter(|_| stored == asked);
        let (scales, codes) = lengths.ok_or(FrameError::Length { stored, asked })?;
        if codec == 0 {
            let (body, rest) = body.split_at_checked(scales + codes).ok_or(FrameError::Cut)?;
            if !is_padding(rest) {
                return Err(FrameError::Trailing);
            }
            finish(form, body.split_at(scales), content, header)
        } else {
            if body.first() != Some(&codec) || Codec::from_id(codec).is_none() {
                return Err(FrameError::Unknown { codec, width: 1 });
            }
            let mut opened = vec![0; scales + codes];
            self.open(body, &mut opened)?;
            finish(form, opened.split_at(scales), content, header)
        }
    }
}

fn finish(
    form: LossyForm,
    (scales, codes): (&[u8], &[u8]),
    content: &mut [u8],
    header: &[u8; FRAME_HEADER_BYTES],
) -> Result<(), FrameError> {
    if !quantise::decode(form, scales, codes, content) {
        return Err(FrameError::Code);
    }
    if number(&header[16..24]) == content_sum(content) { Ok(()) } else { Err(FrameError::Checksum) }
}

#[cfg(test)]
#[path = "lossy/tests.rs"]
mod tests;
