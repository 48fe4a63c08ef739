//! The bars of a fleet of processes that share through a store, exactly as they are promised.
//!
//! One seed each, as part of every test run; twenty with `TOWER_HERD_LONG=1`. The judge is the provider's own
//! count: it serves what is above the ceiling, and so shows it.

use std::time::Duration;

use tower_herd_sim::policy::{Oracle, TowerHerd};
use tower_herd_sim::provider::Outcome;
use tower_herd_sim::scenario::{FleetFigures, Run, Scenario, Settings, What, oracle_seconds, run};

fn long() -> bool {
    std::env::var_os("TOWER_HERD_LONG").is_some_and(|value| value != "0")
}

fn seeds() -> std::ops::RangeInclusive<u64> {
    1..=if long() { 20 } else { 1 }
}

fn settings(scenario: Scenario, pairs: &[&str]) -> Settings {
    let mut settings = Settings::new(scenario);
    for pair in pairs {
        settings.set_pair(pair).unwrap();
    }
    settings
}

/// A case of the fleet: the run, and its figures beside the oracle, a central line with no latency.
fn fleet(pairs: &[&str], seed: u64) -> (Run, FleetFigures) {
    let settings = settings(Scenario::Fleet, pairs);
    let made = run(&settings, &TowerHerd, seed).unwrap();
    let figures = made.fleet(&run(&settings, &Oracle, seed).unwrap()).unwrap();
    println!("{pairs:?} seed {seed}: {figures:?}");
    (made, figures)
}

fn seconds(s: f64) -> Duration {
    Duration::try_from_secs_f64(s).unwrap()
}

/// A hundred processes, a ladder of three rungs, a quota that is cut without notice.
fn stampede(pairs: &[&str], most: f64) {
    let mut pairs = pairs.to_vec();
    pairs.push("store=memory");
    let settings = settings(Scenario::Stampede, &pairs);
    let (mut ratio, mut calls, mut n) = (0.0, 0.0, 0.0);
    for seed in seeds() {
        let made = run(&settings, &TowerHerd, seed).unwrap();
        let stats = made.stats();
        assert_eq!(made.done(), 3000, "{pairs:?} seed {seed}: lost");
        assert_eq!((stats.early_calls, stats.duplicates), (0, 0), "{pairs:?} seed {seed}");
        ratio += made.elapsed.as_secs_f64() / oracle_seconds(&settings, seed).unwrap();
        calls += stats.wire_calls as f64 / 3000.0;
        n += 1.0;
    }
    let (ratio, calls) = (ratio / n, calls / n);
    println!("{pairs:?}: {ratio:.3} x the oracle, {calls:.4} wire calls per task");
    assert!(ratio <= most, "{pairs:?}: {ratio:.3} x the oracle, {most} is allowed");
    assert!(calls <= 1.05, "{pairs:?}: {calls:.4} wire calls per task, 1.05 are allowed");
}

#[test]
fn a_stampede_of_a_hundred_processes() {
    stampede(&["processes=100"], 1.15);
}

/// The same processes, each for itself.
#[test]
fn without_a_store_tasks_are_lost() {
    let settings = settings(Scenario::Stampede, &["processes=100"]);
    for seed in seeds() {
        let made = run(&settings, &TowerHerd, seed).unwrap();
        let (done, calls) = (made.done(), made.stats().wire_calls);
        println!("seed {seed}: {done} done, {calls} calls");
        assert!(done < 3000 && calls > 4500, "seed {seed}: {done} done, {calls} calls");
    }
}

#[test]
fn fifty_processes_on_three_slots() {
    for seed in seeds() {
        let (_, f) = fleet(&["case=turns"], seed);
        assert_eq!(f.in_flight_peak, 3, "seed {seed}");
        assert!(f.used >= 0.95 * f.oracle_used, "seed {seed}: {f:?}");
        assert!(f.jain >= 0.9, "seed {seed}: {f:?}");
        // Twice the round of 50 calls on 3 slots, of a second each.
        assert!(f.longest_gap <= 2.0 * 50.0 / 3.0, "seed {seed}: {f:?}");
    }
}

#[test]
fn fifty_processes_with_little_to_do() {
    for seed in seeds() {
        let (_, f) = fleet(&["case=light", if long() { "duration=600" } else { "duration=200" }], seed);
        assert!(f.in_flight_peak <= 3, "seed {seed}: {f:?}");
        assert!(f.wait_p50 <= f.oracle_wait_p50 + 0.5, "seed {seed}: {f:?}");
    }
}

#[test]
fn twenty_processes_on_two_hundred_slots() {
    for seed in seeds() {
        let (_, f) = fleet(&["case=wide", "duration=60"], seed);
        assert!(
            f.in_flight_peak <= 200 && f.used >= 0.95 * f.oracle_used && f.jain >= 0.99,
            "seed {seed}: {f:?}"
        );
    }
}

/// Everything at once: lost, late and doubled messages, a kill, a stop, a cut, a deaf process, a silent, a frozen
/// and a refusing store, two losses of all data within one time of learning. (Of these, a stop or a cut longer than
/// a lease may exceed the ceiling by what the process had in flight; calls of 1.5 s are over by then.)
#[test]
fn the_ceiling_holds_whatever_happens() {
    for seed in seeds() {
        let (_, f) = fleet(&["case=faults"], seed);
        assert!(f.in_flight_peak <= f.ceiling, "seed {seed}: {f:?}");
        let (_, f) = fleet(&["case=faults", "outage_policy=stop"], seed);
        assert!(f.in_flight_peak <= f.ceiling, "seed {seed}: {f:?}");
    }
}

#[test]
fn short_calls_cost_no_more_exchanges() {
    for seed in seeds() {
        let (_, f) = fleet(&["case=short", "duration=20"], seed);
        assert!(f.in_flight_peak <= f.ceiling && f.most_exchanges <= 2.0, "seed {seed}: {f:?}");
    }
}

/// Weights 1 and 3, all with more tasks than they can send.
#[test]
fn who_weighs_three_gets_three_times_as_much() {
    for seed in seeds() {
        let (made, f) = fleet(&["case=weights"], seed);
        let had = made.service();
        let (light, heavy): (f64, f64) = (had[&0], had[&1]);
        assert!((2.7..=3.3).contains(&(heavy / light)), "seed {seed}: {light} and {heavy}");
        assert!(f.jain >= 0.98, "seed {seed}: {f:?}");
    }
}

/// One process with a hundred agents beside one with a single one: that one never waits for long.
#[test]
fn a_greedy_process_delays_no_other() {
    for seed in seeds() {
        let (made, _) = fleet(&["case=greedy"], seed);
        let had = made.service();
        let length = made.settings.duration.as_secs_f64();
        assert!(had[&1] >= 0.95 * length, "seed {seed}: in service {:.1} of {length} s", had[&1]);
    }
}

/// Process 0 is told to wait 5 s. The others were told nothing, and keep it too: within 50 ms where the store
/// wakes them, within 1.2 s where they have to ask.
#[test]
fn what_one_is_told_all_keep() {
    for (wakes, within) in [("wakes=true", 0.05), ("wakes=false", 1.2)] {
        for seed in seeds() {
            let (made, _) = fleet(&["case=pause", wakes], seed);
            let calls = &made.rungs[0].records;
            let refused = calls.iter().find(|call| call.outcome == Outcome::Throttled);
            let told = refused.unwrap_or_else(|| panic!("seed {seed}: nobody was refused")).ended.unwrap();
            let pause = told + seconds(within)..told + Duration::from_secs(5);
            let late = calls.iter().filter(|call| pause.contains(&call.arrival)).count();
            assert_eq!(late, 0, "{wakes} seed {seed}: calls in the pause");
        }
    }
}

/// The slots of a killed process, all but what is safe, are in use by others within a lease and a renewal.
#[test]
fn a_killed_process_leaves_its_slots_to_the_others() {
    for seed in seeds() {
        for (policy, back) in [("outage_policy=stop", 1.0), ("outage_policy=keep:0.5", 22.0 / 24.0)] {
            let (made, f) = fleet(&["case=kill", policy], seed);
            assert!(f.in_flight_peak <= f.ceiling, "{policy} seed {seed}: {f:?}");
            let used = made.used(seconds(30.3 + 11.0), seconds(90.0));
            assert!(used >= 0.98 * back, "{policy} seed {seed}: {used}");
        }
    }
}

/// All data are lost at full load: no overshoot, and full use at the latest 2 s after the time of learning.
#[test]
fn after_a_flush_the_ceiling_holds_and_is_used_again() {
    for seed in seeds() {
        let (made, f) = fleet(&["case=flush"], seed);
        assert!(f.in_flight_peak <= f.ceiling, "seed {seed}: {f:?}");
        let used = made.used(seconds(30.3 + 12.0), seconds(90.0));
        assert!(used >= 0.98, "seed {seed}: {used}");
    }
}

/// A provider is down for a minute: one alert for the fleet, one probe at a time, and all come back.
#[test]
fn one_breaker_for_all() {
    for seed in seeds() {
        let (made, _) = fleet(&["case=breaker"], seed);
        assert_eq!(made.told(|what| *what == What::Alert), 1, "seed {seed}");
        let arrivals: Vec<_> = made.rungs[0].records.iter().map(|call| call.arrival).collect();
        let probes: Vec<_> =
            arrivals.iter().filter(|at| (seconds(62.0)..seconds(120.0)).contains(*at)).collect();
        assert!((1..=12).contains(&probes.len()), "seed {seed}: {} probes", probes.len());
        assert!(
            probes.windows(2).all(|two| two[1].saturating_sub(*two[0]) >= seconds(4.0)),
            "seed {seed}: {probes:?}"
        );
        let back = arrivals.iter().filter(|at| **at > seconds(200.0)).count();
        assert!(back > 1200, "seed {seed}: {back} calls in the last 40 s");
    }
}
