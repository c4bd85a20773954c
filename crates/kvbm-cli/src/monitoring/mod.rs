//! `kvbm dashboard` and `kvbm alerts`: made of the metrics that there are.

mod alerts;
mod dashboard;

use anyhow::Result;

/// Prints a dashboard for Grafana.
pub fn dashboard() -> Result<()> {
    crate::show(&dashboard::json(), false)
}

/// Prints alert rules for Prometheus.
pub fn alerts() -> Result<()> {
    crate::show(&alerts::yaml(), false)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvbm::metrics::{MetricFamily, Metrics};
    use std::collections::{BTreeMap, BTreeSet};
    use std::path::Path;

    /// Labels that Prometheus and its histograms add.
    const ADDED: [&str; 3] = ["instance", "job", "le"];

    /// Names of series in a text.
    fn named(text: &str) -> BTreeSet<String> {
        let in_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let names = text.split(|c| !in_name(c)).filter(|word| word.starts_with("kvbm_"));
        names.map(str::to_owned).collect()
    }

    /// Every series with its labels.
    fn series(families: &[MetricFamily]) -> BTreeMap<String, Vec<String>> {
        let each = |family: &MetricFamily| {
            family.series().into_iter().map(|name| (name, family.labels.clone())).collect::<Vec<_>>()
        };
        families.iter().flat_map(each).collect()
    }

    fn check_labels(expr: &str, known: &BTreeMap<String, Vec<String>>) {
        let labels: BTreeSet<&str> =
            named(expr).iter().filter_map(|name| known.get(name)).flatten().map(String::as_str).collect();
        let grouped = expr.split("by (").skip(1).filter_map(|rest| rest.split(')').next());
        let selected = expr.split('{').skip(1).filter_map(|rest| rest.split('}').next());
        let selected =
            selected.flat_map(|list| list.split(',')).filter_map(|pair| pair.split(['=', '!']).next());
        for label in grouped.flat_map(|list| list.split(", ")).chain(selected) {
            assert!(labels.contains(label) || ADDED.contains(&label), "label {label} in {expr}");
        }
    }

    #[test]
    fn panels_and_alerts_name_metrics_and_labels_that_there_are() {
        let known = series(&Metrics::schema());
        let mut used = BTreeSet::new();
        for expr in dashboard::expressions().into_iter().chain(alerts::expressions()) {
            let names = named(&expr);
            assert!(!names.is_empty(), "{expr}");
            for name in &names {
                assert!(known.contains_key(name), "{name} in {expr} is no metric");
            }
            check_labels(&expr, &known);
            used.extend(names);
        }
        let unused: Vec<_> =
            known.keys().filter(|name| !name.ends_with("_sum") && !name.ends_with("_count")).collect();
        let unused: Vec<_> = unused.into_iter().filter(|name| !used.contains(*name)).collect();
        assert!(unused.is_empty(), "no panel shows {unused:?}");
    }

    /// `BLESS=1` writes them.
    #[test]
    fn the_committed_files_are_what_is_made() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/grafana");
        for (name, text) in [("kvbm.json", dashboard::json()), ("alerts.yml", alerts::yaml())] {
            let path = folder.join(name);
            if std::env::var_os("BLESS").is_some() {
                std::fs::create_dir_all(&folder).unwrap();
                std::fs::write(&path, &text).unwrap();
            }
            let written = std::fs::read_to_string(&path).unwrap_or_default();
            assert!(written == text, "docs/grafana/{name} is out of date: run this test once with BLESS=1");
        }
    }
}
