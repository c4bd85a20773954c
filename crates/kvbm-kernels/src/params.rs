//! The bytes of a kernel's argument, field by field in the order of `cuda/jobs.h`: 8-byte fields
//! first, so that there is no padding but at the end.

/// Little-endian, as every device that these kernels run on.
#[derive(Debug, Default)]
pub(crate) struct Params {
    bytes: Vec<u8>,
}

impl Params {
    pub(crate) fn wide<const N: usize>(&mut self, fields: [u64; N]) {
        self.bytes.extend(fields.iter().flat_map(|field| field.to_le_bytes()));
    }

    pub(crate) fn narrow(&mut self, field: u32) {
        self.bytes.extend(field.to_le_bytes());
    }

    /// Padded to 8 bytes, as the compiler pads the structure.
    pub(crate) fn into_bytes(mut self) -> Vec<u8> {
        self.bytes.resize(self.bytes.len().next_multiple_of(8), 0);
        self.bytes
    }
}
