//! On which processors threads run: on those of the NUMA node whose memory they read.

use std::io;
use std::path::Path;

use kvbm_device::HostRegion;

use crate::numa::{self, NODES};

/// Most processors that a mask here has bits for.
const MAX_PROCESSORS: usize = 8192;
const BITS: usize = usize::BITS as usize;

/// Where threads were asked to run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ThreadPlacement {
    /// Wherever the system puts them: there is one node only, or nobody knows which.
    Anywhere,
    /// On processors of this node.
    Near {
        /// The node.
        node: u32,
        /// How many of its processors this process may use.
        processors: usize,
    },
    /// On this node, but that is not possible.
    Refused {
        /// The node.
        node: u32,
        /// Why.
        reason: String,
    },
}

/// Processors that a thread may run on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Processors(Box<Mask>);

impl Processors {
    /// Those of the calling thread, which a thread that it starts has too; `None` where the system
    /// does not say.
    pub fn of_this_thread() -> Option<Self> {
        affinity().ok().map(|mask| Self(Box::new(mask)))
    }

    /// The first of them alone.
    #[must_use]
    pub fn first(&self) -> Self {
        let mut mask = [0; MAX_PROCESSORS / BITS];
        if let Some(word) = self.0.iter().position(|word| *word != 0) {
            mask[word] = 1 << self.0[word].trailing_zeros();
        }
        Self(Box::new(mask))
    }

    /// From now on the calling thread runs on these.
    ///
    /// # Errors
    /// What the system says: none of them is there (any more), or it forbids this.
    pub fn run_here(&self) -> io::Result<()> {
        set_affinity(&self.0)
    }
}

/// Does `work` near the memory of `node`: on a thread of its own, which runs on the node's
/// processors, and so does every thread that it starts. Where that is no choice, or not possible,
/// the calling thread does it.
///
/// # Panics
/// As `work` does.
pub fn run_near<T: Send>(node: Option<u32>, work: impl FnOnce(&ThreadPlacement) -> T + Send) -> T {
    near_in(Path::new(NODES), node, work)
}

/// The node that the first page of `region` lies on; `None` where the system does not say.
pub fn node_of(region: &HostRegion) -> Option<u32> {
    /// `MPOL_F_NODE | MPOL_F_ADDR`
    const NODE_OF_ADDRESS: usize = 3;
    let mut node = -1_i32;
    // SAFETY: writes one number through the pointer to it; the address is only looked up.
    let code = unsafe {
        libc::syscall(
            libc::SYS_get_mempolicy,
            &raw mut node,
            std::ptr::null_mut::<usize>(),
            0_usize,
            region.as_ptr(),
            NODE_OF_ADDRESS,
        )
    };
    if code == 0 { u32::try_from(node).ok() } else { None }
}

fn near_in<T: Send>(nodes: &Path, node: Option<u32>, work: impl FnOnce(&ThreadPlacement) -> T + Send) -> T {
    let has_memory = std::fs::read_to_string(nodes.join("has_memory")).unwrap_or_default();
    let Some(node) = numa::wanted(node, &has_memory) else { return work(&ThreadPlacement::Anywhere) };
    let refused = |error: io::Error| ThreadPlacement::Refused { node, reason: error.to_string() };
    let mask = match processors_of(nodes, node) {
        Ok(mask) => mask,
        Err(error) => return work(&refused(error)),
    };
    let run = move || {
        let processors = mask.iter().map(|word| word.count_ones() as usize).sum();
        match set_affinity(&mask) {
            Ok(()) => work(&ThreadPlacement::Near { node, processors }),
            Err(error) => work(&refused(error)),
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(run).join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

type Mask = [usize; MAX_PROCESSORS / BITS];

/// The processors of `node` that this thread may use.
fn processors_of(nodes: &Path, node: u32) -> io::Result<Mask> {
    let list = std::fs::read_to_string(nodes.join(format!("node{node}/cpulist")))?;
    let ranges =
        numa::parse_list(&list).ok_or_else(|| io::Error::other(format!("its processors are {list:?}")))?;
    let is_listed = |processor: usize| {
        u32::try_from(processor).is_ok_and(|processor| ranges.iter().any(|range| range.contains(&processor)))
    };
    let mut mask = affinity()?;
    for (word, bits) in mask.iter_mut().enumerate() {
        let here = (0..BITS).filter(|bit| is_listed(word * BITS + bit));
        *bits &= here.fold(0, |bits, bit| bits | 1 << bit);
    }
    if mask.iter().all(|word| *word == 0) {
        return Err(io::Error::other("this process may use none of its processors"));
    }
    Ok(mask)
}

fn affinity() -> io::Result<Mask> {
    let mut mask = [0; MAX_PROCESSORS / BITS];
    // SAFETY: the kernel writes as many bytes as it is told into an array that has them.
    let code = unsafe { libc::sched_getaffinity(0, size_of_val(&mask), mask.as_mut_ptr().cast()) };
    if code == 0 { Ok(mask) } else { Err(io::Error::last_os_error()) }
}

fn set_affinity(mask: &Mask) -> io::Result<()> {
    // SAFETY: the kernel reads as many bytes as it is told from an array that has them.
    let code = unsafe { libc::sched_setaffinity(0, size_of_val(mask), mask.as_ptr().cast()) };
    if code == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;
    use crate::mapping::{BASE_PAGE, map};
    use crate::numa::MAX_NODES;

    /// A machine with two nodes: the second has the last processor that this thread may use, the
    /// first has none of them.
    fn machine() -> (tempfile::TempDir, usize) {
        let dir = tempfile::tempdir().expect("a directory");
        let mask = affinity().expect("a mask");
        let processor = (0..MAX_PROCESSORS).rfind(|at| mask[at / BITS] & 1 << (at % BITS) != 0);
        let processor = processor.expect("a processor");
        for (file, text) in [
            ("has_memory", "0-2\n".to_owned()),
            ("node0/cpulist", format!("{}\n", MAX_PROCESSORS - 1)),
            ("node1/cpulist", format!("{processor}\n")),
            ("node2/cpulist", "\n".to_owned()),
        ] {
            let file = dir.path().join(file);
            std::fs::create_dir_all(file.parent().expect("a parent")).expect("a directory");
            std::fs::write(file, text).expect("a file");
        }
        (dir, processor)
    }

    #[test]
    fn work_and_what_it_starts_runs_on_the_nodes_processors() {
        let (machine, processor) = machine();
        let before = affinity().expect("a mask");
        let (placement, masks) = near_in(machine.path(), Some(1), |placement| {
            let child = std::thread::spawn(affinity).join().expect("no panic");
            (placement.clone(), [affinity(), child])
        });
        assert_eq!(placement, ThreadPlacement::Near { node: 1, processors: 1 });
        let mut expected = [0; MAX_PROCESSORS / BITS];
        expected[processor / BITS] = 1 << (processor % BITS);
        for mask in masks {
            assert_eq!(mask.expect("a mask"), expected);
        }
        assert_eq!(affinity().expect("a mask"), before, "who asked stays where it was");
    }

    #[test]
    fn a_thread_runs_where_it_is_placed_and_others_stay() {
        let here = Processors::of_this_thread().expect("a mask");
        let there = std::thread::spawn({
            let first = here.first();
            move || (first.run_here().map_err(|error| error.kind()), Processors::of_this_thread())
        });
        assert_eq!(there.join().expect("no panic"), (Ok(()), Some(here.first())));
        assert_eq!(Processors::of_this_thread(), Some(here.clone()));
        assert_eq!(here.first().0.iter().map(|word| word.count_ones()).sum::<u32>(), 1);
        let none = Processors(Box::new([0; MAX_PROCESSORS / BITS]));
        assert_eq!((none.first() == none, none.run_here().is_err()), (true, true));
    }

    #[test]
    fn where_it_is_not_possible_work_is_done_all_the_same() {
        let (machine, _) = machine();
        for (node, expected) in [(0, "none of its processors"), (2, "its processors are")] {
            match near_in(machine.path(), Some(node), ThreadPlacement::clone) {
                ThreadPlacement::Refused { node: found, reason } => {
                    assert!(found == node && reason.contains(expected), "{reason}");
                }
                other => panic!("{other:?}"),
            }
        }
        for (nodes, node) in
            [(machine.path(), None), (machine.path(), Some(7)), (Path::new("nowhere"), Some(0))]
        {
            assert_eq!(near_in(nodes, node, ThreadPlacement::clone), ThreadPlacement::Anywhere);
        }
    }

    #[test]
    fn the_node_of_touched_memory_is_known() {
        let region = map(BASE_PAGE, BASE_PAGE).expect("memory");
        // SAFETY: the memory is this test's alone.
        unsafe { region.fill(0, BASE_PAGE, 1) }.expect("in range");
        // Containers may forbid the question, and kernels may be built without nodes.
        assert!(node_of(&region).is_none_or(|node| (node as usize) < MAX_NODES));
    }
}
