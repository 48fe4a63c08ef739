//! How tasks arrive, and what the settings of the scenarios change.

use std::time::Duration;

use tower_herd_sim::policy::{Chain, Consecutive, Oracle, Policy};
use tower_herd_sim::scenario::{Run, Scenario, Settings, run};

fn play(scenario: Scenario, pairs: &[&str], policy: &dyn Policy) -> Run {
    let mut settings = Settings::new(scenario);
    for pair in pairs {
        settings.set_pair(pair).unwrap();
    }
    run(&settings, policy, 1).unwrap()
}

/// Starts of all tasks, sorted.
fn starts(run: &Run) -> Vec<Duration> {
    let mut starts: Vec<Duration> = run.tasks.iter().map(|t| t.started).collect();
    starts.sort_unstable();
    starts
}

const MS: fn(u64) -> Duration = Duration::from_millis;

#[test]
fn an_open_loop_waits_for_nobody() {
    let even = play(
        Scenario::Brownout,
        &["arrivals=even", "rate=50", "duration=10", "failure=0", "latency=5", "deadline=20"],
        &Oracle,
    );
    let at = starts(&even);
    assert_eq!(at.len(), 499);
    assert!(at.windows(2).all(|w| w[1] == w[0] + MS(20)), "{at:?}");
    assert_eq!((even.settings.tasks, even.row(None).tasks), (499, 499));

    let drawn = play(Scenario::Brownout, &["rate=50", "duration=10", "failure=0"], &Oracle);
    let at = starts(&drawn);
    // 500 in the mean, deviation 22.
    assert!((400..600).contains(&at.len()), "{}", at.len());
    let gaps: Vec<Duration> = at.windows(2).map(|w| w[1].saturating_sub(w[0])).collect();
    assert!(gaps.iter().any(|g| *g > MS(60)) && gaps.iter().filter(|g| **g < MS(10)).count() > 100);
    assert!(at.last().is_some_and(|t| *t < Duration::from_secs(10)));
}

#[test]
fn jobs_start_on_the_minute() {
    let cron = play(Scenario::Cron, &["agents=40", "processes=4", "every=30", "duration=61"], &Oracle);
    let at = starts(&cron);
    let wanted: Vec<Duration> = [0, 30, 60].iter().flat_map(|s| [Duration::from_secs(*s); 40]).collect();
    assert_eq!(at, wanted);
    // 40 jobs of 0.5 s over 20 places: two rounds, and the last one counts from its own start.
    let drain = cron.drain().unwrap();
    assert!((MS(750)..=MS(1500)).contains(&drain), "{drain:?}");

    let late = play(
        Scenario::Cron,
        &["agents=40", "processes=4", "every=30", "duration=61", "start_within=5"],
        &Oracle,
    );
    let at = starts(&late);
    assert!(at[39] < Duration::from_secs(5) && at[39] > at[0] + Duration::from_secs(3), "{at:?}");
}

#[test]
fn a_greedy_agent_is_there_first() {
    let pairs = ["tasks=300", "agents=10", "ceilings=5", "cut_at=none", "greedy=200"];
    let made = play(Scenario::Stampede, &pairs, &Oracle);
    let at_once = made.tasks.iter().filter(|t| t.agent == 0);
    assert_eq!(at_once.clone().count(), 200);
    assert!(at_once.clone().all(|t| t.started == Duration::ZERO && t.id < 200));
    assert_eq!(made.done(), 300);
    // The oracle serves one line: everybody else waits for all of it.
    assert!(made.first_wait().unwrap() > Duration::from_secs(30));
    assert_eq!(play(Scenario::Stampede, &["tasks=300", "agents=10"], &Oracle).first_wait(), None);
}

#[test]
fn attempts_and_stacks_multiply_in_a_chain_of_chains() {
    for (pairs, calls) in [
        (["stacks=1", "attempts=1", "duration=1"], 1),
        (["stacks=1", "attempts=5", "duration=1"], 5),
        (["stacks=2", "attempts=3", "duration=1"], 9),
    ] {
        let stats = play(Scenario::Amplification, &pairs, &Chain::naive()).stats();
        assert_eq!(stats.wire_calls, calls * stats.tasks, "{pairs:?}");
    }
}

#[test]
fn failures_and_stray_refusals_come_at_their_rate() {
    // Nothing is sent again, so each task is one call; its breaker hardly ever sees five in a row at 5 %.
    let failing = play(Scenario::Brownout, &["failure=0.05", "duration=60"], &Consecutive).stats();
    assert!((200..400).contains(&failing.failed), "{failing:?}");
    assert_eq!(failing.throttled, 0);
    let stray = play(Scenario::Brownout, &["failure=0", "stray=0.05", "duration=60"], &Consecutive).stats();
    assert!((200..400).contains(&stray.throttled), "{stray:?}");
    assert_eq!(stray.failed, 0);
}

#[test]
fn the_oracle_knows_what_can_be_known() {
    // It repeats until served: all tasks, and no more calls than failures ask for.
    let brown = play(Scenario::Brownout, &["failure=0.5", "duration=30"], &Oracle);
    let stats = brown.stats();
    assert_eq!(brown.done(), brown.settings.tasks);
    assert_eq!(stats.wire_calls, stats.served + stats.failed);
    // A dead provider it calls until the first reply says so.
    let dead = play(Scenario::Amplification, &["duration=10"], &Oracle).stats();
    assert!(dead.wire_calls < 40, "{dead:?}");
    // Of an outage it learns from one call, and loses only who cannot wait for its end.
    let out = play(Scenario::Recovery, &["outage=10..40", "duration=60"], &Oracle);
    assert_eq!(out.stats().unreachable, 1);
    let hopeless = out.tasks.iter().filter(|t| {
        t.started >= Duration::from_secs(10) && t.started + Duration::from_secs(9) < Duration::from_secs(40)
    });
    assert!(out.tasks.len() as u64 - out.done() <= hopeless.count() as u64 + 100);
    assert_eq!(out.stats().throttled, 0);
    let spare = play(Scenario::Recovery, &["outage=10..40", "duration=60", "ceilings=40,40"], &Oracle);
    assert_eq!(spare.done(), spare.settings.tasks);
}
