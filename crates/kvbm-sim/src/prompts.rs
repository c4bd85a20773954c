//! The prompts of a run: invented, or of a trace.

use crate::random::Random;

/// Tokens of a block.
pub(crate) const PAGE: u32 = 16;

/// Requests of real conversations, thinned out until they fit the small tiers of a run.
const CONVERSATIONS: &str = include_str!("../data/conversations.txt");
/// Requests of the trace that a run repeats.
const WINDOW: usize = 48;

/// What a request asks for.
pub(crate) struct Prompt {
    pub(crate) tokens: Vec<u32>,
    pub(crate) is_of_other_namespace: bool,
}

/// So many prompts, some of which begin alike.
pub(crate) fn at_random(random: &mut Random, count: u32) -> Vec<Prompt> {
    let prompt = |chain: u32| {
        let family = if random.below(2) == 0 { chain - chain % 3 } else { chain };
        let shared = PAGE * (1 + random.below(3) as u32);
        let token = |at: u32| if at < shared { at + 1000 * family } else { at + 1000 * chain };
        let tokens = (0..PAGE * (1 + random.below(6) as u32)).map(token).collect();
        Prompt { tokens, is_of_other_namespace: family % 4 == 3 }
    };
    (0..count).map(prompt).collect()
}

/// Neighbouring requests of the trace, in its order.
pub(crate) fn of_trace(random: &mut Random) -> Vec<Prompt> {
    let requests: Vec<&str> = CONVERSATIONS.lines().filter(|line| !line.starts_with('#')).collect();
    let first = random.below(requests.len() - WINDOW + 1);
    requests[first..first + WINDOW].iter().map(|request| prompt_of(request)).collect()
}

/// The tokens of a line of block numbers.
fn prompt_of(request: &str) -> Prompt {
    let number = |word: &str| word.parse::<u32>().unwrap_or_else(|error| panic!("{word}: {error}"));
    let blocks = request.split(' ').map(number);
    let tokens = blocks.flat_map(|block| (0..PAGE).map(move |at| block * PAGE + at)).collect();
    Prompt { tokens, is_of_other_namespace: false }
}
