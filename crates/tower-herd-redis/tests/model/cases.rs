//! Reports from the field, in the model's world.

use super::{
    judge::At,
    plans::case,
    process::Stop,
    store::Store,
    world::{Plan, SECOND, World},
};
use fastrand::Rng;
use std::time::Duration;

fn long() -> bool {
    std::env::var_os("TOWER_HERD_LONG").is_some()
}

/// What is in use after everything, of an ideal.
fn used_after(world: &mut World<'_>) -> f64 {
    assert!(world.heal(), "above the ceiling");
    world.used();
    assert!(world.run(8 * SECOND), "above the ceiling");
    world.used()
}

/// Nothing is lost on the way.
fn surely(mut plan: Plan) -> Plan {
    (plan.lost, plan.late) = (0, 0);
    plan
}

fn strictly(mut plan: Plan) -> Plan {
    plan.extra = plan.load.longest;
    plan.settings = plan.settings.strict(plan.extra);
    plan
}

/// valkey-io/valkey#4345: a server whose clock stands still lets nothing expire.
#[test]
fn valkey_4345_a_clock_that_stands_still_gives_nothing_away_and_all_comes_back() {
    for catches_up in [false, true] {
        let mut store = Store::start(&format!("valkey-4345-{catches_up}"), None);
        let mut world = World::new(4345, case(1, 5, 12, Duration::from_secs(2)), &mut store, false);
        assert!(world.run(10 * SECOND));
        world.freeze(world.now + 60 * SECOND, catches_up);
        for place in 0..3 {
            assert!(world.run(15 * SECOND), "above the ceiling");
            world.kill(place, false);
        }
        world.used();
        assert!(world.run(14 * SECOND), "above the ceiling");
        let frozen = world.used();
        let after = used_after(&mut world);
        assert!(after > 0.85 && frozen < after, "{catches_up}: {frozen:.2}, and {after:.2} when it goes on");
    }
}

/// sidekiq/sidekiq#4090: calls that outlast the lease made the limit exceeded.
#[test]
fn sidekiq_4090_calls_may_outlast_the_lease() {
    let mut store = Store::start("sidekiq-4090", None);
    let mut plan = surely(case(2, 4, 8, Duration::from_secs(30)));
    plan.load.usual = Duration::from_secs(15);
    plan.load.steady = 1.0;
    plan.load.rate = 1.0;
    let mut world = World::new(4090, plan, &mut store, false);
    assert!(world.run(20 * SECOND));
    world.used();
    for _ in 0..60 {
        assert!(world.run(SECOND), "above the ceiling");
        assert!(world.all_hold(), "a lease was lost at {} s", world.now / SECOND);
    }
    let used = world.used();
    assert!(used > 0.9, "{used:.2}");
}

/// d34ndev/sidekiq-limit_fetch#107: the others purged who was alive, before its late heartbeat.
/// inngest/inngest#3733, #3814: an extension, or a release, of a lease that had expired corrupted the counts.
#[test]
fn sidekiq_limit_fetch_107_inngest_3733_3814_who_comes_late_or_leaves_late_changes_no_count() {
    let mut store = Store::start("late", None);
    for seed in 0..8 {
        let plan = strictly(case(seed, 4, 8, Duration::from_secs(2)));
        let reclaimed = At::try_from((plan.ttl + plan.extra).as_nanos()).unwrap();
        let mut world = World::new(seed, plan, &mut store, false);
        assert!(world.run(12 * SECOND));
        // Its record is gone when it is back, or is about to be.
        let until = world.now + reclaimed + seed * SECOND / 4 - SECOND;
        world.stop(0, Stop::Process, until);
        assert!(world.run(reclaimed + 2 * SECOND), "{seed}: above the ceiling");
        world.leave(0);
        let used = used_after(&mut world);
        assert!(world.run(20 * SECOND), "{seed}: above the ceiling");
        assert!(used > 0.8 && world.all_hold(), "{seed}: {used:.2}");
    }
}

/// PrefectHQ/prefect#17415: slots of processes that died were gone for ever.
#[test]
fn prefect_17415_after_a_thousand_crashes_all_of_it_is_there() {
    let mut store = Store::start("prefect-17415", None);
    let mut world = World::new(17415, case(3, 5, 12, Duration::from_secs(2)), &mut store, false);
    let mut rng = Rng::with_seed(17415);
    assert!(world.run(8 * SECOND));
    for _ in 0..1000 {
        assert!(world.run(rng.u64(20..200) * SECOND / 1000), "above the ceiling");
        world.kill(rng.usize(..5), false);
    }
    let used = used_after(&mut world);
    assert!(used > 0.85, "{used:.2}");
}

/// swarthy/redis-semaphore#205: 32 processes on 25 slots, and all lost their locks at once.
#[test]
fn redis_semaphore_205_under_contention_nobody_loses_a_lease() {
    let mut store = Store::start("redis-semaphore-205", None);
    let mut world = World::new(205, surely(case(4, 32, 25, Duration::from_secs(2))), &mut store, false);
    assert!(world.run(10 * SECOND));
    world.used();
    for _ in 0..if long() { 600 } else { 30 } {
        assert!(world.run(SECOND), "above the ceiling");
        assert!(world.all_hold(), "a lease was lost at {} s", world.now / SECOND);
    }
    let used = world.used();
    assert!(used > 0.75, "{used:.2}");
}

/// rust-lang/rust#87906, #79462: `Instant` stands still while the machine sleeps, and a lease held by it does not end.
#[test]
fn rust_87906_79462_who_wakes_up_finds_its_lease_over() {
    let mut store = Store::start("rust-87906", None);
    for seed in 0..8 {
        let plan = strictly(case(seed, 4, 8, Duration::from_secs(2)));
        let reclaimed = At::try_from((plan.ttl + plan.extra).as_nanos()).unwrap();
        let mut world = World::new(seed, plan, &mut store, false);
        assert!(world.run(12 * SECOND));
        let until = world.now + reclaimed + seed * SECOND / 2;
        world.stop(0, Stop::Machine, until);
        assert!(world.run(reclaimed + 8 * SECOND), "{seed}: above the ceiling");
        let used = used_after(&mut world);
        assert!(used > 0.8, "{seed}: {used:.2}");
    }
}
