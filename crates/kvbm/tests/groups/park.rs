//! A preempted request's private blocks in several cache groups: all of them are parked, and all
//! come back, or none. The same of G1 that kvbm owns and of an engine's own.

use crate::support::script::{IN_TIME, Mode, Ranks};
use crate::support::{GROUPS, compute_in, holds_in, model_of, namespace, soon, unlimited};
use crate::{FULL, STATE, WINDOW, engine_tensors, open};
use kvbm::config::{Blocks, Config, LayoutKind};
use kvbm::pool::TierStatus;
use kvbm::{
    BatchPosition, BlockBatch, BlockId, Engine, EngineError, FailureKind, G1, GroupId, KvBlockManager, Lost,
    Owned, ParkError, ParkedGroups, Partial, Path, Rank, Tier,
};

/// Group, first position, blocks of each batch: a window has two, one of them is empty.
const BATCHES: [(GroupId, u32, usize); 5] =
    [(WINDOW, 1, 2), (FULL, 0, 3), (FULL, 3, 0), (STATE, 2, 1), (WINDOW, 4, 1)];
/// Blocks of all of them.
const BLOCKS: usize = 7;
/// Runs of blocks of one group, in this order: a plan each.
const PLANS: [GroupId; 4] = [WINDOW, FULL, STATE, WINDOW];
/// Blocks of G1.
const DEVICE: u32 = 32;
const RANKS: usize = 2;

/// A manager of each type.
enum Manager {
    Owned(KvBlockManager<Owned>),
    Engine(KvBlockManager<Engine>),
}

/// What `$call` says of the manager, whatever its type.
macro_rules! on_either {
    ($of:expr, $manager:ident => $call:expr) => {
        match $of {
            Manager::Owned($manager) => $call,
            Manager::Engine($manager) => $call,
        }
    };
}

/// A request's private blocks in G1.
#[derive(Debug)]
enum Private {
    Batches(Vec<BlockBatch<G1, Partial>>),
    Ids(Vec<(BatchPosition, Vec<BlockId>)>),
}

impl Private {
    fn ids(&self) -> Vec<Vec<BlockId>> {
        match self {
            Self::Batches(batches) => batches.iter().map(|batch| batch.block_ids().to_vec()).collect(),
            Self::Ids(batches) => batches.iter().map(|(_, ids)| ids.clone()).collect(),
        }
    }

    fn origins(&self) -> Vec<BatchPosition> {
        match self {
            Self::Batches(batches) => batches.iter().map(BlockBatch::origin).collect(),
            Self::Ids(batches) => batches.iter().map(|(origin, _)| *origin).collect(),
        }
    }
}

fn configure(config: &mut Config) {
    unlimited(config);
    config.model = model_of(GROUPS);
    config.device.layout = LayoutKind::FullyContiguous;
    config.offload.g1_g2.write_through = false;
}

/// Managers of both types whose bytes are real.
fn with_bytes(g2: u32) -> [Manager; 2] {
    let groups = [WINDOW, FULL, STATE].map(engine_tensors).to_vec();
    let builder = KvBlockManager::<Owned>::builder().model(model_of(GROUPS)).namespace(namespace());
    let engine = builder.engine_groups(vec![(None, groups)]).host(Blocks(g2)).configure(unlimited);
    [Manager::Owned(open([DEVICE, g2, 0], None, 1)), Manager::Engine(engine.build().unwrap())]
}

/// Managers of both types over ranks whose answers the test decides.
fn scripted(g2: u32, set: impl Fn(&mut Config) + Copy + Send + 'static) -> [(Ranks, Manager); 2] {
    let all = [(); 2].map(|()| Ranks::new(RANKS));
    let owned = all[0].manager([DEVICE, g2, 0], move |config| {
        configure(config);
        set(config);
    });
    let builder = KvBlockManager::<Owned>::builder().model(model_of(GROUPS)).namespace(namespace());
    let builder = builder.engine_blocks(DEVICE).host(Blocks(g2)).tensor_parallel(RANKS as u32);
    let builder = builder.configure(move |config| {
        unlimited(config);
        set(config);
    });
    let engine = builder.build_with_workers(|rank, epoch, sink| all[1].connect(rank, epoch, sink));
    let [first, second] = all.clone();
    for ranks in &all {
        (0..RANKS).for_each(|rank| ranks.start(rank));
    }
    [(first, Manager::Owned(owned)), (second, Manager::Engine(engine.unwrap()))]
}

impl Manager {
    fn name(&self) -> &'static str {
        match self {
            Self::Owned(_) => "owned",
            Self::Engine(_) => "engine",
        }
    }

    fn tiers(&self) -> Vec<TierStatus> {
        on_either!(self, manager => manager.status().tiers)
    }

    /// Blocks for `BATCHES`.
    fn private(&self) -> Private {
        let namespace = on_either!(self, manager => manager.namespace().tag().into());
        let origins = BATCHES.map(|(group, position, _)| BatchPosition { namespace, group, position });
        match self {
            Self::Owned(manager) => {
                let batch = |(origin, (_, _, blocks)): (BatchPosition, (GroupId, u32, usize))| {
                    let fresh = manager.allocate(blocks).unwrap();
                    fresh.init_sequence(namespace, origin.group, origin.position).unwrap()
                };
                Private::Batches(origins.into_iter().zip(BATCHES).map(batch).collect())
            }
            Self::Engine(_) => {
                let counts = BATCHES.map(|(_, _, blocks)| blocks);
                Private::Ids(origins.into_iter().zip(split(0..BLOCKS as u32, &counts)).collect())
            }
        }
    }

    /// Where blocks come back: ids of the engine that are not those of `private`.
    fn places() -> Vec<Vec<BlockId>> {
        split(16..16 + BLOCKS as u32, &BATCHES.map(|(_, _, blocks)| blocks))
    }

    fn park(&self, private: Private) -> Result<ParkedGroups, (Option<Private>, ParkError)> {
        match (self, private) {
            (Self::Owned(manager), Private::Batches(batches)) => manager
                .park_groups(batches)
                .map_err(|rejected| (rejected.blocks.map(Private::Batches), rejected.error)),
            (Self::Engine(manager), Private::Ids(batches)) => {
                let of: Vec<_> = batches.iter().map(|(origin, ids)| (*origin, &ids[..])).collect();
                match manager.park_groups(&of, None) {
                    Ok(parked) => Ok(parked),
                    Err(EngineError::Private(error)) => Err((Some(Private::Ids(batches)), error)),
                    Err(error) => panic!("{error}"),
                }
            }
            _ => panic!("blocks of the other type"),
        }
    }

    fn resume(&self, parked: ParkedGroups) -> Result<Private, (Option<ParkedGroups>, ParkError)> {
        match self {
            Self::Owned(manager) => match manager.resume_groups(parked) {
                Ok(batches) => Ok(Private::Batches(batches)),
                Err(rejected) => Err((rejected.blocks, rejected.error)),
            },
            Self::Engine(manager) => {
                let origins: Vec<_> = parked.batches().iter().map(|(origin, _)| *origin).collect();
                let places = Self::places();
                let ids: Vec<_> = places.iter().map(Vec::as_slice).collect();
                match manager.resume_groups(parked, &ids, None) {
                    Ok(()) => Ok(Private::Ids(origins.into_iter().zip(places).collect())),
                    Err(rejected) => {
                        let EngineError::Private(error) = rejected.error else {
                            panic!("{}", rejected.error)
                        };
                        Err((rejected.blocks, error))
                    }
                }
            }
        }
    }

    /// Nothing is parked, and no transfer or batch holds a slot.
    fn check_free(&self, what: &str) {
        let tiers = self.tiers();
        let g2 = &tiers[1];
        assert_eq!(g2.free, g2.capacity, "{}: {what}", self.name());
        for tier in &tiers {
            assert_eq!((tier.arriving, tier.held, tier.transfer_pins), (0, 0, 0), "{}: {what}", self.name());
        }
        if let Self::Engine(manager) = self {
            let all: Vec<_> = (0..DEVICE).map(BlockId).collect();
            assert_eq!(manager.busy(&all).unwrap(), [], "{what}");
        }
    }
}

/// A list of ids for each of these counts.
fn split(ids: std::ops::Range<u32>, counts: &[usize]) -> Vec<Vec<BlockId>> {
    let mut ids = ids.map(BlockId);
    counts.iter().map(|&count| ids.by_ref().take(count).collect()).collect()
}

#[test]
fn all_groups_are_parked_and_come_back_byte_for_byte() {
    for manager in with_bytes(16) {
        let tokens = on_either!(&manager, manager => manager.sequence(&[3; 16 * BLOCKS], b"").unwrap());
        let write = |ids: &[Vec<BlockId>], reversed: bool| {
            let mut hashes = tokens.hashes().to_vec();
            if reversed {
                hashes.reverse();
            }
            let mut hashes = hashes.into_iter();
            for (ids, (group, ..)) in ids.iter().zip(BATCHES) {
                for (&id, hash) in ids.iter().zip(hashes.by_ref()) {
                    on_either!(&manager, manager => compute_in(manager, group, id, hash));
                }
            }
        };
        let private = manager.private();
        let (ids, origins) = (private.ids(), private.origins());
        write(&ids, false);
        let parked = manager.park(private).unwrap();
        let batches: Vec<_> = parked.batches().iter().map(|&(origin, blocks)| (origin, blocks)).collect();
        let wanted: Vec<_> = origins.iter().copied().zip(BATCHES.map(|(_, _, blocks)| blocks)).collect();
        assert_eq!((parked.len(), batches), (BLOCKS, wanted), "{}", manager.name());
        assert_eq!(manager.tiers()[1].held, BLOCKS as u32, "{}", manager.name());
        on_either!(&manager, manager => assert_eq!(manager.match_groups(&tokens).len(), 0, "nobody finds them"));
        // The slots in G1 are for others.
        write(&ids, true);
        let back = manager.resume(parked).unwrap();
        assert_eq!(back.origins(), origins, "{}", manager.name());
        let mut hashes = tokens.hashes().iter();
        for (ids, (group, _, blocks)) in back.ids().iter().zip(BATCHES) {
            assert_eq!(ids.len(), blocks, "group {group}");
            for (&id, &hash) in ids.iter().zip(hashes.by_ref().take(blocks)) {
                let holds = on_either!(&manager, manager => holds_in(manager, group, id, hash));
                assert!(holds, "{}: group {group}, block {id}", manager.name());
            }
        }
        drop(back);
        manager.check_free("resumed");
    }
}

/// What a test does with the plans of a copy.
#[derive(Clone, Copy, Debug)]
enum Fault {
    /// The first block of this plan fails on this rank.
    Block { rank: usize, plan: usize },
    /// The rank is given up after so many of its plans.
    Lost { rank: usize, after: usize },
    /// The rank's worker starts anew after so many of its plans, and answers for the others.
    Restart { rank: usize, after: usize },
}

/// One for each group, and a loss before, between and after the groups.
fn faults() -> Vec<Fault> {
    let mut faults = Vec::new();
    for rank in 0..RANKS {
        faults.extend((0..PLANS.len()).map(|plan| Fault::Block { rank, plan }));
        for after in [0, 2, 3] {
            faults.extend([Fault::Lost { rank, after }, Fault::Restart { rank, after }]);
        }
    }
    faults
}

impl Fault {
    /// Answers all plans of a copy, and does the fault. The rank that is at fault comes last.
    fn happen(self, ranks: &Ranks, manager: &Manager) {
        let (Self::Block { rank: bad, .. } | Self::Lost { rank: bad, .. } | Self::Restart { rank: bad, .. }) =
            self;
        for rank in [1 - bad, bad] {
            for (at, group) in PLANS.into_iter().enumerate() {
                match self {
                    Self::Lost { after, .. } if rank == bad && at == after => {
                        on_either!(manager, manager => manager.rank_lost(Rank(rank as u16)).unwrap());
                        return;
                    }
                    Self::Restart { after, .. } if rank == bad && at == after => ranks.start(rank),
                    _ => {}
                }
                let plan = ranks.next_plan(rank);
                assert_eq!(plan.group, group, "a plan for each run of blocks of a group");
                match self {
                    Self::Block { plan: failed, .. } if rank == bad && at == failed => {
                        ranks.fail(rank, &plan, 0, FailureKind::Device);
                    }
                    _ => ranks.done(rank, &plan),
                }
            }
        }
    }

    /// Runs a call whose copies it happens to.
    fn during<T: Send>(self, ranks: &Ranks, manager: &Manager, call: impl FnOnce() -> T + Send) -> T {
        ranks.set_all(Mode::Hold);
        let answer = std::thread::scope(|scope| {
            let called = scope.spawn(call);
            self.happen(ranks, manager);
            called.join().unwrap()
        });
        ranks.set_all(Mode::Answer);
        answer
    }

    fn check(self, error: &ParkError, from: Tier) {
        let path = if from == Tier::G1 { Path::G1_G2 } else { Path::G2_G1 };
        match (self, error) {
            (Self::Block { plan, .. }, ParkError::Failed(failures)) => {
                let named: Vec<_> =
                    failures.iter().map(|failed| (failed.identity.group, failed.path)).collect();
                assert_eq!(named, [(PLANS[plan], path)], "{self:?}: {error}");
            }
            (Self::Lost { .. } | Self::Restart { .. }, ParkError::Lost(Lost { tier })) => {
                assert_eq!(*tier, from, "{self:?}");
            }
            _ => panic!("{self:?}: {error}"),
        }
    }
}

#[test]
fn a_fault_of_one_group_or_rank_leaves_all_groups_in_g1() {
    for fault in faults() {
        for (ranks, manager) in scripted(16, |_| ()) {
            let private = manager.private();
            let (ids, origins) = (private.ids(), private.origins());
            let (back, error) = fault.during(&ranks, &manager, || manager.park(private)).unwrap_err();
            fault.check(&error, Tier::G1);
            let back = back.expect("no worker touches them any more");
            assert_eq!((back.ids(), back.origins()), (ids, origins), "{fault:?}");
            assert_eq!(manager.tiers()[1].free, 16, "{fault:?}");
            if let Fault::Block { .. } = fault {
                drop(manager.park(back).unwrap());
            } else {
                drop(back);
            }
            manager.check_free(&format!("{fault:?}"));
        }
    }
}

#[test]
fn a_fault_of_one_group_or_rank_leaves_all_groups_parked() {
    for fault in faults() {
        for (ranks, manager) in scripted(16, |_| ()) {
            let parked = manager.park(manager.private()).unwrap();
            let (back, error) = fault.during(&ranks, &manager, || manager.resume(parked)).unwrap_err();
            fault.check(&error, Tier::G2);
            let parked = back.expect("they stay parked");
            assert_eq!((parked.len(), manager.tiers()[1].held), (BLOCKS, BLOCKS as u32), "{fault:?}");
            if let Manager::Owned(manager) = &manager {
                assert_eq!(manager.status().tiers[0].free, DEVICE, "{fault:?}");
            }
            if let Fault::Block { .. } = fault {
                drop(manager.resume(parked).unwrap());
            } else {
                drop(parked);
            }
            manager.check_free(&format!("{fault:?}"));
        }
    }
}

#[test]
fn groups_that_were_parked_before_a_loss_do_not_come_back() {
    let losses: [fn(&Ranks, &Manager); 2] = [
        |ranks, _| ranks.start(1),
        |_, manager| {
            on_either!(manager, manager => manager.rank_lost(Rank(1)).unwrap());
        },
    ];
    for lose in losses {
        for (ranks, manager) in scripted(16, |_| ()) {
            let parked = manager.park(manager.private()).unwrap();
            lose(&ranks, &manager);
            let (parked, error) = manager.resume(parked).unwrap_err();
            assert!(matches!(error, ParkError::Lost(Lost { tier: Tier::G2 })), "{}: {error}", manager.name());
            assert_eq!(parked.as_ref().map(ParkedGroups::len), Some(BLOCKS));
            drop(parked);
            manager.check_free("lost");
        }
    }
}

#[test]
fn groups_that_do_not_all_fit_stay_where_they_are() {
    for (_, manager) in scripted(BLOCKS as u32 - 1, |_| ()) {
        let private = manager.private();
        let ids = private.ids();
        let (back, error) = manager.park(private).unwrap_err();
        let ParkError::Alloc(full) = &error else { panic!("{error}") };
        assert_eq!((full.tier, full.asked), (Tier::G2, BLOCKS), "{}", manager.name());
        assert_eq!(back.map(|back| back.ids()), Some(ids), "{}", manager.name());
        manager.check_free("no room in G2");
    }
    let [(_, manager), _] = scripted(16, |_| ());
    let parked = manager.park(manager.private()).unwrap();
    let Manager::Owned(owned) = &manager else { panic!("the first is that") };
    let held = owned.allocate(DEVICE as usize - BLOCKS + 1).unwrap();
    let (parked, error) = manager.resume(parked).unwrap_err();
    assert!(matches!(&error, ParkError::Alloc(full) if full.tier == Tier::G1), "{error}");
    drop(held);
    drop(manager.resume(parked.unwrap()).unwrap());
    manager.check_free("room in G1");
}

#[test]
fn a_group_that_is_late_holds_all_blocks_until_it_is_over() {
    for (ranks, manager) in scripted(16, |config| config.transfer.deadline = IN_TIME) {
        let all_but_one = |rank: usize| {
            let plans = if rank == 0 { PLANS.len() } else { PLANS.len() - 1 };
            (0..plans).for_each(|_| drop(ranks.execute(rank)));
        };
        ranks.set_all(Mode::Hold);
        let rejected = std::thread::scope(|scope| {
            let called = scope.spawn(|| manager.park(manager.private()));
            (0..RANKS).for_each(all_but_one);
            called.join().unwrap()
        });
        let (back, error) = rejected.unwrap_err();
        assert!(error.to_string().contains("deadline"), "{error}");
        match &manager {
            Manager::Owned(manager) => {
                assert!(back.is_none(), "a worker may still read them");
                assert_eq!(manager.status().tiers[0].held, BLOCKS as u32);
            }
            Manager::Engine(manager) => {
                let ids = back.unwrap().ids().concat();
                assert_eq!(manager.busy(&ids).unwrap(), ids, "a worker may still read them");
            }
        }
        assert_eq!(manager.tiers()[1].held, BLOCKS as u32);
        ranks.execute(1);
        manager.check_free("the last plan of a park is over");

        ranks.set_all(Mode::Answer);
        let parked = manager.park(manager.private()).unwrap();
        ranks.set_all(Mode::Hold);
        let rejected = std::thread::scope(|scope| {
            let called = scope.spawn(|| manager.resume(parked));
            (0..RANKS).for_each(all_but_one);
            called.join().unwrap()
        });
        let (parked, error) = rejected.unwrap_err();
        assert!(error.to_string().contains("deadline"), "{error}");
        if let Manager::Engine(manager) = &manager {
            let ids = Manager::places().concat();
            assert_eq!(manager.busy(&ids).unwrap(), ids, "a worker may still write them");
        }
        ranks.execute(1);
        ranks.set_all(Mode::Answer);
        drop(manager.resume(parked.unwrap()).unwrap());
        manager.check_free("the last plan of a resume is over");
    }
}

#[test]
fn batches_that_do_not_belong_together_are_refused() {
    for (ours, theirs) in with_bytes(16).into_iter().zip(with_bytes(16)) {
        let parked = theirs.park(theirs.private()).unwrap();
        let (parked, error) = ours.resume(parked).unwrap_err();
        assert!(matches!(error, ParkError::Foreign), "{}: {error}", ours.name());
        drop(theirs.resume(parked.unwrap()).unwrap());
        theirs.check_free("given back");

        let mut mixed = ours.private();
        let other = kvbm::plan::NamespaceId::from(namespace().weights("2").tag());
        match &mut mixed {
            Private::Batches(batches) => {
                let last = batches.pop().unwrap();
                batches.push(last.into_reset().init_sequence(other, WINDOW, 4).unwrap());
            }
            Private::Ids(batches) => batches[4].0.namespace = other,
        }
        let (mixed, error) = ours.park(mixed).unwrap_err();
        assert!(matches!(error, ParkError::Namespaces), "{}: {error}", ours.name());
        assert_eq!(mixed.map(|mixed| mixed.ids().concat().len()), Some(BLOCKS));

        // A group that there is not fails, and the others with it.
        let mut unknown = ours.private();
        match &mut unknown {
            Private::Batches(batches) => {
                let last = batches.pop().unwrap();
                let origin = last.origin();
                batches.push(last.into_reset().init_sequence(origin.namespace, GroupId(9), 4).unwrap());
            }
            Private::Ids(batches) => batches[4].0.group = GroupId(9),
        }
        let (unknown, error) = ours.park(unknown).unwrap_err();
        let ParkError::Failed(failures) = &error else { panic!("{error}") };
        assert_eq!((failures.len(), failures[0].identity.group), (1, GroupId(9)), "{error}");
        drop(unknown);
        let none = match &ours {
            Manager::Owned(_) => Private::Batches(Vec::new()),
            Manager::Engine(_) => Private::Ids(Vec::new()),
        };
        assert!(ours.park(none).unwrap().is_empty());
        ours.check_free("refused");
    }
}

#[test]
fn an_engine_s_ids_that_do_not_fit_the_batches_are_refused() {
    let [_, manager] = with_bytes(16);
    let private = manager.private();
    let Manager::Engine(engine) = &manager else { panic!("the second is that") };
    let Private::Ids(batches) = &private else { panic!("an engine's") };
    let twice: Vec<_> = batches.iter().chain(&batches[..1]).map(|(at, ids)| (*at, &ids[..])).collect();
    let error = engine.park_groups(&twice, None).unwrap_err();
    assert!(matches!(error, EngineError::NamedTwice(BlockId(0))), "{error}");
    let mut parked = manager.park(private).unwrap();
    let right = Manager::places();
    let ids = |change: fn(&mut Vec<Vec<BlockId>>)| {
        let mut ids = right.clone();
        change(&mut ids);
        ids
    };
    for (ids, wanted) in [
        (ids(|ids| ids.truncate(4)), "engine blocks for 4 of 5 batches"),
        (ids(|ids| ids[1].truncate(2)), "2 engine blocks for 3 blocks"),
        (ids(|ids| ids[1][0] = ids[0][0]), "is named twice"),
        (ids(|ids| ids[1][0] = BlockId(DEVICE)), "does not exist"),
    ] {
        let ids: Vec<_> = ids.iter().map(Vec::as_slice).collect();
        let rejected = engine.resume_groups(parked, &ids, None).unwrap_err();
        assert!(rejected.to_string().contains(wanted), "{rejected}");
        assert_eq!(engine.busy(&right.concat()).unwrap(), []);
        parked = rejected.blocks.unwrap();
        assert_eq!(parked.len(), BLOCKS);
    }
    engine.before_reuse(&right.concat(), soon()).unwrap();
    drop(manager.resume(parked).unwrap());
    manager.check_free("in the end");
}
