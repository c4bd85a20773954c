//! Credentials of one volume, by reference: what stands in a URI is only where they are.

use std::fmt;
use std::future::Future;
use std::io;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::time::SystemTime;

use object_store::aws::{AwsCredential, AwsCredentialProvider};
use object_store::{CredentialProvider, Error, StaticCredentialProvider};
use parking_lot::Mutex;

/// Where the credentials of a volume are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Reference {
    /// `env:PREFIX`: in the variables `PREFIX_ACCESS_KEY_ID`, `PREFIX_SECRET_ACCESS_KEY` and, where
    /// there is one, `PREFIX_SESSION_TOKEN`.
    Variables(String),
    /// `file:PATH`: in a file as the AWS tools have it, read anew when it has changed.
    File(PathBuf),
}

impl Reference {
    pub(super) fn parse(text: &str) -> Option<Self> {
        match text.split_once(':')? {
            (_, "") => None,
            ("env", prefix) => Some(Self::Variables(prefix.to_owned())),
            ("file", path) => Some(Self::File(path.into())),
            _ => None,
        }
    }

    /// Who hands them out. Fails where there are none, so that a volume is not opened that nobody
    /// can use.
    pub(super) fn provider(&self) -> io::Result<AwsCredentialProvider> {
        match self {
            Self::Variables(prefix) => {
                let credential = of_variables(prefix, |name| std::env::var(name).ok())?;
                Ok(Arc::new(StaticCredentialProvider::new(credential)))
            }
            Self::File(path) => {
                let file = CredentialFile::new(path.clone());
                file.current()?;
                Ok(Arc::new(file))
            }
        }
    }
}

pub(super) fn of_variables(prefix: &str, read: impl Fn(&str) -> Option<String>) -> io::Result<AwsCredential> {
    let set = |what: &str| {
        let name = format!("{prefix}_{what}");
        let missing = || {
            let text = format!("credentials=env:{prefix}: the environment variable {name} is not set");
            io::Error::new(io::ErrorKind::NotFound, text)
        };
        read(&name).filter(|value| !value.is_empty()).ok_or_else(missing)
    };
    Ok(AwsCredential {
        key_id: set("ACCESS_KEY_ID")?,
        secret_key: set("SECRET_ACCESS_KEY")?,
        token: set("SESSION_TOKEN").ok(),
    })
}

/// A file that may be replaced while it is used, as secrets of a cluster are.
struct CredentialFile {
    path: PathBuf,
    /// The last one that could be used, and what its file looked like.
    seen: Mutex<Option<(Stamp, Arc<AwsCredential>)>>,
    /// Why it cannot be used now, as the log was told.
    trouble: Mutex<Option<String>>,
}

/// When a file was written, and its length.
type Stamp = (SystemTime, u64);

/// Without what it has read.
impl fmt::Debug for CredentialFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CredentialFile").field(&self.path).finish()
    }
}

impl CredentialFile {
    fn new(path: PathBuf) -> Self {
        Self { path, seen: Mutex::default(), trouble: Mutex::default() }
    }

    /// What the file says now. While it cannot be used, because it is being replaced, what it said
    /// last: the store knows whether that still holds.
    fn current(&self) -> io::Result<Arc<AwsCredential>> {
        let seen = self.seen.lock().clone();
        match (self.read(seen.as_ref()), seen) {
            (Err(error), Some((_, last))) => {
                self.log_once(&error);
                Ok(last)
            }
            (Err(error), None) => Err(error),
            (Ok((stamp, credential)), _) => {
                *self.seen.lock() = Some((stamp, Arc::clone(&credential)));
                *self.trouble.lock() = None;
                Ok(credential)
            }
        }
    }

    /// Why the last ones are used on: once, not with each request.
    fn log_once(&self, error: &io::Error) {
        let error = error.to_string();
        let mut trouble = self.trouble.lock();
        if trouble.as_ref() != Some(&error) {
            tracing::warn!(target: "kvbm", error, "credentials cannot be read anew: the last ones are used on");
            *trouble = Some(error);
        }
    }

    /// Reads the file, unless it looks as it did.
    fn read(&self, seen: Option<&(Stamp, Arc<AwsCredential>)>) -> io::Result<(Stamp, Arc<AwsCredential>)> {
        let unreadable = |error: io::Error| {
            let text = format!("credentials=file:{}: {error}", self.path.display());
            io::Error::new(error.kind(), text)
        };
        let found = std::fs::metadata(&self.path).map_err(unreadable)?;
        let stamp = (found.modified().map_err(unreadable)?, found.len());
        if let Some((at, credential)) = seen
            && *at == stamp
        {
            return Ok((stamp, Arc::clone(credential)));
        }
        let text = std::fs::read_to_string(&self.path).map_err(unreadable)?;
        Ok((stamp, Arc::new(of_text(&text, &self.path)?)))
    }
}

impl CredentialProvider for CredentialFile {
    type Credential = AwsCredential;

    fn get_credential<'a, 'b>(
        &'a self,
    ) -> Pin<Box<dyn Future<Output = Result<Arc<AwsCredential>, Error>> + Send + 'b>>
    where
        'a: 'b,
        Self: 'b,
    {
        Box::pin(async move {
            self.current().map_err(|error| Error::Generic { store: "credentials", source: error.into() })
        })
    }
}

/// The credentials of the first section, or before any.
fn of_text(text: &str, path: &Path) -> io::Result<AwsCredential> {
    let (mut key_id, mut secret_key, mut token) = (None, None, None);
    let mut sections = 0;
    for line in text.lines().map(str::trim) {
        if line.starts_with('[') {
            sections += 1;
            if sections > 1 || key_id.is_some() {
                break;
            }
        }
        let Some((name, value)) = line.split_once('=') else { continue };
        let value = Some(value.trim().to_owned()).filter(|value| !value.is_empty());
        match name.trim() {
            "aws_access_key_id" => key_id = value,
            "aws_secret_access_key" => secret_key = value,
            "aws_session_token" => token = value,
            _ => {}
        }
    }
    match (key_id, secret_key) {
        (Some(key_id), Some(secret_key)) => Ok(AwsCredential { key_id, secret_key, token }),
        _ => Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!(
                "credentials=file:{}: its first section has no aws_access_key_id, or no aws_secret_access_key",
                path.display()
            ),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::super::log_capture::captured_lines;
    use super::*;
    use std::time::Duration;

    fn parts(credential: &AwsCredential) -> (&str, &str, Option<&str>) {
        (&credential.key_id, &credential.secret_key, credential.token.as_deref())
    }

    #[test]
    fn variables_are_found_by_their_prefix_and_a_missing_one_is_named() {
        let read = |name: &str| match name {
            "STORE_ACCESS_KEY_ID" => Some("id".to_owned()),
            "STORE_SECRET_ACCESS_KEY" => Some("secret".to_owned()),
            "OTHER_ACCESS_KEY_ID" => Some(String::new()),
            _ => None,
        };
        assert_eq!(parts(&of_variables("STORE", read).unwrap()), ("id", "secret", None));
        let error = of_variables("OTHER", read).unwrap_err().to_string();
        assert!(error.contains("OTHER_ACCESS_KEY_ID is not set"), "{error}");
    }

    #[test]
    fn a_file_is_read_again_when_it_has_changed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("credentials");
        let write = |text: &str, at: u64| {
            std::fs::write(&path, text).unwrap();
            let written = SystemTime::UNIX_EPOCH + Duration::from_secs(at);
            std::fs::File::options().write(true).open(&path).unwrap().set_modified(written).unwrap();
        };
        let file = CredentialFile::new(path.clone());
        let error = file.current().unwrap_err().to_string();
        assert!(error.contains("credentials=file:") && error.contains("credentials"), "{error}");
        write(
            "[default]\naws_access_key_id = a\naws_secret_access_key=b\n[other]\naws_access_key_id = c\n",
            1,
        );
        assert_eq!(parts(&file.current().unwrap()), ("a", "b", None));
        write("aws_access_key_id = d\naws_secret_access_key = e\naws_session_token = f\n", 2);
        assert_eq!(parts(&file.current().unwrap()), ("d", "e", Some("f")));
        // Half written, and not there for a moment: the last one may still hold. The log tells of
        // it once.
        let lines = captured_lines(|| {
            let keeps = || (0..3).for_each(|_| assert_eq!(parts(&file.current().unwrap()).0, "d"));
            write("[default]\naws_access_key_id = a\n", 3);
            keeps();
            std::fs::remove_file(&path).unwrap();
            keeps();
            write("aws_access_key_id = g\naws_secret_access_key = h\n", 3);
            assert_eq!(parts(&file.current().unwrap()), ("g", "h", None));
            std::fs::remove_file(&path).unwrap();
            assert_eq!(parts(&file.current().unwrap()).0, "g");
        });
        assert_eq!(lines.len(), 3, "{lines:?}");
        assert!(lines[0].contains("no aws_secret_access_key") && lines[1] == lines[2], "{lines:?}");
        // A volume is not opened with half of one.
        write("[default]\naws_access_key_id = a\n", 4);
        let error = Reference::File(path.clone()).provider().unwrap_err().to_string();
        assert!(error.contains("no aws_secret_access_key"), "{error}");
        assert!(
            !format!("{file:?}").contains('e') || !format!("{file:?}").contains("\"e\""),
            "nothing is shown"
        );
    }
}
