//! Memory that an engine owns: any strides, checked before they are believed.

use crate::arith;
use crate::config::LayoutConfig;
use crate::engine_order::{EngineAxis, EngineOrder};
use crate::geometry::{CellStrides, Geometry, layout_of_geometry, width};
use crate::layout::{AxisOrder, Cell, LayoutError, LayoutType, RegionSpec};

/// How an engine's tensor is spread over regions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum EngineRegions {
    /// One region holds all layers (and one more region each opaque plane).
    One,
    /// Each layer is a tensor of its own; only for orders in which the layer axis is outermost.
    PerLayer,
}

/// Explicit strides over any regions.
///
/// Elements must lie inside the regions, must be aligned to their width, and must not overlap; a
/// layout is only made when that is proven. Use alignment 1 in the config unless the engine really
/// pads its blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StridedLayout {
    geometry: Geometry,
}

impl StridedLayout {
    /// The layout with these regions and strides; `cells` in the order of [`LayoutConfig::cells`].
    ///
    /// # Errors
    /// A broken rule of the config, or strides that leave a region, misalign an element, or
    /// overlap.
    pub fn new(
        config: LayoutConfig,
        regions: Vec<RegionSpec>,
        mut cells: Vec<CellStrides>,
    ) -> Result<Self, LayoutError> {
        config.validate()?;
        let planes_from = config.outer_dim as usize;
        for cell in cells.iter_mut().skip(planes_from) {
            (cell.token_stride, cell.head_stride, cell.elem_stride) = (0, 0, 1);
        }
        let order = AxisOrder::Strided;
        let geometry = Geometry { config, layout_type: LayoutType::Strided, order, regions, cells };
        geometry.validate()?;
        Ok(Self { geometry })
    }

    /// A dense engine tensor whose axes lie in `order`, outermost first. The element axis holds all
    /// outer chunks of a head side by side (K | V), as vLLM's does.
    ///
    /// # Errors
    /// As [`new`](Self::new); also [`EngineRegions::PerLayer`] for an order in which the layer is
    /// not outermost, and a config alignment that the dense tensor does not have.
    pub fn from_engine_order(
        config: LayoutConfig,
        order: EngineOrder,
        spread: EngineRegions,
    ) -> Result<Self, LayoutError> {
        config.validate()?;
        let per_layer = spread == EngineRegions::PerLayer;
        if per_layer && order.axes()[0] != EngineAxis::Layer {
            let rule = format!("the layer axis of {order} is not outermost: use EngineRegions::One");
            let value = u64::from(config.num_layers);
            return Err(LayoutError::Regions { field: "count", value, rule });
        }
        let layers_here = if per_layer { 1 } else { u64::from(config.num_layers) };
        let num_regions = if per_layer { config.num_layers } else { 1 };
        let alignment = Geometry::region_alignment(&config);
        let (mut cells, bytes) = order.dense_cells(&config, layers_here)?;
        let mut regions = Vec::new();
        if config.outer_dim > 0 {
            regions.resize(num_regions as usize, RegionSpec { bytes, alignment });
        }
        for plane in &config.planes {
            let block_stride = u64::from(plane.bytes_per_layer);
            let layer_stride = arith::product("one plane", &[block_stride, u64::from(config.num_blocks)])?;
            let bytes = arith::product("one plane", &[layer_stride, layers_here])?;
            let region =
                u32::try_from(regions.len()).map_err(|_| LayoutError::TooLarge { what: "regions" })?;
            cells.push(CellStrides { region, layer_stride, block_stride, ..CellStrides::default() });
            regions.resize(regions.len() + num_regions as usize, RegionSpec { bytes, alignment });
        }
        for cell in cells.iter_mut().filter(|_| per_layer) {
            (cell.region_per_layer, cell.layer_stride) = (1, 0);
        }
        Self::new(config, regions, cells)
    }

    /// The strides of each cell, in the order of [`LayoutConfig::cells`].
    pub fn cells(&self) -> &[CellStrides] {
        &self.geometry.cells
    }
}

impl Geometry {
    /// Checks regions and cells that came from outside.
    pub(crate) fn validate(&self) -> Result<(), LayoutError> {
        let (config, num_cells) = (&self.config, self.cells.len() as u64);
        if num_cells != u64::from(config.cells_per_layer()) {
            let rule = format!("the config has {} outer chunks and planes", config.cells_per_layer());
            return Err(LayoutError::Regions { field: "cells", value: num_cells, rule });
        }
        let most = u64::from(config.num_layers) * num_cells;
        let num_regions = self.regions.len() as u64;
        if num_regions == 0 || num_regions > most {
            let rule = format!("must be between 1 and {most} (layers x cells)");
            return Err(LayoutError::Regions { field: "count", value: num_regions, rule });
        }
        for region in &self.regions {
            if !region.alignment.is_power_of_two() || region.alignment < Self::region_alignment(config) {
                let rule = format!("must be a power of two, at least {}", Self::region_alignment(config));
                return Err(LayoutError::Regions { field: "alignment", value: region.alignment, rule });
            }
        }
        for cell in config.cells() {
            self.validate_cell(cell)?;
        }
        crate::overlap::prove_apart(self)
    }

    fn validate_cell(&self, cell: Cell) -> Result<(), LayoutError> {
        let config = &self.config;
        let at = &self.cells[crate::geometry::cell_index(config, cell)?];
        let unit = if matches!(cell, Cell::Plane(_)) { 1 } else { width(config) };
        for (field, value) in at.strides() {
            if !value.is_multiple_of(unit) {
                return Err(bad_stride(
                    cell,
                    field,
                    value,
                    format!("must be a multiple of the element width ({unit})"),
                ));
            }
        }
        if !at.block_stride.is_multiple_of(config.alignment) {
            let rule = format!(
                "must be a multiple of the config's alignment ({}); set alignment 1 for dense memory",
                config.alignment
            );
            return Err(bad_stride(cell, "block_stride", at.block_stride, rule));
        }
        let layers = u64::from(config.num_layers);
        let last_region = u64::from(at.region) + (layers - 1) * u64::from(at.region_per_layer);
        if last_region >= self.regions.len() as u64 {
            let rule = format!("the layout has {} regions", self.regions.len());
            return Err(bad_stride(cell, "region of the last layer", last_region, rule));
        }
        for layer in 0..config.num_layers {
            let end = self.cell_end(at, cell, layer)?;
            let region = at.region + layer * at.region_per_layer;
            let bytes = self.regions[region as usize].bytes;
            if end > bytes {
                let rule = format!("exceeds region {region} of {bytes} bytes in layer {layer}");
                return Err(bad_stride(cell, "end of the last block", end, rule));
            }
        }
        Ok(())
    }

    /// Byte after the last element of `cell` in `layer`, over all blocks.
    fn cell_end(&self, at: &CellStrides, cell: Cell, layer: u32) -> Result<u64, LayoutError> {
        let what = "one region";
        let config = &self.config;
        let mut end =
            arith::sum(what, &[at.offset, arith::product(what, &[u64::from(layer), at.layer_stride])?])?;
        for (count, stride) in at.block_dims(config, cell) {
            end = arith::sum(what, &[end, arith::product(what, &[count - 1, stride])?])?;
        }
        let unit = if matches!(cell, Cell::Plane(_)) { 1 } else { width(config) };
        arith::sum(what, &[end, unit])
    }
}

impl CellStrides {
    fn strides(&self) -> [(&'static str, u64); 6] {
        [
            ("offset", self.offset),
            ("layer_stride", self.layer_stride),
            ("block_stride", self.block_stride),
            ("token_stride", self.token_stride),
            ("head_stride", self.head_stride),
            ("elem_stride", self.elem_stride),
        ]
    }

    /// (count, stride) of every axis but the layer; counts are at least 1.
    pub(crate) fn block_dims(&self, config: &LayoutConfig, cell: Cell) -> [(u64, u64); 4] {
        let blocks = (u64::from(config.num_blocks), self.block_stride);
        match cell {
            Cell::Kv(outer) => [
                blocks,
                (u64::from(config.page_size), self.token_stride),
                (u64::from(config.num_heads), self.head_stride),
                (u64::from(config.head_dim_of(outer)), self.elem_stride),
            ],
            Cell::Plane(_) => [blocks, (1, 0), (1, 0), (config.cell_bytes(cell), self.elem_stride)],
        }
    }
}

fn bad_stride(cell: Cell, field: &'static str, value: u64, rule: String) -> LayoutError {
    LayoutError::Strides { cell: cell.to_string(), field, value, rule }
}

layout_of_geometry!(StridedLayout);
