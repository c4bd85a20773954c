//! A block manager that publishes, dies and comes back.

use crate::load::{Engine, Random, TIERS};
use crate::ports::Port;
use crate::proxy::Proxy;
use crate::support::{books, model, namespace, soon, unlimited};
use kvbm::config::{Blocks, Config, Secret};
use kvbm::{KvBlockManager, Owned};
use std::time::Duration;

/// How a manager's events leave it.
pub(crate) enum Way {
    /// To a server, through what can be cut.
    Proxied(Proxy),
    /// To a server, over a network.
    Direct(String),
    /// From sockets of its own, which followers reach through these: events and replay.
    Bound,
}

pub(crate) struct Source {
    pub(crate) id: u64,
    pub(crate) manager: KvBlockManager<Owned>,
    pub(crate) way: Way,
    engine: Engine,
    /// Of a bound one: events and replay, the same in every life.
    pub(crate) ports: Option<[Port; 2]>,
}

/// What is the same in every life of a run's sources.
#[derive(Clone)]
pub(crate) struct Plan {
    /// Beginning and end of the URL, around the place.
    pub(crate) url: [String; 2],
    /// Records that the pool's ring holds.
    pub(crate) ring: u32,
}

/// Odd ones keep the books of three tiers; even ones move bytes, and have a volume below host
/// memory.
pub(crate) fn manager(id: u64, url: &str, ring: u32) -> KvBlockManager<Owned> {
    let configure = |config: &mut Config| {
        config.events.url = Some(Secret::new(url));
        config.events.worker_id = id;
        config.events.ring_capacity = ring;
        config.events.batch_events = 20;
        config.events.batch_age = Duration::from_millis(1);
        config.events.heartbeat = Duration::from_millis(50);
        config.events.publish_timeout = Duration::from_millis(300);
    };
    if id.is_multiple_of(2) {
        return over_a_volume(configure);
    }
    books(TIERS, |config| {
        config.offload.g2_g3.write_through = true;
        configure(config);
    })
}

/// The volume lives as long as the manager and has room for fewer blocks than there are, so that it
/// evicts, too.
fn over_a_volume(configure: impl FnOnce(&mut Config)) -> KvBlockManager<Owned> {
    let [g1, g2, below] = TIERS;
    let builder = KvBlockManager::<Owned>::builder().model(model()).namespace(namespace());
    let builder = builder.device(Blocks(g1)).host(Blocks(g2)).volume("memory:").configure(|config| {
        unlimited(config);
        config.volumes.queue_share = 1.0;
        config.volume[0].capacity = Blocks(below).into();
        configure(config);
    });
    builder.build().unwrap()
}

impl Source {
    pub(crate) fn start(id: u64, plan: &Plan, way: Way) -> Self {
        let ports = matches!(way, Way::Bound).then(|| [Port::claim(), Port::claim()]);
        Self::start_at(id, plan, way, ports)
    }

    /// Where it was in an earlier life.
    pub(crate) fn start_at(id: u64, plan: &Plan, way: Way, ports: Option<[Port; 2]>) -> Self {
        let [before, after] = &plan.url;
        let url = match &way {
            Way::Proxied(proxy) => format!("{before}{}{after}", proxy.address()),
            Way::Direct(address) => format!("{before}{address}{after}"),
            Way::Bound => {
                let [events, replay] = ports.as_ref().unwrap().each_ref().map(Port::number);
                format!("zmq+tcp://127.0.0.1:{events}?replay={replay}")
            }
        };
        Self { id, manager: manager(id, &url, plan.ring), way, engine: Engine::default(), ports }
    }

    pub(crate) fn work(&mut self, random: &mut Random) {
        for _ in 0..random.below(6) {
            self.engine.work(&self.manager, random);
        }
        // So that faults meet events on their way. While nobody takes them this does not work.
        let _ = self.manager.events().flush(Duration::from_millis(4));
    }

    /// Nothing of it changes any more.
    pub(crate) fn rest(&self) {
        assert!(self.manager.wait_offloads(soon()));
    }
}
