//! How far the order was searched for each tenant, so that a search looks at each position once for
//! each tenant.

/// No valid position with a number from `from` and below `to` holds a block of the tenant.
#[derive(Clone, Copy)]
pub(super) struct TenantScan {
    pub from: u64,
    pub to: u64,
}

impl TenantScan {
    /// Something was put at the old end.
    pub(super) fn pushed_old(&mut self, number: u64) {
        if (self.from..self.to).contains(&number) {
            self.from = number + 1;
        }
    }

    /// A position has another number, nearer to the old end.
    pub(super) fn moved(&mut self, number: u64, to: u64) {
        if number >= self.to && (self.from..self.to).contains(&to) {
            self.to = to;
        }
    }
}
