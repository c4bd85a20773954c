//! `s3://BUCKET/PREFIX?OPTION=VALUE&...`, taken apart.

use std::io;

use super::credentials::{Reference, of_variables};
use super::transport::TransportStore;

/// Objects, and requests, at a time, unless the URI says otherwise.
const CONCURRENCY: usize = 32;
/// Variables by which the client, and not NIXL, finds a store.
const ENDPOINTS: [&str; 3] = ["AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"];
/// S3 takes no smaller parts.
const MIN_PART_BYTES: usize = 5 << 20;
/// Objects above this go up in parts, unless the URI says otherwise.
const PART_BYTES: usize = 16 << 20;

/// What the URI of a volume says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct S3Uri {
    pub(super) bucket: String,
    /// Without slashes at its ends.
    pub(super) prefix: String,
    pub(super) endpoint: Option<String>,
    pub(super) region: Option<String>,
    /// Where the credentials are, unless it is where the AWS tools look for them.
    pub(super) credentials: Option<Reference>,
    /// Requests are not signed.
    pub(super) anonymous: bool,
    /// Objects, and requests, at a time.
    pub(super) concurrency: usize,
    /// Larger objects go up in parts of this size.
    pub(super) part_bytes: usize,
    /// A transport moves large objects.
    pub(super) transport: bool,
}

impl S3Uri {
    pub(super) fn parse(uri: &str) -> io::Result<Self> {
        let rest = uri.strip_prefix("s3://").ok_or_else(|| wrong("it does not begin with s3://"))?;
        let (place, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (bucket, prefix) = place.split_once('/').unwrap_or((place, ""));
        check_bucket(bucket)?;
        let mut parsed = Self {
            bucket: bucket.to_owned(),
            prefix: prefix.trim_matches('/').to_owned(),
            endpoint: None,
            region: None,
            credentials: None,
            anonymous: false,
            concurrency: CONCURRENCY,
            part_bytes: PART_BYTES,
            transport: false,
        };
        query
            .split('&')
            .filter(|option| !option.is_empty())
            .try_for_each(|option| parsed.set_option(option))?;
        if parsed.anonymous && parsed.credentials.is_some() {
            return Err(wrong("it has anonymous=true and credentials: leave one of them out"));
        }
        Ok(parsed)
    }

    /// What a transport needs to know, in the environment of this process. What it could not do as
    /// the client does is refused: both must go to the same place.
    pub(super) fn transport_store(&self) -> io::Result<TransportStore> {
        let refuse = |why: &str| Err(wrong(format!("option transport=nixl: {why}")));
        if self.anonymous {
            return refuse(
                "NIXL signs its requests; leave anonymous=true out, and name credentials=env:PREFIX",
            );
        }
        let named = ENDPOINTS.iter().find(|name| std::env::var_os(name).is_some());
        if let (None, Some(name)) = (&self.endpoint, named) {
            return refuse(&format!(
                "the variable {name} names an endpoint, and NIXL does not read it; name endpoint=URL"
            ));
        }
        let credential = match &self.credentials {
            None => None,
            Some(Reference::File(_)) => {
                return refuse(
                    "NIXL reads credentials once, and a file may change; name credentials=env:PREFIX",
                );
            }
            Some(Reference::Variables(prefix)) => {
                Some(of_variables(prefix, |name| std::env::var(name).ok())?)
            }
        };
        let mut store = TransportStore::new(self, credential.as_ref());
        let of_machine =
            ["AWS_REGION", "AWS_DEFAULT_REGION"].iter().find_map(|name| std::env::var(name).ok());
        store.region = store.region.or(of_machine);
        Ok(store)
    }

    fn set_option(&mut self, option: &str) -> io::Result<()> {
        let (name, value) = option.split_once('=').unwrap_or((option, ""));
        let bad = |rule: &str| wrong(format!("option {name} = {value:?}: {rule}"));
        match name {
            "endpoint" => self.endpoint = Some(endpoint(value)?),
            "region" => self.region = Some(value.to_owned()),
            "credentials" => {
                let form = "option credentials: write it as env:PREFIX or file:PATH; the credentials themselves stand there";
                self.credentials = Some(Reference::parse(value).ok_or_else(|| wrong(form))?);
            }
            "anonymous" => self.anonymous = value.parse().map_err(|_| bad("true or false"))?,
            "concurrency" => {
                let number = value.parse().ok().filter(|number| (1..=1024).contains(number));
                self.concurrency = number.ok_or_else(|| bad("a number from 1 to 1024"))?;
            }
            "part_bytes" => {
                let number = value.parse().ok().filter(|number| *number >= MIN_PART_BYTES);
                self.part_bytes = number.ok_or_else(|| bad("a number from 5242880 on"))?;
            }
            "transport" if value == "nixl" => self.transport = true,
            "transport" => return Err(bad("nixl, or leave it out")),
            _ => return Err(unknown_option(option)),
        }
        Ok(())
    }
}

/// What may be a secret is not repeated, here and below: errors go to logs.
fn check_bucket(bucket: &str) -> io::Result<()> {
    if bucket.is_empty() {
        return Err(wrong("name a bucket: s3://BUCKET/PREFIX"));
    }
    let of_a_name = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c);
    if !bucket.chars().all(of_a_name) {
        return Err(wrong(
            "the name of its bucket has other characters than letters, digits, '-', '.' and '_'; where that is a user or a password, name \
             credentials=env:PREFIX or credentials=file:PATH instead",
        ));
    }
    Ok(())
}

fn endpoint(value: &str) -> io::Result<String> {
    if value.contains('@') {
        return Err(wrong(
            "option endpoint: it has a user or a password; leave them out, and name credentials=env:PREFIX or \
             credentials=file:PATH",
        ));
    }
    if !value.starts_with("http://") && !value.starts_with("https://") {
        let rule = "write it as http://HOST:PORT or https://HOST:PORT";
        return Err(wrong(format!("option endpoint = {value:?}: {rule}")));
    }
    Ok(value.trim_end_matches('/').to_owned())
}

fn unknown_option(option: &str) -> io::Error {
    let (name, _) = option.split_once('=').unwrap_or((option, ""));
    // It may be the rest of a secret that has a `?`.
    let is_a_name = name.len() <= 32 && name.chars().all(|c| c.is_ascii_lowercase() || c == '_');
    let shown = if is_a_name && option.contains('=') { format!(" {name}") } else { String::new() };
    wrong(format!(
        "unknown option{shown}; known are endpoint, region, credentials, anonymous, concurrency, part_bytes and transport. \
         Credentials come from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, from the machine, or from where \
         credentials=env:PREFIX or credentials=file:PATH says"
    ))
}

fn wrong(what: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, what.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uris_are_taken_apart() {
        let parsed = S3Uri::parse("s3://kv/a/b/?endpoint=http://127.0.0.1:9000/&region=eu-1&credentials=env:STORE&concurrency=4&part_bytes=5242880").unwrap();
        let expected = S3Uri {
            bucket: "kv".into(),
            prefix: "a/b".into(),
            endpoint: Some("http://127.0.0.1:9000".into()),
            region: Some("eu-1".into()),
            credentials: Some(Reference::Variables("STORE".into())),
            anonymous: false,
            concurrency: 4,
            part_bytes: 5 << 20,
            transport: false,
        };
        assert_eq!(parsed, expected);
        assert_eq!(S3Uri::parse("s3://kv").unwrap().prefix, "");
        assert!(S3Uri::parse("s3://kv?transport=nixl").unwrap().transport);
    }

    #[test]
    fn what_may_be_a_secret_is_refused_and_not_repeated() {
        for (option, said) in [
            ("endpoint=https://user:hunter2@store.example", "option endpoint"),
            ("credentials=AKIA:hunter2", "option credentials"),
            ("secret_access_key=hunter2", "unknown option secret_access_key"),
            ("hunter2@kv", "unknown option;"),
            ("hunter2@kv/p?endpoint=http://h", "unknown option;"),
        ] {
            let message = S3Uri::parse(&format!("s3://kv?{option}")).unwrap_err().to_string();
            assert!(message.contains(said) && !message.contains("hunter2"), "{message}");
        }
        for uri in ["s3://AKIA:hunter2@kv/p", "s3://AKIA:hun/ter2@kv", "s3://hunter2@kv"] {
            let message = S3Uri::parse(uri).unwrap_err().to_string();
            assert!(message.contains("credentials=env:PREFIX") && !message.contains("hun"), "{message}");
        }
    }

    #[test]
    fn what_a_transport_cannot_do_is_refused_and_nothing_secret_is_shown() {
        for (options, why) in [
            ("&anonymous=true", "NIXL signs its requests"),
            ("&credentials=file:/etc/kv", "NIXL reads credentials once"),
            ("&credentials=env:NOBODYS_STORE", "NOBODYS_STORE_ACCESS_KEY_ID is not set"),
        ] {
            let uri = format!("s3://kv?transport=nixl&endpoint=http://h:1{options}");
            let error = S3Uri::parse(&uri).unwrap().transport_store().unwrap_err().to_string();
            assert!(error.contains(why), "{uri}: {error}");
        }
        let uri = S3Uri::parse("s3://kv?transport=nixl&endpoint=http://h:1&region=eu&concurrency=3").unwrap();
        let mut store = uri.transport_store().unwrap();
        assert_eq!((store.bucket.as_str(), store.endpoint.as_deref()), ("kv", Some("http://h:1")));
        assert_eq!((store.region.as_deref(), store.concurrency), (Some("eu"), 3));
        store.credentials = Some(("hunter1".into(), "hunter2".into(), None));
        assert!(!format!("{store:?}").contains("hunter"), "{store:?}");
    }

    #[test]
    fn what_is_wrong_with_a_uri_is_named() {
        for (uri, what) in [
            ("s4://kv", "s3://"),
            ("s3:///a", "name a bucket"),
            ("s3://kv?endpoint=127.0.0.1:9000", "http://HOST:PORT"),
            ("s3://kv?anonymous=maybe", "true or false"),
            ("s3://kv?anonymous=true&credentials=env:A", "leave one of them out"),
            ("s3://kv?concurrency=0", "from 1 to 1024"),
            ("s3://kv?part_bytes=1000", "from 5242880"),
            ("s3://kv?transport=rdma", "nixl, or leave it out"),
            ("s3://kv?credentials=AKIA123", "env:PREFIX or file:PATH"),
            ("s3://kv?secret_access_key=x", "AWS_SECRET_ACCESS_KEY"),
        ] {
            let error = S3Uri::parse(uri).unwrap_err().to_string();
            assert!(error.contains(what), "{uri}: {error}");
        }
    }
}
