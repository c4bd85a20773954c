//! What a URL says about `ZeroMQ`.

use super::parts::{Parts, malformed};
use super::{PublisherIdentity, UrlError};
use crate::zmq::{ZmqAddress, ZmqConfig};

const KNOWN: &[&str] = &["replay", "topic", "from", "insecure", "format", "rank", "kind"];

/// The configuration and the addresses that `parts` ask for; one address to publish, any number to
/// subscribe.
pub(super) fn config(parts: &Parts) -> Result<(ZmqConfig, Vec<ZmqAddress>), UrlError> {
    parts.expect_only(KNOWN)?;
    if parts.user.is_some() {
        return Err(malformed(&parts.shown(), "ZeroMQ has no authentication: leave user and password out"));
    }
    let kind = parts.scheme.trim_start_matches("zmq+");
    let events: Vec<String> = parts.place.split(',').map(|place| format!("{kind}://{place}")).collect();
    let replays = parts.get("replay").map(|text| replays(text, &events)).transpose()?;
    let mut addresses: Vec<ZmqAddress> = events.into_iter().map(ZmqAddress::new).collect();
    for (address, replay) in addresses.iter_mut().zip(replays.into_iter().flatten()) {
        address.replay = Some(replay);
    }
    let is_vllm = |text: &str| ["kvbm", "vllm"].iter().position(|known| *known == text);
    let is_vllm = parts.read("format", "kvbm or vllm", is_vllm)? == Some(1);
    speaker(parts)?;
    if let Some(name) = ["rank", "kind"].into_iter().find(|name| !is_vllm && parts.get(name).is_some()) {
        return Err(malformed(&parts.shown(), &format!("{name} goes with format=vllm")));
    }
    let from_start = |text: &str| ["new", "start"].iter().position(|known| *known == text);
    let mut config = ZmqConfig { insecure: parts.flag("insecure")?, ..ZmqConfig::default() };
    if let Some(topic) = parts.get("topic") {
        topic.clone_into(&mut config.topic);
    }
    config.from_start = parts.read("from", "new or start", from_start)? == Some(1);
    Ok((config, addresses))
}

/// In whose name a publisher speaks as engines do.
pub(super) fn speaker(parts: &Parts) -> Result<PublisherIdentity, UrlError> {
    let rank = parts.read("rank", "a number below 2^32", |text| text.parse().ok())?;
    let word = |text: &str| {
        let good = |c: char| c.is_ascii_lowercase() || c == '_';
        (!text.is_empty() && text.len() <= 64 && text.chars().all(good)).then(|| text.to_owned())
    };
    let kind = parts.read("kind", "small letters and _, such as mla_attention", word)?;
    Ok(PublisherIdentity {
        rank: rank.unwrap_or(0),
        kind: kind.unwrap_or_else(|| crate::vllm::FULL_ATTENTION.into()),
    })
}

/// A replay socket for each of `events`: a port alone is one of the same host.
fn replays(text: &str, events: &[String]) -> Result<Vec<String>, UrlError> {
    let wrong = || UrlError::Value {
        name: "replay",
        value: text.to_owned(),
        expected: "a port, or as many addresses (tcp://HOST:PORT or ipc://PATH, commas between) as there are publishers",
    };
    let is_port = |text: &str| text == "*" || text.parse::<u16>().is_ok();
    if is_port(text) {
        let of_host = |events: &String| {
            let host = events.strip_prefix("tcp://")?.rsplit_once(':')?.0;
            Some(format!("tcp://{host}:{text}"))
        };
        return events.iter().map(of_host).collect::<Option<_>>().ok_or_else(wrong);
    }
    let replays: Vec<String> = text.split(',').map(str::to_owned).collect();
    let good = |replay: &String| replay.starts_with("tcp://") || replay.starts_with("ipc://");
    if replays.len() == events.len() && replays.iter().all(good) { Ok(replays) } else { Err(wrong()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(url: &str) -> Result<(ZmqConfig, Vec<ZmqAddress>), UrlError> {
        config(&Parts::parse(url)?)
    }

    fn addresses(url: &str) -> Vec<(String, Option<String>)> {
        read(url).unwrap().1.into_iter().map(|address| (address.events, address.replay)).collect()
    }

    #[test]
    fn addresses_and_their_replays() {
        let one = |events: &str, replay: Option<&str>| vec![(events.to_owned(), replay.map(str::to_owned))];
        assert_eq!(addresses("zmq+tcp://127.0.0.1:5557"), one("tcp://127.0.0.1:5557", None));
        let same_host = one("tcp://127.0.0.1:5557", Some("tcp://127.0.0.1:5558"));
        assert_eq!(addresses("zmq+tcp://127.0.0.1:5557?replay=5558"), same_host);
        assert_eq!(addresses("zmq+tcp://127.0.0.1:5557?replay=tcp://127.0.0.1:5558"), same_host);
        let ipc = one("ipc:///run/a", Some("ipc:///run/b"));
        assert_eq!(addresses("zmq+ipc:///run/a?replay=ipc:///run/b"), ipc);
        let many = addresses("zmq+tcp://a:1,b:2?replay=9");
        assert_eq!(many[1], ("tcp://b:2".into(), Some("tcp://b:9".into())));
        let parts = Parts::parse("zmq+tcp://a:1?format=vllm&rank=3&kind=mla_attention").unwrap();
        assert_eq!(speaker(&parts).unwrap(), PublisherIdentity { rank: 3, kind: "mla_attention".into() });
        let (config, _) = read("zmq+tcp://*:1?topic=&from=start&insecure=true").unwrap();
        assert_eq!((config.topic.as_str(), config.from_start, config.insecure), ("", true, true));
    }

    #[test]
    fn what_makes_no_sense_is_named() {
        for (url, part) in [
            ("zmq+tcp://a:1?subject=x", "no parameter 'subject'; it has replay"),
            ("zmq+tcp://a:1,b:2?replay=tcp://a:3", "replay=tcp://a:3: expected a port, or as many"),
            ("zmq+ipc:///a?replay=7", "replay=7"),
            ("zmq+tcp://a:1?from=end", "expected new or start"),
            ("zmq+tcp://a:1?format=sglang", "format=sglang: expected kvbm or vllm"),
            ("zmq+tcp://a:1?format=vllm&rank=x", "rank=x: expected a number"),
            ("zmq+tcp://a:1?format=vllm&kind=Full", "kind=Full: expected small letters"),
            ("zmq+tcp://a:1?rank=1", "rank goes with format=vllm"),
            ("zmq+tcp://me:word@a:1", "leave user and password out"),
        ] {
            let error = read(url).err().unwrap().to_string();
            assert!(error.contains(part) && !error.contains("word@"), "{url}: {error}");
        }
    }
}
