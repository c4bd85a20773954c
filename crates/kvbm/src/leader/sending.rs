//! From the leader to the workers: commands, and the plans of an operation.

use super::answers::Item;
use super::operation::{Move, Operation, Parts, PlanPart, Purpose};
use super::{Leader, plans};
use kvbm_plan::{
    ChecksumMode, Command, Endpoint, Failure, FailureKind, Gate, Path, Priority, Rank, Tier, TransferPlan,
    wire,
};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// An operation whose plans are cut and not sent.
pub(crate) struct Prepared {
    operation: Arc<Operation>,
    moves: Vec<Move>,
    ranges: Vec<Range<usize>>,
}

impl Prepared {
    pub(crate) fn operation(&self) -> &Arc<Operation> {
        &self.operation
    }
}

impl Leader {
    /// Sends a command to every worker. The ranks that it did not reach, with the reason.
    pub(crate) fn broadcast(&self, command: &Command) -> Vec<(Rank, Failure)> {
        let links = self.links.get().map_or(&[][..], Vec::as_slice);
        let failed = |detail: String| Failure::new(FailureKind::Io, detail);
        match wire::encode_command(command) {
            Ok(bytes) => {
                let refused = links.iter().zip(0..).filter_map(|(link, rank)| {
                    let rank = Rank(rank);
                    if self.is_lost(rank) {
                        return Some((rank, super::given_up(rank)));
                    }
                    link.send(&bytes).err().map(|error| (rank, failed(error.to_string())))
                });
                refused.collect()
            }
            Err(error) => {
                let all = 0..self.settings.ranks as u16;
                all.map(|rank| (Rank(rank), failed(error.to_string()))).collect()
            }
        }
    }

    /// Makes an operation that is not under way yet: nothing can answer for it before [`send`](Self::send).
    pub(crate) fn prepare(&self, purpose: Purpose, to: Tier, parts: Parts) -> Prepared {
        let moves = parts.moves.clone();
        let ranges = plans::ranges(&moves, self.settings.max_plan_blocks);
        let limit = self.limit(&moves);
        let operation = Operation::new(purpose, to, limit, parts, ranges.len());
        Prepared { operation, moves, ranges }
    }

    /// How long these moves may take.
    pub(crate) fn limit(&self, moves: &[Move]) -> Duration {
        let reads = |tier: Tier| moves.iter().any(|step| step.from == tier);
        let mut limit = self.settings.transfer_deadline;
        if reads(Tier::G3) {
            limit = limit.min(self.settings.read_deadline);
        }
        match &self.volume {
            Some(volume) if reads(Tier::G4) => limit.min(volume.settings.deadline),
            _ => limit,
        }
    }

    fn endpoint(&self, tier: Tier) -> Endpoint {
        match &self.volume {
            Some(volume) if tier == Tier::G4 => Endpoint::Volume(volume.settings.id),
            _ => Endpoint::Local(tier),
        }
    }

    /// Sends the plans of an operation.
    pub(crate) fn send(self: &Arc<Self>, prepared: Prepared) {
        let Prepared { operation, moves, ranges } = prepared;
        let _inside = operation.span.enter();
        for range in ranges {
            self.send_plan(&operation, &moves, range);
        }
    }

    /// Sends the plan for `moves[range]` to every rank.
    fn send_plan(self: &Arc<Self>, operation: &Arc<Operation>, moves: &[Move], range: Range<usize>) {
        let from = moves[range.start].from;
        let path = Path::new(from, operation.to);
        let part = PlanPart { operation: Arc::clone(operation), first: range.start };
        let plan_id = self.inflight.enter(part, path, range.len());
        self.metrics.path(path).enter();
        let plan = TransferPlan {
            plan_id,
            epoch: self.settings.epoch,
            group: moves[range.start].identity.group,
            src: self.endpoint(from),
            dst: self.endpoint(operation.to),
            blocks: plans::transfers(&moves[range]),
            layers: None,
            gate: self.gate(path),
            after: Vec::new(),
            priority: match operation.purpose {
                Purpose::Onboard => Priority::Urgent,
                Purpose::Private => Priority::Normal,
                Purpose::Offload => Priority::Background,
            },
            // 0 would mean no limit.
            budget_ms: u32::try_from(operation.limit.as_millis()).unwrap_or(u32::MAX).max(1),
            checksums: ChecksumMode::Required,
        };
        for (rank, failure) in self.broadcast(&Command::Transfer(plan)) {
            self.react(Item::Unreached { plan_id, rank, path, failure });
        }
    }

    /// A block of G1 is read after the engine wrote it and overwritten after the engine read it: both are behind the
    /// last event that the engine handed over.
    fn gate(&self, path: Path) -> Gate {
        let fence = self.fence.load(Ordering::Acquire);
        let touches_device = path.src == Tier::G1 || path.dst == Tier::G1;
        if touches_device && fence > 0 { Gate::DeviceEvent(fence) } else { Gate::None }
    }
}
