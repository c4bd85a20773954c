//! Numbers to short codes and back. 32 numbers that follow each other, a *piece*, share a scale.
//!
//! A scale is a power of two, so a decoded number is exactly one of its element type, and what was
//! decoded encodes to the same bytes again. The scale is the smallest one with which no number of
//! the piece is too large for a code.

use crate::form::{Element, Lossy, LossyForm};

/// Numbers of a lossy block that share a scale.
pub const PIECE: usize = 32;

/// A scale is stored as its exponent of two, with this added.
const BIAS: i32 = 130;

/// Encodes `content` into a scale for each piece and a code for each number. `false` where a
/// number, or what it would come back as, is not finite.
pub(crate) fn encode(form: LossyForm, content: &[u8], scales: &mut [u8], codes: &mut [u8]) -> bool {
    match form.element {
        Element::Bf16 => encode_numbers::<Bf16>(form.lossy, content, scales, codes),
        Element::F16 => encode_numbers::<F16>(form.lossy, content, scales, codes),
        Element::F32 => encode_numbers::<F32>(form.lossy, content, scales, codes),
    }
}

/// The other way round: fills `content`. `false` where there are codes or scales that nothing
/// encodes to.
pub(crate) fn decode(form: LossyForm, scales: &[u8], codes: &[u8], content: &mut [u8]) -> bool {
    match form.element {
        Element::Bf16 => decode_numbers::<Bf16>(form.lossy, scales, codes, content),
        Element::F16 => decode_numbers::<F16>(form.lossy, scales, codes, content),
        Element::F32 => decode_numbers::<F32>(form.lossy, scales, codes, content),
    }
}

impl Element {
    /// The number that these bytes are, as many as [`width`](Self::width) says. 0 where they are
    /// fewer.
    pub fn number(self, bytes: &[u8]) -> f32 {
        match self {
            _ if bytes.len() < self.width() => 0.0,
            Self::Bf16 => Bf16::get(bytes),
            Self::F16 => F16::get(bytes),
            Self::F32 => F32::get(bytes),
        }
    }
}

/// Bytes of the scales and of the codes of a content of so many bytes; `None` where these are no
/// whole numbers.
pub(crate) fn body_bytes(form: LossyForm, content: usize) -> Option<(usize, usize)> {
    let width = form.element.width();
    let numbers = content / width;
    let whole = content.is_multiple_of(width);
    whole.then(|| (numbers.div_ceil(PIECE), code_bytes(form.lossy, numbers)))
}

const fn code_bytes(lossy: Lossy, numbers: usize) -> usize {
    match lossy {
        Lossy::Fp8E4m3 | Lossy::Int8 => numbers,
        Lossy::Int4 => numbers.div_ceil(2),
    }
}

fn encode_numbers<N: Number>(lossy: Lossy, content: &[u8], scales: &mut [u8], codes: &mut [u8]) -> bool {
    match lossy {
        Lossy::Fp8E4m3 => encode_as::<N, Fp8E4m3>(content, scales, codes),
        Lossy::Int8 => encode_as::<N, Int8>(content, scales, codes),
        Lossy::Int4 => encode_as::<N, Int4>(content, scales, codes),
    }
}

fn decode_numbers<N: Number>(lossy: Lossy, scales: &[u8], codes: &[u8], content: &mut [u8]) -> bool {
    match lossy {
        Lossy::Fp8E4m3 => decode_as::<N, Fp8E4m3>(scales, codes, content),
        Lossy::Int8 => decode_as::<N, Int8>(scales, codes, content),
        Lossy::Int4 => decode_as::<N, Int4>(scales, codes, content),
    }
}

fn encode_as<N: Number, C: Code>(content: &[u8], scales: &mut [u8], codes: &mut [u8]) -> bool {
    let pieces = content.chunks(PIECE * N::WIDTH);
    for ((piece, scale), out) in pieces.zip(scales).zip(codes.chunks_mut(C::PIECE_BYTES)) {
        let mut values = [0.0; PIECE];
        N::load(piece, &mut values);
        let Some(exponent) = exponent_of::<N, C>(&values) else { return false };
        let (first, second) = halves(-exponent);
        let mut codes = [0; PIECE];
        for (code, value) in codes.iter_mut().zip(&values) {
            *code = C::of(value * first * second);
        }
        // Such as the largest number of all, rounded up.
        if N::floor::<C>() > exponent || !fits::<N, C>(exponent, &codes, &mut values) {
            return false;
        }
        *scale = (exponent + BIAS) as u8;
        C::pack(&codes, out);
    }
    true
}

fn decode_as<N: Number, C: Code>(scales: &[u8], codes: &[u8], content: &mut [u8]) -> bool {
    let mut sound = true;
    let pieces = content.chunks_mut(PIECE * N::WIDTH);
    for ((piece, scale), packed) in pieces.zip(scales).zip(codes.chunks(C::PIECE_BYTES)) {
        let exponent = i32::from(*scale) - BIAS;
        let (mut codes, mut values) = ([0; PIECE], [0.0; PIECE]);
        C::unpack(packed, &mut codes);
        sound &= exponent >= N::floor::<C>() && fits::<N, C>(exponent, &codes, &mut values);
        N::store(&values, piece);
    }
    sound
}

/// The decoded values. Whether all of them are numbers of the element type.
fn fits<N: Number, C: Code>(exponent: i32, codes: &[u8; PIECE], values: &mut [f32; PIECE]) -> bool {
    let (first, second) = halves(exponent);
    let (mut most, mut sound) = (0, true);
    for (value, code) in values.iter_mut().zip(codes) {
        *value = C::value(*code) * first * second;
        most = most.max(magnitude(*value));
        sound &= C::is_code(*code);
    }
    sound && most <= magnitude(N::MOST)
}

/// The exponent of the scale of a piece; `None` where a number is not finite.
fn exponent_of<N: Number, C: Code>(values: &[f32; PIECE]) -> Option<i32> {
    let most = values.iter().fold(0, |most: i32, value| most.max(magnitude(*value)));
    if most >= magnitude(f32::INFINITY) {
        return None;
    }
    // Of numbers that have no exponent of their own.
    let (most, shift) =
        if most < 1 << 23 { (magnitude(f32::from_bits(most as u32) * power(64)), 64) } else { (most, 0) };
    let is_beyond = most & 0x7f_ffff >= C::LIMIT;
    Some(((most >> 23) - 127 - shift - C::TOP + i32::from(is_beyond)).max(N::floor::<C>()))
}

/// The bits but for the sign. They order as the numbers do.
const fn magnitude(value: f32) -> i32 {
    (value.to_bits() & 0x7fff_ffff).cast_signed()
}

/// A power of two, from -126 to 127.
const fn power(exponent: i32) -> f32 {
    f32::from_bits(((exponent + 127) as u32) << 23)
}

/// Two factors that multiply by a power of two which may be none of this type.
const fn halves(exponent: i32) -> (f32, f32) {
    (power(exponent / 2), power(exponent - exponent / 2))
}

/// An element type.
trait Number {
    const WIDTH: usize;
    /// The largest finite one.
    const MOST: f32;
    /// Decoded numbers are multiples of this power of two, which the type has.
    const LEAST: i32;

    fn get(bytes: &[u8]) -> f32;
    /// Of one that is a number of the type.
    fn put(value: f32, bytes: &mut [u8]);

    /// The least exponent of a scale.
    fn floor<C: Code>() -> i32 {
        Self::LEAST + C::FRACTION
    }

    fn load(piece: &[u8], values: &mut [f32; PIECE]) {
        for (value, bytes) in values.iter_mut().zip(piece.chunks_exact(Self::WIDTH)) {
            *value = Self::get(bytes);
        }
    }

    fn store(values: &[f32; PIECE], piece: &mut [u8]) {
        for (value, bytes) in values.iter().zip(piece.chunks_exact_mut(Self::WIDTH)) {
            Self::put(*value, bytes);
        }
    }
}

struct Bf16;
struct F16;
struct F32;

impl Number for Bf16 {
    const WIDTH: usize = 2;
    const MOST: f32 = f32::from_bits(0x7f7f << 16);
    const LEAST: i32 = -BIAS;

    fn get(bytes: &[u8]) -> f32 {
        f32::from_bits(u32::from(bytes[0]) << 16 | u32::from(bytes[1]) << 24)
    }

    fn put(value: f32, bytes: &mut [u8]) {
        bytes.copy_from_slice(&((value.to_bits() >> 16) as u16).to_le_bytes());
    }
}

impl Number for F16 {
    const WIDTH: usize = 2;
    const MOST: f32 = 65504.0;
    const LEAST: i32 = -24;

    fn get(bytes: &[u8]) -> f32 {
        let bits = u32::from(bytes[0]) | u32::from(bytes[1]) << 8;
        let (sign, rest) = ((bits & 0x8000) << 16, bits & 0x7fff);
        let normal = (rest << 13) + (112 << 23);
        // Of infinity and what is no number the exponent is the largest one here too.
        let normal = if rest >= 0x7c00 { normal + (112 << 23) } else { normal };
        let small = (rest.cast_signed() as f32 * power(-24)).to_bits();
        f32::from_bits(sign | if rest < 0x400 { small } else { normal })
    }

    fn put(value: f32, bytes: &mut [u8]) {
        let (sign, rest) = ((value.to_bits() >> 16) & 0x8000, value.to_bits() & 0x7fff_ffff);
        let normal = rest.wrapping_sub(112 << 23) >> 13;
        // The last bit of this sum counts the smallest numbers.
        let small = (f32::from_bits(rest) + 0.5).to_bits().wrapping_sub(0.5_f32.to_bits());
        let bits = sign | if rest < 113 << 23 { small } else { normal };
        bytes.copy_from_slice(&(bits as u16).to_le_bytes());
    }
}

impl Number for F32 {
    const WIDTH: usize = 4;
    const MOST: f32 = f32::MAX;
    const LEAST: i32 = -BIAS;

    fn get(bytes: &[u8]) -> f32 {
        f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
    }

    fn put(value: f32, bytes: &mut [u8]) {
        bytes.copy_from_slice(&value.to_le_bytes());
    }
}

/// What numbers, divided by their scale, are rounded to.
trait Code {
    /// From 2^TOP to 2^(TOP+1) is the largest number that does not become too large for a code.
    const TOP: i32;
    /// Its mantissa is below this.
    const LIMIT: i32;
    /// Codes are multiples of 2^-FRACTION.
    const FRACTION: i32;
    /// Bytes of the codes of a piece.
    const PIECE_BYTES: usize = PIECE;

    /// Rounded, ties to even.
    fn of(value: f32) -> u8;
    fn value(code: u8) -> f32;

    fn is_code(_code: u8) -> bool {
        true
    }

    fn pack(codes: &[u8; PIECE], out: &mut [u8]) {
        out.copy_from_slice(&codes[..out.len()]);
    }

    fn unpack(packed: &[u8], codes: &mut [u8; PIECE]) {
        codes[..packed.len()].copy_from_slice(packed);
    }
}

struct Fp8E4m3;
struct Int8;
struct Int4;

impl Code for Fp8E4m3 {
    const TOP: i32 = 8;
    // 464 is as far from 448 as from what would be 480: it becomes the even one.
    const LIMIT: i32 = 0x68_0001;
    const FRACTION: i32 = 9;

    fn of(value: f32) -> u8 {
        let (sign, rest) = ((value.to_bits() >> 24) & 0x80, value.to_bits() & 0x7fff_ffff);
        let normal = ((rest + 0x7_ffff + (rest >> 20 & 1)) >> 20).wrapping_sub(120 << 3);
        // The last bit of this sum counts the smallest codes.
        let small = (f32::from_bits(rest) + power(14)).to_bits().wrapping_sub(power(14).to_bits());
        (sign | if rest < 121 << 23 { small } else { normal }) as u8
    }

    fn value(code: u8) -> f32 {
        let (sign, rest) = (u32::from(code & 0x80) << 24, u32::from(code & 0x7f));
        let normal = (rest << 20) + (120 << 23);
        let small = (rest.cast_signed() as f32 * power(-9)).to_bits();
        f32::from_bits(sign | if rest < 8 { small } else { normal })
    }

    fn is_code(code: u8) -> bool {
        code & 0x7f != 0x7f
    }
}

/// Rounded to a whole number, of one of few bits.
fn whole(value: f32) -> u8 {
    const HALF_UP: f32 = (3 << 22) as f32;
    (value + HALF_UP).to_bits().wrapping_sub(HALF_UP.to_bits()) as u8
}

impl Code for Int8 {
    const TOP: i32 = 6;
    const LIMIT: i32 = 0x7f_0000;
    const FRACTION: i32 = 0;

    fn of(value: f32) -> u8 {
        whole(value)
    }

    fn value(code: u8) -> f32 {
        f32::from(code.cast_signed())
    }

    fn is_code(code: u8) -> bool {
        code != 0x80
    }
}

impl Code for Int4 {
    const TOP: i32 = 2;
    const LIMIT: i32 = 0x70_0000;
    const FRACTION: i32 = 0;
    const PIECE_BYTES: usize = PIECE / 2;

    fn of(value: f32) -> u8 {
        whole(value) & 0xf
    }

    fn value(code: u8) -> f32 {
        f32::from((code << 4).cast_signed() >> 4)
    }

    fn is_code(code: u8) -> bool {
        code & 0xf != 8
    }

    fn pack(codes: &[u8; PIECE], out: &mut [u8]) {
        for (byte, codes) in out.iter_mut().zip(codes.as_chunks::<2>().0) {
            *byte = codes[0] | codes[1] << 4;
        }
    }

    fn unpack(packed: &[u8], codes: &mut [u8; PIECE]) {
        for (codes, byte) in codes.as_chunks_mut::<2>().0.iter_mut().zip(packed) {
            *codes = [byte & 0xf, byte >> 4];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every code of fp8 by its definition, and every f16 and bf16, come back.
    #[test]
    fn numbers_of_each_type_are_what_they_are_defined_to_be() {
        for code in (0..=255_u8).filter(|code| Fp8E4m3::is_code(*code)) {
            let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
            let magnitude = if exponent == 0 {
                mantissa / 8.0 * 2_f32.powi(-6)
            } else {
                (1.0 + mantissa / 8.0) * 2_f32.powi(exponent - 7)
            };
            let value = if code < 0x80 { magnitude } else { -magnitude };
            assert_eq!(Fp8E4m3::value(code).to_bits(), value.to_bits(), "{code:#x}");
            assert_eq!(Fp8E4m3::of(value), code, "{value}");
        }
        assert_eq!(Fp8E4m3::value(0x7e).to_bits(), 448.0_f32.to_bits());
        for bits in 0..=u16::MAX {
            let (exponent, mantissa) = (i32::from(bits >> 10 & 31), f32::from(bits & 0x3ff));
            let value = F16::get(&bits.to_le_bytes());
            if exponent == 31 {
                assert!(!value.is_finite(), "{bits:#x}");
                continue;
            }
            let magnitude = if exponent == 0 {
                mantissa * 2_f32.powi(-24)
            } else {
                (1.0 + mantissa / 1024.0) * 2_f32.powi(exponent - 15)
            };
            assert_eq!(value.abs().to_bits(), magnitude.to_bits(), "{bits:#x}");
            let mut put = [0; 2];
            F16::put(value, &mut put);
            assert_eq!(put, bits.to_le_bytes());
            Bf16::put(Bf16::get(&bits.to_le_bytes()), &mut put);
            assert_eq!(put, bits.to_le_bytes());
        }
    }

    /// Against a search over all codes. Mutation that makes it fail: a tie is rounded up.
    #[test]
    fn the_nearest_code_is_chosen_and_the_even_one_of_two() {
        fn check<C: Code>(last: u8, most: f32) {
            let steps = (most * 64.0) as i32;
            for step in -steps..=steps {
                let value = step as f32 / 64.0;
                let chosen = C::of(value);
                let away = |code: u8| (C::value(code) - value).abs();
                for code in (0..=last).filter(|code| C::is_code(*code)) {
                    let nearer = away(chosen).total_cmp(&away(code));
                    assert!(nearer.is_le(), "{value}: {chosen:#x} or {code:#x}");
                    let is_tie = nearer.is_eq() && C::value(chosen).to_bits() != C::value(code).to_bits();
                    assert!(!is_tie || chosen & 1 == 0, "{value}: {chosen:#x} or {code:#x}");
                }
            }
        }
        check::<Fp8E4m3>(255, 464.0);
        check::<Int8>(255, 127.0);
        check::<Int4>(15, 7.0);
    }
}
