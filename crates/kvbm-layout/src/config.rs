//! The shape of a layout and the rules a shape must keep.

use std::collections::HashSet;
use std::fmt::Display;

use crate::dtype::DType;
use crate::layout::Cell;
use crate::slice::Selection;

/// Most layers of one layout.
pub(crate) const MAX_LAYERS: u32 = 4096;
/// Most outer indices (keys, values) of one layout.
pub(crate) const MAX_OUTER: u32 = 8;
/// Most opaque planes of one layout.
pub(crate) const MAX_PLANES: usize = 1024;
/// Longest name of an opaque plane, in bytes.
pub(crate) const MAX_PLANE_NAME: usize = 32;
const MAX_PAGE_SIZE: u32 = 1 << 20;
const MAX_INNER_DIM: u32 = 1 << 24;
const MAX_ALIGNMENT: u64 = 1 << 30;

/// A shape that breaks a rule: which field, what it was, and what it has to be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("layout config: {field} = {value}: {rule}")]
pub struct ConfigError {
    /// The field of [`LayoutConfig`] at fault.
    pub field: &'static str,
    /// The value it had.
    pub value: String,
    /// The rule it breaks, with the other values that matter.
    pub rule: String,
}

impl ConfigError {
    pub(crate) fn new(field: &'static str, value: impl Display, rule: impl Into<String>) -> Self {
        Self { field, value: value.to_string(), rule: rule.into() }
    }
}

/// Bytes that belong to each layer of a block but have no axes we know: quantisation scales,
/// sub-byte formats, recurrent state.
///
/// They are copied whole, layer by layer, and never permuted or sliced by head.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct OpaquePlane {
    /// Name, 1 to 32 bytes of ASCII letters, digits, `_`, `-` and `.`; unique in a layout.
    pub name: String,
    /// Bytes of this plane in one layer of one block.
    pub bytes_per_layer: u32,
}

impl OpaquePlane {
    /// A plane of `bytes_per_layer` bytes.
    pub fn new(name: impl Into<String>, bytes_per_layer: u32) -> Self {
        Self { name: name.into(), bytes_per_layer }
    }
}

/// Shape of the KV blocks of one group on one rank.
///
/// The fields are plain data; [`validate`](Self::validate) holds the rules, and every layout
/// constructor calls it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct LayoutConfig {
    /// Blocks in the layout, at least 1.
    pub num_blocks: u32,
    /// Layers in each block, 1 to 4096.
    pub num_layers: u32,
    /// Chunks per layer: 2 for keys and values, 1 for MLA; 0 only when everything is in opaque
    /// planes.
    pub outer_dim: u32,
    /// Tokens per block.
    pub page_size: u32,
    /// Elements of one token in one outer chunk: `num_heads * head_dim`.
    pub inner_dim: u32,
    /// `inner_dim` of outer index 1, where values are narrower or wider than keys. `None`: the
    /// same.
    pub value_inner_dim: Option<u32>,
    /// Element type.
    pub dtype: DType,
    /// Alignment of each block in bytes, a power of two; 1 packs blocks densely.
    pub alignment: u64,
    /// KV heads on this rank; divides `inner_dim`. MLA has 1.
    pub num_heads: u32,
    /// Opaque planes that travel with each block.
    pub planes: Vec<OpaquePlane>,
}

impl LayoutConfig {
    /// A builder; every field without a default has to be set.
    pub fn builder() -> LayoutConfigBuilder {
        LayoutConfigBuilder::default()
    }

    /// Elements of one token in outer chunk `outer`.
    pub fn inner_dim_of(&self, outer: u32) -> u32 {
        match self.value_inner_dim {
            Some(value) if outer == 1 => value,
            _ => self.inner_dim,
        }
    }

    /// Elements of one head in outer chunk `outer`.
    pub fn head_dim_of(&self, outer: u32) -> u32 {
        self.inner_dim_of(outer) / self.num_heads.max(1)
    }

    /// Number of cells in one layer of a block: outer chunks, then opaque planes.
    pub fn cells_per_layer(&self) -> u32 {
        self.outer_dim.saturating_add(u32::try_from(self.planes.len()).unwrap_or(u32::MAX))
    }

    /// The cells of one layer: outer chunks in order, then opaque planes in order.
    pub fn cells(&self) -> impl Iterator<Item = Cell> + use<> {
        let outer = self.outer_dim;
        (0..self.cells_per_layer())
            .map(move |index| if index < outer { Cell::Kv(index) } else { Cell::Plane(index - outer) })
    }

    /// Layers that a copy can move one by one: `num_layers`. Of a block that is opaque planes and
    /// nothing else, and so has one layer, each plane counts as a layer.
    pub fn separable_layers(&self) -> u32 {
        if self.is_planes_only() { self.cells_per_layer() } else { self.num_layers }
    }

    /// What a copy moves of `count` of the [separable layers](Self::separable_layers) from `first`
    /// on, between two layouts of this shape.
    pub fn select_layers(&self, first: u32, count: u32) -> Selection {
        let all = Selection::all();
        if self.is_planes_only() { all.planes(first, count) } else { all.layers(first, first, count) }
    }

    fn is_planes_only(&self) -> bool {
        (self.num_layers, self.outer_dim) == (1, 0)
    }

    /// Payload bytes of `cell` in one layer of one block, without padding.
    ///
    /// `cell` must be one of [`cells`](Self::cells); an unknown cell has 0 bytes.
    pub fn cell_bytes(&self, cell: Cell) -> u64 {
        match cell {
            Cell::Kv(outer) if outer < self.outer_dim => u64::from(self.page_size)
                .saturating_mul(u64::from(self.inner_dim_of(outer)))
                .saturating_mul(u64::from(self.dtype.width())),
            Cell::Plane(index) => {
                self.planes.get(index as usize).map_or(0, |plane| u64::from(plane.bytes_per_layer))
            }
            Cell::Kv(_) => 0,
        }
    }

    /// Payload bytes of one layer of one block: all outer chunks and planes, without padding.
    pub fn layer_bytes(&self) -> u64 {
        self.cells().fold(0, |sum, cell| sum.saturating_add(self.cell_bytes(cell)))
    }

    /// Payload bytes of one block, without padding.
    pub fn bytes_per_block(&self) -> u64 {
        self.layer_bytes().saturating_mul(u64::from(self.num_layers))
    }

    /// Checks every rule; the first broken one is returned.
    pub fn validate(&self) -> Result<(), ConfigError> {
        in_range("num_blocks", self.num_blocks, 1, u32::MAX)?;
        in_range("num_layers", self.num_layers, 1, MAX_LAYERS)?;
        in_range("page_size", self.page_size, 1, MAX_PAGE_SIZE)?;
        self.validate_outer()?;
        self.validate_inner()?;
        if !self.alignment.is_power_of_two() || self.alignment > MAX_ALIGNMENT {
            let rule = format!("must be a power of two between 1 and {MAX_ALIGNMENT}");
            return Err(ConfigError::new("alignment", self.alignment, rule));
        }
        self.validate_planes()
    }

    fn validate_outer(&self) -> Result<(), ConfigError> {
        if self.outer_dim == 0 && self.planes.is_empty() {
            return Err(ConfigError::new(
                "outer_dim",
                0,
                "must be at least 1 unless the layout has opaque planes",
            ));
        }
        in_range("outer_dim", self.outer_dim, 0, MAX_OUTER)
    }

    fn validate_inner(&self) -> Result<(), ConfigError> {
        in_range("num_heads", self.num_heads, 1, MAX_INNER_DIM)?;
        in_range("inner_dim", self.inner_dim, 1, MAX_INNER_DIM)?;
        if !self.inner_dim.is_multiple_of(self.num_heads) {
            let rule = format!(
                "must divide inner_dim ({}): each head has inner_dim / num_heads elements",
                self.inner_dim
            );
            return Err(ConfigError::new("num_heads", self.num_heads, rule));
        }
        let Some(value) = self.value_inner_dim else { return Ok(()) };
        if self.outer_dim != 2 {
            let rule = format!(
                "only layouts with outer_dim 2 (keys and values) have it, this one has outer_dim {}",
                self.outer_dim
            );
            return Err(ConfigError::new("value_inner_dim", value, rule));
        }
        in_range("value_inner_dim", value, 1, MAX_INNER_DIM)?;
        if !value.is_multiple_of(self.num_heads) {
            let rule = format!("must be a multiple of num_heads ({})", self.num_heads);
            return Err(ConfigError::new("value_inner_dim", value, rule));
        }
        Ok(())
    }

    fn validate_planes(&self) -> Result<(), ConfigError> {
        if self.planes.len() > MAX_PLANES {
            let rule = format!("at most {MAX_PLANES} opaque planes");
            return Err(ConfigError::new("planes", self.planes.len(), rule));
        }
        let mut names = HashSet::with_capacity(self.planes.len());
        for plane in &self.planes {
            let legal = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.');
            if plane.name.is_empty() || plane.name.len() > MAX_PLANE_NAME || !plane.name.bytes().all(legal) {
                let shown: String = plane.name.chars().take(MAX_PLANE_NAME).collect();
                let rule = format!("must be 1 to {MAX_PLANE_NAME} ASCII letters, digits, `_`, `-` or `.`");
                return Err(ConfigError::new("planes.name", format!("{shown:?}"), rule));
            }
            if !names.insert(plane.name.as_str()) {
                return Err(ConfigError::new("planes.name", &plane.name, "must be unique in a layout"));
            }
            if plane.bytes_per_layer == 0 {
                let rule = format!("must be at least 1 (plane `{}`)", plane.name);
                return Err(ConfigError::new("planes.bytes_per_layer", 0, rule));
            }
        }
        Ok(())
    }
}

fn in_range(field: &'static str, value: u32, min: u32, max: u32) -> Result<(), ConfigError> {
    if (min..=max).contains(&value) {
        return Ok(());
    }
    let rule = if max == u32::MAX {
        format!("must be at least {min}")
    } else {
        format!("must be between {min} and {max}")
    };
    Err(ConfigError::new(field, value, rule))
}

/// Builds a [`LayoutConfig`].
///
/// Defaults: `outer_dim` 2, `num_heads` 1, `alignment` 1, no opaque planes. The other fields have
/// to be set.
#[derive(Debug, Clone, Default)]
pub struct LayoutConfigBuilder {
    num_blocks: Option<u32>,
    num_layers: Option<u32>,
    outer_dim: Option<u32>,
    page_size: Option<u32>,
    inner_dim: Option<u32>,
    value_inner_dim: Option<u32>,
    dtype: Option<DType>,
    alignment: Option<u64>,
    num_heads: Option<u32>,
    planes: Vec<OpaquePlane>,
}

impl LayoutConfigBuilder {
    /// Blocks in the layout.
    #[must_use]
    pub fn num_blocks(mut self, num_blocks: u32) -> Self {
        self.num_blocks = Some(num_blocks);
        self
    }

    /// Layers in each block.
    #[must_use]
    pub fn num_layers(mut self, num_layers: u32) -> Self {
        self.num_layers = Some(num_layers);
        self
    }

    /// Chunks per layer: 2 for keys and values (the default), 1 for MLA.
    #[must_use]
    pub fn outer_dim(mut self, outer_dim: u32) -> Self {
        self.outer_dim = Some(outer_dim);
        self
    }

    /// Tokens per block.
    #[must_use]
    pub fn page_size(mut self, page_size: u32) -> Self {
        self.page_size = Some(page_size);
        self
    }

    /// Elements per token and outer chunk: `num_heads * head_dim`.
    #[must_use]
    pub fn inner_dim(mut self, inner_dim: u32) -> Self {
        self.inner_dim = Some(inner_dim);
        self
    }

    /// Elements per token of the values, where it differs from the keys.
    #[must_use]
    pub fn value_inner_dim(mut self, value_inner_dim: u32) -> Self {
        self.value_inner_dim = Some(value_inner_dim);
        self
    }

    /// Element type.
    #[must_use]
    pub fn dtype(mut self, dtype: DType) -> Self {
        self.dtype = Some(dtype);
        self
    }

    /// Alignment of each block in bytes, a power of two (default 1).
    #[must_use]
    pub fn alignment(mut self, alignment: u64) -> Self {
        self.alignment = Some(alignment);
        self
    }

    /// KV heads on this rank (default 1).
    #[must_use]
    pub fn num_heads(mut self, num_heads: u32) -> Self {
        self.num_heads = Some(num_heads);
        self
    }

    /// Adds an opaque plane.
    #[must_use]
    pub fn plane(mut self, plane: OpaquePlane) -> Self {
        self.planes.push(plane);
        self
    }

    /// The config, if every field is set and every rule kept.
    pub fn build(self) -> Result<LayoutConfig, ConfigError> {
        let config = LayoutConfig {
            num_blocks: required("num_blocks", self.num_blocks)?,
            num_layers: required("num_layers", self.num_layers)?,
            outer_dim: self.outer_dim.unwrap_or(2),
            page_size: required("page_size", self.page_size)?,
            inner_dim: required("inner_dim", self.inner_dim)?,
            value_inner_dim: self.value_inner_dim,
            dtype: required("dtype", self.dtype)?,
            alignment: self.alignment.unwrap_or(1),
            num_heads: self.num_heads.unwrap_or(1),
            planes: self.planes,
        };
        config.validate()?;
        Ok(config)
    }
}

fn required<T>(field: &'static str, value: Option<T>) -> Result<T, ConfigError> {
    value.ok_or_else(|| {
        ConfigError::new(field, "(not set)", format!("must be set: call .{field}(..) on the builder"))
    })
}
