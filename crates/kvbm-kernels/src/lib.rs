//! Conversions between the forms in which engines and stores keep a KV block.
//!
//! | form | shape | memory per block |
//! |---|---|---|
//! | [`BlockForm::Stack`] | `[nl][no]` of `[nt, nh, hd]` (NHD) or `[nh, nt, hd]` (HND) | `nl * no` chunks |
//! | [`BlockForm::Operational`] | `[nl, no, inner]`, `inner` being a stack's chunk as it is | one chunk |
//! | [`BlockForm::Universal`] | `[nh, nl, no, nt, hd]` | one chunk |
//!
//! `nl` layers, `no` outer parts (2: keys and values; 1: MLA), `nh` heads, `nt` tokens of a block,
//! `hd` elements of a head. Heads are outermost in the universal form, so a tensor-parallel rank's
//! part of it is one contiguous slice.
//!
//! In every form the `hd` elements of one (layer, outer, head, token) are contiguous: a *row*. So
//! every conversion is a permutation of rows, whatever the element type: [`convert`] moves them,
//! and moves neighbours together.
//!
//! **Knows:** forms, and how to move rows between them.
//! **Must never know:** what a block is for, which one to move, where memory comes from.
//!
//! The free functions run on the CPU and define what any kernel must do, byte for byte. On a
//! device, a [`Conversion`] checks [`Operand`]s of device addresses and says which kernel of
//! `cuda/kvbm_kernels.cu` to launch, with which argument and geometry: one launch for any number of
//! blocks. [`PairCopies`] does the same for ranges of unequal lengths.
//!
//! ```
//! use kvbm_kernels::{BlockShape, ChunkOrder, block_to_universal};
//!
//! // One layer, keys only, 2 heads, 2 tokens, rows of one 4-byte element.
//! let shape = BlockShape::new(1, 1, 2, 2, 1, 4)?;
//! let nhd = *b"t0h0t0h1t1h0t1h1";
//! let mut universal = [0; 16];
//! block_to_universal(&shape, ChunkOrder::Nhd, &[&nhd], &mut [&mut universal])?;
//! assert_eq!(&universal, b"t0h0t1h0t0h1t1h1");
//! # Ok::<(), kvbm_kernels::KernelError>(())
//! ```
#![deny(unsafe_code)]

mod backend;
mod conversion;
mod convert;
#[allow(unsafe_code)]
mod cuda;
mod error;
mod form;
mod image;
mod job;
mod layout;
#[allow(unsafe_code)]
mod measure;
mod operand;
mod pairs;
mod params;
mod run;
mod tensor;

pub use backend::{Backend, Capabilities, Crossover, Measurement};
pub use conversion::{Conversion, Piece};
pub use convert::{
    block_to_operational, block_to_universal, convert, convert_heads, operational_to_block,
    operational_to_universal, universal_to_block, universal_to_operational,
};
pub use cuda::{CudaKernels, StagedWords};
pub use error::{Argument, KernelError};
pub use form::{BlockForm, BlockShape, ChunkOrder, Heads};
pub use image::{FATBIN, Image, ImageError, ImageKind, image_for, images};
pub use job::{DeviceLimits, Kernel, Launch, THREADS};
pub use measure::{HostCopies, OneWay};
pub use operand::Operand;
pub use pairs::PairCopies;
pub use run::{Converter, Driver};
pub use tensor::Tensor;
