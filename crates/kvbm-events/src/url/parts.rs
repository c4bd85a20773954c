//! `SCHEME://[USER[:PASSWORD]@]PLACE[?NAME=VALUE[&..]]`, taken apart.

use super::UrlError;

/// A URL's parts, percent signs decoded.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Parts {
    pub(super) scheme: String,
    /// User, and password if there is one.
    pub(super) user: Option<(String, Option<String>)>,
    /// Between `://` (or `@`) and `?`: an address or a path.
    pub(super) place: String,
    pub(super) query: Vec<(String, String)>,
}

impl Parts {
    pub(super) fn parse(text: &str) -> Result<Self, UrlError> {
        let Some((scheme, rest)) = text.split_once("://").filter(|(scheme, _)| !scheme.is_empty()) else {
            // What stands there may be a password.
            return Err(malformed("(not shown)", "it has no scheme"));
        };
        let shown = |reason: &str| malformed(&format!("{scheme}://.."), reason);
        let (before, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (user, place) = match before.rsplit_once('@') {
            Some((user, place)) => (Some(user), place),
            None => (None, before),
        };
        if place.is_empty() {
            return Err(shown("it names no place"));
        }
        let decode = |text: &str| decode(text).ok_or_else(|| shown("a percent sign needs two hex digits"));
        let user = match user.map(|user| user.split_once(':').map_or((user, None), |(a, b)| (a, Some(b)))) {
            Some((user, password)) => Some((decode(user)?, password.map(decode).transpose()?)),
            None => None,
        };
        let pairs = query.split('&').filter(|pair| !pair.is_empty());
        let query = pairs
            .map(|pair| {
                let (name, value) =
                    pair.split_once('=').ok_or_else(|| shown("a parameter is written NAME=VALUE"))?;
                Ok((name.to_owned(), decode(value)?))
            })
            .collect::<Result<_, UrlError>>()?;
        Ok(Self { scheme: scheme.to_owned(), user, place: place.to_owned(), query })
    }

    /// Without user and password.
    pub(super) fn shown(&self) -> String {
        let user = if self.user.is_some() { "***@" } else { "" };
        let mut text = format!("{}://{user}{}", self.scheme, self.place);
        for (at, (name, value)) in self.query.iter().enumerate() {
            text.push(if at == 0 { '?' } else { '&' });
            text.push_str(name);
            text.push('=');
            text.push_str(value);
        }
        text
    }
}

/// What the parameters of a scheme say, asked for one by one.
#[cfg(any(feature = "nats", feature = "zmq"))]
impl Parts {
    /// Refuses parameters that are not `known`, and those that stand there twice.
    pub(super) fn expect_only(&self, known: &'static [&'static str]) -> Result<(), UrlError> {
        for (at, (name, _)) in self.query.iter().enumerate() {
            if !known.contains(&name.as_str()) {
                let (scheme, name) = (self.scheme.clone(), name.clone());
                return Err(UrlError::Parameter { scheme, name, known });
            }
            if self.query[..at].iter().any(|(before, _)| before == name) {
                return Err(malformed(&self.shown(), &format!("{name} stands there twice")));
            }
        }
        Ok(())
    }

    pub(super) fn get(&self, name: &str) -> Option<&str> {
        self.query.iter().find(|(found, _)| found == name).map(|(_, value)| value.as_str())
    }

    /// The value of a parameter, as `read` understands it.
    pub(super) fn read<T>(
        &self,
        name: &'static str,
        expected: &'static str,
        read: impl Fn(&str) -> Option<T>,
    ) -> Result<Option<T>, UrlError> {
        let Some(text) = self.get(name) else { return Ok(None) };
        match read(text) {
            Some(value) => Ok(Some(value)),
            None => Err(UrlError::Value { name, value: text.to_owned(), expected }),
        }
    }

    pub(super) fn flag(&self, name: &'static str) -> Result<bool, UrlError> {
        let read = |text: &str| match text {
            "true" | "1" | "yes" => Some(true),
            "false" | "0" | "no" => Some(false),
            _ => None,
        };
        Ok(self.read(name, "true or false", read)?.unwrap_or(false))
    }
}

pub(super) fn malformed(url: &str, reason: &str) -> UrlError {
    UrlError::Malformed { url: url.to_owned(), reason: reason.to_owned() }
}

fn decode(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, after)) = rest.split_first() {
        rest = after;
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let (digits, after) = rest.split_at_checked(2)?;
        let digit = |byte: u8| char::from(byte).to_digit(16);
        bytes.push((digit(digits[0])? * 16 + digit(digits[1])?) as u8);
        rest = after;
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_is_taken_apart_and_shown_without_its_secrets() {
        let parts = Parts::parse("nats://me%40home:p%3Aw@host:4222?subject=a.b&tls=true").unwrap();
        assert_eq!(parts.user, Some(("me@home".into(), Some("p:w".into()))));
        assert_eq!((parts.scheme.as_str(), parts.place.as_str()), ("nats", "host:4222"));
        assert_eq!(parts.query, [("subject".into(), "a.b".into()), ("tls".into(), "true".into())]);
        assert_eq!(parts.shown(), "nats://***@host:4222?subject=a.b&tls=true");
        assert_eq!(Parts::parse("x://token@h").unwrap().user, Some(("token".into(), None)));
    }

    #[test]
    fn what_cannot_be_read_is_refused_without_showing_it() {
        for text in ["", "host", "://host", "x://", "x://me@", "x://s%zz@h", "x://h?word", "x://h?a=%4"] {
            let error = Parts::parse(text).err().unwrap().to_string();
            assert!(error.contains("event URL ") && !error.contains('%'), "{text}: {error}");
        }
    }
}
