//! Tests of the configuration as a whole.

use std::collections::HashSet;
use std::time::Duration;

use super::*;
use kvbm_layout::DType;
use proptest::prelude::*;

const FULL: &str = include_str!("../../tests/data/full.toml");

fn minimal() -> Config {
    let mut config = Config::default();
    for (key, value) in [
        ("model.num_layers", "32"),
        ("model.num_kv_heads", "8"),
        ("model.head_dim", "128"),
        ("namespace.model", "llama-3-8b"),
    ] {
        config.set(key, value).unwrap();
    }
    config
}

fn keys() -> impl Iterator<Item = &'static Key> {
    Config::schema().iter().flat_map(Section::keys)
}

#[test]
fn defaults_are_those_of_the_design() {
    let config = Config::default();
    assert_eq!(config.model.page_size, 16);
    assert_eq!(
        config.offload,
        OffloadConfig {
            g1_g2: EdgeConfig {
                write_through: true,
                watermark: 0.90,
                idle_iterations: 100,
                queue_share: 0.25,
                ahead_share: 0.0
            },
            g2_g3: EdgeConfig {
                write_through: false,
                watermark: 0.90,
                idle_iterations: 1000,
                queue_share: 0.25,
                ahead_share: 0.2
            },
        }
    );
    assert!((config.disk.drive_writes_per_day - 1.0).abs() < f64::EPSILON);
    assert!(config.host.capacity.is_none() && config.disk.capacity.is_none());
    minimal().validate().unwrap();
}

#[test]
fn keys_and_variables_are_unique_and_described() {
    let mut seen = HashSet::new();
    for key in keys() {
        assert!(seen.insert(key.path().to_owned()), "{} twice", key.path());
        assert!(seen.insert(key.variable()), "{} twice", key.variable());
        assert!(key.doc().trim().ends_with('.'), "{}: {:?}", key.path(), key.doc());
        assert!(!key.expected().is_empty());
    }
    assert!(seen.contains("KVBM_OFFLOAD_G1_G2_WATERMARK"), "{seen:?}");
}

#[test]
fn the_file_of_the_operators_page_works() {
    let page = include_str!("../../../../docs/operate.md");
    let (_, rest) = page.split_once("```toml\n").unwrap();
    let mut config = Config::from_toml(rest.split_once("```").unwrap().0, "operate.md").unwrap();
    if !cfg!(feature = "nats") {
        config.events.url = None;
    }
    config.validate().unwrap();
    assert_eq!(config.rank_block_bytes(), 2 << 20, "as the page says");
    assert_eq!(config.disk.capacity, Bytes::gib(800).into());
}

#[test]
fn a_full_file_sets_every_key() {
    let config = Config::from_toml(FULL, "full.toml").unwrap();
    config.validate().unwrap();
    let defaults = Config::default();
    for key in keys() {
        // One has no meaning on a GPU, two stand in place of the model's axes, two are for those
        // alone, and two stand in place of others of their section.
        let only_choice = [
            "device.bandwidth_model",
            "model.opaque_tensors",
            "model.groups",
            "model.replicas",
            "volumes.lossy_dtype",
            "encryption.key_file",
            "encryption.previous_key_command",
        ]
        .contains(&key.path());
        let set = only_choice || key.secret || key.value(&config) != key.value(&defaults);
        assert!(set, "{} has its default {:?}", key.path(), key.value(&config));
    }
    assert_eq!(config.model.dtype, DType::F16);
    assert_eq!(config.host.capacity, Bytes::gib(8).into());
    assert_eq!(config.disk.capacity, Blocks(16_000).into());
    assert_eq!(config.disk.more_dirs, Paths::from_iter(["cache-b", "cache-c"]));
    assert_eq!(config.disk.write_budget, Bytes(200_000_000));
    assert_eq!(config.disk.scrub, Bytes::mib(8));
    assert_eq!(config.disk.read_deadline, Duration::from_millis(750));
    assert_eq!(config.namespace.tenant_salt.as_ref().unwrap().text(), "salt");
    assert!(!config.offload.g1_g2.write_through && config.offload.g2_g3.write_through);
}

#[test]
fn servers_over_http_serve_no_strangers_unless_the_risk_is_named() {
    let mut config = minimal();
    config.set("admin.token_file", "/etc/kvbm/token").unwrap();
    let error = |config: &Config| config.validate().unwrap_err().to_string();
    for section in ["admin", "metrics"] {
        let set = |config: &mut Config, key: &str, value: &str| {
            config.set(&format!("{section}.{key}"), value).unwrap();
        };
        let mut config = config.clone();
        let mut idle = minimal();
        set(&mut idle, "insecure", "true");
        let text = error(&idle);
        assert!(text.contains("insecure = true") && text.contains("has no use"), "{text}");
        for (local, far) in [("127.0.0.1:9401", "0.0.0.0:9401"), ("[::1]:9401", "[::]:9401")] {
            let mut config = config.clone();
            set(&mut config, "http", local);
            // The other section of this test has a file and no address.
            config.admin.http = config.admin.http.or(Some("127.0.0.1:1".parse().unwrap()));
            config.validate().unwrap();
            set(&mut config, "http", far);
            let text = error(&config);
            assert!(text.starts_with(&format!("{section}.http = {far}: ")), "{text}");
            assert!(text.contains("set tls_cert and tls_key"), "{text}");
            set(&mut config, "insecure", "true");
            config.validate().unwrap();
        }
        set(&mut config, "tls_cert", "/etc/kvbm/node.pem");
        config.admin.http = config.admin.http.or(Some("127.0.0.1:1".parse().unwrap()));
        if section == "metrics" {
            assert!(
                error(&config).contains("metrics.tls_cert = /etc/kvbm/node.pem: has no use"),
                "no address"
            );
            set(&mut config, "http", "10.0.0.1:9400");
        }
        assert!(error(&config).contains("needs tls_key too"), "{}", error(&config));
        set(&mut config, "tls_key", "/etc/kvbm/node.key");
        if section == "metrics" {
            assert!(error(&config).contains("set token_file or client_ca"), "{}", error(&config));
            set(&mut config, "client_ca", "/etc/kvbm/prometheus.pem");
        }
        config.validate().unwrap();
    }
}

#[test]
fn a_model_may_have_tensors_in_place_of_axes() {
    let read = |model: &str| {
        let text = format!("[model]\n{model}\n[namespace]\nmodel = \"m\"");
        let config = Config::from_toml(&text, "x")?;
        config.validate().map(|()| config)
    };
    let config = read("opaque_tensors = \"2x32768, 1024\"").unwrap();
    assert_eq!(config.model.opaque_tensors.as_slice(), [32768, 32768, 1024]);
    assert_eq!(config.rank_block_bytes(), 66_560);
    assert_eq!(read("opaque_tensors = [\"2x32768\", 1024]").unwrap(), config);
    assert_eq!(Config::from_toml(&config.to_toml(), "x").unwrap(), config);
    let mut tags = HashSet::from([config.namespace().tag()]);
    for tensors in ["32768,2x1024", "66560", "3x32768", "2x32768,1024,1"] {
        let other = read(&format!("opaque_tensors = \"{tensors}\"")).unwrap();
        assert!(tags.insert(other.namespace().tag()), "{tensors}");
    }
    for (model, message) in [
        ("opaque_tensors = \"\"", "model.num_layers"),
        ("opaque_tensors = 64\nnum_layers = 2", "leave it out"),
        ("opaque_tensors = 64\ndtype = \"f16\"", "model.dtype"),
        ("opaque_tensors = 64\npage_size = 0", "model.page_size"),
        ("opaque_tensors = \"64,0\"", "must be at least 1"),
        ("opaque_tensors = \"1025x64\"", "at most 1024"),
        ("opaque_tensors = \"4000000000x64\"", "expected bytes"),
        ("opaque_tensors = \"64 and 64\"", "expected bytes"),
        ("opaque_tensors = 64\n[host]\norder = \"universal\"", "host.order"),
    ] {
        let error = read(model).unwrap_err().to_string();
        assert!(error.contains(message), "expected `{message}`, found `{error}`");
    }
}

#[test]
fn variables_come_after_the_file_and_unknown_ones_are_refused() {
    let mut config = Config::from_toml(FULL, "full.toml").unwrap();
    let vars = |list: &[(&str, &str)]| {
        list.iter().map(|(name, value)| (name.into(), value.into())).collect::<Vec<(OsString, OsString)>>()
    };
    config
        .apply_variables(vars(&[
            ("PATH", "/bin"),
            ("KVBM_CUDA_DRIVER", "/opt/libcuda.so.1"),
            ("KVBM_NATS_SERVER", "/opt/nats-server"),
            ("KVBM_RECORD", "/var/tmp/run.kvbmrec"),
            ("KVBM_RECORD_LIMIT", "65536"),
            ("KVBM_HOST_CAPACITY", "4_000"),
            ("KVBM_HOST_HUGE_PAGES", "TRUE"),
            ("KVBM_OFFLOAD_G2_G3_WATERMARK", "0.5"),
            ("KVBM_TRANSFER_DEADLINE", "2min"),
            ("KVBM_TRANSFER_VERIFY_HOST", "Always"),
        ]))
        .unwrap();
    assert_eq!(config.host.capacity, Blocks(4000).into());
    assert!(config.host.huge_pages);
    assert!((config.offload.g2_g3.watermark - 0.5).abs() < f64::EPSILON);
    assert_eq!(config.transfer.deadline, Duration::from_secs(120));
    assert_eq!((config.transfer.verify_host, config.transfer.verify_every), (VerifyHost::Always, 100));

    let error = config.apply_variables(vars(&[("KVBM_HOST_CAPCITY", "1")])).unwrap_err().to_string();
    assert!(error.contains("KVBM_HOST_CAPCITY") && error.contains("is KVBM_HOST_CAPACITY"), "{error}");
    let error = config.apply_variables(vars(&[("KVBM_DISK_THREADS", "many")])).unwrap_err().to_string();
    assert_eq!(
        error,
        "environment variable KVBM_DISK_THREADS: disk.threads = \"many\": expected a whole number from 1 to 256"
    );
}

#[test]
fn what_is_wrong_is_named_with_its_place() {
    for (text, message) in [
        (
            "[host]\n capcity = 1",
            "c.toml:2:2: unknown key 'host.capcity'; the nearest known one is 'host.capacity'",
        ),
        ("[hots]\n", "c.toml:1:2: unknown key 'hots'; the nearest known one is 'host'"),
        (
            "watermark = 1.0",
            "c.toml:1:1: unknown key 'watermark'; the nearest known one is 'offload.g1_g2.watermark'",
        ),
        (
            "[host]\ncapacity = \"8 gigs\"",
            "c.toml:2:12: host.capacity = \"8 gigs\": expected a number of blocks, or",
        ),
        ("[model]\nnum_layers = -1", "c.toml:2:14: model.num_layers = -1: expected a whole number"),
        (
            "[model]\nnum_layers = 99999999999999999999",
            "c.toml:2:14: model.num_layers = (an integer beyond 64 bits)",
        ),
        ("host = 3", "c.toml:1:8: host = 3: expected a table: [host]"),
        ("[offload]\ng1_g2 = true", "c.toml:2:9: offload.g1_g2 = true: expected a table: [offload.g1_g2]"),
        ("[transfer]\ndeadline = 30", "c.toml:2:12: transfer.deadline = 30: expected a duration such as"),
        (
            "[disk]\nengine = \"fast\"",
            "disk.engine = \"fast\": expected one of \"auto\", \"io_uring\", \"threads\", \"buffered\", \"nixl\"",
        ),
        ("[offload.g1_g2]\nwatermark = nan", "offload.g1_g2.watermark = NaN: expected a number"),
        ("[tenants]\nshares = \"acme\"", "tenants.shares = \"acme\": expected tenants with their shares"),
        (
            "[tenants.shares]\nacme = \"half\"",
            "c.toml:1:1: tenants.shares = { acme = \"half\" }: expected tenants with their shares",
        ),
        ("[disk]\nmore_dirs = [\"a,b\"]", "c.toml:2:13: disk.more_dirs = [\"a,b\"]: expected paths"),
        ("[disk]\nmore_dirs = [3]", "disk.more_dirs = [3]: expected paths"),
        ("[host]\ncapacity = { blocks = 3 }", "host.capacity = { blocks = 3 }: expected a number of blocks"),
        ("[namespace]\ntenant_salt = 7", "namespace.tenant_salt = (not shown): expected"),
        ("[host\n", "c.toml:1:6: not valid TOML"),
        ("[host]\ncapacity = 1\ncapacity = 2", "c.toml:3:1: not valid TOML"),
    ] {
        let error = Config::from_toml(text, "c.toml").unwrap_err().to_string();
        assert!(error.contains(message), "{text}\n got: {error}\nwant: {message}");
    }
}

#[test]
fn victims_need_host_memory_where_there_is_a_disk() {
    let mut config = minimal();
    config.set("volumes.offload", "victims").unwrap();
    config.validate().unwrap();
    for (key, value) in [("disk.capacity", "5"), ("disk.dir", "d")] {
        config.set(key, value).unwrap();
    }
    let error = config.validate().unwrap_err().to_string();
    assert!(
        error.contains("volumes.offload = victims: needs host.capacity where there is a disk"),
        "{error}"
    );
    config.set("host.capacity", "5").unwrap();
    config.validate().unwrap();
}

#[test]
fn rules_name_the_key_and_the_way_out() {
    let cases: &[(&[(&str, &str)], &str)] = &[
        (
            &[("model.num_layers", "0")],
            "model.num_layers is not set: Layers with a KV cache. Set it in the file or by KVBM_MODEL_NUM_LAYERS",
        ),
        (&[("namespace.model", "")], "namespace.model is not set"),
        (&[("model.outer_dim", "3")], "model.outer_dim = 3: must be from 1 to 2"),
        (
            &[("parallelism.tensor_parallel", "3")],
            "parallelism.tensor_parallel = 3: must divide model.num_kv_heads (8)",
        ),
        (&[("model.replicas", "2")], "model.replicas = 2: must be 1 for a model whose heads"),
        (
            &[("parallelism.workers", "a,b")],
            "parallelism.workers = 2 sockets: must name one socket for each of the 1 ranks",
        ),
        (
            &[("parallelism.tensor_parallel", "2"), ("parallelism.workers", "a,a")],
            "parallelism.workers = a: must name each socket once",
        ),
        (&[("parallelism.workers", "tcp://a")], "parallelism.workers = tcp://a: must be tcp://HOST:PORT"),
        (
            &[("parallelism.workers", "tcp://a:7")],
            if cfg!(feature = "tls") {
                "parallelism.workers = tcp://a:7: a line over TCP needs certificates of both ends: set tls_cert"
            } else {
                "parallelism.workers = tcp://a:7: this build has no TLS: build it with the feature tls"
            },
        ),
        (&[("parallelism.tls_ca", "x")], "parallelism.tls_ca = x: needs parallelism.tls_cert too"),
        (&[("disk.capacity", "5"), ("host.capacity", "5")], "disk.capacity = 5 blocks: needs disk.dir"),
        (&[("device.ordinal", "2")], "device.ordinal = 2: has a meaning only with device.kind = \"cuda\""),
        (&[("transfer.copies", "batch")], "transfer.copies = batch: chooses among the ways of a GPU"),
        (
            &[("device.kind", "cuda"), ("device.bandwidth_model", "reference")],
            "device.bandwidth_model = reference: slows the emulated device only",
        ),
        (&[("disk.dir", "d")], "disk.dir = d: needs disk.capacity"),
        (&[("volume.capacity", "5")], "volume.uri is not set: Where it is:"),
        (
            &[("volume.uri", "memory:"), ("host.capacity", "5"), ("volume.alignment", "3")],
            "volume.alignment = 3: of volume 0 must be a power of two",
        ),
        (
            &[("volume.uri", "memory:"), ("host.capacity", "5"), ("volume.deadline", "0s")],
            "volume.deadline = 0ns: of volume 0 must be more than 0 and at most 1h",
        ),
        (
            &[("volume.uri", "memory:"), ("host.capacity", "5"), ("volume.capacity", "1KiB")],
            "volume.capacity = 1KiB: holds not one block of volume 0",
        ),
        (&[("volumes.queue_share", "2")], "volumes.queue_share = 2: must be above 0"),
        (&[("transfer.staging", "0")], "transfer.staging = 0: must be more than 0"),
        (&[("host.capacity", "1MiB")], "host.capacity = 1MiB: holds not one block of 2097152 bytes"),
        (&[("host.capacity", "16000000TiB")], "is more than 268435455 blocks"),
        (&[("host.capacity", "268435456")], "host.capacity = 268435456 blocks: is more than 268435455"),
        (&[("events.ring_capacity", "268435456")], "events.ring_capacity = 268435456: must be from 1"),
        (&[("offload.g1_g2.watermark", "0")], "offload.g1_g2.watermark = 0: must be above 0"),
        (&[("offload.g2_g3.watermark", "1.1")], "offload.g2_g3.watermark = 1.1"),
        (&[("disk.drive_writes_per_day", "-1")], "disk.drive_writes_per_day = -1"),
        (&[("transfer.queue_depth", "0")], "transfer.queue_depth = 0: must be from 1"),
        (&[("transfer.staging", "0")], "transfer.staging = 0: must be more than 0"),
        (&[("transfer.verify_every", "0")], "transfer.verify_every = 0: must be from 1"),
        (&[("transfer.deadline", "0s")], "transfer.deadline = 0"),
        (&[("events.batch_age", "11s")], "events.batch_age = 11s: must be at most 10s"),
        (&[("events.publish_timeout", "0s")], "events.publish_timeout = 0: must be more than 0"),
        (&[("events.batch_bytes", "3000000")], "events.batch_bytes = 3000000: must be from 1024"),
        (
            &[("events.url", "amqp://me:word@host")],
            "events.url = (not shown): event URL: there is no transport 'amqp'",
        ),
        (&[("namespace.chain_root", "external")], "needs namespace.chain_root_seed"),
        (&[("namespace.chain_root_seed", "x")], "has no meaning with chain_root = \"fixed\""),
        (
            &[
                ("namespace.chain_root", "per-process"),
                ("namespace.chain_root_seed", "x"),
                ("host.capacity", "5"),
                ("disk.capacity", "5"),
                ("disk.dir", "d"),
            ],
            "changes with every process",
        ),
        (&[("tenants.shares", "a=0.6,b=0.5")], "tenants.shares = 1.1 in all: must be at most 1"),
        (&[("tenants.shares", "a=0.1,a=0.2")], "tenants.shares = a: must name a tenant once"),
        (&[("tenants.shares", "a=1.5")], "tenants.shares = a=1.5: must have shares from 0 to 1"),
        (&[("tenants.shares", "a b=0.5")], "tenants.shares = a b: must name tenants by"),
    ];
    for (settings, message) in cases {
        let mut config = minimal();
        for (key, value) in *settings {
            config.set(key, value).unwrap();
        }
        let error = config.validate().unwrap_err().to_string();
        assert!(error.contains(message), "{settings:?}\n got: {error}\nwant: {message}");
    }
    let error = minimal().set("host.pined", "true").unwrap_err().to_string();
    assert!(error.contains("'host.pinned'"), "{error}");
}

#[test]
fn what_holds_several_values_is_a_text_or_what_toml_has_for_it() {
    for (text, table) in [
        ("[tenants]\nshares = \"acme=0.5,beta=1\"", "[tenants.shares]\nacme = 0.5\nbeta = 1"),
        ("[tenants]\nshares = \"\"", "[tenants]\nshares = {}"),
        ("[disk]\nmore_dirs = \"/a, /b\"", "[disk]\nmore_dirs = [\"/a\", \"/b\"]"),
        ("[disk]\nmore_dirs = \"\"", "[disk]\nmore_dirs = []"),
        (
            "[remote]\nucx = \"device_list=a,b; num_workers = 2\"",
            "[remote.ucx]\ndevice_list = \"a,b\"\nnum_workers = 2",
        ),
        ("[remote]\nucx = \"\"", "[remote]\nucx = {}"),
    ] {
        let [one, other] = [text, table].map(|text| Config::from_toml(text, "c.toml").unwrap());
        assert_eq!(one, other, "{text}");
        assert_eq!(Config::from_toml(&other.to_toml(), "c.toml").unwrap(), other, "{text}");
    }
    for wrong in ["\"num_workers\"", "\"=2\"", "{ a = \"b;c\" }", "{ a = 1.5 }", "3"] {
        let error = Config::from_toml(&format!("[remote]\nucx = {wrong}"), "c.toml").unwrap_err();
        assert!(error.to_string().contains("expected NAME=VALUE"), "{wrong}: {error}");
    }
    let config = Config::from_toml("[tenants.shares]\nbeta = 0.25\nacme = 0.5", "c.toml").unwrap();
    assert_eq!(config.tenants.shares.to_string(), "acme=0.5,beta=0.25");
}

#[test]
fn volumes_are_a_list() {
    let minimal = |text: &str| {
        let mut base = minimal();
        base.set("host.capacity", "8").unwrap();
        Config::from_toml(&format!("{}{text}", base.to_toml()), "c.toml").unwrap()
    };
    let two =
        "[[volume]]\nuri = \"dir:///a\"\nid = 7\ndeadline = \"2s\"\n[[volume]]\nuri = \"dir:///b\"\nid = 8\n";
    let config = minimal(two);
    config.validate().unwrap();
    let seen: Vec<_> = config.volume.iter().map(|volume| (volume.uri.as_str(), volume.id)).collect();
    assert_eq!(seen, [("dir:///a", 7), ("dir:///b", 8)]);
    assert_eq!(config.volume[0].deadline, Duration::from_secs(2));
    assert_eq!(config.volume[1].deadline, VolumeConfig::default().deadline, "each has its own");
    assert_eq!(Config::from_toml(&config.to_toml(), "again").unwrap(), config);

    // One alone, as a table; a variable speaks of the first, and makes one where there is none.
    let mut one = minimal("[volume]\nuri = \"dir:///a\"\n");
    assert_eq!(one.volume, [VolumeConfig { uri: "dir:///a".into(), ..VolumeConfig::default() }]);
    one.apply_variables([("KVBM_VOLUME_URI".into(), "dir:///c".into())]).unwrap();
    assert_eq!(one.volume[0].uri, "dir:///c");
    let mut none = minimal("");
    none.apply_variables([("KVBM_VOLUME_URI".into(), "dir:///c".into())]).unwrap();
    assert_eq!((none.volume.len(), &none.volume[0].uri), (1, &one.volume[0].uri));

    for (text, message) in [
        ("[[volume]]\nid = 1\n", "volume.uri is not set"),
        (
            "[[volume]]\nuri = \"memory:\"\n[[volume]]\nuri = \"dir:/a\"\n",
            "volume.id = 0: is the id of two volumes",
        ),
        (
            "[[volume]]\nuri = \"dir:/a\"\n[[volume]]\nuri = \"dir:/a\"\nid = 3\n",
            "volume.uri = dir:/a: is both volume 0 and volume 3",
        ),
        (
            "[[volume]]\nuri = \"dir:/a\"\n[[volume]]\nuri = \"dir:/b\"\nid = 3\nalignment = 12\n",
            "volume.alignment = 12: of volume 3 must be a power of two",
        ),
    ] {
        let error = minimal(text).validate().unwrap_err().to_string();
        assert!(error.contains(message), "{text}\n got: {error}\nwant: {message}");
    }
    for (text, message) in [
        ("[[volume]]\nurl = 1\n", "unknown key 'volume.url'; the nearest known one is 'volume.uri'"),
        ("volume = 3\n", "volume = 3: expected a table [volume], or several [[volume]]"),
        ("volume = [3]\n", "volume = 3: expected a table [volume], or several [[volume]]"),
        (
            "[volume]\nthreads = 3\n",
            "unknown key 'volume.threads'; the nearest known one is 'volumes.threads'",
        ),
        // Not passed over: it goes for all volumes.
        (
            "[volume]\nencrypt = true\n",
            "unknown key 'volume.encrypt'; the nearest known one is 'volumes.encrypt'",
        ),
    ] {
        let error = Config::from_toml(text, "c.toml").unwrap_err().to_string();
        assert!(error.contains(message), "{text}\n got: {error}\nwant: {message}");
    }
    assert!(minimal("").volume.is_empty());
}

#[test]
fn secrets_are_never_shown() {
    let mut config = minimal();
    config.set("namespace.tenant_salt", "s3cr3t-salt").unwrap();
    config.set("namespace.deployment_secret", "s3cr3t-too").unwrap();
    assert!(!format!("{config:?}").contains("s3cr3t"), "{config:?}");
    assert!(!config.to_toml().contains("s3cr3t"), "{}", config.to_toml());
    for text in [
        "[[namespace]]\ntenant_salt = \"s3cr3t\"",
        "namespace = [{ tenant_salt = \"s3cr3t\" }]",
        "[[events]]\nurl = \"nats://user:s3cr3t@host\"",
        "events = [\"nats://user:s3cr3t@host\"]",
        "events = \"nats://user:s3cr3t@host\"",
        "[events]\nurl = [\"nats://user:s3cr3t@host\"]",
    ] {
        let error = Config::from_toml(text, "c.toml").unwrap_err().to_string();
        assert!(!error.contains("s3cr3t") && error.contains("c.toml:"), "{error}");
    }
}

/// Mutation that makes it fail: `validate` shows a URI as it was written.
#[test]
fn what_may_be_a_secret_in_the_uri_of_a_volume_is_not_shown() {
    let mut config = minimal();
    let volume = |id| VolumeConfig {
        id,
        uri: "s3://user:s3cr3t@bucket/p?token=s3cr3t".into(),
        ..VolumeConfig::default()
    };
    config.volume = vec![volume(0), volume(1)];
    let error = config.validate().unwrap_err().to_string();
    assert!(error.starts_with("volume.uri = s3://bucket/p: ") && error.contains("name it once"), "{error}");
    assert!(!error.contains("s3cr3t"), "{error}");
}

#[test]
fn the_namespace_follows_every_setting_that_is_identity() {
    let base = minimal();
    let mut tags = HashSet::from([base.namespace().tag()]);
    for (key, value) in [
        ("namespace.model", "other"),
        ("namespace.weights", "v2"),
        ("namespace.rope_scaling", "yarn"),
        ("namespace.kv_quantization", "q"),
        ("namespace.adapter", "lora"),
        ("namespace.tenant_salt", "t"),
        ("namespace.deployment_secret", "s"),
        ("namespace.algorithm", "xxh3-128"),
        ("namespace.chain_root", "external"),
        ("namespace.flat", "true"),
        ("model.page_size", "32"),
        ("model.dtype", "f16"),
    ] {
        let mut config = base.clone();
        config.set(key, value).unwrap();
        assert!(tags.insert(config.namespace().tag()), "{key} does not change the namespace");
    }
    let mut placed = base.clone();
    placed.set("parallelism.tensor_parallel", "2").unwrap();
    assert_eq!(placed.namespace().tag(), base.namespace().tag());
    assert_eq!(placed.rank_block_bytes() * 2, base.rank_block_bytes());
    assert!(base.namespace().hasher().is_ok());
}

#[test]
fn a_file_that_is_not_there_is_named() {
    let error = Config::load(Some(Path::new("no/such/kvbm.toml"))).unwrap_err().to_string();
    assert!(error.contains("no/such/kvbm.toml"), "{error}");
}

#[test]
fn the_reference_is_up_to_date() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/config.md");
    let reference = Config::reference();
    if std::env::var_os("BLESS").is_some() {
        std::fs::write(&path, &reference).unwrap();
    }
    let written = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(written == reference, "docs/config.md is out of date: run the tests of kvbm once with BLESS=1");
}

proptest! {
    #[test]
    fn a_written_configuration_reads_back(
        layers in 1_u32..100, capacity in "[0-9]{1,4}(KiB|MiB|GiB)?", huge: bool, watermark in 0.01_f64..1.0,
        millis in 1_u64..10_000_000, model in "\\PC{1,20}", uris in proptest::collection::vec("\\PC{1,20}", 0..4),
    ) {
        let mut config = minimal();
        config.model.num_layers = layers;
        config.host.capacity = capacity.parse().unwrap();
        config.host.huge_pages = huge;
        config.offload.g2_g3.watermark = watermark;
        config.transfer.deadline = Duration::from_millis(millis);
        config.namespace.model = model.clone();
        config.encryption.key_command = CommandLine::from_iter([&model, " two words ", ""]);
        let volume = |(id, uri)| VolumeConfig { uri, id, ..VolumeConfig::default() };
        config.volume = (1..).zip(uris).map(volume).collect();
        prop_assert_eq!(Config::from_toml(&config.to_toml(), "x").unwrap(), config);
    }

    #[test]
    fn no_text_makes_the_parser_panic(text in "\\PC{0,200}", key in "[a-z_.]{0,40}", value in "\\PC{0,40}") {
        for error in [
            Config::from_toml(&text, "x").err(),
            Config::from_toml(&format!("{key} = {value}"), "x").err(),
            Config::default().set(&key, &value).err(),
        ] {
            prop_assert!(error.is_none_or(|error| !error.to_string().is_empty()));
        }
    }
}

#[test]
fn a_numa_node_is_for_all_ranks_or_for_each() {
    let read = |nodes: &str| {
        let text = format!(
            "[model]\nnum_layers = 1\nnum_kv_heads = 2\nhead_dim = 8\n[namespace]\nmodel = \"m\"\n\
             [parallelism]\ntensor_parallel = 2\n[node]\nnuma_nodes = {nodes}"
        );
        let config = Config::from_toml(&text, "x")?;
        config.validate().map(|()| config.node.numa_nodes)
    };
    let of = |nodes: &str| [0, 1].map(|rank| read(nodes).unwrap().of(rank));
    assert_eq!(of("3"), [Some(3); 2]);
    assert_eq!((of("\"0,1\""), of("[\"2x1\"]")), ([Some(0), Some(1)], [Some(1); 2]));
    assert_eq!(Config::default().node.numa_nodes.of(0), None);
    let wrong = read("\"3x0\"").unwrap_err().to_string();
    assert!(wrong.contains("node.numa_nodes") && wrong.contains("each of the 2 ranks"), "{wrong}");
}
