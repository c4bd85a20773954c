//! On which NUMA node host memory lies: near the device that copies from and to it.

use std::fs::read_to_string;
use std::io;
use std::ops::RangeInclusive;

use kvbm_device::HostRegion;

use crate::PageSize;
use crate::mapping::{BASE_PAGE, HUGE_PAGE};

/// What the system says about its nodes.
pub(crate) const NODES: &str = "/sys/devices/system/node";

/// Most nodes that a mask here has bits for; as many as Linux can be built for.
pub(crate) const MAX_NODES: usize = 1024;

/// Where page-locked memory was asked to lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NumaPlacement {
    /// Wherever the system puts it: there is one node only, or nobody knows the device's.
    Anywhere,
    /// On this node, the device's; on others if it is full.
    Preferred(u32),
    /// On this node, but the system did not take the wish.
    Refused {
        /// The device's node.
        node: u32,
        /// What the system says.
        reason: String,
    },
}

/// Asks the system for pages of `node`, the device's, where that is a choice. Before the pages are
/// touched.
pub(crate) fn place(region: &HostRegion, pages: &PageSize, node: Option<u32>) -> NumaPlacement {
    if node.is_none() {
        return NumaPlacement::Anywhere;
    }
    let Some(node) = wanted(node, &read_to_string(format!("{NODES}/has_memory")).unwrap_or_default()) else {
        return NumaPlacement::Anywhere;
    };
    match prefer(region, pages, node) {
        Ok(()) => NumaPlacement::Preferred(node),
        Err(error) => NumaPlacement::Refused { node, reason: error.to_string() },
    }
}

/// The node to ask for: the device's, if there is another one and it has memory. `nodes` is the
/// system's list (`0-1,4`).
pub(crate) fn wanted(node: Option<u32>, nodes: &str) -> Option<u32> {
    let known = parse_list(nodes)?;
    let several = known.len() > 1 || known.iter().any(|range| range.start() < range.end());
    node.filter(|node| several && known.iter().any(|range| range.contains(node)))
}

/// A list of the system (`0-1,4`).
pub(crate) fn parse_list(list: &str) -> Option<Vec<RangeInclusive<u32>>> {
    let range = |range: &str| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        Some(first.parse::<u32>().ok()?..=last.parse::<u32>().ok()?)
    };
    list.trim().split(',').map(range).collect()
}

/// New pages of the region come from `node` as long as it has any (`MPOL_PREFERRED`): a full node
/// is no error.
fn prefer(region: &HostRegion, pages: &PageSize, node: u32) -> io::Result<()> {
    const BITS: usize = usize::BITS as usize;
    let mut mask = [0_usize; MAX_NODES / BITS];
    let word = mask.get_mut(node as usize / BITS).ok_or(io::ErrorKind::InvalidInput)?;
    *word = 1 << (node as usize % BITS);
    // The mapping is whole pages, of which the region may use a part of the last one.
    let page = if *pages == PageSize::Huge { HUGE_PAGE } else { BASE_PAGE };
    let len = region.len().next_multiple_of(page) as usize;
    // The kernel takes one bit less than it is told.
    let (start, bits, flags) = (region.as_ptr(), MAX_NODES + 1, 0_usize);
    // SAFETY: the range is mapped by this crate and no byte of it changes; the mask, read during
    // the call, has the bits that are told.
    let code = unsafe {
        libc::syscall(libc::SYS_mbind, start, len, libc::MPOL_PREFERRED as usize, mask.as_ptr(), bits, flags)
    };
    if code == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mapping::map;

    #[test]
    fn the_devices_node_is_asked_for_where_there_is_a_choice() {
        for (node, nodes, expected) in [
            (Some(1), "0-1\n", Some(1)),
            (Some(0), "0,1", Some(0)),
            (Some(4), "0-1,4-5", Some(4)),
            (Some(3), "0-1,4-5", None),
            (Some(0), "0\n", None),
            (Some(0), "", None),
            (Some(0), "nonsense", None),
            (Some(0), "0-x", None),
            (None, "0-1", None),
        ] {
            assert_eq!(wanted(node, nodes), expected, "{node:?} of {nodes:?}");
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "it asks the system for a policy")]
    fn the_system_keeps_the_wish_and_refuses_a_node_that_is_not_there() {
        /// `MPOL_F_ADDR`
        const OF_ADDRESS: usize = 2;
        let region = map(3 * BASE_PAGE - 1, BASE_PAGE).expect("memory");
        match prefer(&region, &PageSize::Base, 0) {
            // Containers may forbid the call, and kernels may be built without nodes.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EPERM | libc::ENOSYS)) => return,
            result => result.expect("every machine has a node 0"),
        }
        let last = region.as_ptr().wrapping_add(region.len() as usize - 1);
        let (mut policy, mut mask) = (-1_i32, [0_usize; MAX_NODES / usize::BITS as usize]);
        // SAFETY: writes a number and a mask of as many bits as it is told through pointers to
        // them.
        let code = unsafe {
            libc::syscall(
                libc::SYS_get_mempolicy,
                &raw mut policy,
                mask.as_mut_ptr(),
                MAX_NODES,
                last,
                OF_ADDRESS,
            )
        };
        assert_eq!((code, policy, mask[0]), (0, libc::MPOL_PREFERRED, 1));
        assert!(prefer(&region, &PageSize::Base, 1000).is_err());
        assert!(prefer(&region, &PageSize::Base, 5000).is_err());
    }
}
