//! The bars of the stampede, of equal hints and of jobs on the minute, exactly as they are promised. (Those
//! of brown-outs, outages and stacked stacks: `bars_stack.rs`.)
//!
//! Three seeds each, as part of every test run; twenty with `TOWER_HERD_LONG=1`. Ratios are means over
//! the seeds, against the oracle on the same seed; nothing lost, nothing early, nothing executed twice
//! holds for each seed.

use std::time::Duration;

use tower_herd_sim::policy::{Oracle, Policy, TowerHerd};
use tower_herd_sim::provider::{Outcome, peak, peak_after};
use tower_herd_sim::scenario::{Run, RungRun, Scenario, Settings, oracle_seconds, run};

const WINDOW: Duration = Duration::from_millis(100);

fn long() -> bool {
    std::env::var_os("TOWER_HERD_LONG").is_some_and(|value| value != "0")
}

fn seeds() -> std::ops::RangeInclusive<u64> {
    1..=if long() { 20 } else { 3 }
}

fn settings(scenario: Scenario, pairs: &[&str]) -> Settings {
    let mut settings = Settings::new(scenario);
    for pair in pairs {
        settings.set_pair(pair).unwrap();
    }
    settings
}

struct Measured {
    runs: Vec<Run>,
    ratio: f64,
}

/// Runs the stack on all seeds; what must hold on each of them is checked here.
fn stampede(pairs: &[&str]) -> Measured {
    let settings = settings(Scenario::Stampede, pairs);
    let (mut runs, mut ratio) = (Vec::new(), 0.0);
    for seed in seeds() {
        let made = run(&settings, &TowerHerd, seed).unwrap();
        let stats = made.stats();
        assert_eq!(made.done(), 3000, "{pairs:?} seed {seed}: lost");
        assert_eq!((stats.early_calls, stats.duplicates), (0, 0), "{pairs:?} seed {seed}");
        ratio += made.elapsed.as_secs_f64() / oracle_seconds(&settings, seed).unwrap();
        runs.push(made);
    }
    ratio /= runs.len() as f64;
    println!("{} {pairs:?}: {ratio:.3}", TowerHerd.name());
    Measured { runs, ratio }
}

impl Measured {
    fn within(self, most: f64) -> Self {
        assert!(self.ratio <= most, "{:.3} x the oracle, {most} is allowed", self.ratio);
        self
    }

    fn calls_per_task(self, most: f64) -> Self {
        let calls: f64 =
            self.runs.iter().map(|r| r.stats().wire_calls as f64 / r.settings.tasks as f64).sum();
        let calls = calls / self.runs.len() as f64;
        assert!(calls <= most, "{calls:.4} wire calls per task, {most} are allowed");
        self
    }

    /// In the 2 s after each pause at most max(2, ceiling / 4) arrivals per sliding 100 ms.
    fn calm_after_pauses(self) -> Self {
        for made in &self.runs {
            for rung in &made.rungs {
                calm(rung, made.settings.hint.unwrap(), made.seed);
            }
        }
        self
    }
}

fn calm(rung: &RungRun, hint: Duration, seed: u64) {
    let arrivals: Vec<_> = rung.records.iter().map(|call| call.arrival).collect();
    let refused = rung.records.iter().filter(|call| call.outcome == Outcome::Throttled);
    let mut told: Vec<_> = refused.filter_map(|call| call.ended).collect();
    told.sort_unstable();
    for (i, at) in told.iter().enumerate() {
        let end = *at + hint;
        if told.get(i + 1).is_some_and(|next| *next <= end) {
            continue;
        }
        let ceiling = rung.ceiling.iter().rev().find(|(from, _)| *from <= end).unwrap().1;
        let seen = peak_after(&arrivals, &[end], Duration::from_secs(2), WINDOW);
        let most = u64::from(ceiling / 4).max(2);
        assert!(seen <= most, "seed {seed}, rung {}: {seen} of {most} after the pause to {end:?}", rung.name);
    }
}

#[test]
fn ceilings_learned_from_429s() {
    stampede(&[]).within(1.10).calls_per_task(1.03).calm_after_pauses();
}

#[test]
fn ceilings_configured() {
    stampede(&["configured=true"]).within(1.03).calls_per_task(1.01).calm_after_pauses();
}

#[test]
fn no_hint() {
    stampede(&["hint=none"]).within(1.08);
}

#[test]
fn longer_hints() {
    stampede(&["hint=5"]).within(1.25);
    stampede(&["hint=30"]).within(1.6);
}

#[test]
fn the_quota_comes_back() {
    stampede(&["returns=25"]).within(1.2);
}

#[test]
fn longer_and_shorter_calls() {
    stampede(&["latency=10"]).within(1.05);
    stampede(&["latency=0.2"]).within(1.25);
}

#[test]
fn rates_told_by_headers() {
    for headers in ["headers=openai", "headers=anthropic", "headers=ietf"] {
        stampede(&["limit=rate", headers]).within(1.15);
    }
}

#[test]
fn rates_not_told() {
    stampede(&["limit=rate"]).within(1.5);
}

/// Arrivals after everybody was told to wait 30 s: the most per sliding 100 ms, and the end.
fn equal_hint(handles: &str, most: u64) {
    for seed in seeds() {
        let settings = settings(Scenario::EqualHint, &[handles]);
        let made = run(&settings, &TowerHerd, seed).unwrap();
        assert_eq!((made.done(), made.stats().early_calls), (1000, 0), "{handles} seed {seed}");
        let hint = settings.hint.unwrap();
        let bound = hint * 3 / 2 + Duration::from_secs(5);
        assert!(made.elapsed <= bound, "{handles} seed {seed}: the last at {:?}", made.elapsed);
        let calls = made.rungs[0].records.iter();
        let again: Vec<_> = calls.map(|call| call.arrival).filter(|at| *at >= hint).collect();
        let seen = peak(&again, WINDOW);
        println!("{handles} seed {seed}: {seen}, last at {:?}", made.elapsed);
        assert!(seen <= most, "{handles} seed {seed}: {seen} of {most} in 100 ms");
    }
}

#[test]
fn equal_hints_with_one_handle() {
    equal_hint("handles=shared", 9);
}

#[test]
fn equal_hints_in_a_thousand_processes() {
    equal_hint("handles=separate", 22);
}

/// Beside one agent that starts 1000 tasks at once, and before all others, the first task of everybody else
/// comes at most one call later than without them.
#[test]
fn a_greedy_agent_delays_nobody() {
    let first = |greedy: &str, seed| {
        let made = run(&settings(Scenario::Stampede, &[greedy]), &TowerHerd, seed).unwrap();
        assert_eq!(made.done(), 3000, "{greedy} seed {seed}");
        made.first_wait().unwrap()
    };
    for seed in seeds() {
        let (alone, beside) = (first("greedy=1", seed), first("greedy=1000", seed));
        println!("greedy seed {seed}: {beside:?}, alone {alone:?}");
        assert!(beside <= alone + Duration::from_millis(1500), "seed {seed}: {beside:?}, alone {alone:?}");
    }
}

/// Jobs of a hundred processes that know nothing of each other, without tokens that tell each its turn:
/// none is lost, they are through within three times the oracle's time, and no instant brings what naive
/// clients send (2960 in 100 ms).
#[test]
fn jobs_on_the_minute() {
    let settings = settings(Scenario::Cron, if long() { &[] } else { &["duration=120"] });
    for seed in seeds() {
        let made = run(&settings, &TowerHerd, seed).unwrap();
        let oracle = run(&settings, &Oracle, seed).unwrap();
        let stats = made.stats();
        assert_eq!((made.done(), stats.early_calls, stats.duplicates), (oracle.done(), 0, 0), "seed {seed}");
        let (drain, best) = (made.drain().unwrap(), oracle.drain().unwrap());
        println!(
            "cron seed {seed}: drained in {drain:?}, oracle {best:?}, {} refused, {} in 100 ms",
            stats.throttled, stats.peak_100ms
        );
        assert!(drain <= best * 3, "seed {seed}: {drain:?}, the oracle takes {best:?}");
        assert!(stats.peak_100ms <= 150, "seed {seed}: {}", stats.peak_100ms);
    }
}

/// The longest wait of any task is at most three times the oracle's longest.
#[test]
fn nobody_starves() {
    for (scenario, pairs) in [
        (Scenario::Stampede, &[][..]),
        (Scenario::Stampede, &["configured=true"]),
        (Scenario::Stampede, &["limit=rate"]),
        (Scenario::EqualHint, &[]),
        (Scenario::Cron, &["duration=60"]),
        (Scenario::Brownout, &["duration=30", "failure=0.05"]),
        (Scenario::Brownout, &["duration=30", "failure=0.2"]),
        (Scenario::Brownout, &["duration=30", "failure=0.5", "ceilings=100,40"]),
    ] {
        let settings = settings(scenario, pairs);
        for seed in if long() { seeds() } else { 1..=1 } {
            let most = run(&settings, &Oracle, seed).unwrap().longest_wait().unwrap() * 3;
            let seen = run(&settings, &TowerHerd, seed).unwrap().longest_wait().unwrap();
            assert!(
                seen <= most,
                "{} {pairs:?} seed {seed}: {seen:?}, {most:?} are allowed",
                scenario.name()
            );
        }
    }
}
