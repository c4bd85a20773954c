//! Numbers as people read them.

/// `12,345,678`.
pub fn count(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// `1.5 GiB`: at most one decimal place.
pub fn bytes(n: u64) -> String {
    scaled(n as f64, 1024.0, &["B", "KiB", "MiB", "GiB", "TiB", "PiB"])
}

/// `250 us`, `1.5 ms`, `2 s`.
pub fn micros(us: f64) -> String {
    scaled(us, 1000.0, &["us", "ms", "s"])
}

/// `23.4 %`.
pub fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

/// `part / whole`; 0 of nothing is 0.
pub fn share(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

fn scaled(mut value: f64, step: f64, units: &[&str]) -> String {
    let mut unit = 0;
    while unit + 1 < units.len() && value >= step {
        value /= step;
        unit += 1;
    }
    let text = if value >= 100.0 { format!("{value:.0}") } else { format!("{value:.1}") };
    format!("{} {}", text.trim_end_matches(".0"), units[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short_and_have_units() {
        assert_eq!(count(0), "0");
        assert_eq!(count(999), "999");
        assert_eq!(count(1_234_567), "1,234,567");
        assert_eq!(bytes(512), "512 B");
        assert_eq!(bytes(3 << 29), "1.5 GiB");
        assert_eq!(micros(12.34), "12.3 us");
        assert_eq!(micros(2_000_000.0), "2 s");
        assert_eq!(percent(share(1, 3)), "33.3 %");
        assert_eq!(share(1, 0).to_bits(), 0);
    }
}
