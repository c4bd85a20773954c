//! How much of a chain can be served in all cache groups with what a peer has.

/// Blocks of the longest prefix of `blocks` blocks that every group can serve. A group needs so
/// many blocks at its end, or all; `has` says whether a group's block is there.
pub(super) fn served(needed: &[Option<usize>], blocks: usize, has: impl Fn(usize, usize) -> bool) -> usize {
    // How many blocks in a row each group has, up to the one that is looked at.
    let mut runs = vec![0_usize; needed.len()];
    let mut longest = 0;
    for at in 0..blocks {
        let length = at + 1;
        let mut serves = true;
        for ((group, run), needed) in runs.iter_mut().enumerate().zip(needed) {
            *run = if has(group, at) { *run + 1 } else { 0 };
            if needed.is_none() && *run < length {
                return longest;
            }
            serves &= *run >= needed.unwrap_or(length).min(length);
        }
        if serves {
            longest = length;
        }
    }
    longest
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Mutation that makes it fail: the last group's run is not compared.
    #[test]
    fn each_group_has_what_it_needs_at_the_end() {
        let full = [true, true, true, true, true, false];
        let window = [false, false, true, true, true, true];
        let state = [false, true, false, true, false, true];
        let all = [full, window, state];
        let has = |group: usize, at: usize| all[group][at];
        assert_eq!(served(&[None, Some(2), Some(1)], 6, has), 4);
        assert_eq!(served(&[None, Some(3), Some(1)], 6, has), 0, "the window lacks blocks 0 and 1");
        assert_eq!(served(&[None, Some(2), Some(1)], 3, has), 0);
        assert_eq!(served(&[None], 6, has), 5);
        assert_eq!(served(&[None, Some(1)], 0, has), 0);
    }
}
