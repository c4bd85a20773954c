use super::*;
use crate::{Element, Lossy};
use proptest::prelude::*;

fn forms() -> impl Iterator<Item = LossyForm> {
    Lossy::ALL.into_iter().flat_map(|lossy| Element::ALL.map(move |element| LossyForm { lossy, element }))
}

/// Numbers of the element type, by a conversion of its own.
fn content(element: Element, numbers: &[f64]) -> Vec<u8> {
    let of = |number: &f64| match element {
        Element::F32 => (*number as f32).to_le_bytes().to_vec(),
        Element::Bf16 => {
            let bits = (*number as f32).to_bits();
            (((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16).to_le_bytes().to_vec()
        }
        Element::F16 => {
            let exponent = number.abs().log2().floor().clamp(-14.0, 15.0);
            let units = (number.abs() * 2_f64.powf(10.0 - exponent)).round_ties_even();
            let bits = units as u32 + (((exponent + 14.0) as u32) << 10);
            ((bits | u32::from(number.is_sign_negative()) << 15) as u16).to_le_bytes().to_vec()
        }
    };
    numbers.iter().flat_map(of).collect()
}

fn numbers(element: Element, content: &[u8]) -> Vec<f64> {
    let of = |bytes: &[u8]| match element {
        Element::F32 => f64::from(f32::from_le_bytes(bytes.try_into().unwrap())),
        Element::Bf16 => {
            let bits = u32::from(u16::from_le_bytes(bytes.try_into().unwrap())) << 16;
            f64::from(f32::from_bits(bits))
        }
        Element::F16 => {
            let bits = u16::from_le_bytes(bytes.try_into().unwrap());
            let (exponent, mantissa) = (i32::from(bits >> 10 & 31), f64::from(bits & 0x3ff));
            let magnitude = match exponent {
                0 => mantissa * 2_f64.powi(-24),
                31 => f64::INFINITY,
                _ => (1.0 + mantissa / 1024.0) * 2_f64.powi(exponent - 15),
            };
            if bits < 0x8000 { magnitude } else { -magnitude }
        }
    };
    content.chunks(element.width()).map(of).collect()
}

/// Of the normal distribution.
fn normal(count: usize, mut state: u64) -> Vec<f64> {
    let mut uniform = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 11) as f64 + 0.5) / (1_u64 << 53) as f64
    };
    (0..count).map(|_| (-2.0 * uniform().ln()).sqrt() * (std::f64::consts::TAU * uniform()).cos()).collect()
}

fn frame(form: LossyForm, content: &[u8]) -> Option<Vec<u8>> {
    lossy_frame(form, content, None)
}

fn opened(form: LossyForm, frame: &[u8], bytes: usize) -> Result<Vec<u8>, FrameError> {
    let mut content = vec![0; bytes];
    Expander::default().open_lossy(form, frame, &mut content).map(|()| content)
}

/// Half a step of the piece's largest number, for each kind of code; of fp8 relative to the number
/// itself. Mutations that make it fail: codes are cut in place of rounded; a scale is one too
/// large.
#[test]
fn what_comes_back_is_as_near_as_the_codes_allow() {
    for form in forms() {
        let numbers_in = normal(40_000, 7);
        let content = content(form.element, &numbers_in);
        let frame = frame(form, &content).unwrap();
        let codes = if form.lossy == Lossy::Int4 { 20_000 } else { 40_000 };
        assert_eq!(frame.len(), FRAME_HEADER_BYTES + 40_000 / 32 + codes, "{form:?}");
        let back = opened(form, &frame, content.len()).unwrap();
        let (before, after) = (numbers(form.element, &content), numbers(form.element, &back));
        for (before, after) in before.chunks(32).zip(after.chunks(32)) {
            let most = before.iter().fold(0.0, |most: f64, number| most.max(number.abs()));
            for (number, found) in before.iter().zip(after) {
                let bound = match form.lossy {
                    // Codes from 64 to 127 for the largest number: half of one is a 127th of it.
                    Lossy::Int8 => most / 127.0,
                    Lossy::Int4 => most / 7.0,
                    Lossy::Fp8E4m3 => (number.abs() / 16.0).max(most * 2_f64.powi(-17)),
                };
                assert!((number - found).abs() <= bound, "{form:?}: {number} became {found}");
            }
        }
    }
}

#[test]
fn the_largest_and_the_smallest_numbers_come_back_or_have_no_frame() {
    for form in forms() {
        let (most, least, beyond) = match form.element {
            Element::F16 => (61_000.0, 2_f64.powi(-24), 65_504.0),
            Element::Bf16 | Element::F32 => {
                (2_f64.powi(127) * 1.75, 2_f64.powi(-130), 2_f64.powi(128) * 0.997)
            }
        };
        let mut numbers_in = vec![least; 32];
        numbers_in.extend_from_slice(&[most; 32]);
        numbers_in.extend_from_slice(&[-0.0; 64]);
        let bytes = content(form.element, &numbers_in);
        let back = opened(form, &frame(form, &bytes).unwrap(), bytes.len()).unwrap();
        let back = numbers(form.element, &back);
        assert_eq!(back[0].to_bits(), least.to_bits(), "{form:?}");
        assert!((back[40] - most).abs() <= most / 14.0, "{form:?}: {}", back[40]);
        assert!(back[64..].iter().all(|zero| *zero == 0.0), "{form:?}");
        numbers_in[3] = beyond;
        let bytes = content(form.element, &numbers_in);
        assert!(frame(form, &bytes).is_none(), "{form:?}: it would come back as infinity");
    }
}

/// Mutation that makes it fail: infinity is taken for a number.
#[test]
fn what_is_not_finite_has_no_frame_and_neither_has_a_part_of_a_number() {
    for form in forms() {
        let width = form.element.width();
        let sound = content(form.element, &normal(256, 3));
        assert!(frame(form, &sound).is_some());
        let infinity: &[u8] = match form.element {
            Element::Bf16 => &[0x80, 0x7f],
            Element::F16 => &[0, 0x7c],
            Element::F32 => &[0, 0, 0x80, 0x7f],
        };
        for at in [0, 31, 255] {
            for sign in [0, 0x80] {
                for fraction in [0, 1] {
                    let mut bytes = sound.clone();
                    let number = &mut bytes[at * width..][..width];
                    number.copy_from_slice(infinity);
                    number[width - 1] |= sign;
                    number[0] |= fraction;
                    assert!(frame(form, &bytes).is_none(), "{form:?} {at}");
                }
            }
        }
        assert!(frame(form, &sound[1..]).is_none(), "{form:?}");
        assert!(frame(form, &[]).is_none());
        assert!(frame(form, &sound[..width]).is_none(), "{form:?}: it would be longer");
    }
}

#[test]
fn a_frame_says_what_is_wrong_with_it() {
    let form = LossyForm { lossy: Lossy::Fp8E4m3, element: Element::Bf16 };
    let content = content(Element::Bf16, &normal(64, 1));
    let frame = frame(form, &content).unwrap();
    let changed = |at: usize, byte: u8| {
        let mut frame = frame.clone();
        frame[at] = byte;
        opened(form, &frame, 128).unwrap_err()
    };
    assert_eq!(changed(0, 17), FrameError::Lossy { lossy: 17, element: 1 });
    assert_eq!(changed(1, 2), FrameError::Lossy { lossy: 16, element: 2 });
    assert_eq!(changed(2, 9), FrameError::Unknown { codec: 9, width: 1 });
    assert_eq!(changed(7, 1), FrameError::Reserved);
    assert_eq!(changed(17, frame[17] ^ 1), FrameError::Checksum);
    assert_eq!(changed(24, frame[24] + 1), FrameError::Checksum, "a scale");
    assert_eq!(changed(24, 0), FrameError::Code, "no bf16 is so small");
    assert_eq!(changed(24, 255), FrameError::Code, "no bf16 is so large");
    assert_eq!(changed(26, 0x7f), FrameError::Code, "it is no number");
    assert_eq!(opened(form, &frame, 126), Err(FrameError::Length { stored: 128, asked: 126 }));
    assert_eq!(opened(form, &frame[..23], 128), Err(FrameError::Cut));
    assert_eq!(opened(form, &frame[..frame.len() - 1], 128), Err(FrameError::Cut));
    let longer = |bytes: &[u8]| opened(form, &[&frame[..], bytes].concat(), 128);
    assert!(longer(&[0; 4095]).is_ok());
    assert_eq!(longer(&[0; 4096]), Err(FrameError::Trailing));
    assert_eq!(longer(&[1]), Err(FrameError::Trailing));
    let exact = Expander::default().open(&frame, &mut [0; 128]);
    assert_eq!(exact, Err(FrameError::Lossy { lossy: 16, element: 1 }), "who is exact takes none");
}

/// A frame that says to hold another one, of very many bytes: the caller's length counts.
#[test]
fn a_bomb_fills_what_it_was_given_and_no_more() {
    let zeros = vec![0; 1 << 20];
    for form in forms() {
        for codec in Codec::ALL {
            let mut packer = Compressor::new(codec).unwrap();
            let frame = lossy_frame(form, &zeros, Some(&mut packer)).unwrap();
            assert!(frame.len() < 1 << 13, "{form:?} {codec}: {}", frame.len());
            assert_eq!(opened(form, &frame, 1 << 20).as_ref(), Ok(&zeros));
            assert_eq!(opened(form, &frame, 4096), Err(FrameError::Length { stored: 1 << 20, asked: 4096 }));
            let mut lying = frame.clone();
            lying[8..16].copy_from_slice(&4096_u64.to_le_bytes());
            assert!(matches!(opened(form, &lying, 4096), Err(FrameError::Length { .. })), "{form:?} {codec}");
            let mut deep = frame[..24].to_vec();
            deep.extend_from_slice(&frame);
            assert!(opened(form, &deep, 1 << 20).is_err(), "a lossy frame in a lossy frame");
        }
    }
}

/// Exact frames are what is stored where there is no lossy one.
#[test]
fn exact_frames_are_opened_too_and_bodies_become_shorter() {
    for form in forms() {
        let content = content(form.element, &normal(4096, 2));
        let exact = Compressor::new(Codec::Zstd).unwrap().frame(&content, Some(form.element.width() as u32));
        let exact = exact.unwrap();
        assert_eq!(opened(form, &exact, content.len()).unwrap(), content);
        let mut packer = Compressor::new(Codec::Zstd).unwrap();
        let plain = frame(form, &content).unwrap();
        let packed = lossy_frame(form, &content, Some(&mut packer)).unwrap();
        assert!(packed.len() <= plain.len(), "{form:?}");
        assert_eq!(opened(form, &packed, content.len()), opened(form, &plain, content.len()));
    }
}

fn any_form() -> impl Strategy<Value = LossyForm> {
    (0..3_usize, 0..3_usize)
        .prop_map(|(lossy, element)| LossyForm { lossy: Lossy::ALL[lossy], element: Element::ALL[element] })
}

proptest! {
    /// Any bits, of which some are not finite.
    #[test]
    fn what_was_encoded_once_encodes_to_the_same_bytes(
        form in any_form(),
        bits in prop::collection::vec(any::<u32>(), 40..200),
        spread in 0..32_u32,
    ) {
        // With `spread`, exponents that are near each other.
        let bits = bits.iter().map(|bits| if spread == 0 { *bits } else { bits & !(0x7fff_ffff_u32 << spread.min(30) >> 1) | 0x3c00_0000 });
        let width = form.element.width();
        let bytes: Vec<u8> = bits.flat_map(|bits| bits.to_le_bytes()[4 - width..].to_vec()).collect();
        if let Some(first) = frame(form, &bytes) {
            let once = opened(form, &first, bytes.len()).unwrap();
            prop_assert!(numbers(form.element, &once).iter().all(|number| number.is_finite()));
            prop_assert_eq!(frame(form, &once), Some(first));
        }
    }

    #[test]
    fn a_changed_bit_is_noticed(form in any_form(), bit in 0..40_000_usize) {
        let content = content(form.element, &normal(3000, 9));
        let mut changed = frame(form, &content).unwrap();
        let back = opened(form, &changed, content.len()).unwrap();
        let at = bit / 8 % changed.len();
        changed[at] ^= 1 << (bit % 8);
        // The unused half of a last byte, or of a scale of zeros, does not matter.
        if let Ok(opened) = opened(form, &changed, content.len()) {
            prop_assert_eq!(opened, back);
        }
    }
}
