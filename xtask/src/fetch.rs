//! Getting what tests need from package registries, which now and then do not answer.

use std::time::Duration;

/// How often, and how long to wait before each further time.
const PAUSES: [Duration; 4] =
    [Duration::from_secs(3), Duration::from_secs(20), Duration::from_secs(60), Duration::from_secs(120)];

/// What `get` gives, tried again after failures that are told as they come.
pub(crate) fn with_retries<T>(what: &str, get: impl FnMut() -> anyhow::Result<T>) -> anyhow::Result<T> {
    with_pauses(what, &PAUSES, get)
}

fn with_pauses<T>(
    what: &str,
    pauses: &[Duration],
    mut get: impl FnMut() -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    println!("fetching {what}");
    let mut pauses = pauses.iter();
    loop {
        match (get(), pauses.next()) {
            (Ok(got), _) => return Ok(got),
            (Err(error), Some(pause)) => {
                println!("{what}: {error:#}; trying again in {} s", pause.as_secs());
                std::thread::sleep(*pause);
            }
            (Err(error), None) => {
                return Err(error.context(format!("{what} cannot be fetched, not even after several tries")));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::anyhow;

    #[test]
    fn what_fails_is_tried_again_and_named() {
        let pauses = [Duration::ZERO; 2];
        let mut tries = 0;
        let got = with_pauses("a thing", &pauses, || {
            tries += 1;
            if tries == 3 { Ok(7) } else { Err(anyhow!("no answer")) }
        });
        assert_eq!(got.unwrap(), 7);
        let error = with_pauses("a thing", &pauses, || Err::<(), _>(anyhow!("no answer"))).unwrap_err();
        let error = format!("{error:#}");
        assert!(error.starts_with("a thing cannot be fetched") && error.ends_with("no answer"), "{error}");
    }
}
