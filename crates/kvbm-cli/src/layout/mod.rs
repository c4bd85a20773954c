//! `kvbm layout explain`: how a block lies in memory, and what copying it to another layout does.

mod draw;

use crate::number::{ANY, SOME, whole};
use std::ops::Range;

use anyhow::{Context, Result};
use clap::{Args, Subcommand, ValueEnum};
use kvbm_layout::{
    AxisOrder, BlockLayout, CopyPlan, DType, FullyContiguous, LayerSeparate, LayoutConfig, OuterPlacement,
    Selection,
};

/// What to show.
#[derive(Debug, Subcommand)]
pub enum LayoutCommand {
    /// Draw how a block lies in memory and, with --to, what copies it to another layout.
    Explain(Box<ExplainArgs>),
}

/// Families of layouts on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Family {
    /// One region; each block is one run of bytes.
    FullyContiguous,
    /// One region per layer: all keys, then all values.
    LayerSeparate,
    /// One region per layer: keys and values of a block side by side.
    LayerSeparateBlockOuter,
    /// One region per layer: keys and values side by side in each head.
    LayerSeparatePacked,
}

/// Options of `kvbm layout explain`.
#[derive(Clone, Debug, Args)]
pub struct ExplainArgs {
    /// Family of the layout.
    #[arg(long = "type", value_enum, default_value_t = Family::FullyContiguous)]
    pub family: Family,

    /// Order of the axes: nhd, hnd, operational, operational-nhd, operational-hnd, universal.
    #[arg(long, value_name = "NAME", default_value = "nhd")]
    pub order: AxisOrder,

    /// A second layout: show what copies a block to it.
    #[arg(long, value_enum)]
    pub to: Option<Family>,

    /// Order of the axes of the second layout, as for --order.
    #[arg(long, value_name = "NAME", default_value = "nhd", requires = "to")]
    pub to_order: AxisOrder,

    /// Copy only these layers, the end not included (0..2 is two layers).
    #[arg(long, value_name = "A..B", value_parser = range, requires = "to")]
    pub copy_layers: Option<Range<u32>>,

    /// Copy only these heads, likewise.
    #[arg(long, value_name = "A..B", value_parser = range, requires = "to")]
    pub copy_heads: Option<Range<u32>>,

    /// Layers of a block.
    #[arg(long, value_name = "N", default_value_t = 4, allow_negative_numbers = true, value_parser = whole::<u32>(SOME))]
    pub layers: u32,

    /// Tensors of a layer: 2 for keys and values, 1 for MLA.
    #[arg(long, value_name = "N", default_value_t = 2, allow_negative_numbers = true, value_parser = whole::<u32>(SOME))]
    pub outer_dim: u32,

    /// Tokens of a block.
    #[arg(long, value_name = "N", default_value_t = 16, allow_negative_numbers = true, value_parser = whole::<u32>(SOME))]
    pub page_size: u32,

    /// KV heads of a layer.
    #[arg(long, value_name = "N", default_value_t = 8, allow_negative_numbers = true, value_parser = whole::<u32>(SOME))]
    pub heads: u32,

    /// Elements of a head.
    #[arg(long, value_name = "N", default_value_t = 128, allow_negative_numbers = true, value_parser = whole::<u32>(SOME))]
    pub head_dim: u32,

    /// Element type.
    #[arg(long, value_name = "NAME", default_value = "bf16", help = dtypes())]
    pub dtype: DType,

    /// Blocks of the layout.
    #[arg(long, value_name = "N", default_value_t = 4, allow_negative_numbers = true, value_parser = whole::<u32>(SOME))]
    pub blocks: u32,

    /// Alignment of a block in bytes, a power of two.
    #[arg(long, value_name = "BYTES", default_value_t = 1, allow_negative_numbers = true, value_parser = whole::<u64>(1..=u64::MAX))]
    pub alignment: u64,

    /// The block to draw, from 0.
    #[arg(long, value_name = "N", default_value_t = 1, allow_negative_numbers = true, value_parser = whole::<u32>(ANY))]
    pub block: u32,
}

fn dtypes() -> String {
    format!("Element type: {}", DType::ALL.map(DType::name).join(", "))
}

/// Carries out `command` and returns what to print.
pub fn run(command: &LayoutCommand) -> Result<String> {
    let LayoutCommand::Explain(args) = command;
    let source = build(args.family, args.order, args)?;
    let mut out = draw::layout(source.as_ref(), args.block)?;
    if let Some(family) = args.to {
        let target = build(family, args.to_order, args).context("the layout of --to")?;
        out.push('\n');
        out += &draw::layout(target.as_ref(), args.block)?;
        let mut selection = Selection::all();
        if let Some(layers) = &args.copy_layers {
            selection = selection.layers(layers.start, layers.start, layers.end - layers.start);
        }
        if let Some(heads) = &args.copy_heads {
            selection = selection.heads(heads.start, heads.start, heads.end - heads.start);
        }
        let plan = CopyPlan::between(source.as_ref(), target.as_ref(), &selection)
            .context("no copy plan between the two layouts")?;
        out.push('\n');
        out += &draw::plan(&plan, args.block)?;
    }
    Ok(out)
}

fn build(family: Family, order: AxisOrder, args: &ExplainArgs) -> Result<Box<dyn BlockLayout>> {
    let inner = args.heads.checked_mul(args.head_dim).context("--heads times --head-dim is beyond 2^32")?;
    let config = LayoutConfig::builder()
        .num_blocks(args.blocks)
        .num_layers(args.layers)
        .outer_dim(args.outer_dim)
        .page_size(args.page_size)
        .inner_dim(inner)
        .num_heads(args.heads)
        .dtype(args.dtype)
        .alignment(args.alignment)
        .build()?;
    let separate = |placement| -> Result<Box<dyn BlockLayout>> {
        Ok(Box::new(LayerSeparate::new(config.clone(), order, placement)?))
    };
    match family {
        Family::FullyContiguous => Ok(Box::new(FullyContiguous::new(config, order)?)),
        Family::LayerSeparate => separate(OuterPlacement::KvOuter),
        Family::LayerSeparateBlockOuter => separate(OuterPlacement::BlockOuter),
        Family::LayerSeparatePacked => separate(OuterPlacement::PackedInHead),
    }
}

fn range(text: &str) -> Result<Range<u32>, String> {
    let parse = || {
        let (first, end) = text.split_once("..")?;
        let range = first.trim().parse::<u32>().ok()?..end.trim().parse::<u32>().ok()?;
        (!range.is_empty()).then_some(range)
    };
    parse().ok_or_else(|| "expected a range like 0..4 (the end is not part of it)".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Cli, CliCommand};
    use clap::Parser;

    fn explain(line: &str) -> Result<String> {
        let words = ["kvbm", "layout", "explain"].into_iter().chain(line.split_whitespace());
        let Some(CliCommand::Layout { command }) = Cli::try_parse_from(words)?.command else {
            panic!("not layout")
        };
        run(&command)
    }

    #[test]
    fn a_contiguous_block_is_one_run_and_copies_as_one() {
        let text = explain("--to fully-contiguous").unwrap();
        assert!(text.contains("one run of 262144 bytes"), "{text}");
        assert!(text.contains("1 run of 262144 bytes per block"), "{text}");
    }

    #[test]
    fn an_engine_layout_is_cut_into_its_cells() {
        let text =
            explain("--type layer-separate --to fully-contiguous --to-order universal --layers 2").unwrap();
        assert!(text.contains("2 regions"), "{text}");
        assert!(text.contains("KvOuter"), "{text}");
        // Every (layer, outer, token, head) row of 256 bytes goes its own way.
        assert!(text.contains("512 runs of 256 bytes per block"), "{text}");
    }

    #[test]
    fn slices_of_heads_and_layers_are_planned() {
        let text = explain("--order universal --to fully-contiguous --to-order universal --copy-heads 2..4")
            .unwrap();
        assert!(text.contains("1 run of 65536 bytes per block"), "{text}");
        let text = explain("--to fully-contiguous --copy-layers 1..3").unwrap();
        assert!(text.contains("1 run of 131072 bytes per block"), "{text}");
    }

    #[test]
    fn impossible_shapes_are_explained() {
        for (line, message) in [
            ("--alignment 3", "power of two"),
            ("--type layer-separate --order universal", "does not support axis order universal"),
            ("--block 4", "block 4 is out of range"),
            ("--to fully-contiguous --copy-heads 4..4", "expected a range like 0..4"),
            ("--to fully-contiguous --copy-heads 4..40", "heads"),
            ("--copy-heads 0..1", "--to"),
            ("--order ndh", "unknown axis order"),
            ("--heads 4294967295", "beyond 2^32"),
        ] {
            let error = format!("{:#}", explain(line).unwrap_err());
            assert!(error.contains(message), "{line}: {error}");
        }
    }
}
