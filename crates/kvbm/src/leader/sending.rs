//! From the leader to the workers: commands, and the plans of an operation.

use super::answers::Item;
use super::operation::{Move, Operation, Parts, PlanPart, Purpose};
use super::{Leader, plans};
use crate::volume::VolumeTier;
use crate::worker::LinkError;
use kvbm_plan::{
    ChecksumMode, Command, Failure, FailureKind, Gate, Path, Priority, Rank, Tier, TransferPlan, wire,
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
        let ranks = (0..self.settings.ranks as u16).map(Rank);
        match wire::encode_command(command) {
            Ok(bytes) => ranks
                .filter_map(|rank| self.send_bytes(rank, &bytes).err().map(|failure| (rank, failure)))
                .collect(),
            Err(error) => ranks.map(|rank| (rank, unreached(&error))).collect(),
        }
    }

    /// Sends a command to one worker.
    pub(crate) fn send_to(&self, rank: Rank, command: &Command) -> Result<(), Failure> {
        let bytes = wire::encode_command(command).map_err(|error| unreached(&error))?;
        self.send_bytes(rank, &bytes)
    }

    fn send_bytes(&self, rank: Rank, command: &[u8]) -> Result<(), Failure> {
        let starts = self.ranks.line(rank)?;
        match self.links.get().and_then(|links| links.get(rank.index())) {
            Some(link) => {
                let sent = link.send(command);
                if sent == Err(LinkError::Closed) {
                    self.ranks.found_closed(rank, starts);
                }
                sent.map_err(|error| unreached(&error))
            }
            // Workers are connected before anything is sent.
            None => Ok(()),
        }
    }

    /// Makes an operation that is not under way yet: nothing can answer for it before [`send`](Self::send).
    pub(crate) fn prepare(&self, purpose: Purpose, to: Tier, parts: Parts) -> Prepared {
        let moves = parts.moves.clone();
        let most = |from| match from {
            Tier::G1 | Tier::G2 => self.settings.max_plan_blocks,
            Tier::G3 | Tier::G4 => self.settings.max_read_blocks,
        };
        let ranges = plans::ranges(&moves, most);
        if moves.iter().any(|step| step.from == Tier::G3) {
            self.ask_disk();
        }
        if let Some(volume) = &parts.volume {
            volume.asks();
        }
        let limit = self.limit(&moves, to, parts.volume.as_deref());
        let operation = Operation::new(purpose, to, limit, parts, ranges.len());
        Prepared { operation, moves, ranges }
    }

    /// How long these moves may take. What is read from below has the deadline of its tier, and beside it the time that all the bytes take:
    /// a device that works is not given up because much is asked of it.
    pub(crate) fn limit(&self, moves: &[Move], to: Tier, volume: Option<&VolumeTier>) -> Duration {
        let most = self.settings.transfer_deadline;
        let deadlines = [
            (Tier::G3, Some(self.settings.read_deadline)),
            (Tier::G4, volume.map(|volume| volume.descriptor.deadline)),
        ];
        let (mut limit, mut beside) = (most, Duration::ZERO);
        for (tier, deadline) in deadlines {
            let blocks = moves.iter().filter(|step| step.from == tier).count();
            if let Some(deadline) = deadline.filter(|_| blocks > 0) {
                limit = limit.min(deadline);
                beside = beside.saturating_add(self.time_of_read(Path::new(tier, to), blocks));
            }
        }
        limit.saturating_add(beside).min(most)
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
            src: operation.endpoint(from),
            dst: operation.endpoint(operation.to),
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
        let unreached = self.broadcast(&Command::Transfer(plan));
        // After it was sent: a worker whose start is told later has not got it.
        self.inflight.sent(plan_id, self.ranks.starts_told());
        for (rank, failure) in unreached {
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

fn unreached(error: &dyn std::fmt::Display) -> Failure {
    Failure::new(FailureKind::Io, error.to_string())
}
