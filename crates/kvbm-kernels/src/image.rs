//! The prebuilt kernels, and what of them a device would load.

/// The fatbin of all kernels, for `cuModuleLoadData`. It is the prebuilt one, which `cargo xtask
/// regen-kernels` makes of `cuda/`. But if the environment variable `CUDA_ARCHS` named
/// architectures at build time, a local nvcc built it.
pub const FATBIN: &[u8] = include_bytes!(env!("KVBM_KERNELS_FATBIN"));

/// What an image is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ImageKind {
    /// Machine code: runs on devices of its major version whose minor version is not smaller.
    Cubin,
    /// Text that the driver compiles when it loads it: runs on every device that is not older.
    Ptx,
}

/// One image of a fatbin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Image<'a> {
    /// What it is.
    pub kind: ImageKind,
    /// Compute capability that it was built for, times ten: 90 is 9.0.
    pub arch: u32,
    /// Its bytes.
    pub code: &'a [u8],
}

/// A fatbin that cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("byte {at} of the fatbin: {what}; build the kernels again (`cargo xtask regen-kernels`)")]
pub struct ImageError {
    /// Where.
    pub at: usize,
    /// What is wrong.
    pub what: &'static str,
}

/// First bytes of a fatbin.
const MAGIC: u64 = 0xBA55_ED50;

/// The images of a fatbin, in its order. The format is not documented; this reads what nvFatbin
/// writes. First comes a header (magic, version, length of the header, length of the rest). Then
/// each image has a header and its bytes. That header is kind, version, length of the header and
/// length of the image, with the architecture at byte 28 and flags at 40.
///
/// # Errors
/// [`ImageError`] if a length does not fit or an image is compressed.
pub fn images(fatbin: &[u8]) -> Result<Vec<Image<'_>>, ImageError> {
    let fail = |at, what| Err(ImageError { at, what });
    let number = |at: usize, len: usize| {
        let bytes = at.checked_add(len).and_then(|end| fatbin.get(at..end));
        let bytes = bytes.ok_or(ImageError { at, what: "it ends too early" })?;
        Ok(bytes.iter().rev().fold(0_u64, |value, byte| value << 8 | u64::from(*byte)))
    };
    let size =
        |value: u64, at| usize::try_from(value).map_err(|_| ImageError { at, what: "a length is too large" });
    if number(0, 4)? != MAGIC {
        return fail(0, "it does not begin like one");
    }
    let mut at = size(number(6, 2)?, 6)?;
    let rest = size(number(8, 8)?, 8)?;
    if at < 16 || fatbin.len() - at.min(fatbin.len()) < rest {
        return fail(8, "its length is wrong");
    }
    let end = at + rest;
    let mut images = Vec::new();
    while at < end {
        let header = size(number(at + 4, 4)?, at + 4)?;
        let length = size(number(at + 8, 8)?, at + 8)?;
        let begin = at.checked_add(header).filter(|_| header >= 64);
        let stop = begin.and_then(|begin| begin.checked_add(length)).filter(|stop| *stop <= end);
        let (Some(begin), Some(stop)) = (begin, stop) else { return fail(at, "an image does not fit") };
        if number(at + 16, 4)? != 0 {
            return fail(at + 16, "an image is compressed");
        }
        let kind = match number(at, 2)? {
            1 => ImageKind::Ptx,
            2 => ImageKind::Cubin,
            _ => return fail(at, "an image is of an unknown kind"),
        };
        images.push(Image { kind, arch: number(at + 28, 4)? as u32, code: &fatbin[begin..stop] });
        at = stop;
    }
    Ok(images)
}

/// The image that a device of this compute capability loads: the best machine code, else PTX, else
/// none.
pub fn image_for<'a>(images: &[Image<'a>], major: u32, minor: u32) -> Option<Image<'a>> {
    let device = major * 10 + minor;
    let runs = |image: &&Image<'a>| match image.kind {
        ImageKind::Cubin => image.arch / 10 == major && image.arch <= device,
        ImageKind::Ptx => image.arch <= device,
    };
    images.iter().filter(runs).max_by_key(|image| (image.kind == ImageKind::Cubin, image.arch)).copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Kernel;

    const PREBUILT: &[u8] = include_bytes!("../cuda/prebuilt/kvbm_kernels.fatbin");

    #[test]
    fn every_image_that_is_embedded_has_every_kernel() {
        let images = images(FATBIN).unwrap();
        assert!(images.iter().any(|image| image.kind == ImageKind::Ptx));
        assert!(images.iter().any(|image| image.kind == ImageKind::Cubin));
        every_kernel_in(&images);
    }

    #[test]
    fn the_prebuilt_image_has_every_architecture() {
        let images = images(PREBUILT).unwrap();
        let cubins = images.iter().filter(|image| image.kind == ImageKind::Cubin);
        assert_eq!(cubins.map(|image| image.arch).collect::<Vec<_>>(), [80, 86, 89, 90, 100, 120]);
        let ptx: Vec<_> = images.iter().filter(|image| image.kind == ImageKind::Ptx).collect();
        assert_eq!(ptx.iter().map(|image| image.arch).collect::<Vec<_>>(), [80]);
        every_kernel_in(&images);
    }

    fn every_kernel_in(images: &[Image<'_>]) {
        for image in images {
            for kernel in Kernel::ALL {
                let name = kernel.name().as_bytes();
                let found = image.code.windows(name.len()).any(|bytes| bytes == name);
                assert!(found, "{} is not in {:?} {}", kernel.name(), image.kind, image.arch);
            }
        }
    }

    #[test]
    fn devices_load_machine_code_where_there_is_some() {
        let images = images(PREBUILT).unwrap();
        for (major, minor, expected) in [
            (7, 5, None),
            (8, 0, Some((ImageKind::Cubin, 80))),
            (8, 6, Some((ImageKind::Cubin, 86))),
            (8, 7, Some((ImageKind::Cubin, 86))),
            (8, 9, Some((ImageKind::Cubin, 89))),
            (9, 0, Some((ImageKind::Cubin, 90))),
            (10, 0, Some((ImageKind::Cubin, 100))),
            (10, 3, Some((ImageKind::Cubin, 100))),
            (11, 0, Some((ImageKind::Ptx, 80))),
            (12, 0, Some((ImageKind::Cubin, 120))),
            (13, 0, Some((ImageKind::Ptx, 80))),
        ] {
            let image = image_for(&images, major, minor).map(|image| (image.kind, image.arch));
            assert_eq!(image, expected, "compute capability {major}.{minor}");
        }
    }

    #[test]
    fn damaged_fatbins_are_errors() {
        let small = &PREBUILT[..4096];
        assert_eq!(images(&[]).unwrap_err().what, "it ends too early");
        assert_eq!(images(b"not a fatbin at all").unwrap_err().what, "it does not begin like one");
        assert_eq!(images(small).unwrap_err().what, "its length is wrong");
        // Any byte of the headers may be anything: an answer or an error, never a panic.
        for at in 0..160 {
            for value in [0, 1, 0x7F, 0xFF] {
                let mut damaged = PREBUILT.to_vec();
                damaged[at] = value;
                if let Ok(images) = images(&damaged) {
                    assert!(images.iter().map(|image| image.code.len()).sum::<usize>() <= PREBUILT.len());
                }
            }
        }
    }
}
