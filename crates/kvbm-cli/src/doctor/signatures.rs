//! Whether blocks that others could write are signed.

use kvbm::config::Config;

use super::{Finding, Status};

const NAME: &str = "signatures";
const FIX: &str = "give every node the same namespace.deployment_secret, what `openssl rand -hex 32` prints; the cache \
                   begins anew then";
/// Fewer bytes are found by trial.
const ENOUGH_BYTES: usize = 16;

pub(super) fn examine(config: &Config) -> Finding {
    let short = |found: String, effect| Finding::short(NAME, Status::Limited, found, effect, FIX);
    match config.namespace.deployment_secret.as_ref().map(|secret| secret.expose().len()) {
        None => short(
            "namespace.deployment_secret is not set: blocks on disk and volumes, and announcements, are not signed".into(),
            "checksums find damage, not forgery: who can write there can choose what the model answers",
        ),
        Some(bytes) if bytes < ENOUGH_BYTES => short(
            format!("namespace.deployment_secret has {bytes} bytes"),
            "who can read the disk or a volume can find it by trial, and forge blocks then",
        ),
        Some(_) => Finding::ok(NAME, "blocks on disk and volumes, and announcements, are signed"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvbm::config::Secret;

    #[test]
    fn what_is_not_protected_is_reported() {
        let with = |secret: Option<&str>| {
            let mut config = Config::default();
            config.namespace.deployment_secret = secret.map(Secret::new);
            examine(&config)
        };
        assert_eq!(with(Some("0123456789abcdef")).status, Status::Ok);
        for (secret, expected) in [(None, "not signed"), (Some("short"), "5 bytes")] {
            let finding = with(secret);
            assert!(finding.status == Status::Limited && finding.found.contains(expected), "{finding:?}");
            assert!(finding.effect.is_some() && finding.fix.is_some());
        }
    }
}
