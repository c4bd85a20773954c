//! Layouts and copy plans as text.

use std::fmt::Write;

use anyhow::Result;
use kvbm_layout::{BlockLayout, Cell, CellView, CopyPlan, LayoutType, Segment};

use crate::human::bytes;
use crate::table::Table;

/// Characters of a drawn region.
const WIDTH: u64 = 64;
/// Regions, cells and segments that are shown; of more, the first ones.
const SHOWN: usize = 8;
/// Shorter runs are dominated by the cost of each copy.
const SMALL_RUN: u64 = 4096;

/// How `layout` and its block `block` lie in memory.
pub(super) fn layout(layout: &dyn BlockLayout, block: u32) -> Result<String> {
    let config = layout.config();
    let mut out = String::new();
    let family = match layout.layout_type() {
        LayoutType::FullyContiguous => "FullyContiguous".to_owned(),
        LayoutType::LayerSeparate(placement) => format!("LayerSeparate, {placement:?}"),
        LayoutType::Strided => "Strided".to_owned(),
    };
    let regions = layout.regions();
    // Writing to a string cannot fail, here and below.
    let _ = writeln!(
        out,
        "{family}, {}: {} blocks x {} layers x {} outer x {} tokens x {} heads x {} elements of {}",
        layout.axis_order(),
        config.num_blocks,
        config.num_layers,
        config.outer_dim,
        config.page_size,
        config.num_heads,
        config.head_dim_of(0),
        config.dtype,
    );
    let payload = layout.bytes_per_block();
    let shape = match layout.contiguous_block() {
        Some(run) if run.stride == run.bytes => format!("one run of {payload} bytes"),
        Some(run) => format!("one run of {payload} bytes, then {} of padding", run.stride - run.bytes),
        None => format!("{payload} bytes in several runs"),
    };
    let count = if regions.len() == 1 { "1 region".to_owned() } else { format!("{} regions", regions.len()) };
    let _ = writeln!(out, "{count}, {} in all; a block is {shape}\n", bytes(layout.total_bytes()));
    out += &strides(&layout.view(0, Cell::Kv(0))?);
    out += &regions_drawn(layout, block)?;
    out += &cells(layout, block)?;
    Ok(out)
}

fn strides(view: &CellView) -> String {
    let axes = [
        ("block", view.block_stride),
        ("token", view.token_stride),
        ("head", view.head_stride),
        ("element", view.elem_stride),
    ];
    let axes: Vec<_> = axes.iter().map(|(name, stride)| format!("{name} {stride}")).collect();
    format!("strides in bytes (layer 0, outer 0): {}\n\n", axes.join(", "))
}

fn letter(cell: Cell) -> char {
    match cell {
        Cell::Kv(0) => 'K',
        Cell::Kv(1) => 'V',
        Cell::Kv(_) => 'X',
        Cell::Plane(_) => 'P',
    }
}

/// One line per region: `K` and `V` where the block is, `.` where other blocks are.
fn regions_drawn(layout: &dyn BlockLayout, block: u32) -> Result<String> {
    let config = layout.config();
    let regions = layout.regions();
    let mut lines: Vec<Vec<char>> = vec![vec!['.'; WIDTH as usize]; regions.len().min(SHOWN)];
    for layer in 0..config.num_layers {
        for cell in config.cells() {
            let view = layout.block_view(block, layer, cell)?;
            let Some(line) = lines.get_mut(view.region as usize) else { continue };
            let total = u128::from(regions[view.region as usize].bytes.max(1));
            let at = |byte: u64| (u128::from(byte) * u128::from(WIDTH) / total) as usize;
            let (from, to) = (at(view.offset), at(view.offset + view.cell.span().saturating_sub(1)));
            for mark in &mut line[from..=to.min(WIDTH as usize - 1)] {
                *mark = match *mark {
                    '.' => letter(cell),
                    same if same == letter(cell) => same,
                    _ => '*',
                };
            }
        }
    }
    let mut out =
        format!("block {block} in memory (K, V: its keys and values; *: both; .: other blocks or padding)\n");
    for (index, line) in lines.iter().enumerate() {
        let text: String = line.iter().collect();
        let _ = writeln!(out, "  region {index:>3} |{text}| {}", bytes(regions[index].bytes));
    }
    if regions.len() > SHOWN {
        let _ = writeln!(out, "  ... and {} regions more", regions.len() - SHOWN);
    }
    out.push('\n');
    Ok(out)
}

fn cells(layout: &dyn BlockLayout, block: u32) -> Result<String> {
    let config = layout.config();
    let mut table = Table::new(["cell", "region", "offset", "bytes", "form"]);
    let all = u64::from(config.num_layers) * u64::from(config.cells_per_layer());
    let shown =
        (0..config.num_layers).flat_map(|layer| config.cells().map(move |cell| (layer, cell))).take(SHOWN);
    for (layer, cell) in shown {
        let view = layout.block_view(block, layer, cell)?;
        let form = if view.cell.is_contiguous() {
            "one run".to_owned()
        } else {
            format!("spread over {} bytes", view.cell.span())
        };
        table.row([
            format!("layer {layer}, {cell}"),
            view.region.to_string(),
            view.offset.to_string(),
            view.cell.bytes().to_string(),
            form,
        ]);
    }
    let mut out = table.render();
    if all > SHOWN as u64 {
        let _ = writeln!(out, "  ... and {} cells more", all - SHOWN as u64);
    }
    Ok(out)
}

/// What `plan` does to copy block `block` onto block `block`.
pub(super) fn plan(plan: &CopyPlan, block: u32) -> Result<String> {
    let segments = plan.segments();
    let lengths = segments.iter().map(|segment| segment.run_bytes);
    let (shortest, longest) = (lengths.clone().min().unwrap_or(0), lengths.max().unwrap_or(0));
    let runs = plan.num_runs();
    let plural = if runs == 1 { "run" } else { "runs" };
    let length = if shortest == longest { format!("{shortest}") } else { format!("{shortest} to {longest}") };
    let mut out = format!("copy plan: {runs} {plural} of {length} bytes per block\n");
    let advice = match (runs, shortest) {
        (1, _) => "one memcpy, one read or write: nothing is permuted".to_owned(),
        (_, SMALL_RUN..) => "a batch of copies, or one scattered read or write".to_owned(),
        _ => format!(
            "the axes are permuted: runs below {SMALL_RUN} bytes are work for a kernel or a staging buffer"
        ),
    };
    let _ = writeln!(out, "  {advice}\n");
    let mut table = Table::new(["segment", "source", "destination", "run", "repeated"]);
    for (index, segment) in segments.iter().take(SHOWN).enumerate() {
        table.row([
            index.to_string(),
            format!("region {} + {}", segment.src_region, segment.src_offset),
            format!("region {} + {}", segment.dst_region, segment.dst_offset),
            segment.run_bytes.to_string(),
            repeated(segment),
        ]);
    }
    out += &table.render();
    if segments.len() > SHOWN {
        let _ = writeln!(out, "  ... and {} segments more", segments.len() - SHOWN);
    }
    let _ = writeln!(out, "\n  first runs, block {block} to block {block}:");
    let mut seen = 0;
    plan.for_each_run(block, block, |run| {
        if seen < SHOWN {
            let _ = writeln!(
                out,
                "    region {} + {} -> region {} + {}, {} bytes",
                run.src_region, run.src_offset, run.dst_region, run.dst_offset, run.len
            );
        }
        seen += 1;
    })?;
    Ok(out)
}

/// `4 x (+65536 -> +1024), 16 x (...)`.
fn repeated(segment: &Segment) -> String {
    let dims: Vec<_> = segment
        .dims()
        .iter()
        .map(|dim| format!("{} x (+{} -> +{})", dim.count, dim.src_stride, dim.dst_stride))
        .collect();
    if dims.is_empty() { "once".to_owned() } else { dims.join(", ") }
}
