//! What went wrong with a request, in few words. The client's own name the object three times
//! before the reason, which a log may cut off, and leave out what a connection failed with.

use std::error::Error as StdError;
use std::io;

use object_store::Error;
use object_store::client::{HttpError, HttpErrorKind};

/// Most characters of what a store says in its own words.
const MAX_WORDS: usize = 120;

/// Where a machine in a cloud asks for its credentials.
const METADATA: &str = "169.254.169.254";

/// Error codes for a caller that the store does not know.
const UNKNOWN_CALLER: [&str; 4] =
    ["InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken"];
const WRONG_CLOCK: &str = "RequestTimeTooSkewed";

/// An answer that says that a store did not do what it was asked for.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    /// Such as `404 Not Found`.
    status: String,
    /// Such as `NoSuchBucket`; a store gives none where only a head was asked for.
    code: Option<String>,
    /// What it says, in its own words.
    words: String,
}

impl Refusal {
    /// Where `error` came of an answer.
    pub(super) fn of(error: &Error) -> Option<Self> {
        let (status, body) = chain(error).find_map(|link| status_and_body(&link.to_string()))?;
        let code = element(&body, "Code").map(str::to_owned);
        let words = element(&body, "Message").unwrap_or(if code.is_some() { "" } else { &body });
        let words = words.split_whitespace().collect::<Vec<_>>().join(" ").chars().take(MAX_WORDS).collect();
        Some(Self { status, code, words })
    }

    /// The number of its status.
    pub(super) fn status(&self) -> u16 {
        self.status.get(..3).and_then(|number| number.parse().ok()).unwrap_or(0)
    }

    /// Its code, where the store gave one.
    pub(super) fn code(&self) -> Option<&str> {
        self.code.as_deref()
    }

    /// Whether not even the bucket is there.
    pub(super) fn lacks_bucket(&self) -> bool {
        self.code() == Some("NoSuchBucket")
    }

    /// Whether the store has no room.
    fn is_full(&self) -> bool {
        const FULL: [&str; 3] = ["QuotaExceeded", "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded"];
        self.status() == 507 || self.code().is_some_and(|code| FULL.contains(&code))
    }

    /// Whether the store does not permit what it was asked for to whom it knows: it may permit
    /// other things.
    fn forbids(&self) -> bool {
        let knows_caller = |code| code != WRONG_CLOCK && !UNKNOWN_CALLER.contains(&code);
        self.status() == 403 && self.code().is_none_or(knows_caller)
    }

    /// The kind of error that callers get.
    fn kind(&self) -> io::ErrorKind {
        if self.is_full() {
            io::ErrorKind::StorageFull
        } else if self.forbids() {
            io::ErrorKind::PermissionDenied
        } else {
            io::ErrorKind::Other
        }
    }

    /// What helps, as far as that is known.
    fn way_out(&self) -> Option<&'static str> {
        Some(match (self.code().unwrap_or_default(), self.status()) {
            ("NoSuchBucket", _) => "create the bucket, or correct the volume's URI",
            (WRONG_CLOCK, _) => "set this machine's clock",
            (code, _) if UNKNOWN_CALLER.contains(&code) => "check the credentials",
            ("PermanentRedirect" | "AuthorizationHeaderMalformed", _) | (_, 301 | 307 | 308) => {
                "check the options region and endpoint"
            }
            _ if self.is_full() => "make room, or raise the store's quota",
            (_, 401 | 403) => {
                "check the credentials and that they permit to get, put, delete and list; without list a store gives this answer for \
                 objects that it does not have"
            }
            ("SlowDown", _) | (_, 429 | 503) => "where this lasts, lower the option concurrency",
            _ => return None,
        })
    }
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.status.trim())?;
        if let Some(code) = &self.code {
            write!(f, ", {code}")?;
        }
        if !self.words.is_empty() {
            write!(f, ": {}", self.words)?;
        }
        self.way_out().map_or(Ok(()), |way_out| write!(f, "; {way_out}"))
    }
}

/// Status and body of an answer, out of the client's words for it: the type that holds them is its
/// own secret. Tests keep to the words.
fn status_and_body(text: &str) -> Option<(String, String)> {
    if text.starts_with("Received redirect without LOCATION") {
        return Some(("301 Moved Permanently".into(), String::new()));
    }
    let (status, body) = match text.strip_prefix("Server returned error response: ") {
        // Some requests are answered before it is known what comes of them.
        Some(body) => ("200 OK", body),
        None => text.strip_prefix("Server returned non-2xx status code: ")?.split_once(": ")?,
    };
    Some((status.into(), body.into()))
}

/// The text between `<name>` and `</name>`.
fn element<'a>(body: &'a str, name: &str) -> Option<&'a str> {
    let (_, rest) = body.split_once(&format!("<{name}>"))?;
    rest.split_once(&format!("</{name}>")).map(|(text, _)| text.trim())
}

/// `error` with its causes and the remedy, for callers and logs.
pub(super) fn explained(error: &Error) -> io::Error {
    let server = server(error);
    let at = server.as_deref().unwrap_or("the store");
    if let Some(refusal) = Refusal::of(error) {
        return io::Error::new(refusal.kind(), format!("{at} answered {refusal}"));
    }
    let kind = if timed_out(error) { io::ErrorKind::TimedOut } else { io::ErrorKind::Other };
    let text = match connection(error) {
        Some(trouble) if at.contains(METADATA) => format!(
            "no credentials: the variable AWS_ACCESS_KEY_ID is not set, and this machine has none of its own ({at}: {trouble}); set it with \
             AWS_SECRET_ACCESS_KEY, or the option credentials, or anonymous=true"
        ),
        Some(trouble) => format!("{at}: {trouble}"),
        None => error.to_string(),
    };
    io::Error::new(kind, text)
}

/// Whom the request went to.
fn server(error: &Error) -> Option<String> {
    let address = |link: &(dyn StdError + 'static)| {
        let text = link.to_string();
        // The method comes before it.
        text.strip_prefix("Error performing ")?.split_whitespace().nth(1).map(str::to_owned)
    };
    let address = chain(error).find_map(address)?;
    let (scheme, rest) = address.split_once("://")?;
    rest.split('/').next().map(|host| format!("{scheme}://{host}"))
}

/// What the connection failed with, down to what the system said.
fn connection(error: &Error) -> Option<String> {
    let mut links = chain(error).skip_while(|link| !link.is::<HttpError>()).skip(1).map(ToString::to_string);
    let first = links.next()?;
    // Some links repeat those below them.
    Some(links.fold(first, |explained, link| {
        if explained.contains(&link) { explained } else { format!("{explained}: {link}") }
    }))
}

/// Whether a request was given up because its time was over.
fn timed_out(error: &Error) -> bool {
    let kinds = chain(error).filter_map(|link| link.downcast_ref::<HttpError>()).map(HttpError::kind);
    kinds.into_iter().any(|kind| kind == HttpErrorKind::Timeout)
}

/// An error, and what it came of.
fn chain(error: &Error) -> impl Iterator<Item = &(dyn StdError + 'static)> {
    let first: &(dyn StdError + 'static) = error;
    std::iter::successors(Some(first), |&link| link.source())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One of the client's own, over what it came of.
    #[derive(Debug, thiserror::Error)]
    #[error("{0}")]
    struct Link(String, #[source] Box<dyn StdError + Send + Sync>);

    fn generic(source: impl StdError + Send + Sync + 'static) -> Error {
        Error::Generic { store: "S3", source: Box::new(source) }
    }

    /// That nobody set any shows as a machine without a metadata service.
    #[test]
    fn missing_credentials_are_named() {
        let explained = |address: &str| {
            let request = format!(
                "Error performing PUT {address}/latest/api/token in 3s, after 2 retries - HTTP error"
            );
            let http =
                HttpError::new(HttpErrorKind::Connect, io::Error::from(io::ErrorKind::ConnectionRefused));
            explained(&generic(Link(request, Box::new(http)))).to_string()
        };
        let nobodys = explained("http://169.254.169.254");
        assert!(
            nobodys.starts_with("no credentials: the variable AWS_ACCESS_KEY_ID is not set"),
            "{nobodys}"
        );
        assert_eq!(explained("http://10.0.0.1:9000"), "http://10.0.0.1:9000: connection refused");
    }

    #[test]
    fn the_words_of_a_store_are_kept_short_and_those_of_others_as_they_are() {
        let page = "<html>\n".repeat(1 << 20);
        let answer = format!("Server returned non-2xx status code: 502 Bad Gateway: {page}");
        let refusal = Refusal::of(&generic(io::Error::other(answer))).expect("an answer");
        assert_eq!((refusal.status(), refusal.code()), (502, None));
        assert!(
            refusal.to_string().len() < 512
                && refusal.to_string().starts_with("502 Bad Gateway: <html> <html>")
        );
        let other = generic(io::Error::other("credentials=file:/etc/kv: permission denied"));
        assert_eq!(Refusal::of(&other), None);
        assert_eq!(
            explained(&other).to_string(),
            "Generic S3 error: credentials=file:/etc/kv: permission denied"
        );
    }
}
