//! Gates: iterations and layers of the model, device events.

use kvbm_plan::PlanId;
use std::collections::{BTreeMap, HashMap, VecDeque};

/// A point in the model's work: (iteration, layers finished in it). `u64::MAX` layers mean all.
pub(crate) type Progress = (u64, u64);

/// Registered events that are remembered: fourteen seconds at 1,000 steps of the model a second.
/// The oldest is forgotten beyond that, complete or not. The plans that wait for it fail.
///
/// A table of 32,768 places takes 28,672. Where it is full of removed entries, it is cleaned if at
/// most half of them are in use, and doubled otherwise.
pub(crate) const MAX_EVENTS: usize = 14_000;

/// Where a device event stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum EventState {
    /// A plan names it, nobody registered it yet.
    Unregistered,
    /// Registered, not complete.
    Pending,
    /// Complete.
    Complete,
    /// The engine's work failed, with the reason.
    Failed(String),
}

struct EventEntry {
    state: EventState,
    generation: u64,
    waiting: Vec<PlanId>,
}

/// All gates of a worker.
#[derive(Default)]
pub(crate) struct Gates {
    progress: Progress,
    by_progress: BTreeMap<Progress, Vec<PlanId>>,
    events: HashMap<u64, EventEntry>,
    registered: VecDeque<(u64, u64)>,
    generation: u64,
}

/// The point that a finished `layer` of `iteration` (or all its layers) reaches.
pub(crate) fn point(iteration: u64, layer: Option<u32>) -> Progress {
    (iteration, layer.map_or(u64::MAX, |layer| u64::from(layer) + 1))
}

impl Gates {
    /// Whether the model got there.
    pub(crate) fn reached(&self, point: Progress) -> bool {
        self.progress >= point
    }

    pub(crate) fn wait_for(&mut self, point: Progress, plan: PlanId) {
        self.by_progress.entry(point).or_default().push(plan);
    }

    /// The model got to `point`: the plans whose gates open. An earlier point than known changes
    /// nothing.
    pub(crate) fn advance(&mut self, point: Progress) -> Vec<PlanId> {
        self.progress = self.progress.max(point);
        let mut opened = Vec::new();
        while let Some(first) = self.by_progress.first_entry() {
            if *first.key() > self.progress {
                break;
            }
            opened.extend(first.remove());
        }
        opened
    }

    /// State of event `id` as far as it is known.
    pub(crate) fn event(&self, id: u64) -> EventState {
        self.events.get(&id).map_or(EventState::Unregistered, |entry| entry.state.clone())
    }

    pub(crate) fn wait_for_event(&mut self, id: u64, plan: PlanId) {
        let fresh = || EventEntry { state: EventState::Unregistered, generation: 0, waiting: Vec::new() };
        self.events.entry(id).or_insert_with(fresh).waiting.push(plan);
    }

    /// Registers event `id` and returns its generation, by which [`Gates::finish_event`] tells it
    /// from an older event of the same number. Also returns the plans that lose an event which had
    /// to be forgotten, since the number of events is bounded.
    pub(crate) fn register_event(&mut self, id: u64) -> (u64, Vec<PlanId>) {
        self.generation += 1;
        let generation = self.generation;
        let entry = self.events.entry(id).or_insert(EventEntry {
            state: EventState::Pending,
            generation,
            waiting: Vec::new(),
        });
        entry.state = EventState::Pending;
        entry.generation = generation;
        self.registered.push_back((id, generation));
        let mut lost = Vec::new();
        if self.registered.len() > MAX_EVENTS
            && let Some((oldest, its_generation)) = self.registered.pop_front()
            && self.events.get(&oldest).is_some_and(|entry| entry.generation == its_generation)
            && let Some(entry) = self.events.remove(&oldest)
        {
            lost = entry.waiting;
        }
        (generation, lost)
    }

    /// The event is over: the plans that waited for it. Nothing if a newer event took its number.
    pub(crate) fn finish_event(
        &mut self,
        id: u64,
        generation: u64,
        result: Result<(), String>,
    ) -> Vec<PlanId> {
        match self.events.get_mut(&id) {
            Some(entry) if entry.generation == generation => {
                entry.state = result.map_or_else(EventState::Failed, |()| EventState::Complete);
                std::mem::take(&mut entry.waiting)
            }
            _ => Vec::new(),
        }
    }

    /// The plan no longer waits for `gate`.
    pub(crate) fn forget(&mut self, plan: PlanId, gate: kvbm_plan::Gate) {
        let waits_at = match gate {
            kvbm_plan::Gate::None => return,
            kvbm_plan::Gate::Iteration(iteration) => point(iteration, None),
            kvbm_plan::Gate::Layer { iteration, layer } => point(iteration, Some(layer)),
            kvbm_plan::Gate::DeviceEvent(id) => {
                self.forget_event(plan, id);
                return;
            }
        };
        if let Some(plans) = self.by_progress.get_mut(&waits_at) {
            plans.retain(|waiting| *waiting != plan);
            if plans.is_empty() {
                self.by_progress.remove(&waits_at);
            }
        }
    }

    fn forget_event(&mut self, plan: PlanId, id: u64) {
        if let Some(entry) = self.events.get_mut(&id) {
            entry.waiting.retain(|waiting| *waiting != plan);
            if entry.waiting.is_empty() && entry.state == EventState::Unregistered {
                self.events.remove(&id);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvbm_plan::Gate;

    #[test]
    fn progress_opens_every_gate_behind_it_and_none_ahead() {
        let mut gates = Gates::default();
        assert!(!gates.reached(point(0, Some(0))));
        for (plan, at) in
            [(1, point(3, Some(0))), (2, point(3, Some(5))), (3, point(3, None)), (4, point(4, Some(0)))]
        {
            gates.wait_for(at, PlanId(plan));
        }
        assert_eq!(gates.advance(point(2, None)), []);
        assert_eq!(gates.advance(point(3, Some(4))), [PlanId(1)]);
        assert_eq!(gates.advance(point(3, Some(1))), []);
        assert!(gates.reached(point(3, Some(4))));
        assert_eq!(gates.advance(point(4, Some(0))), [PlanId(2), PlanId(3), PlanId(4)]);
    }

    #[test]
    fn events_of_a_reused_number_are_distinguished() {
        let mut gates = Gates::default();
        gates.wait_for_event(7, PlanId(1));
        assert_eq!(gates.event(7), EventState::Unregistered);
        let (old, lost) = gates.register_event(7);
        assert_eq!(lost, []);
        let (new, _) = gates.register_event(7);
        assert_eq!(gates.finish_event(7, old, Ok(())), []);
        assert_eq!(gates.event(7), EventState::Pending);
        assert_eq!(gates.finish_event(7, new, Err("boom".into())), [PlanId(1)]);
        assert_eq!(gates.event(7), EventState::Failed("boom".into()));
    }

    #[test]
    fn events_are_bounded_and_the_losers_are_named() {
        let mut gates = Gates::default();
        gates.register_event(0);
        gates.wait_for_event(0, PlanId(9));
        let mut lost = Vec::new();
        for id in 1..=MAX_EVENTS as u64 {
            lost.extend(gates.register_event(id).1);
        }
        assert_eq!(lost, [PlanId(9)]);
        assert_eq!(gates.events.len(), MAX_EVENTS);
        assert_eq!(gates.event(0), EventState::Unregistered);
        let mut most = 0;
        for id in 0..8 * MAX_EVENTS as u64 {
            gates.register_event(MAX_EVENTS as u64 + id);
            most = most.max(gates.events.capacity());
        }
        assert_eq!(gates.events.len(), MAX_EVENTS);
        assert!(most <= 28_672, "room for {most} events");
    }

    #[test]
    fn a_forgotten_plan_leaves_nothing_behind() {
        let mut gates = Gates::default();
        let waits = [Gate::Iteration(5), Gate::Layer { iteration: 5, layer: 1 }, Gate::DeviceEvent(3)];
        gates.wait_for(point(5, None), PlanId(1));
        gates.wait_for(point(5, Some(1)), PlanId(1));
        gates.wait_for_event(3, PlanId(1));
        for gate in waits {
            gates.forget(PlanId(1), gate);
        }
        assert!(gates.by_progress.is_empty());
        assert!(gates.events.is_empty());
    }
}
