//! What a URL says about NATS.

use super::UrlError;
use super::parts::{Parts, malformed};
use crate::nats::{BucketConfig, Login, NatsConfig};
use std::time::Duration;

const CORE: &[&str] = &["subject", "tls", "ca", "cert", "key", "creds", "nkey", "stream"];
const STREAM: &[&str] = &[
    "subject",
    "tls",
    "ca",
    "cert",
    "key",
    "creds",
    "nkey",
    "stream",
    "storage",
    "max_bytes",
    "max_age",
    "from",
];

const BUCKET: &[&str] = &["bucket", "tls", "ca", "cert", "key", "creds", "nkey", "insecure"];

/// The bucket that `parts` ask for.
pub(super) fn bucket(parts: &Parts, lease: Duration) -> Result<BucketConfig, UrlError> {
    parts.expect_only(BUCKET)?;
    let name = parts.read("bucket", "letters, digits, - and _", name)?;
    let name = name.unwrap_or_else(|| "kvbm-nodes".into());
    parts.flag("insecure")?;
    Ok(BucketConfig { server: server(parts)?, name, lease })
}

/// The configuration that `parts` ask for.
pub(super) fn config(parts: &Parts) -> Result<NatsConfig, UrlError> {
    let kept = parts.scheme.starts_with("jetstream+") || parts.get("stream").is_some();
    parts.expect_only(if kept { STREAM } else { CORE })?;
    let mut config = server(parts)?;
    let subject = |text: &str| {
        let good = |word: &str| !word.is_empty() && !word.contains(['*', '>', ' ']);
        text.split('.').all(good).then(|| text.to_owned())
    };
    if let Some(subject) = parts.read("subject", "words with points between them", subject)? {
        config.subject = subject;
    }
    if !kept {
        return Ok(config);
    }
    let name = parts.read("stream", "letters, digits, - and _", name)?;
    let mut config = config.with_stream(name.unwrap_or_else(|| "kvbm-events".into()));
    if let Some(stream) = &mut config.stream {
        let on_disk = |text: &str| ["memory", "file"].iter().position(|known| *known == text);
        let number = |text: &str| text.parse::<u64>().ok().filter(|number| *number > 0);
        let from_start = |text: &str| ["new", "start"].iter().position(|known| *known == text);
        if let Some(storage) = parts.read("storage", "file or memory", on_disk)? {
            stream.on_disk = storage == 1;
        }
        if let Some(bytes) = parts.read("max_bytes", "a number of bytes above 0", number)? {
            stream.max_bytes = bytes;
        }
        if let Some(seconds) = parts.read("max_age", "a number of seconds above 0", number)? {
            stream.max_age = Duration::from_secs(seconds);
        }
        if let Some(from) = parts.read("from", "new or start", from_start)? {
            stream.from_start = from == 1;
        }
    }
    Ok(config)
}

/// The name of a stream or a bucket.
fn name(text: &str) -> Option<String> {
    let good = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
    (!text.is_empty() && text.chars().all(good)).then(|| text.to_owned())
}

/// How to reach the server, and who we are.
fn server(parts: &Parts) -> Result<NatsConfig, UrlError> {
    let tls = parts.scheme.ends_with("tls");
    if parts.place.contains('/') {
        return Err(malformed(&parts.shown(), "nothing may follow HOST:PORT but ?NAME=VALUE"));
    }
    let word = |text: &str| (!text.is_empty()).then(|| text.to_owned());
    let server = format!("{}://{}", if tls { "tls" } else { "nats" }, parts.place);
    let mut config = NatsConfig::new(server, "kvbm.events");
    config.require_tls = tls || parts.flag("tls")?;
    config.root_certificates = parts.read("ca", "a file", word)?.map(Into::into);
    config.client_certificate =
        match (parts.read("cert", "a file", word)?, parts.read("key", "a file", word)?) {
            (Some(certificate), Some(key)) => Some((certificate.into(), key.into())),
            (None, None) => None,
            _ => return Err(malformed(&parts.shown(), "cert and key go together")),
        };
    config.login = login(parts)?;
    Ok(config)
}

/// Who we are, said once.
fn login(parts: &Parts) -> Result<Login, UrlError> {
    let file = |text: &str| (!text.is_empty()).then(|| text.into());
    let creds = parts.read("creds", "a file", file)?.map(Login::CredentialsFile);
    let nkey = parts.read("nkey", "a file", file)?.map(Login::NkeyFile);
    let user = parts.user.clone().map(|(user, password)| match password {
        Some(password) => Login::User(user, password),
        None => Login::Token(user),
    });
    let mut logins = [user, creds, nkey].into_iter().flatten();
    let login = logins.next().unwrap_or(Login::None);
    if logins.next().is_some() {
        let reason = "it has two kinds of credentials (a user or token, creds, nkey): leave one out";
        return Err(malformed(&parts.shown(), reason));
    }
    Ok(login)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(url: &str) -> Result<NatsConfig, UrlError> {
        config(&Parts::parse(url)?)
    }

    #[test]
    fn core_and_streams_are_distinguished() {
        let core = read("nats://127.0.0.1:4222").unwrap();
        assert_eq!((core.url.as_str(), core.subject.as_str()), ("nats://127.0.0.1:4222", "kvbm.events"));
        assert!(core.stream.is_none() && !core.require_tls && core.login == Login::None);
        assert_eq!(read("nats://h?stream=a").unwrap().stream.unwrap().name, "a");
        let url = "jetstream+tls://u:p@h:1?storage=memory&max_bytes=7&max_age=9&from=start&subject=a.b&ca=/c";
        let kept = read(url).unwrap();
        let stream = kept.stream.unwrap();
        assert_eq!((stream.name.as_str(), stream.on_disk, stream.max_bytes), ("kvbm-events", false, 7));
        assert_eq!((stream.max_age, stream.from_start), (Duration::from_secs(9), true));
        assert_eq!((kept.url.as_str(), kept.require_tls), ("tls://h:1", true));
        assert!(kept.login == Login::User("u".into(), "p".into()));
        assert_eq!(kept.root_certificates, Some("/c".into()));
        assert!(read("nats://t@h").unwrap().login == Login::Token("t".into()));
        assert!(read("nats://h?creds=/f").unwrap().login == Login::CredentialsFile("/f".into()));
        assert!(read("nats://h?nkey=/f").unwrap().login == Login::NkeyFile("/f".into()));
        assert_eq!(
            read("tls://h?cert=/c&key=/k").unwrap().client_certificate,
            Some(("/c".into(), "/k".into()))
        );
        assert!(read("nats://h?tls=true").unwrap().require_tls);
    }

    #[test]
    fn what_makes_no_sense_is_named() {
        for (url, part) in [
            ("nats://h?storage=file", "no parameter 'storage'; it has subject"),
            ("nats://h?subject=a.*", "subject=a.*: expected words"),
            ("nats://h?stream=a.b", "stream=a.b: expected letters"),
            ("jetstream+nats://h?from=middle", "expected new or start"),
            ("jetstream+nats://h?max_bytes=0", "max_bytes=0"),
            ("nats://h?tls=perhaps", "expected true or false"),
            ("nats://h?tls=true&tls=true", "twice"),
            ("nats://u:p@h?creds=/f", "leave one out"),
            ("nats://h?creds=/f&nkey=/g", "leave one out"),
            ("nats://h?cert=/f", "cert and key go together"),
            ("nats://h/path", "nothing may follow"),
        ] {
            let error = read(url).err().unwrap().to_string();
            assert!(error.contains(part) && !error.contains("u:p"), "{url}: {error}");
        }
    }
}
