//! Which known name someone meant.

/// Edit distance with swaps of neighbours (optimal string alignment), over bytes.
fn distance(a: &str, b: &str) -> usize {
    let (a, b) = (a.as_bytes(), b.as_bytes());
    let mut before: Vec<usize> = Vec::new();
    let mut above: Vec<usize> = (0..=b.len()).collect();
    for i in 1..=a.len() {
        let mut row = vec![i; b.len() + 1];
        for j in 1..=b.len() {
            let same = usize::from(a[i - 1] != b[j - 1]);
            row[j] = (above[j] + 1).min(row[j - 1] + 1).min(above[j - 1] + same);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                row[j] = row[j].min(before[j - 2] + 1);
            }
        }
        before = std::mem::replace(&mut above, row);
    }
    above[b.len()]
}

/// The name among `known` that is nearest to `name`: by the whole name, or, at a price, by the last
/// word of a dotted one (`capacity` under the wrong section). Case does not matter. The first of
/// equals wins.
pub(crate) fn nearest<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    const OTHER_SECTION: usize = 2;
    // Names are short; a hostile one must not cost quadratic time.
    let name: String = name.chars().take(80).collect::<String>().to_ascii_lowercase();
    let last = |text: &str| text.rsplit('.').next().unwrap_or_default().to_owned();
    known.into_iter().min_by_key(|candidate| {
        let lower = candidate.to_ascii_lowercase();
        let whole = distance(&name, &lower);
        if lower.contains('.') {
            whole.min(distance(&last(&name), &last(&lower)) + OTHER_SECTION)
        } else {
            whole
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_are_the_textbook_ones() {
        for (a, b, d) in [
            ("", "", 0),
            ("", "abc", 3),
            ("kitten", "sitting", 3),
            ("capcaity", "capacity", 1),
            ("ab", "ba", 1),
        ] {
            assert_eq!(distance(a, b), d, "{a} {b}");
            assert_eq!(distance(b, a), d, "{b} {a}");
        }
    }

    #[test]
    fn the_last_word_counts_when_the_section_is_wrong() {
        let known = ["host.capacity", "disk.dir", "offload.g1_g2.watermark"];
        assert_eq!(nearest("host.capcity", known), Some("host.capacity"));
        assert_eq!(nearest("disk.watermark", known), Some("offload.g1_g2.watermark"));
        assert_eq!(nearest("DISK.DIRR", known), Some("disk.dir"));
        assert_eq!(nearest("x", []), None);
    }
}
