//! Lossless compression of KV blocks.
//!
//! The bytes of a floating-point number differ in kind: its exponent takes few values in a block,
//! its mantissa takes all. So a chunk of a block is first cut into *planes*, one for each byte of
//! an element. Then each plane is compressed by itself, or stays as it is where that saves too
//! little.
//!
//! **Knows:** bytes, the width of their elements, and two compressors.
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
//! | `fuzz` | the body of the fuzz target | `frame`, `entropy` |
//! | `frame` | frames: chunks of planes, and a checksum of the content | `entropy`, `planes` |
//! | `entropy` | the compressors of planes | - |
//! | `planes` | elements to planes and back | - |
#![forbid(unsafe_code)]

mod entropy;
mod frame;
#[cfg(any(test, feature = "fuzz"))]
#[doc(hidden)]
pub mod fuzz;
mod planes;

pub use entropy::Codec;
pub use frame::{Compressor, Expander, FRAME_HEADER_BYTES, FrameError};
