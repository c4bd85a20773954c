//! `cargo run --release --example storage_advisor -- URL [--every SECONDS] [--count N]
//! [--forget-after SECONDS]`: listens to a URL and prints what the storage could do, every so
//! often. A source that is silent for longer than `--forget-after` (30 s; 0 for never) is
//! forgotten. `kvbm replay --events URL` gives it something to listen to.

use advisor::{Advisor, FORGET_AFTER, Policy, Proposal, best_of_each, follow};
use anyhow::{Context, Result, bail};
use kvbm_events::EventUrl;
use std::time::{Duration, Instant};

/// Proposals of a kind that are printed of each report.
const SHOWN: usize = 4;

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let (mut url, mut every, mut left) = (None, 5, u64::MAX);
    let mut forget_after = FORGET_AFTER.as_secs();
    while let Some(arg) = args.next() {
        let mut seconds = || args.next().and_then(|text| text.parse().ok());
        let mut number = || seconds().filter(|n| *n > 0);
        match arg.as_str() {
            "--every" => every = number().context("--every needs a number of seconds")?,
            "--count" => left = number().context("--count needs a number of reports")?,
            "--forget-after" => {
                forget_after = seconds().context("--forget-after needs a number of seconds")?;
            }
            text if url.is_none() && !text.starts_with("--") => url = Some(text.parse::<EventUrl>()?),
            other => bail!(
                "{other} is not known: storage_advisor URL [--every SECONDS] [--count N] [--forget-after SECONDS]"
            ),
        }
    }
    let url = url.context("name what to listen to, like nats://127.0.0.1:4222")?;
    let advisor = Advisor::new(Policy::default());
    let following = follow(&url, advisor).with_context(|| format!("cannot follow {url}"))?;
    let mut following = following.forget_after(Duration::from_secs(forget_after));
    eprintln!("listening to {url}");
    while left > 0 {
        following.listen(Duration::from_secs(every))?;
        report(&following.advisor, following.suspects());
        left -= 1;
    }
    Ok(())
}

fn report(advisor: &Advisor, suspects: usize) {
    let proposals = advisor.proposals(Instant::now());
    let count = |is: fn(&Proposal) -> bool| proposals.iter().filter(|proposal| is(proposal)).count();
    println!(
        "{} blocks known, {} sources incomplete; {} promotions, {} demotions, {} compactions",
        advisor.blocks(),
        suspects,
        count(|proposal| matches!(proposal, Proposal::Promote { .. })),
        count(|proposal| matches!(proposal, Proposal::Demote { .. })),
        count(|proposal| matches!(proposal, Proposal::Compact { .. })),
    );
    for proposal in best_of_each(&proposals, SHOWN) {
        println!("  {proposal}");
    }
}
