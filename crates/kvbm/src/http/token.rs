//! The token that requests carry.

use super::error::HttpError;
use kvbm_link::private_file;
use std::hint::black_box;
use std::path::Path;

/// Bytes of a token: fewer can be guessed, more are a mistake.
const LENGTHS: std::ops::RangeInclusive<usize> = 16..=4096;

/// A secret that requests carry.
pub(super) struct BearerToken(Vec<u8>);

impl BearerToken {
    /// Reads a file that belongs to this user, or to root, and that no other user reads.
    pub(super) fn read(path: &Path) -> Result<Self, HttpError> {
        let wrong = |why: String| HttpError::File { setting: "token_file", path: path.to_owned(), why };
        let bytes =
            private_file::read(path, *LENGTHS.end() as u64 + 3).map_err(|error| wrong(error.to_string()))?;
        let token = bytes.trim_ascii();
        if !LENGTHS.contains(&token.len()) {
            let (least, most) = (LENGTHS.start(), LENGTHS.end());
            let why = format!(
                "a token of {} bytes, {least} to {most} are needed: make one with `openssl rand -hex 32`",
                token.len()
            );
            return Err(wrong(why));
        }
        if !token.iter().all(u8::is_ascii_graphic) {
            return Err(wrong("a token has no spaces and no control characters".into()));
        }
        Ok(Self(token.to_vec()))
    }

    /// Whether the header `Authorization` has this token. How long that takes says nothing of the
    /// token but its length.
    pub(super) fn admits(&self, authorization: Option<&str>) -> bool {
        let given = authorization.and_then(|text| {
            let (scheme, token) = text.split_once(' ')?;
            scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
        });
        let given = given.unwrap_or_default().as_bytes();
        let mut difference = usize::from(given.len() != self.0.len());
        for (at, byte) in self.0.iter().enumerate() {
            difference |= usize::from(byte ^ given.get(at).copied().unwrap_or_default());
            difference = black_box(difference);
        }
        difference == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_token_admits_itself_alone() {
        let token = BearerToken(b"0123456789abcdef".to_vec());
        assert!(token.admits(Some("Bearer 0123456789abcdef")));
        assert!(token.admits(Some("bearer 0123456789abcdef ")));
        for wrong in [
            None,
            Some(""),
            Some("Bearer"),
            Some("Bearer "),
            Some("Basic 0123456789abcdef"),
            Some("Bearer 0123456789abcdeg"),
            Some("Bearer 0123456789abcde"),
            Some("Bearer 0123456789abcdef0"),
            Some("0123456789abcdef"),
        ] {
            assert!(!token.admits(wrong), "{wrong:?}");
        }
    }

    #[test]
    fn a_file_that_others_read_or_that_is_no_token_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        let write = |text: &str, mode| {
            fs::write(&path, text).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        };
        write("0123456789abcdef\n", 0o600);
        assert!(BearerToken::read(&path).unwrap().admits(Some("Bearer 0123456789abcdef")));
        for (text, mode, why) in [
            ("0123456789abcdef", 0o640, "mode 640"),
            ("0123456789abcdef", 0o604, "chmod 600"),
            ("short", 0o600, "5 bytes, 16 to 4096"),
            ("0123456789 abcdef", 0o600, "no spaces"),
        ] {
            write(text, mode);
            let error = BearerToken::read(&path).err().unwrap().to_string();
            assert!(error.contains(why) && error.contains("token_file = "), "{error}");
        }
        write(&"x".repeat(5000), 0o600);
        assert!(BearerToken::read(&path).is_err());
        assert!(BearerToken::read(folder.path()).is_err());
        assert!(BearerToken::read(&folder.path().join("absent")).is_err());
    }
}
