//! The bars of brown-outs, outages and stacked stacks, exactly as they are promised: what retries, budgets,
//! throttles, breakers and ramps do together.
//!
//! Short and on few seeds as part of every test run; as long as promised, on twenty seeds, with
//! `TOWER_HERD_LONG=1`. Nothing is tuned to a scenario: the stack is the one of the other bars.

use std::time::Duration;

use tower_herd_sim::policy::{
    Chain, Consecutive, NoBreaker, Oracle, Policy, StrictBreaker, ThrottleOnly, TowerHerd,
};
use tower_herd_sim::provider::peak;
use tower_herd_sim::report::Row;
use tower_herd_sim::scenario::{Recovery, Run, Scenario, Settings, What, ramp, run, trace_hash};

fn long() -> bool {
    std::env::var_os("TOWER_HERD_LONG").is_some_and(|value| value != "0")
}

fn seeds() -> std::ops::RangeInclusive<u64> {
    1..=if long() { 20 } else { 2 }
}

fn settings(scenario: Scenario, pairs: &[&str]) -> Settings {
    let mut settings = Settings::new(scenario);
    for pair in pairs {
        settings.set_pair(pair).unwrap();
    }
    settings.validate().unwrap();
    settings
}

fn seconds(s: u64) -> Duration {
    Duration::from_secs(s)
}

/// The share of the tasks that were done.
fn done(run: &Run) -> f64 {
    run.done() as f64 / run.tasks.len() as f64
}

/// The share of the tasks that were done, of those that made a wire call.
fn done_of_called(run: &Run) -> f64 {
    run.done() as f64 / run.stats().tasks as f64
}

/// Wire calls against law 3: so many for each task that made one, and a burst of 3 that refills by one every
/// 10 s.
fn within_budget(run: &Run) {
    let stats = run.stats();
    let most = 1.1 * stats.tasks as f64 + 3.0 + run.elapsed.as_secs_f64() / 10.0;
    assert!(
        stats.wire_calls as f64 <= most,
        "seed {}: {} calls for {} tasks, {most:.1} are allowed",
        run.seed,
        stats.wire_calls,
        stats.tasks
    );
}

// ---------------------------------------------------------------- amplification

#[test]
fn naive_stacks_multiply() {
    let made = run(&settings(Scenario::Amplification, &["duration=2"]), &Chain::naive(), 1).unwrap();
    let stats = made.stats();
    assert_eq!((made.done(), stats.wire_calls), (0, 64 * stats.tasks));
}

#[test]
fn three_stacks_in_front_of_a_dead_provider() {
    for seed in seeds() {
        let made = run(&settings(Scenario::Amplification, &[]), &TowerHerd, seed).unwrap();
        within_budget(&made);
        assert_eq!(made.done(), 0);
    }
}

/// Without a breaker in between, too: each stack forgives a little, and they must not multiply.
#[test]
fn three_stacks_in_front_of_a_provider_that_fails_half_of_its_calls() {
    for seed in seeds() {
        let made = run(&settings(Scenario::Amplification, &["failure=0.5"]), &TowerHerd, seed).unwrap();
        within_budget(&made);
    }
}

/// Only tasks that made a wire call count: at 50 percent, 18 failures among 20 calls come by chance about once in
/// a minute of 100 calls a second, and whom the breaker refuses then is not the budget's doing. Without a breaker
/// all tasks call, or nearly all.
#[test]
fn half_of_the_calls_fail_and_five_attempts_are_allowed() {
    let pairs = ["failure=0.5", "stacks=1", "attempts=5"];
    for seed in seeds() {
        for policy in [&TowerHerd as &dyn Policy, &NoBreaker] {
            let made = run(&settings(Scenario::Amplification, &pairs), policy, seed).unwrap();
            within_budget(&made);
            let share = done_of_called(&made);
            println!("{} seed {seed}: {share:.3} of {}", policy.name(), made.stats().tasks);
            assert!(share >= 0.52, "{} seed {seed}: {share:.3} are done", policy.name());
        }
    }
}

// ---------------------------------------------------------------- brownout

fn brownout(failure: &str, more: &[&str]) -> Settings {
    let mut settings = settings(Scenario::Brownout, &[failure]);
    settings.set("duration", if long() { "3600" } else { "120" }).unwrap();
    for pair in more {
        settings.set_pair(pair).unwrap();
    }
    settings
}

fn trips(run: &Run) -> u64 {
    run.told(|what| *what == What::Opened)
}

#[test]
fn one_call_in_twenty_fails() {
    for seed in seeds() {
        let made = run(&brownout("failure=0.05", &[]), &TowerHerd, seed).unwrap();
        let calls = made.stats().wire_calls as f64 / made.stats().tasks as f64;
        assert!(done(&made) >= 0.995, "seed {seed}: {:.4} are done", done(&made));
        assert!(calls <= 1.06, "seed {seed}: {calls:.4} calls a task");
        assert_eq!(trips(&made), 0, "seed {seed}");
    }
}

#[test]
fn one_call_in_five_fails() {
    let p = 0.2f64;
    let least = 0.97 * (1.0 - p.powi(3)).min(1.1 * (1.0 - p));
    for seed in seeds() {
        let made = run(&brownout("failure=0.2", &[]), &TowerHerd, seed).unwrap();
        assert!(done(&made) >= least, "seed {seed}: {:.4} are done, {least:.4} are due", done(&made));
        within_budget(&made);
        assert_eq!(trips(&made), 0, "seed {seed}");
    }
}

#[test]
fn no_trip_where_three_calls_in_ten_fail() {
    for seed in seeds() {
        let made = run(&brownout("failure=0.3", &[]), &TowerHerd, seed).unwrap();
        assert_eq!(trips(&made), 0, "seed {seed}");
        within_budget(&made);
    }
}

/// Vectors, `consecutive_trip`: the rule of five in a row leaves 4.9 percent of an hour at 20 percent errors.
#[test]
fn five_in_a_row_turn_a_brown_out_into_an_outage() {
    let mut settings = brownout("failure=0.2", &[]);
    settings.set("duration", if long() { "3600" } else { "600" }).unwrap();
    let mut share = 0.0;
    for seed in seeds() {
        let made = run(&settings, &Consecutive, seed).unwrap();
        assert!(trips(&made) > 0 && done(&made) < 0.4, "seed {seed}: {:.3}", done(&made));
        share += done(&made);
    }
    if long() {
        let mean = share / 20.0;
        assert!((0.035..0.065).contains(&mean), "{mean:.4}");
    }
}

#[test]
fn a_dead_provider_trips_within_twenty_calls_and_within_five_where_strict() {
    for seed in seeds() {
        // Short calls, one after the other, so that none is under way when the breaker opens.
        let one_by_one = ["rate=0.2", "duration=600", "deadline=10", "latency=0.01", "arrivals=even"];
        let settings = brownout("failure=1", &one_by_one);
        for (policy, most) in [(&TowerHerd as &dyn Policy, 20), (&StrictBreaker, 5)] {
            let made = run(&settings, policy, seed).unwrap();
            let at = made.events.iter().find(|e| e.what == What::Opened).map(|e| e.at);
            let at = at.unwrap_or_else(|| panic!("{} seed {seed}: never opened", policy.name()));
            let before = made.rungs[0].records.iter().filter(|r| r.arrival < at).count();
            assert!(before <= most, "{} seed {seed}: opened after {before} calls", policy.name());
        }
    }
}

#[test]
fn a_healthy_second_rung_takes_what_the_first_one_fails() {
    for failure in ["failure=0.05", "failure=0.2", "failure=0.5", "failure=0.8", "failure=1"] {
        for told in ["configured=true", "configured=false"] {
            let more = ["ceilings=100,40", told, if long() { "duration=600" } else { "duration=60" }];
            let made = run(&brownout(failure, &more), &TowerHerd, 1).unwrap();
            assert!(done(&made) >= 0.995, "{failure} {told}: {:.4} are done", done(&made));
            let second = &made.rungs[1].stats;
            // What the provider itself serves is never more; nobody may even try.
            assert!(second.in_flight_peak <= 40, "{failure} {told}: {second:?}");
            if told == "configured=true" {
                assert_eq!(second.throttled, 0, "{failure}: more than its ceiling was sent");
            }
        }
    }
}

// ---------------------------------------------------------------- recovery

/// As promised: ten minutes. Short: three, after one.
fn outage(more: &[&str]) -> Settings {
    let mut settings = settings(Scenario::Recovery, &[]);
    if !long() {
        settings.set("outage", "60..240").unwrap();
        settings.set("duration", "330").unwrap();
    }
    for pair in more {
        settings.set_pair(pair).unwrap();
    }
    settings
}

struct Back {
    made: Run,
    row: Row,
    recovery: Recovery,
}

fn come_back(settings: &Settings, policy: &dyn Policy, seed: u64) -> Back {
    let oracle = run(settings, &Oracle, seed).unwrap();
    let made = run(settings, policy, seed).unwrap();
    let row = made.row_beside(&oracle);
    let recovery = row.recovery.clone().unwrap();
    println!("{} seed {seed}: {recovery:?}", policy.name());
    Back { made, row, recovery }
}

/// At every instant, of the tasks that asked since the first good call no larger share has got through than
/// the ramp's, but for chance: which tasks are back is a draw by hash (four deviations are allowed).
fn below_the_ramp(back: &Back) {
    let Some(good) = back.made.first_good() else { panic!("nothing was served after the return") };
    for half in 1..44u32 {
        let since = seconds(1) * half / 2;
        let (asked, called) = back.made.readmitted(good, good + since);
        let share = ramp(since) * asked as f64;
        assert!(
            called as f64 <= share + 4.0 * share.sqrt() + 3.0,
            "seed {}: {called} of {asked} tasks are back {since:?} after the first good call, {share:.0} are due",
            back.made.seed
        );
    }
}

#[test]
fn an_outage_of_ten_minutes() {
    for seed in seeds() {
        let back = come_back(&outage(&[]), &TowerHerd, seed);
        let r = &back.recovery;
        let (good, t95) = (r.first_good.unwrap(), r.t95.unwrap());
        assert!(t95 <= 30.0, "seed {seed}: {t95} s after the first good probe");
        assert!(good + t95 <= 60.0, "seed {seed}: {} s after the return", good + t95);
        assert_eq!((r.second_trips, back.row.alerts), (0, 1), "seed {seed}");
        assert_eq!(back.row.trips, 1, "seed {seed}");
        assert!(r.outage_share.unwrap() <= 0.01, "seed {seed}: {} calls while it was down", r.outage_calls);
        assert!(r.probes_in_flight <= 1, "seed {seed}: {} probes at once", r.probes_in_flight);
        below_the_ramp(&back);
    }
}

/// At nine tenths of what the ceiling lets through, strays cut it and a queue builds up: calls that waited start
/// just before their deadline. Nothing fails at the provider before the outage, and nothing trips.
#[test]
fn a_queue_of_our_own_opens_no_breaker() {
    for seed in 1..=if long() { 20 } else { 3 } {
        let settings = outage(&["stray=0.005", "hint=0.05", "hint_form=ms"]);
        let made = run(&settings, &TowerHerd, seed).unwrap();
        let (down, _) = settings.outage_at().unwrap();
        let first = made.events.iter().find(|e| e.what == What::Opened).map(|e| e.at);
        assert!(first.is_some_and(|at| at > down), "seed {seed}: opened at {first:?}");
    }
}

/// An open breaker is probed by who has time for the reply, and so every outage ends.
#[test]
fn every_outage_ends() {
    for seed in 1..=if long() { 20 } else { 5 } {
        let back = come_back(&outage(&[]), &TowerHerd, seed);
        assert!(
            back.recovery.first_good.is_some_and(|good| good <= 31.0),
            "seed {seed}: {:?}",
            back.recovery
        );
        assert!(back.recovery.t95.is_some_and(|t95| t95 <= 30.0), "seed {seed}: {:?}", back.recovery);
    }
}

/// What stray 429s do to the ceiling is another matter (each cuts it, hence the smaller demand here); the ramp
/// takes no longer, and the outage is one incident.
#[test]
fn one_stray_429_in_two_hundred_does_not_stretch_the_ramp() {
    for seed in seeds() {
        let back =
            come_back(&outage(&["stray=0.005", "hint=0.05", "hint_form=ms", "rate=40"]), &TowerHerd, seed);
        let good = back.made.first_good().unwrap();
        let whole = back.made.events.iter().find(|e| e.at >= good && e.what == What::Ramp(1.0));
        let took =
            whole.unwrap_or_else(|| panic!("seed {seed}: the ramp never ended")).at.saturating_sub(good);
        assert!(took <= seconds(30), "seed {seed}: {took:?}");
        assert_eq!((back.recovery.second_trips, back.row.alerts), (0, 1), "seed {seed}");
        below_the_ramp(&back);
    }
}

#[test]
fn with_a_spare_rung_nobody_notices() {
    for seed in seeds() {
        let back = come_back(&outage(&["ceilings=40,40"]), &TowerHerd, seed);
        assert!(done(&back.made) >= 0.995, "seed {seed}: {:.4} are done", done(&back.made));
        assert!(back.recovery.outage_share.unwrap() <= 0.01, "seed {seed}: {:?}", back.recovery);
        assert_eq!(back.row.alerts, 1, "seed {seed}");
        below_the_ramp(&back);
    }
}

#[test]
fn the_throttle_alone() {
    for seed in seeds() {
        let mut settings = outage(&[]);
        settings.duration += seconds(60);
        let r = come_back(&settings, &ThrottleOnly, seed).recovery;
        let back = r.first_good.unwrap() + r.t95.unwrap();
        assert!(back <= 75.0, "seed {seed}: {back} s after the return");
        // One in ten still goes, and more until the window has forgotten the good time.
        assert!(r.outage_share.unwrap() <= 0.25, "seed {seed}: {r:?}");
    }
}

#[test]
fn two_hundred_processes_spread_their_probes() {
    let many = ["agents=200", "processes=200", "rate=200", "ceilings=200", "outage=20..150", "duration=151"];
    let settings = settings(Scenario::Recovery, &many);
    let made = run(&settings, &TowerHerd, 1).unwrap();
    // The breakers trip, each after its own 18 failures at one call a second; then there are probes.
    let last = made.events.iter().filter(|e| e.what == What::Opened).map(|e| e.at).max().unwrap();
    let (from, to) = settings.outage_at().unwrap();
    assert!(last > from && last < from + seconds(60), "{last:?}");
    let probes = made.rungs[0].records.iter().filter(|r| (last..to).contains(&r.arrival));
    let arrivals: Vec<Duration> = probes.map(|r| r.arrival).collect();
    assert!(arrivals.len() >= 200, "every process looks now and then: {}", arrivals.len());
    let crowd = peak(&arrivals, Duration::from_millis(3));
    assert!(crowd <= 5, "{crowd} probes of {} in 3 ms", arrivals.len());
}

// ---------------------------------------------------------------- all of them

#[test]
fn the_same_seed_gives_the_same_trace() {
    for (scenario, pairs) in [
        (Scenario::Brownout, &["duration=20", "ceilings=100,40", "failure=0.5"][..]),
        (Scenario::Recovery, &["duration=60", "outage=10..30", "processes=5"]),
        (Scenario::Amplification, &["duration=10"]),
        (Scenario::Cron, &["agents=200", "processes=20", "duration=61"]),
    ] {
        let hash = |seed| trace_hash(&run(&settings(scenario, pairs), &TowerHerd, seed).unwrap());
        assert_eq!(hash(7), hash(7), "{}", scenario.name());
        assert_ne!(hash(7), hash(8), "{}", scenario.name());
    }
}
