//! The leader's line to a rank.

use super::{Event, World};
use kvbm::worker::{Lane, LinkError, WorkerLink};
use kvbm_plan::{Command, TransferPlan, wire};
use std::hash::Hash;
use std::time::Duration;

/// See the module.
pub(super) struct Link {
    world: World,
    rank: usize,
}

impl Link {
    pub(super) fn new(world: World, rank: usize) -> Self {
        Self { world, rank }
    }

    /// What a plan writes is touched by no other plan, and what it reads is written by none.
    fn check(&self, plan: &TransferPlan) {
        let path = plan.path();
        let clash = self.world.with(|state| {
            let rank = &state.ranks[self.rank];
            plan.blocks.iter().find_map(|block| {
                let user = rank.user_of(path.dst, block.dst)?;
                Some((block.dst, user))
            })
        });
        if let (Some((slot, user)), true) = (clash, path.dst != kvbm_plan::Tier::G4) {
            self.world.violate(format!(
                "plan {} writes slot {slot} of {} on rank {}, which plan {user} still uses",
                plan.plan_id, path.dst, self.rank
            ));
        }
    }
}

impl WorkerLink for Link {
    fn send(&self, _lane: Lane, command: &[u8]) -> Result<(), LinkError> {
        let decoded = wire::decode_command(command).map_err(|error| LinkError::Refused(error.to_string()))?;
        let refused = self.world.with(|state| {
            command.hash(&mut state.digest);
            if !state.ranks[self.rank].takes {
                return Some(LinkError::Closed);
            }
            let is_plan = matches!(decoded, Command::Transfer(_));
            (is_plan && state.fails(state.faults.refuse)).then(|| LinkError::Refused("busy".to_owned()))
        });
        if let Some(refused) = refused {
            return Err(refused);
        }
        if let Command::Transfer(plan) = &decoded {
            self.check(plan);
        }
        self.world.with(|state| {
            state.note(|| format!("rank {} is sent {decoded:?}", self.rank));
            let delay = state.random.duration(Duration::from_millis(2));
            let model = &mut state.ranks[self.rank];
            if let Command::Transfer(plan) = decoded {
                model.owed.insert(plan.plan_id, plan);
            }
            let time = model.arrival(delay, model.commands_until);
            model.commands_until = Some(time);
            let (rank, life, command) = (self.rank, model.life, command.to_vec());
            state.schedule_at(time, Event::Command { rank, life, command });
        });
        Ok(())
    }
}
