//! Whether blocks are compressed on their way to volumes, and whether that can be a gain.

use kvbm::config::{Config, VolumeCompress, VolumeLossy};

use super::{Finding, Status};

const NAME: &str = "compression";
/// Schemes whose stores are as fast as a disk.
const LOCAL: [&str; 2] = ["dir://", "memory:"];

pub(super) fn examine(config: &Config) -> Finding {
    let volumes = &config.volume;
    if volumes.is_empty() {
        return Finding::ok(NAME, "no volumes, so nothing is compressed");
    }
    let compress = config.volumes.compress;
    let is_local = |uri: &str| LOCAL.iter().any(|scheme| uri.starts_with(scheme));
    let local: Vec<&str> =
        volumes.iter().map(|volume| volume.uri.as_str()).filter(|uri| is_local(uri)).collect();
    let loss = match config.volumes.lossy {
        VolumeLossy::Off => String::new(),
        lossy => format!(
            "lossy ({lossy}): what comes back is not what was computed, and tokens may differ; they are "
        ),
    };
    let found = |what: &str| format!("blocks on volumes ({} configured) are {loss}{what}", volumes.len());
    match compress {
        VolumeCompress::Off => Finding::ok(NAME, found("not compressed")),
        VolumeCompress::Auto => Finding::ok(NAME, found("compressed while that makes a volume faster")),
        _ if local.is_empty() => Finding::ok(NAME, found(&format!("always compressed ({compress})"))),
        _ => Finding::short(
            NAME,
            Status::Limited,
            found(&format!("always compressed ({compress}), also on {}", local.join(", "))),
            "a core compresses more slowly than a local disk writes, so these volumes are slower",
            "set volumes.compress = \"auto\", which measures, unless you want the space",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvbm::config::VolumeConfig;

    fn with(compress: VolumeCompress, uris: &[&str]) -> Finding {
        let mut config = Config::default();
        config.volumes.compress = compress;
        config.volume = uris
            .iter()
            .map(|uri| VolumeConfig { uri: (*uri).to_owned(), ..VolumeConfig::default() })
            .collect();
        examine(&config)
    }

    #[test]
    fn the_setting_and_what_it_costs_are_named() {
        let none = with(VolumeCompress::Zstd, &[]);
        assert_eq!((none.status, none.found.as_str()), (Status::Ok, "no volumes, so nothing is compressed"));
        for (compress, uris, status, found) in [
            (VolumeCompress::Off, &["dir:///a"][..], Status::Ok, "(1 configured) are not compressed"),
            (VolumeCompress::Auto, &["dir:///a"], Status::Ok, "compressed while that makes a volume faster"),
            (VolumeCompress::Zstd, &["s3://bucket/a"], Status::Ok, "always compressed (zstd)"),
            (VolumeCompress::Lz4, &["s3://bucket/a", "dir:///a"], Status::Limited, "(lz4), also on dir:///a"),
        ] {
            let finding = with(compress, uris);
            assert!(finding.status == status && finding.found.contains(found), "{finding:?}");
            assert_eq!(finding.fix.is_some(), status != Status::Ok);
        }
        let mut config = Config::default();
        config.volumes.lossy = VolumeLossy::Int8;
        config.volume = vec![VolumeConfig { uri: "dir:///a".to_owned(), ..VolumeConfig::default() }];
        let found = examine(&config).found;
        assert!(
            found.contains("lossy (int8): ") && found.contains("tokens may differ; they are not compressed")
        );
    }
}
