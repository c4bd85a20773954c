//! Scales and axes of the plots.

use std::fmt::Write;

/// Width of every plot in user units; the page scales it.
pub(super) const WIDTH: f64 = 1000.0;

/// The area inside the axes.
#[derive(Clone, Copy)]
pub(super) struct Frame {
    pub(super) left: f64,
    pub(super) right: f64,
    pub(super) top: f64,
    pub(super) bottom: f64,
}

impl Frame {
    /// The place of a share (0 to 1) of the width.
    pub(super) fn x(&self, share: f64) -> f64 {
        self.left + share.clamp(0.0, 1.0) * (self.right - self.left)
    }

    /// The place of a share (0 to 1) of the height, from the bottom.
    pub(super) fn y(&self, share: f64) -> f64 {
        self.bottom - share.clamp(0.0, 1.0) * (self.bottom - self.top)
    }
}

/// An SVG of this height with `body` inside; `label` is what a screen reader says.
pub(super) fn svg(height: f64, label: &str, body: &str) -> String {
    format!("<svg viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" aria-label=\"{label}\">\n{body}</svg>\n")
}

pub(super) fn text(out: &mut String, x: f64, y: f64, anchor: &str, class: &str, content: &str) {
    // Writing to a string cannot fail, here and below.
    let _ = writeln!(
        out,
        "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" class=\"{class}\">{content}</text>"
    );
}

pub(super) fn line(out: &mut String, class: &str, from: (f64, f64), to: (f64, f64)) {
    let _ = writeln!(
        out,
        "<line class=\"{class}\" x1=\"{:.1}\" y1=\"{:.1}\" x2=\"{:.1}\" y2=\"{:.1}\"/>",
        from.0, from.1, to.0, to.1
    );
}

pub(super) fn rect(out: &mut String, class: &str, from: (f64, f64), size: (f64, f64), title: &str) {
    let _ = writeln!(
        out,
        "<rect class=\"{class}\" x=\"{:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{:.1}\"><title>{title}</title></rect>",
        from.0,
        from.1,
        size.0.max(0.5),
        size.1.max(0.0)
    );
}

/// About `n` round numbers from 0 to `max`.
pub(super) fn ticks(max: u64, n: u64) -> Vec<u64> {
    let rough = (max / n.max(1)).max(1);
    let power = 10_u64.pow(rough.ilog10());
    let step = [1, 2, 5, 10].into_iter().map(|k| k * power).find(|step| *step >= rough).unwrap_or(rough);
    (0..=max / step).map(|i| i * step).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_few() {
        assert_eq!(ticks(12_031, 6), [0, 5000, 10_000]);
        assert_eq!(ticks(100, 5), [0, 20, 40, 60, 80, 100]);
        assert_eq!(ticks(1, 5), [0, 1]);
        for max in [1, 7, 99, 12_345, u64::from(u32::MAX)] {
            assert!((2..=12).contains(&ticks(max, 6).len()), "{max}");
        }
    }
}
