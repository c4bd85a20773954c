//! Blocks that another rank writes for this one, too.

use super::{Carrier, Site};
use crate::completion_queue::Done;
use crate::schedule::Portion;
use kvbm_plan::BlockOutcome;

/// Reports blocks as done and moves nothing: the rank with the same bytes moves them.
pub(crate) struct WrittenElsewhere {
    site: Site,
}

impl WrittenElsewhere {
    pub(crate) fn new(site: Site) -> Self {
        Self { site }
    }
}

impl Carrier for WrittenElsewhere {
    fn room(&self) -> usize {
        usize::MAX
    }

    fn in_flight(&self) -> usize {
        0
    }

    fn issue(&mut self, Portion { plan, indices, .. }: Portion) {
        // No checksum: this rank has not read its bytes.
        let done = indices.into_iter().map(|index| (index, BlockOutcome::Done { checksum: 0 }));
        self.site.settle(&plan, done.collect(), 0);
    }

    fn complete(&mut self, _done: Done) {}

    fn is_parked(&self) -> bool {
        false
    }

    fn retry(&mut self) {}
}
