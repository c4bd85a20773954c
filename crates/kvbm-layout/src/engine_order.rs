//! Engines' names for the order of tensor axes: vLLM's `LBHNC`, `BLHNC` and their like.

use std::fmt;
use std::str::FromStr;

use crate::arith;
use crate::config::LayoutConfig;
use crate::geometry::{CellStrides, width};
use crate::layout::LayoutError;

/// One axis of an engine's KV tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum EngineAxis {
    /// L
    Layer,
    /// B
    Block,
    /// H
    Head,
    /// N, the token in the block
    Token,
    /// C, the element of a head; holds K and V side by side
    Element,
}

impl EngineAxis {
    const ALL: [Self; 5] = [Self::Layer, Self::Block, Self::Head, Self::Token, Self::Element];

    /// The letter of this axis.
    pub const fn letter(self) -> char {
        match self {
            Self::Layer => 'L',
            Self::Block => 'B',
            Self::Head => 'H',
            Self::Token => 'N',
            Self::Element => 'C',
        }
    }
}

/// A permutation of the logical axes `[L, B, H, N, C]`, outermost first. Parse it from its name:
/// `"LBHNC".parse()`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct EngineOrder([EngineAxis; 5]);

impl EngineOrder {
    /// The six orders that vLLM names.
    pub const VLLM: [&'static str; 6] = ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"];

    /// The axes, outermost first.
    pub fn axes(self) -> [EngineAxis; 5] {
        self.0
    }

    /// Cells of a dense tensor with `layers` layers in one region, and its length in bytes.
    pub(crate) fn dense_cells(
        self,
        config: &LayoutConfig,
        layers: u64,
    ) -> Result<(Vec<CellStrides>, u64), LayoutError> {
        let packed: u64 = (0..config.outer_dim).map(|outer| u64::from(config.head_dim_of(outer))).sum();
        let mut strides = CellStrides::default();
        let mut stride = width(config);
        for axis in self.0.into_iter().rev() {
            let (slot, extent) = match axis {
                EngineAxis::Layer => (&mut strides.layer_stride, layers),
                EngineAxis::Block => (&mut strides.block_stride, u64::from(config.num_blocks)),
                EngineAxis::Head => (&mut strides.head_stride, u64::from(config.num_heads)),
                EngineAxis::Token => (&mut strides.token_stride, u64::from(config.page_size)),
                EngineAxis::Element => (&mut strides.elem_stride, packed),
            };
            *slot = stride;
            stride = arith::product("the engine's tensor", &[stride, extent])?;
        }
        let mut first = 0;
        let mut cells = Vec::new();
        for outer in 0..config.outer_dim {
            let offset = arith::product("the engine's tensor", &[first, strides.elem_stride])?;
            cells.push(CellStrides { offset, ..strides });
            first += u64::from(config.head_dim_of(outer));
        }
        Ok((cells, stride))
    }
}

impl fmt::Display for EngineOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|axis| write!(f, "{}", axis.letter()))
    }
}

/// A name that is no order of axes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "unknown engine order `{name}`; each of the letters L, B, H, N, C has to occur once, such as LBHNC or BLNHC"
)]
pub struct UnknownEngineOrder {
    /// What was given.
    pub name: String,
}

impl FromStr for EngineOrder {
    type Err = UnknownEngineOrder;

    fn from_str(name: &str) -> Result<Self, UnknownEngineOrder> {
        let unknown = || UnknownEngineOrder { name: name.chars().take(64).collect() };
        let mut axes = [EngineAxis::Layer; 5];
        let mut seen = 0;
        for letter in name.chars() {
            let axis = EngineAxis::ALL.into_iter().find(|axis| axis.letter() == letter.to_ascii_uppercase());
            let axis = axis.filter(|axis| !axes[..seen].contains(axis)).ok_or_else(unknown)?;
            axes[seen] = axis;
            seen += 1;
        }
        if seen == axes.len() { Ok(Self(axes)) } else { Err(unknown()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for name in EngineOrder::VLLM {
            assert_eq!(name.parse::<EngineOrder>().unwrap().to_string(), name);
        }
    }

    #[test]
    fn wrong_names_are_refused() {
        for name in ["", "LBHN", "LLHNC", "LBHNCC", "LBHNX", "LBHNCL"] {
            assert!(name.parse::<EngineOrder>().unwrap_err().to_string().contains(name));
        }
    }
}
