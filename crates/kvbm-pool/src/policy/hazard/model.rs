//! How likely blocks are used again: rates by class and by time since the last use, learnt while
//! running.
//!
//! For each class and each range of ages two numbers are kept. They are how many uses came at that
//! age, and for how long blocks of the class were of that age without being used. Their quotient is
//! the rate of reuse (the hazard). What a block is worth keeping for is the best ratio of expected
//! reuse to expected time that holding it from now on can give. This is the largest, over all times
//! to give up, of P(used before) / E(time until used or given up).
//!
//! Rates of which little is known lean on the rate of all classes at that age, and those on 1 /
//! age. That makes an untaught model evict in order of recency.

/// Ranges of age: 0, 1, 2, 3, then two for each power of two.
pub(crate) const AGES: usize = 32;
pub(crate) const CLASSES: usize = 128;

/// Uses that a guess counts for against what was seen.
const GUESS: f32 = 4.0;
/// What is kept of old observations when newer ones come.
const KEEP: f32 = 0.97;

#[derive(Clone, Copy)]
struct Count {
    uses: f32,
    time: f32,
}

impl Count {
    const NOTHING: Self = Self { uses: 0.0, time: 0.0 };
}

/// The uses of blocks that the policy saw, and their times without use.
pub(crate) struct Observations {
    classes: Box<[[Count; AGES]]>,
    all: [Count; AGES],
}

/// What blocks are worth, from what was seen.
pub(crate) struct Worth {
    classes: Box<[[f32; AGES]]>,
}

/// Which range an age belongs to.
#[inline]
pub(crate) fn range_of(age: u16) -> usize {
    if age < 4 {
        return usize::from(age);
    }
    let log = age.ilog2() as usize;
    2 * log + usize::from(age >> (log - 1) & 1)
}

/// The first age of a range.
fn first_of(range: usize) -> f32 {
    if range < 4 {
        return range as f32;
    }
    let log = range / 2;
    ((2 + range % 2) << (log - 1)) as f32
}

impl Observations {
    pub(crate) fn new() -> Self {
        let classes = vec![[Count::NOTHING; AGES]; CLASSES].into_boxed_slice();
        Self { classes, all: [Count::NOTHING; AGES] }
    }

    /// A block of `class` was used at `age`.
    #[inline]
    pub(crate) fn saw_use(&mut self, class: usize, age: u16) {
        let range = range_of(age);
        self.classes[class][range].uses += 1.0;
        self.all[range].uses += 1.0;
    }

    /// A block of `class` was found unused at `age`, which stands for `time` of it.
    #[inline]
    pub(crate) fn saw_rest(&mut self, class: usize, age: u16, time: f32) {
        let range = range_of(age);
        self.classes[class][range].time += time;
        self.all[range].time += time;
    }

    /// Makes room for newer observations.
    pub(crate) fn fade(&mut self) {
        let fade = |seen: &mut Count| {
            seen.uses *= KEEP;
            seen.time *= KEEP;
        };
        self.classes.iter_mut().flatten().for_each(fade);
        self.all.iter_mut().for_each(fade);
    }
}

impl Worth {
    pub(crate) fn new() -> Self {
        let mut worth = Self { classes: vec![[0.0; AGES]; CLASSES].into_boxed_slice() };
        let nothing = Observations::new();
        (0..CLASSES).for_each(|class| worth.fit(class, &nothing));
        worth
    }

    /// What keeping a block is worth: larger is better.
    #[inline]
    pub(crate) fn of(&self, class: usize, age: u16) -> f32 {
        self.classes[class][range_of(age)]
    }

    /// Brings the worth of one class up to date.
    pub(crate) fn fit(&mut self, class: usize, seen: &Observations) {
        let (mut used, mut spent) = ([0.0; AGES], [0.0; AGES]);
        for range in 0..AGES {
            let width = first_of(range + 1) - first_of(range);
            let by_age = 1.0 / (1.0 + first_of(range) + width / 2.0);
            let rate = leaning(seen.classes[class][range], leaning(seen.all[range], by_age));
            used[range] = 1.0 - (-rate * width).exp();
            // The mean time in the range of a block that may be used in it.
            spent[range] = if rate * width > 1e-3 { used[range] / rate } else { width };
        }
        for from in 0..AGES {
            let (mut left, mut uses, mut time, mut best) = (1.0_f32, 0.0, 0.0, 0.0_f32);
            for range in from..AGES {
                uses += left * used[range];
                time += left * spent[range];
                left *= 1.0 - used[range];
                best = best.max(uses / time);
            }
            self.classes[class][from] = best;
        }
    }
}

/// A rate from what was seen, and from a guess that counts for [`GUESS`] uses.
fn leaning(seen: Count, guess: f32) -> f32 {
    (seen.uses + GUESS) / (seen.time + GUESS / guess)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_follow_each_other_without_a_gap() {
        let mut last = 0;
        for age in 0..=u16::MAX {
            let range = range_of(age);
            assert!(range == last || range == last + 1, "age {age}");
            assert!((first_of(range)..first_of(range + 1)).contains(&f32::from(age)), "age {age}");
            last = range;
        }
        assert_eq!(last, AGES - 1);
    }

    #[test]
    fn an_untaught_model_goes_by_recency() {
        let worth = Worth::new();
        for ages in [0_u16, 1, 2, 4, 8, 100, 1000, 10_000, 60_000].windows(2) {
            assert!(worth.of(5, ages[0]) > worth.of(5, ages[1]), "{ages:?}");
        }
    }

    fn fit(worth: &mut Worth, seen: &Observations) {
        (0..CLASSES).for_each(|class| worth.fit(class, seen));
    }

    /// Class 1 is used at age 1000 as a rule, class 2 never.
    fn teach(seen: &mut Observations, times: usize) {
        for _ in 0..times {
            for age in [10, 100, 500] {
                seen.saw_rest(1, age, 100.0);
                seen.saw_rest(2, age, 100.0);
                seen.saw_rest(2, 4 * age, 100.0);
            }
            seen.saw_use(1, 1000);
        }
    }

    #[test]
    fn what_was_seen_counts_and_fades() {
        let (mut seen, mut worth) = (Observations::new(), Worth::new());
        teach(&mut seen, 5000);
        fit(&mut worth, &seen);
        assert!(worth.of(1, 900) > 20.0 * worth.of(2, 900));
        assert!(worth.of(1, 900) > worth.of(1, 100), "the nearer the use the better");
        for _ in 0..2000 {
            seen.fade();
        }
        fit(&mut worth, &seen);
        assert!((worth.of(1, 900) / worth.of(2, 900) - 1.0).abs() < 0.01);
    }
}
