//! How the slots of a daemon's host memory lie, in words for whoever maps it.
//!
//! Slots of one size hold blocks of every cache group. A layout whose slots are longer than its own
//! blocks has no description of its own, so one block of each group is described.

use crate::protocol::{Bytes, Memory};
use kvbm::SharedHost;
use kvbm::layout::{BlockLayout, FullyContiguous, LayoutConfig, LayoutDescriptor, MemoryKind, RegionMemory};
use std::sync::Arc;

/// What a process that maps this memory is told.
pub(crate) fn describe(host: &SharedHost) -> Result<Memory, String> {
    let first = host.slots.first().ok_or("host memory has no slots")?;
    let (slots, bytes) = (first.num_blocks(), first.layout().total_bytes());
    let layouts = host.slots.iter().map(|slots| describe_block(slots.layout().as_ref()).map(Bytes));
    Ok(Memory {
        bytes: host.memory.region().len(),
        slots,
        slot_bytes: bytes / u64::from(slots.max(1)),
        layouts: layouts.collect::<Result<_, _>>()?,
        populated: host.memory.is_populated(),
    })
}

fn describe_block(slots: &dyn BlockLayout) -> Result<Vec<u8>, String> {
    let config = LayoutConfig { num_blocks: 1, ..slots.config().clone() };
    let one = FullyContiguous::new(config, slots.axis_order()).map_err(|error| error.to_string())?;
    let bytes = one.total_bytes();
    let memory = RegionMemory { kind: MemoryKind::File, device_id: 0, address: 0, bytes, base_offset: 0 };
    let described = LayoutDescriptor::new(one.into(), vec![memory]).and_then(|described| described.encode());
    described.map_err(|error| error.to_string())
}

/// How blocks of each cache group lie in all slots.
pub(crate) fn layouts(memory: &Memory) -> Result<Vec<Arc<dyn BlockLayout>>, String> {
    memory.layouts.iter().map(|described| slots_like(memory, &described.0)).collect()
}

fn slots_like(memory: &Memory, described: &[u8]) -> Result<Arc<dyn BlockLayout>, String> {
    let one = LayoutDescriptor::decode(described).map_err(|error| error.to_string())?;
    let config = LayoutConfig { num_blocks: memory.slots, ..one.layout().config().clone() };
    let all = FullyContiguous::in_slots(config, one.layout().axis_order(), memory.slot_bytes);
    Ok(Arc::new(all.map_err(|error| format!("the daemon described no slots: {error}"))?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvbm::layout::{AxisOrder, Cell, DType};
    use kvbm::storage::{BoundLayout, HugePages, RegionBinding, SharedStorage};

    #[test]
    fn whoever_maps_the_memory_has_every_group_where_the_daemon_has_it() {
        let memory = Arc::new(SharedStorage::create(3 * 8192, HugePages::No, None).unwrap());
        let bind = |(order, head_dim): (AxisOrder, u32)| {
            let config = LayoutConfig::builder().num_blocks(3).num_layers(2).outer_dim(2).page_size(4);
            let config = config.inner_dim(2 * head_dim).num_heads(2).dtype(DType::F16).alignment(4096);
            let layout = FullyContiguous::in_slots(config.build().unwrap(), order, 8192).unwrap();
            let binding = RegionBinding::new(Arc::clone(&memory) as _);
            BoundLayout::bind(Arc::new(layout), vec![binding]).unwrap()
        };
        let groups = [(AxisOrder::Universal, 100), (AxisOrder::Universal, 3), (AxisOrder::Nhd, 64)];
        let host = SharedHost { slots: groups.map(bind).to_vec(), memory: Arc::clone(&memory) };
        let told = describe(&host).unwrap();
        assert_eq!((told.slots, told.slot_bytes, told.bytes), (3, 8192, 3 * 8192));
        for (found, slots) in layouts(&told).unwrap().iter().zip(&host.slots) {
            let ours = slots.layout();
            assert_eq!((found.config(), found.axis_order()), (ours.config(), ours.axis_order()));
            assert_eq!(found.total_bytes(), ours.total_bytes());
            for cell in [Cell::Kv(0), Cell::Kv(1)] {
                assert_eq!(found.view(1, cell).unwrap(), ours.view(1, cell).unwrap());
            }
        }
        assert!(layouts(&Memory { slots: 0, ..told.clone() }).is_err());
        assert!(layouts(&Memory { slot_bytes: u64::MAX, ..told.clone() }).is_err());
        assert!(layouts(&Memory { layouts: vec![Bytes(vec![0; 64])], ..told }).is_err());
    }
}
