//! Elements to planes and back: plane `n` has byte `n` of each element.
//!
//! The widths are written out, so that the compiler makes vector instructions of them.

/// Cuts elements of `width` bytes into planes that lie one after the other. Both are of the same
/// length, a multiple of `width`.
pub(crate) fn split(elements: &[u8], width: usize, planes: &mut [u8]) {
    match width {
        2 => split_as::<2>(elements, planes),
        4 => split_as::<4>(elements, planes),
        8 => split_as::<8>(elements, planes),
        _ => planes.copy_from_slice(elements),
    }
}

fn split_as<const WIDTH: usize>(elements: &[u8], planes: &mut [u8]) {
    let (elements, _) = elements.as_chunks::<WIDTH>();
    for (byte, plane) in planes.chunks_exact_mut(elements.len().max(1)).enumerate() {
        for (out, element) in plane.iter_mut().zip(elements) {
            *out = element[byte];
        }
    }
}

/// The other way round.
pub(crate) fn join(planes: &[u8], width: usize, elements: &mut [u8]) {
    let length = planes.len() / width.max(1);
    match width {
        2 => {
            let (low, high) = planes.split_at(length);
            let (elements, _) = elements.as_chunks_mut::<2>();
            for ((element, low), high) in elements.iter_mut().zip(low).zip(high) {
                *element = [*low, *high];
            }
        }
        4 => {
            let (low, high) = planes.split_at(2 * length);
            let ((a, b), (c, d)) = (low.split_at(length), high.split_at(length));
            let (elements, _) = elements.as_chunks_mut::<4>();
            for ((((element, a), b), c), d) in elements.iter_mut().zip(a).zip(b).zip(c).zip(d) {
                *element = [*a, *b, *c, *d];
            }
        }
        8 => {
            let (elements, _) = elements.as_chunks_mut::<8>();
            for (byte, plane) in planes.chunks_exact(length.max(1)).enumerate() {
                for (element, value) in elements.iter_mut().zip(plane) {
                    element[byte] = *value;
                }
            }
        }
        _ => elements.copy_from_slice(planes),
    }
}

/// Bytes of a content that tell the width of its elements.
const SAMPLE: usize = 8 << 10;

/// The width of elements whose planes have the least entropy, in a part of the middle of `content`:
/// 1, 2 or 4.
pub(crate) fn width_of(content: &[u8]) -> usize {
    let middle = content.len().saturating_sub(SAMPLE) / 2 / 8 * 8;
    let sample = &content[middle..content.len().min(middle + SAMPLE)];
    let sample = &sample[..sample.len() / 4 * 4];
    let mut planes = vec![0; sample.len()];
    let mut best = (1, f64::INFINITY);
    for width in [1, 2, 4] {
        split(sample, width, &mut planes);
        let bits: f64 = planes.chunks_exact((sample.len() / width).max(1)).map(entropy).sum();
        // A wider one has to be better by more than chance.
        if bits < best.1 * 0.99 {
            best = (width, bits);
        }
    }
    best.0
}

/// Bits that the bytes take, by how often each comes; corrected for the number of samples.
fn entropy(bytes: &[u8]) -> f64 {
    let mut counts = [0_u32; 256];
    for byte in bytes {
        counts[usize::from(*byte)] += 1;
    }
    let total = bytes.len() as f64;
    let values = counts.iter().filter(|count| **count > 0);
    let (mut bits, mut distinct) = (0.0, 0.0);
    for count in values {
        bits -= f64::from(*count) * (f64::from(*count) / total).log2();
        distinct += 1.0;
    }
    bits + (distinct - 1.0_f64).max(0.0) / (2.0 * std::f64::consts::LN_2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_width_of_numbers_is_found_out() {
        let mut state = 1_u32;
        let mut number = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 24) as f32 - 0.5
        };
        let floats: Vec<f32> = (0..20_000).map(|_| number()).collect();
        let single: Vec<u8> = floats.iter().flat_map(|number| number.to_le_bytes()).collect();
        let brain: Vec<u8> = floats.iter().flat_map(|number| number.to_le_bytes()[2..].to_vec()).collect();
        let noise: Vec<u8> = floats.iter().map(|number| number.to_le_bytes()[0]).collect();
        for bytes in [0, 3, 4096, 9000, 20_000] {
            assert_eq!(width_of(&noise[..bytes]), 1, "{bytes} bytes");
        }
        for bytes in [4096, 9000, 20_000] {
            assert_eq!((width_of(&single[..bytes]), width_of(&brain[..bytes])), (4, 2), "{bytes} bytes");
        }
        assert_eq!(width_of(&[7; 5000]), 1);
    }

    #[test]
    fn planes_are_bytes_of_elements_and_come_back() {
        for width in [1, 2, 4, 8] {
            for count in [0, 1, 3, 64, 1000] {
                let elements: Vec<u8> = (0..width * count).map(|n| (n * 7 % 251) as u8).collect();
                let mut planes = vec![0; elements.len()];
                split(&elements, width, &mut planes);
                for (at, byte) in planes.iter().enumerate() {
                    let (plane, element) = (at / count, at % count);
                    assert_eq!(*byte, elements[element * width + plane], "width {width}");
                }
                let mut joined = vec![0; elements.len()];
                join(&planes, width, &mut joined);
                assert_eq!(joined, elements, "width {width}");
            }
        }
    }
}
