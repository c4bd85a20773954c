//! Ranks in device memory.

use std::sync::Arc;

use kvbm_device::Device;
use kvbm_nixl::{DeviceAccess, LocalRank};
use kvbm_storage::{BoundLayout, DeviceStorage, RegionBinding, Storage};

/// A rank of the same shape on a device.
pub(crate) fn on_device(
    rank: &LocalRank,
    device: &dyn Device,
    access: &Arc<DeviceAccess>,
) -> (LocalRank, Vec<Arc<DeviceStorage>>) {
    let regions = rank.bound.layout().regions();
    let memory: Vec<_> = regions
        .iter()
        .map(|region| Arc::new(DeviceStorage::new(device, region.bytes, 4096).expect("memory")))
        .collect();
    let bindings = memory.iter().map(|storage| RegionBinding::new(Arc::clone(storage) as Arc<dyn Storage>));
    let bound = BoundLayout::bind(Arc::clone(rank.bound.layout()), bindings.collect()).expect("it fits");
    (LocalRank::on_device(rank.slice, bound, Arc::clone(access)), memory)
}
