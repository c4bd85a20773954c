//! A prompt as token ids in a file.

use std::io::Read;
use std::path::Path;

use anyhow::{Context, Result, ensure};

/// The token ids in `path`, or in standard input where that is `-`: numbers with spaces, commas or
/// brackets between them, in at most `most` bytes.
pub(crate) fn read(path: &Path, most: u64) -> Result<Vec<u32>> {
    let name = path.display();
    let mut text = String::new();
    let read = |from: &mut dyn Read, text: &mut String| from.take(most + 1).read_to_string(text);
    let done = if path.as_os_str() == "-" {
        read(&mut std::io::stdin().lock(), &mut text)
    } else {
        std::fs::File::open(path).and_then(|mut file| read(&mut file, &mut text))
    };
    done.with_context(|| format!("cannot read tokens from {name}"))?;
    ensure!(text.len() as u64 <= most, "{name} has more than {most} bytes: give fewer tokens");
    let words = text.split(|c: char| c.is_whitespace() || ",[]".contains(c)).filter(|word| !word.is_empty());
    let token = |word: &str| {
        word.parse().with_context(|| {
            let word: String = word.chars().take(40).collect();
            format!("{name}: {word:?} is no token id, a number below 2^32")
        })
    };
    words.map(token).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_read_whole_or_refused() {
        let path = std::env::temp_dir().join(format!("kvbm-tokens-{}", std::process::id()));
        let read_of = |text: &str, most| {
            std::fs::write(&path, text).unwrap();
            read(&path, most).map_err(|error| format!("{error:#}"))
        };
        assert_eq!(read_of("[1, 2\n3]", 8), Ok(vec![1, 2, 3]));
        assert_eq!(read_of("", 8), Ok(vec![]));
        let long = read_of("1, 2, 345", 8).unwrap_err();
        assert!(long.contains("more than 8 bytes"), "not 1, 2 and 34: {long}");
        let wrong = read_of("1 x", 8).unwrap_err();
        assert!(wrong.contains("\"x\" is no token id"), "{wrong}");
        std::fs::remove_file(&path).unwrap();
        assert!(read(&path, 8).unwrap_err().to_string().starts_with("cannot read tokens from"));
    }
}
