//! Starting a transfer: its plans and their way to the workers.

use super::inflight::SentAmong;
use super::plans::Part;
use super::transfer::{PlanPart, Transfer};
use super::{Handle, Move, Purpose, Request, Transfers, VolumeEnd, plans};
use kvbm_plan::{ChecksumMode, Command, Gate, Path, Priority, Tier, TransferPlan};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

impl Purpose {
    fn priority(self) -> Priority {
        match self {
            Self::Onboard | Self::EngineOnboard | Self::Stage => Priority::Urgent,
            Self::Prefetch | Self::Private => Priority::Normal,
            Self::Offload | Self::Audit => Priority::Background,
        }
    }
}

impl Transfers {
    /// Starts a transfer of at least one block.
    pub(crate) fn start(self: &Arc<Self>, request: Request) -> Handle {
        let (transfer, parts) = self.prepare(request);
        let handle = Handle::new(self, transfer.interest());
        self.send(&transfer, parts);
        handle
    }

    /// A transfer that is not under way yet, and what each of its plans moves. Nothing can answer
    /// for it before [`send`](Self::send).
    pub(super) fn prepare(&self, request: Request) -> (Arc<Transfer>, Vec<Part>) {
        let most = |from| match from {
            Tier::G1 | Tier::G2 => self.settings.max_plan_blocks,
            Tier::G3 | Tier::G4 => self.settings.max_read_blocks,
        };
        let parts = plans::parts(&request.moves, request.to, request.layers, most);
        let on_disk = request.moves.iter().filter(|block| block.from == Tier::G3);
        self.slots.directories().note_reads(on_disk.map(|block| block.src));
        if let Some(volume) = &request.volume {
            volume.requested();
        }
        let limit = self.limit(&request);
        // An engine's worker may be asked which loads are over.
        let is_tagged = matches!(request.purpose, Purpose::EngineOnboard | Purpose::Audit);
        let tag = if is_tagged { self.tags.fetch_add(1, Ordering::AcqRel).saturating_add(1) } else { 0 };
        (Transfer::new(request, tag, limit, &parts), parts)
    }

    /// How long a request may take: as long as its paths, no longer than its caller waits, and an
    /// onboard no longer than computing its blocks.
    fn limit(&self, request: &Request) -> Duration {
        let Request { moves, to, volume, .. } = request;
        let limit = self.limit_of_paths(moves, *to, volume.as_deref());
        let computes = matches!(request.purpose, Purpose::Onboard | Purpose::EngineOnboard);
        let recompute = self.block_costs().recompute.filter(|_| computes);
        let patience = recompute.and_then(|time| self.onboard_patience(time, moves.len()));
        [patience, request.limit].into_iter().flatten().fold(limit, Duration::min)
    }

    /// How long these moves may take. A read from a disk or a volume has the deadline of its tier,
    /// and beside it the time that all the bytes take. A device that works is not given up because
    /// many blocks are read.
    fn limit_of_paths(&self, moves: &[Move], to: Tier, volume: Option<&dyn VolumeEnd>) -> Duration {
        let most = self.settings.transfer_deadline;
        let now = kvbm_plan::clock::now();
        let deadlines =
            [(Tier::G3, Some(self.settings.read_deadline)), (Tier::G4, volume.map(VolumeEnd::deadline))];
        let (mut limit, mut beside) = (most, Duration::ZERO);
        for (tier, deadline) in deadlines {
            let blocks = moves.iter().filter(|block| block.from == tier).count();
            if let Some(deadline) = deadline.filter(|_| blocks > 0) {
                let path = Path::new(tier, to);
                // Transfers that hang are not waited for.
                let before = self.blocks_before(path, now);
                limit = limit.min(deadline);
                let costs = self.block_costs();
                beside = beside.saturating_add(self.speeds.time_of_read(path, costs, blocks, before));
            }
        }
        limit.saturating_add(beside).min(most)
    }

    /// Sends the plans of a transfer.
    pub(super) fn send(&self, transfer: &Arc<Transfer>, parts: Vec<Part>) {
        let _inside = transfer.span.enter();
        for part in parts {
            self.send_plan(transfer, part);
        }
    }

    /// Sends the plan for `part` to every rank.
    fn send_plan(&self, transfer: &Arc<Transfer>, Part { moves: range, step }: Part) {
        let moves = &transfer.moves[range.clone()];
        let first = moves[0];
        let path = Path::new(first.from, transfer.to);
        let part = PlanPart { transfer: Arc::clone(transfer), first: range.start, step };
        let steps = transfer.layers.zip(step);
        let plan_id = self.inflight.enter(part, path, range.len());
        self.metrics.path(path).enter();
        let plan = TransferPlan {
            plan_id,
            epoch: self.settings.epoch,
            group: first.identity.group,
            src: transfer.endpoint(first.from),
            dst: transfer.endpoint(transfer.to),
            blocks: plans::transfers(moves),
            layers: steps.map(|(steps, step)| steps.range(step)),
            gate: steps
                .and_then(|(steps, step)| steps.gate(step))
                .or_else(|| transfer.iteration.map(|iteration| self.computed(iteration)))
                .unwrap_or_else(|| self.gate(path, transfer)),
            after: Vec::new(),
            priority: transfer.purpose.priority(),
            // 0 would mean no limit.
            budget_ms: u32::try_from(transfer.limit.as_millis()).unwrap_or(u32::MAX).max(1),
            checksums: ChecksumMode::Required,
            tag: transfer.tag,
            compare: transfer.compare,
        };
        let before = self.ranks.starts_announced();
        let not_sent = self.ranks.broadcast(&Command::Transfer(plan));
        // A worker whose start is announced later has not got it.
        self.inflight.sent(plan_id, SentAmong { before, after: self.ranks.starts_announced() });
        for (rank, failure) in not_sent {
            self.fail_plans(rank, &[(plan_id, path)], &failure);
        }
    }

    /// What whole blocks wait for that an iteration computes: its last layer, where it is known
    /// which that is.
    fn computed(&self, iteration: u64) -> Gate {
        match self.settings.num_layers {
            0 | 1 => Gate::Iteration(iteration),
            layers => Gate::Layer { iteration, layer: layers - 1 },
        }
    }

    /// A fence lies behind the engine's writes and its reads of G1. A plan that touches G1 waits
    /// for it: blocks are read after the engine wrote them, and overwritten after the engine read
    /// them.
    fn gate(&self, path: Path, transfer: &Transfer) -> Gate {
        let fence = transfer.fence.map_or_else(|| self.fence.load(Ordering::Acquire), |fence| fence.0);
        let touches_device = path.src == Tier::G1 || path.dst == Tier::G1;
        if touches_device && fence > 0 { Gate::DeviceEvent(fence) } else { Gate::None }
    }
}
