//! Transfers that go layer by layer.

use kvbm_plan::{Gate, LayerRange};

/// The steps of a transfer between G1 and G2: each moves some layers of all its blocks, the first
/// layers first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LayerSteps {
    layers: u32,
    steps: u32,
    /// The iteration that computes the layers: a step waits for its last one.
    iteration: Option<u64>,
}

impl LayerSteps {
    /// At most `most` steps for `layers` layers. `None` where one step would do all.
    pub(crate) fn new(layers: u32, most: u32, iteration: Option<u64>) -> Option<Self> {
        let steps = most.min(layers);
        (steps > 1).then_some(Self { layers, steps, iteration })
    }

    pub(crate) fn count(self) -> usize {
        self.steps as usize
    }

    /// First layer of a step.
    fn first(self, step: usize) -> u32 {
        let first = u64::from(self.layers) * step as u64 / u64::from(self.steps);
        first as u32
    }

    pub(crate) fn range(self, step: usize) -> LayerRange {
        let first = self.first(step);
        LayerRange { first, count: self.first(step + 1) - first }
    }

    /// The step that moves `layer`; the last one for layers that there are not.
    pub(crate) fn of_layer(self, layer: u32) -> usize {
        (0..self.count()).find(|&step| layer < self.first(step + 1)).unwrap_or(self.count() - 1)
    }

    /// What a step waits for, where its layers are being computed.
    pub(crate) fn gate(self, step: usize) -> Option<Gate> {
        let layer = self.first(step + 1) - 1;
        self.iteration.map(|iteration| Gate::Layer { iteration, layer })
    }

    /// The part of a block that a step moves.
    pub(crate) fn share(self, step: usize) -> f64 {
        f64::from(self.range(step).count) / f64::from(self.layers)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_cover_every_layer_once_and_wait_for_their_last() {
        for (layers, most) in [(2, 2), (3, 2), (32, 16), (80, 16), (61, 16), (5, 99)] {
            let steps = LayerSteps::new(layers, most, Some(7)).expect("more than one step");
            let mut next = 0;
            for step in 0..steps.count() {
                let range = steps.range(step);
                assert!(range.first == next && range.count > 0, "{steps:?}: {range:?}");
                next += range.count;
                assert!((range.first..next).all(|layer| steps.of_layer(layer) == step));
                assert_eq!(steps.gate(step), Some(Gate::Layer { iteration: 7, layer: next - 1 }));
            }
            assert_eq!((next, steps.of_layer(u32::MAX)), (layers, steps.count() - 1));
            let all: f64 = (0..steps.count()).map(|step| steps.share(step)).sum();
            assert!((all - 1.0).abs() < 1e-9);
        }
        assert_eq!(LayerSteps::new(1, 16, None), None);
        assert_eq!(LayerSteps::new(32, 1, None), None);
        assert_eq!(LayerSteps::new(32, 2, None).and_then(|steps| steps.gate(0)), None);
    }
}
