//! Models with axes and models without.

use super::{ModelConfig, TensorBytes};
use kvbm_tokens::Namespace;

impl ModelConfig {
    /// A model whose blocks are bytes without axes: `tensor_bytes` has, for each tensor of a rank,
    /// the bytes of a block of `page_size` tokens. The engine's memory is bound to a
    /// [`kvbm_layout::OpaqueLayout`] of the same tensors.
    pub fn opaque(page_size: u32, tensor_bytes: impl IntoIterator<Item = u32>) -> Self {
        Self { page_size, opaque_tensors: TensorBytes::from_iter(tensor_bytes), ..Self::default() }
    }

    /// Whether blocks have no axes.
    pub fn is_opaque(&self) -> bool {
        !self.opaque_tensors.as_slice().is_empty()
    }

    /// The namespace of this model's blocks: `given`, with what the model says.
    #[must_use]
    pub fn namespace(&self, given: Namespace) -> Namespace {
        given.page_size(self.page_size).dtype(self.content())
    }

    /// What a namespace says of the elements: their type, or, where there are no axes, the bytes of
    /// each tensor, and the groups, where there are several. So blocks of one shape are never found
    /// by a deployment of another.
    pub(crate) fn content(&self) -> String {
        if self.is_opaque() {
            format!("opaque {}", self.opaque_tensors)
        } else if self.has_groups() {
            format!("{}; {}", self.dtype.name(), self.groups)
        } else {
            self.dtype.name().to_owned()
        }
    }
}
