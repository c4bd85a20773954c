//! Layouts and copy plans in words and drawings, for people who want to see what lies where.

use std::fmt;

use crate::layout::{BlockLayout, Cell, CellView, LayoutError};
use crate::plan::{CopyPlan, Segment};

/// One axis of a cell.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct AxisDescription {
    /// `block`, `layer`, `token`, `head`, `element` or `byte`.
    pub name: &'static str,
    /// How many.
    pub extent: u64,
    /// Bytes between neighbours; `None` if neighbours are in different regions, or not at equal distances.
    pub stride: Option<u64>,
}

/// One cell: an outer chunk or an opaque plane, over all layers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CellDescription {
    /// `keys`, `values`, `latent`, `outer 2`, or the name of a plane.
    pub name: String,
    /// Region of layer 0.
    pub region: u32,
    /// Offset in layer 0 of block 0.
    pub offset: u64,
    /// Payload bytes in one layer of one block.
    pub bytes: u64,
    /// Longest run of bytes in one layer of one block.
    pub run_bytes: u64,
    /// Axes, outermost first. Axes that change the region stand in front.
    pub axes: Vec<AxisDescription>,
}

/// What a layout looks like.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayoutDescription {
    /// The family and the axis order, in words.
    pub title: String,
    /// The shape, in words.
    pub shape: String,
    /// Payload bytes of a block.
    pub bytes_per_block: u64,
    /// Bytes of all regions that are not payload of any block: padding.
    pub padding_bytes: u64,
    /// Bytes of all regions.
    pub total_bytes: u64,
    /// Number of regions.
    pub regions: usize,
    /// If blocks are one run of bytes: from one block to the next.
    pub block_stride: Option<u64>,
    /// The cells.
    pub cells: Vec<CellDescription>,
}

/// Describes `layout`.
///
/// # Errors
/// Only if the layout does not answer for its own layers and cells.
pub fn describe_layout(layout: &dyn BlockLayout) -> Result<LayoutDescription, LayoutError> {
    let config = layout.config();
    let bytes_per_block = layout.bytes_per_block();
    let total_bytes = layout.total_bytes();
    let payload = bytes_per_block.saturating_mul(u64::from(config.num_blocks));
    Ok(LayoutDescription {
        title: format!("{:?}, axis order {}", layout.layout_type(), layout.axis_order()),
        shape: format!(
            "{} blocks x {} layers x {} outer x {} tokens x {} heads x {} elements of {}",
            config.num_blocks,
            config.num_layers,
            config.outer_dim,
            config.page_size,
            config.num_heads,
            config.head_dim_of(0),
            config.dtype
        ),
        bytes_per_block,
        padding_bytes: total_bytes.saturating_sub(payload),
        total_bytes,
        regions: layout.regions().len(),
        block_stride: layout.contiguous_block().map(|run| run.stride),
        cells: config.cells().map(|cell| describe_cell(layout, cell)).collect::<Result<_, _>>()?,
    })
}

fn describe_cell(layout: &dyn BlockLayout, cell: Cell) -> Result<CellDescription, LayoutError> {
    let config = layout.config();
    let view = layout.view(0, cell)?;
    let mut axes = vec![
        axis("block", u64::from(config.num_blocks), Some(view.block_stride)),
        axis("layer", u64::from(config.num_layers), layer_stride(layout, cell)?),
    ];
    if view.opaque {
        axes.push(axis("byte", view.bytes(), Some(1)));
    } else {
        axes.push(axis("token", u64::from(view.tokens), Some(view.token_stride)));
        axes.push(axis("head", u64::from(view.heads), Some(view.head_stride)));
        axes.push(axis("element", view.elems, Some(view.elem_stride)));
    }
    axes.sort_by_key(|axis| std::cmp::Reverse(axis.stride.unwrap_or(u64::MAX)));
    let name = match cell {
        Cell::Kv(0) if config.outer_dim == 1 => "latent".to_owned(),
        Cell::Kv(0) => "keys".to_owned(),
        Cell::Kv(1) => "values".to_owned(),
        Cell::Kv(outer) => format!("outer {outer}"),
        Cell::Plane(plane) => {
            config.planes.get(plane as usize).map_or_else(String::new, |plane| plane.name.clone())
        }
    };
    let (region, offset) = (view.region, view.offset);
    Ok(CellDescription { name, region, offset, bytes: view.bytes(), run_bytes: run_bytes(&view), axes })
}

fn axis(name: &'static str, extent: u64, stride: Option<u64>) -> AxisDescription {
    AxisDescription { name, extent, stride }
}

/// Distance of layers, if all are in one region and equally far apart.
fn layer_stride(layout: &dyn BlockLayout, cell: Cell) -> Result<Option<u64>, LayoutError> {
    let mut stride = None;
    for layer in 1..layout.config().num_layers {
        let (a, b) = (layout.view(layer - 1, cell)?, layout.view(layer, cell)?);
        let step = b.offset.checked_sub(a.offset).filter(|_| a.region == b.region);
        if step.is_none() || stride.is_some_and(|stride| Some(stride) != step) {
            return Ok(None);
        }
        stride = step;
    }
    Ok(stride.or(Some(0)))
}

fn run_bytes(view: &CellView) -> u64 {
    let mut axes = [
        (view.elem_stride, view.elems),
        (view.token_stride, u64::from(view.tokens)),
        (view.head_stride, u64::from(view.heads)),
    ];
    axes.sort_unstable();
    let longer = axes.iter().filter(|&&(_, count)| count > 1);
    longer
        .fold((u64::from(view.elem_bytes), true), |(run, dense), &(stride, count)| {
            if dense && stride == run { (run * count, true) } else { (run, false) }
        })
        .0
}

impl fmt::Display for LayoutDescription {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.title)?;
        writeln!(f, "{}", self.shape)?;
        writeln!(
            f,
            "{} regions, {} bytes: {} bytes per block, {} bytes of padding in all",
            self.regions, self.total_bytes, self.bytes_per_block, self.padding_bytes
        )?;
        match self.block_stride {
            Some(stride) => {
                let pad = stride.saturating_sub(self.bytes_per_block);
                writeln!(
                    f,
                    "| block 0: {} bytes | {pad} pad | block 1 at +{stride} ...",
                    self.bytes_per_block
                )?;
            }
            None => writeln!(f, "a block is scattered")?,
        }
        for cell in &self.cells {
            write!(f, "  {:<10} region {}, offset {}: ", cell.name, cell.region, cell.offset)?;
            for (index, axis) in cell.axes.iter().enumerate() {
                let separator = if index == 0 { "" } else { ", " };
                match axis.stride {
                    Some(stride) => write!(f, "{separator}{}[{}] +{stride}", axis.name, axis.extent)?,
                    None => write!(f, "{separator}{}[{}] by region", axis.name, axis.extent)?,
                }
            }
            writeln!(f, "; runs of {} bytes", cell.run_bytes)?;
        }
        Ok(())
    }
}

/// What a copy plan will do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlanDescription {
    /// Bytes copied per block.
    pub bytes_per_block: u64,
    /// Contiguous runs per block.
    pub num_runs: u64,
    /// Shortest and longest run.
    pub run_bytes: (u64, u64),
    /// The segments.
    pub segments: Vec<Segment>,
}

/// Describes `plan`.
pub fn describe_plan(plan: &CopyPlan) -> PlanDescription {
    let lengths = || plan.segments().iter().map(|segment| segment.run_bytes);
    PlanDescription {
        bytes_per_block: plan.bytes_per_block(),
        num_runs: plan.num_runs(),
        run_bytes: (lengths().min().unwrap_or(0), lengths().max().unwrap_or(0)),
        segments: plan.segments().to_vec(),
    }
}

/// Segments beyond this many are counted, not listed.
const LISTED_SEGMENTS: usize = 8;

impl fmt::Display for PlanDescription {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (shortest, longest) = self.run_bytes;
        writeln!(
            f,
            "{} bytes per block in {} runs of {shortest} to {longest} bytes",
            self.bytes_per_block, self.num_runs
        )?;
        for segment in self.segments.iter().take(LISTED_SEGMENTS) {
            write!(
                f,
                "  region {} +{} -> region {} +{}: {} bytes",
                segment.src_region,
                segment.src_offset,
                segment.dst_region,
                segment.dst_offset,
                segment.run_bytes
            )?;
            for dim in segment.dims() {
                write!(f, " x {} (+{} -> +{})", dim.count, dim.src_stride, dim.dst_stride)?;
            }
            writeln!(f)?;
        }
        match self.segments.len().checked_sub(LISTED_SEGMENTS) {
            Some(more) if more > 0 => writeln!(f, "  and {more} more segments"),
            _ => Ok(()),
        }
    }
}
