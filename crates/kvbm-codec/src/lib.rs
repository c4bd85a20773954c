//! Compression of KV blocks, lossless and lossy.
//!
//! The bytes of a floating-point number differ in kind: its exponent takes few values in a block,
//! its mantissa takes all. So a chunk of a block is first cut into *planes*, one for each byte of
//! an element. Then each plane is compressed by itself, or stays as it is where that saves too
//! little.
//!
//! A lossy frame has a short code for each number, and a scale for every 32 of them. Its checksum
//! is that of the content as it comes back. A frame of that content has the same codes: a block
//! that is written and read many times changes once.
//!
//! **Knows:** bytes, the type or width of their elements, and two compressors.
//! **Must never know:** which block they are of, where they lie.
//!
//! A frame is untrusted: whoever opens it says how long its content is. Nothing is allocated by a
//! number in it.
//!
//! ```
//! use kvbm_codec::{Codec, Compressor, Expander};
//!
//! let content: Vec<u8> = (0..4096_u32).flat_map(|n| (1.0 + n as f32 / 8192.0).to_le_bytes()).collect();
//! let frame = Compressor::new(Codec::Zstd)?.frame(&content, Some(4)).expect("it becomes shorter");
//! let mut opened = vec![0; content.len()];
//! Expander::default().open(&frame, &mut opened)?;
//! assert!(opened == content && frame.len() < content.len() * 3 / 4);
//! # Ok::<(), kvbm_codec::FrameError>(())
//! ```
//!
//! # Modules
//! | module | what it is | uses |
//! |---|---|---|
//! | `fuzz` | the body of the fuzz target | `lossy`, `frame`, `form`, `entropy` |
//! | `lossy` | lossy frames: codes, scales, and a checksum of what comes back | `frame`, `quantise`, `form`, `entropy` |
//! | `quantise` | numbers to codes and back | `form` |
//! | `frame` | frames: chunks of planes, and a checksum of the content | `form`, `entropy`, `planes` |
//! | `form` | which numbers become which codes | - |
//! | `entropy` | the compressors of planes | - |
//! | `planes` | elements to planes and back | - |
#![forbid(unsafe_code)]

mod entropy;
mod form;
mod frame;
#[cfg(any(test, feature = "fuzz"))]
#[doc(hidden)]
pub mod fuzz;
mod lossy;
mod planes;
mod quantise;

pub use entropy::Codec;
pub use form::{Element, Lossy, LossyForm};
pub use frame::{Compressor, Expander, FRAME_HEADER_BYTES, FrameError};
pub use lossy::{is_compressed, lossy_frame};
pub use quantise::PIECE as LOSSY_PIECE;
