//! Parts of the program that a build may leave out.

use kvbm::events_plane::url::UrlError;

/// How to run the program with `features`, a list with commas.
pub(crate) fn command_with(features: &str) -> String {
    format!("run it with `cargo run --release --features {features} -- ...`")
}

/// The error, with the command that builds a transport which this build lacks.
pub(crate) fn explain_url(error: &UrlError) -> String {
    match error {
        UrlError::NotBuilt { feature, .. } => format!("{error}; {}", command_with(feature)),
        _ => error.to_string(),
    }
}

/// Fails where this build lacks a transport that `what` needs.
pub(crate) fn require_transports(what: &str) -> anyhow::Result<()> {
    let transports = [("nats", cfg!(feature = "nats")), ("zmq", cfg!(feature = "zmq"))];
    require(what, &transports)
}

fn require(what: &str, features: &[(&str, bool)]) -> anyhow::Result<()> {
    let missing: Vec<&str> = features.iter().filter(|(_, built)| !built).map(|(name, _)| *name).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let all = features.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(",");
    anyhow::bail!(
        "{what} needs the features {all}; this build lacks {}: {}",
        missing.join(", "),
        command_with(&all)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_feature_is_named_with_its_command() {
        let error = UrlError::NotBuilt { scheme: "tls".into(), feature: "nats" };
        let text = explain_url(&error);
        assert!(
            text.contains("'tls'") && text.ends_with("`cargo run --release --features nats -- ...`"),
            "{text}"
        );
        let other = UrlError::Scheme { scheme: "pigeon".into() };
        assert_eq!(explain_url(&other), other.to_string());
        let text = require("a benchmark", &[("nats", true), ("zmq", false)]).unwrap_err().to_string();
        assert!(
            text.starts_with("a benchmark needs the features nats,zmq; this build lacks zmq: "),
            "{text}"
        );
        assert!(require("a benchmark", &[("nats", true)]).is_ok());
    }
}
