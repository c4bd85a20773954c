//! What of the blocks that leave memory is encrypted.

use kvbm::config::Config;

use super::{Finding, Status};

const NAME: &str = "encryption";

pub(super) fn examine(config: &Config) -> Finding {
    let has_disk = config.disk.dir.is_some() && !config.disk.capacity.is_none();
    let volumes = format!("on volumes ({} configured)", config.volume.len());
    let places = [
        (has_disk, "on disk", config.disk.encrypt),
        (!config.volume.is_empty(), volumes.as_str(), config.volumes.encrypt),
    ];
    let used: Vec<_> = places.into_iter().filter(|(is_used, ..)| *is_used).collect();
    let state = |(_, place, encrypt): &(bool, &str, bool)| {
        format!("blocks {place} are {}encrypted", if *encrypt { "" } else { "not " })
    };
    let found = used.iter().map(state).collect::<Vec<_>>().join("; ");
    if used.is_empty() {
        return Finding::ok(NAME, "no blocks leave memory");
    }
    if used.iter().all(|(.., encrypt)| *encrypt) {
        return Finding::ok(NAME, found);
    }
    Finding::short(
        NAME,
        Status::Limited,
        found,
        "who reads what is not encrypted can reconstruct prompts",
        "set disk.encrypt and volumes.encrypt with encryption.key_file or key_command, or let the file system and the \
         store encrypt",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvbm::config::{Blocks, VolumeConfig};

    #[test]
    fn each_tier_is_named() {
        let mut config = Config::default();
        assert_eq!(examine(&config).status, Status::Ok);
        (config.disk.dir, config.disk.capacity) = (Some("cache".into()), Blocks(4).into());
        let plain = examine(&config);
        assert!(plain.status == Status::Limited && plain.found.contains("not encrypted"), "{plain:?}");
        config.disk.encrypt = true;
        assert_eq!(examine(&config).status, Status::Ok);
        config.volume.push(VolumeConfig::default());
        let volume = examine(&config);
        assert_eq!(
            volume.found,
            "blocks on disk are encrypted; blocks on volumes (1 configured) are not encrypted"
        );
        assert!(volume.status == Status::Limited && volume.fix.is_some());
        config.volumes.encrypt = true;
        assert_eq!(examine(&config).status, Status::Ok);
    }
}
